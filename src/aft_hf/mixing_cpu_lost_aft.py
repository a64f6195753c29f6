"""Lost queries of the chunked causal mixing on a CPU: detection and exact computation.

`mixing_cpu_causal_aft.py` sums exp(K) relative to one reference for each chunk and feature. A query that sees only
keys far below that reference, for instance one of the first tokens of a chunk in which a much larger key comes later,
loses its terms to underflow: its denominator is near 0. Such a lost query is computed again over the keys of its
window, with one more term for the running sum of everything further back, and so is its part of the backward pass.

The lost queries of a chunk and feature share a window of keys, and see none of the largest keys of that window. So all
of them are summed at once, relative to the largest of the other keys. A query for which this is not precise either is
computed by a softmax of its own.
"""

import math
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from .mixing_cpu_chunks_aft import SMALLEST_EXPONENT, Chunks, Rows, Segment, smallest_exponent


# For biases up to this absolute value, K + w relative to the largest key is precise in the dtype of the sums.
PRECISE_BIAS = 20.0

# Numbers per tensor in one step of the computation, chosen to stay in a processor's cache. Windows need many short
# calls, so their steps are larger; this size is an estimate.
PIECE_SIZE = 2**17
PIECE_OF_WINDOWS = 2**19

# The largest number in float64.
LARGEST = torch.finfo(torch.float64).max

# Estimated number of lost queries in a window that has lost queries.
QUERIES_OF_WINDOW = 8


class Lost(NamedTuple):
    """N lost queries, each of one feature (or head), and their softmax statistics for the backward pass."""

    # (N,) indices into the flat (B, T, h k)
    index: torch.Tensor  # type: ignore[assignment]  # hides the method `index` of tuples
    # (N,) log of the denominator relative to the largest key of its sum, in float64; inf for a query that sees no key
    log_sum: torch.Tensor
    # (N,) weight of the running sum in the average, divided by its denominator; 0 without a running sum
    far_inverse: torch.Tensor
    by_window: torch.Tensor  # (N,) whether the query was summed together with its window


class Far(NamedTuple):
    """The running sums that lost queries see beyond their windows."""

    numerator: torch.Tensor  # (N, c / k)
    denominator: torch.Tensor  # (N,)
    reference: torch.Tensor  # (N,) in float64

    def at(self, which: torch.Tensor) -> "Far":
        return Far(*(x[which] for x in self))

    def log_relative_to(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the log of their weight relative to exp(keys), for keys (N,), in float64."""
        return self.denominator.double().log().add_(self.reference - keys.double())


class Upstream(NamedTuple):
    """Inputs of the backward pass of lost queries."""

    log_sum: torch.Tensor  # (N,), as in `Lost`
    context: torch.Tensor  # (N, c / k)
    gradient: torch.Tensor  # (N, c / k), of the context


class Gradients(NamedTuple):
    """Gradients to which lost queries are added."""

    keys: torch.Tensor  # (B, T, h k, 1)
    values: torch.Tensor  # (B, T, h k, c / k)
    biases: torch.Tensor | None  # (h n, C, S)


class Places(NamedTuple):
    """Indices of lost queries in (h, R, T, k) of a segment."""

    head: torch.Tensor
    row: torch.Tensor
    token: torch.Tensor
    feature: torch.Tensor

    def at(self, which: torch.Tensor) -> "Places":
        return Places(*(x[which] for x in self))


class LostQueries:
    """Lost queries of `sums`. Indices refer to the flat (B, T, h k), with k = c, or k = 1 for one key per head."""

    def __init__(self, sums: Chunks):
        # The sums own this object. A strong reference back would keep their tensors alive until garbage collection.
        self.sums: Chunks = weakref.proxy(sums)
        self.dtype = sums.dtype
        self.key, self.value = sums.key, sums.value
        self.size, self.span = sums.chunk_size, (1 + sums.before) * sums.chunk_size
        self.length, self.width = sums.key.shape[1:]
        self.features_of_key = self.value.shape[-1] // self.width

    @cached_property
    def biases(self) -> torch.Tensor:
        """w from each query of a chunk to its window of S keys, -inf for keys after the query: (h or 1, n or 1, C, S),
        in float64 if K + w would lose digits in the dtype of the sums.
        """
        place = torch.arange(self.span, device=self.key.device)
        lag = place[-self.size :, None] - place
        if self.sums.tables is not None:
            biases = self.sums.tables.detach().to(self.dtype)
            largest = biases.masked_fill(biases == -math.inf, 0.0).abs().amax()
            biases = biases if float(largest) <= PRECISE_BIAS else biases.double()
        elif self.sums.slopes is not None:
            biases = (-self.sums.slopes.to(self.dtype)[:, None, None] * lag).unsqueeze(1)
        else:
            biases = torch.zeros(1, 1, *lag.shape, dtype=self.dtype, device=lag.device)
        return biases.masked_fill(lag < 0, -math.inf)

    @cached_property
    def exp_biases(self) -> torch.Tensor | None:
        """exp(w) as (h n, C, S), with h or 1 heads and n or 1 chunks; None if it may not be representable."""
        lowest, highest = self._range_of_biases
        if lowest < SMALLEST_EXPONENT[self.dtype] or highest > PRECISE_BIAS or self.near < PRECISE_BIAS:
            return None
        return self.biases.to(self.dtype).exp().flatten(0, 1)

    @cached_property
    def near(self) -> float:
        """Lost queries see no keys that are less than this distance below the largest key of their window."""
        return self.sums.headroom - self.sums.biases.lost_exponent(False) + self._range_of_biases[0] - 1.0

    @cached_property
    def smallest_total(self) -> float:
        """The smallest precise denominator, relative to the largest key in the sum of a window."""
        return math.exp(max(self._range_of_biases[1], 0.0) + smallest_exponent(self.sums.room))

    @cached_property
    def _range_of_biases(self) -> tuple[float, float]:
        shown = self.biases > -math.inf
        return float(self.biases.where(shown, 0.0).amin()), float(self.biases.where(shown, 0.0).amax())

    # ---------------------------------------------------------------------------------------------------- search

    def find(
        self,
        rows: Rows,
        segment: Segment,
        inverse: torch.Tensor,
        context: torch.Tensor,
        far: torch.Tensor | None,
        for_backward: bool,
    ) -> tuple[torch.Tensor, Far | None] | None:
        """Return the indices of the lost queries of a segment, and the running sums that they see; None, after one
        pass over all numbers, if there are no lost queries.

        Queries that see no key are left out, and their context is set to 0. For the backward pass, the `inverse` of
        lost queries is set to 0.
        """
        most = math.exp(-self.sums.biases.lost_exponent(rows.seen is None))
        finite = math.isfinite(float(context.sum()))
        if finite and float(inverse.amax()) <= most:
            return None
        places = self._places_above(inverse, most)
        by_feature = context.unflatten(-1, (inverse.shape[-1], -1))  # (h, R, T, k, c / k)
        if not finite:
            # Non-finite averages usually are quotients 0 / 0 of the lost queries.
            by_feature[places] = 0.0
            if not math.isfinite(float(context.sum())):
                lost = (inverse > most) | ~by_feature.isfinite().all(-1)
                places = Places(*lost.nonzero().unbind(-1))
        seen = self._far(rows, segment, places, far)
        if seen is not None and not finite:
            # NaN in the running sum of a query makes its average NaN.
            unknown = seen.denominator.isnan() | seen.numerator.isnan().all(-1)
            if unknown.any():
                by_feature[places.at(unknown)] = math.nan
                places, seen = places.at(~unknown), seen.at(~unknown)
        if for_backward:
            inverse[places] = 0
        position = places.token + segment.positions.start
        first = rows.first_visible() if self.sums.global_connectivity else None
        if first is not None:
            by_feature[places] = 0
            visible = position >= first[places.head, places.row, 0, places.feature]
            places, position, seen = places.at(visible), position[visible], None if seen is None else seen.at(visible)
        if len(position) == 0:
            return None
        index = ((places.row + rows.slice.start) * self.length + position) * self.width
        index.add_(places.head * inverse.shape[-1]).add_(places.feature)
        return index, seen

    def _places_above(self, inverse: torch.Tensor, most: float) -> Places:
        """Return where `inverse` (h, R, T, k) exceeds `most`: first by chunk, since few chunks have such queries."""
        found, whole = [], inverse.shape[2] // self.size * self.size
        for start, tokens in ((0, inverse[:, :, :whole]), (whole, inverse[:, :, whole:])):
            if tokens.shape[2] == 0:
                continue
            chunks = tokens.unflatten(2, (-1, min(self.size, tokens.shape[2])))  # (h, R, n, C, k)
            head, row, chunk, feature = (chunks.amax(3) > most).nonzero().unbind(-1)
            window, place = (chunks[head, row, chunk, :, feature] > most).nonzero().unbind(-1)
            token = start + chunk[window] * self.size + place
            found.append(Places(head[window], row[window], token, feature[window]))
        return Places(*map(torch.cat, zip(*found)))

    def _far(self, rows: Rows, segment: Segment, places: Places, far: torch.Tensor | None) -> Far | None:
        """Return the running sums that the lost queries of a segment see."""
        if far is None:
            return None
        here = places.head, places.row, places.token // self.size, places.feature
        numerator, denominator = (x[here] for x in self.sums.far_parts(far))
        references = rows.references_of_far(segment, self.sums.before)
        if references is None:
            reference = torch.zeros_like(denominator, dtype=torch.float64)
        else:
            reference = references[here].double()
        if self.sums.slopes is not None:
            distance = places.token % self.size + self.size  # to the start of the chunk before
            reference -= self.sums.slope_of_features().double()[places.feature] * distance
        return Far(numerator, denominator, reference)

    # --------------------------------------------------------------------------------------------------- forward

    def restore(self, found: list[tuple[torch.Tensor, Far | None]], context: torch.Tensor) -> Lost:
        """Compute the lost queries that `find` returned, and write their averages into the context (B, T, d).

        Empties the list `found`.
        """
        if not found:
            nothing = self.key.new_empty(0, dtype=self.dtype)
            return Lost(nothing.long(), nothing.double(), nothing, nothing.bool())
        indices, parts = zip(*found)
        found.clear()
        index, far = torch.cat(indices), None if parts[0] is None else Far(*map(torch.cat, zip(*parts)))
        del indices, parts
        lost, average = self._compute(index, far)
        context.view(self.key.numel(), -1)[lost.index] = average.to(context.dtype)
        return lost

    def _compute(self, index: torch.Tensor, far: Far | None) -> tuple[Lost, torch.Tensor]:
        """Return the lost queries with their statistics, and their averages (N, c / k)."""
        lost = Lost(
            index,
            index.new_empty(len(index), dtype=torch.float64),
            index.new_empty(len(index), dtype=self.dtype),
            index.new_zeros(len(index), dtype=torch.bool),
        )
        average = self.value.new_empty(len(index), self.features_of_key, dtype=self.dtype)
        for by_window, compute in ((True, self._sum_windows), (False, self._softmax)):
            if by_window and self.exp_biases is None:
                continue
            for here in self._pieces((~lost.by_window).nonzero().squeeze(-1), by_window):
                found = compute(index[here], None if far is None else far.at(here))
                for x, y in zip((average, *lost[1:]), found):
                    x[here] = y
        return lost, average

    def _sum_windows(self, index: torch.Tensor, far: Far | None) -> tuple[torch.Tensor, ...]:
        """Sum all queries of a window at once. Returns averages, log-sums, `far_inverse`, and which are precise."""
        tables = self.exp_biases
        assert tables is not None
        window = _Window(self, index)
        top, weights, hidden = window.weights(self.near)
        weights = weights.unsqueeze(1)
        summands = torch.cat([hidden.unsqueeze(1), weights, weights * window.values], 1)
        found = window.at_queries(window.products(summands, tables.mT))  # (N, 2 + c / k)
        hides, total, sums = found[:, 0], found[:, 1], found[:, 2:]
        log_far = None if far is None else far.log_relative_to(top[window.of_query])
        total, log_sum, average, share = _quotients(total, sums, far, log_far)
        right = (hides == 0) & (total >= self.smallest_total) & average.isfinite().all(-1) & window.finite
        return average, log_sum, share, right

    def _softmax(self, index: torch.Tensor, far: Far | None) -> tuple[torch.Tensor, ...]:
        """Compute a softmax for each query. Returns averages, log-sums and `far_inverse`."""
        window = _Window(self, index)
        keys, largest, biases = window.logits_of_queries()
        top = (keys - largest.unsqueeze(-1)).add_(biases).amax(-1)  # (N,)
        nothing = top == -math.inf
        top.masked_fill_(nothing, 0.0)
        weights = _weights(keys, largest, biases.sub_(top.unsqueeze(-1)), self.dtype)  # (N, S)
        sums = torch.bmm(window.values_of_queries(), weights.unsqueeze(-1)).squeeze(-1)  # (N, c / k)
        total = weights.sum(-1)
        exponent, log_far = top.double(), None
        if far is not None:
            log_far = far.log_relative_to(largest)
            exponent = torch.where(nothing, log_far.clamp_min(-LARGEST), exponent)
            log_far -= exponent
        total, log_sum, average, share = _quotients(total, sums, far, log_far)
        return average, (exponent + log_sum).masked_fill_(total == 0, math.inf), share

    # -------------------------------------------------------------------------------------------------- backward

    def gradient_of_far(self, lost: Lost, context: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the running sums from lost queries: (G, h, B, n, W / G)."""
        index, share = lost.index, lost.far_inverse.unsqueeze(-1)
        heads, width = self.sums.heads, self.width
        chunks = -(-self.length // self.size)
        row, position = index // width // self.length, index // width % self.length
        place = position // self.size - 1 - self.sums.before
        reached = place >= 0
        target = ((row * chunks + place) * width + index % width)[reached]
        of_numerator = (share * self._at_queries(gradient, index).to(self.dtype))[reached]
        of_denominator = -(of_numerator * self._at_queries(context, index)[reached]).sum(-1)
        total = of_numerator.new_zeros(self.value.shape[0] * chunks * width, of_numerator.shape[-1] + 1)
        total.index_add_(0, target, torch.cat([of_numerator, of_denominator.unsqueeze(-1)], -1))
        total = total.view(-1, chunks, heads, width // heads, total.shape[-1]).permute(2, 0, 1, 3, 4)
        if self.sums.groups == 2:  # (h, B, n, c, 2)
            return torch.stack(total.unbind(-1))
        return total.squeeze(3).unsqueeze(0)

    def add_gradients(
        self,
        lost: Lost,
        context: torch.Tensor,
        gradient: torch.Tensor,
        key_gradient: torch.Tensor,
        value_gradient: torch.Tensor,
        tables_gradient: torch.Tensor | None,
    ) -> None:
        """Add the gradients from lost queries to those of the keys, values and biases of their windows."""
        downstream = Gradients(
            key_gradient.unsqueeze(-1),
            value_gradient.unflatten(-1, (self.width, -1)),
            None if tables_gradient is None else tables_gradient.view(-1, self.size, self.span),
        )
        for by_window, add in ((True, self._add_window_gradients), (False, self._add_softmax_gradients)):
            for here in self._pieces((lost.by_window == by_window).nonzero().squeeze(-1), by_window):
                index = lost.index[here]
                upstream = Upstream(lost.log_sum[here], *(self._at_queries(x, index) for x in (context, gradient)))
                add(_Window(self, index), upstream, downstream)

    def _add_window_gradients(self, window: "_Window", upstream: Upstream, downstream: Gradients) -> None:
        """Add the gradients from all queries of a window at once."""
        tables = self.exp_biases
        assert tables is not None
        _, weights, _ = window.weights(self.near)
        scale = torch.exp(-upstream.log_sum).to(self.dtype)
        of_numerator = scale.unsqueeze(-1) * upstream.gradient.to(self.dtype)  # (N, c / k)
        of_denominator = -(of_numerator * upstream.context).sum(-1, keepdim=True)
        of_sums = weights.new_zeros(len(weights), 1 + self.features_of_key, self.size)
        of_sums[window.of_query, :, window.place] = torch.cat([of_denominator, of_numerator], -1)
        of_weights, of_weighted = window.products(of_sums, tables).tensor_split((1,), 1)  # (M, ..., S)
        weights = weights.unsqueeze(1)
        window.add_to(downstream.keys, weights * (of_weights + (window.values * of_weighted).sum(1, keepdim=True)))
        window.add_to(downstream.values, weights * of_weighted)
        if downstream.biases is not None:
            summands = torch.cat([weights, weights * window.values], 1)
            for table, which in window.by_table():
                product = of_sums[which].flatten(0, 1).mT @ summands[which].flatten(0, 1)
                downstream.biases[table] += tables[table] * product

    def _add_softmax_gradients(self, window: "_Window", upstream: Upstream, downstream: Gradients) -> None:
        """Add the gradients from each query on its own."""
        keys, largest, biases = window.logits_of_queries()
        # A log-sum is rounded to the dtype of the biases; the upstream gradient is multiplied by exp(rounding error).
        rounded = upstream.log_sum.to(biases.dtype)
        rest = torch.exp((rounded.double() - upstream.log_sum).nan_to_num_(0.0).clamp_(-1.0, 1.0)).to(self.dtype)
        weights = _weights(keys, largest, biases.sub_(rounded.unsqueeze(-1)), self.dtype)  # (N, S)
        of_context = (upstream.gradient * rest.unsqueeze(-1)).unsqueeze(-1)  # (N, c / k, 1)
        difference = window.values_of_queries() - upstream.context.unsqueeze(-1)
        of_logits = torch.bmm(of_context.mT, difference).squeeze(1).mul_(weights)
        if not window.finite:
            of_logits.masked_fill_(window.hidden(), 0.0)
        window.add_of_queries(downstream.keys, of_logits.unsqueeze(1))
        window.add_of_queries(downstream.values, weights.unsqueeze(1) * of_context)
        if downstream.biases is not None:
            downstream.biases.view(-1, self.span).index_add_(0, window.bias_rows, of_logits)

    # ---------------------------------------------------------------------------------------------------- shared

    def _at_queries(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the features of (B, T, d) at indices into the flat (B, T, h k): (N, c / k)."""
        return x.view(self.key.numel(), -1).index_select(0, index)

    def _pieces(self, which: torch.Tensor, by_window: bool) -> Iterator[torch.Tensor]:
        """Yield the lost queries that are computed together; most windows have several."""
        size = self.span * self.features_of_key
        at_once = PIECE_OF_WINDOWS * QUERIES_OF_WINDOW // size if by_window else PIECE_SIZE // size
        return iter(which.split(max(1, at_once)) if len(which) else ())


class _Window:
    """M windows of S keys and values that N lost queries see: one window for all queries of a chunk and feature."""

    def __init__(self, lost: LostQueries, index: torch.Tensor):
        size, span, width, length = lost.size, lost.span, lost.width, lost.length
        place = index // width % length % size
        own, of_query = torch.unique(index - place * width, return_inverse=True)  # the first query of each chunk
        heads, chunks = lost.biases.shape[:2]
        head = own % width // (width // heads) if heads > 1 else 0
        chunk = own // width % length // size if chunks > 1 else 0
        # Windows with the same position biases are sorted next to each other.
        self.table, order = torch.zeros_like(own).add_(head * chunks + chunk).sort()  # (M,)
        own, self.of_query = own[order], order.argsort()[of_query]
        self.place, self.bias_rows = place, self.table[self.of_query] * size + place  # (N,)
        # The starts of the windows, and the windows that exceed the sequence (read and written token by token).
        self.size, self.start = size, own // width % length - (span - size)
        self.row, self.feature = own // width // length, own % width
        self.edge = ((self.start < 0) | (self.start > length - span)).nonzero().squeeze(-1)  # (E,)
        token = self.start[self.edge].unsqueeze(-1) + torch.arange(span, device=index.device)  # (E, S)
        missing = (token < 0) | (token >= length)
        self.edge_tokens = (self.row[self.edge] * length).unsqueeze(-1) + token.clamp(0, length - 1)
        self.keys = self._read(lost.key.unsqueeze(-1)).squeeze(1).to(lost.biases.dtype)  # (M, S)
        self.keys[self.edge] = self.keys[self.edge].masked_fill_(missing, -math.inf)
        self.values = self._read(lost.value.unflatten(-1, (width, -1))).to(lost.dtype)  # (M, c / k, S)
        # Infinity and NaN must not reach queries that do not see them.
        self.finite = float(self.keys.amax()) < math.inf and math.isfinite(float(self.values.sum()))
        self.dtype, self.biases = lost.dtype, lost.biases.flatten(0, 2)

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        """Return the windows of x (B, T, h k, f): (M, f, S). Positions outside the sequence read its first or last
        token.
        """
        span = self.edge_tokens.shape[-1]
        at_edge = x.flatten(0, 1)[self.edge_tokens, self.feature[self.edge].unsqueeze(-1)].mT  # (E, f, S)
        if len(self.edge) == len(self.start):
            return at_edge
        start = self.start.clamp(0, x.shape[1] - span)
        found = x.unfold(1, span, 1)[self.row, start, self.feature]
        found[self.edge] = at_edge
        return found

    def add_to(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add x (M, f, S), which must be 0 outside the sequence, to the windows of a gradient (B, T, h k, f)."""
        tokens = gradient.view(-1, gradient.shape[-1])
        target = self.edge_tokens * gradient.shape[2] + self.feature[self.edge].unsqueeze(-1)
        tokens.index_add_(0, target.flatten(), x[self.edge].mT.flatten(0, 1))
        if len(self.edge) == len(self.start):
            return
        inside = torch.ones_like(self.start, dtype=torch.bool).index_fill_(0, self.edge, False)
        row, start, feature = (y[inside] for y in (self.row, self.start, self.feature))
        chunks = gradient.unfold(1, self.size, 1)  # (B, T - C + 1, h k, f, C)
        # Windows of neighbouring chunks overlap, but no two begin with the same chunk.
        for i, part in enumerate(x[inside].split(self.size, -1)):
            chunks[row, start + i * self.size, feature] += part

    def weights(self, near: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Leave out the keys that are less than `near` below the largest key of a window. Return the largest remaining
        key (M,), exp(K) relative to it (M, S), and a mask that is 1 for keys that are left out (M, S).
        """
        hidden = self.keys > self.keys.amax(-1, keepdim=True) - near
        keys = self.keys.masked_fill(hidden, -math.inf)
        top = keys.amax(-1)
        top.masked_fill_(top == -math.inf, 0.0)
        return top, _weights(keys, top, torch.zeros((), dtype=keys.dtype), self.dtype), hidden.to(self.dtype)

    def by_table(self) -> Iterator[tuple[int, slice]]:
        """Yield each table of position biases by its index, with the windows that use it."""
        tables, counts = torch.unique_consecutive(self.table, return_counts=True)
        ends = counts.cumsum(0).tolist()
        yield from ((table, slice(*ends)) for table, *ends in zip(tables.tolist(), [0, *ends], ends))

    def products(self, x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Multiply rows (M, F, A) by the table (A, B) of each window: (M, F, B)."""
        out = x.new_empty(*x.shape[:2], tables.shape[-1])
        for table, here in self.by_table():
            torch.mm(x[here].flatten(0, 1), tables[table], out=out[here].flatten(0, 1))
        return out

    def at_queries(self, x: torch.Tensor) -> torch.Tensor:
        """Select the entries of the queries from (M, F, C): (N, F)."""
        return x[self.of_query, :, self.place]

    def logits_of_queries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return copies of the keys (N, S), -inf where hidden from the query; the largest key of each query (N,), 0 if
        it sees no key; and the biases (N, S).
        """
        biases = self.biases.index_select(0, self.bias_rows)
        keys = self.keys.index_select(0, self.of_query).masked_fill_(biases == -math.inf, -math.inf)
        largest = keys.amax(-1)
        return keys, largest.masked_fill_(largest == -math.inf, 0.0), biases

    def values_of_queries(self) -> torch.Tensor:
        """Return the values (N, c / k, S), with 0 for hidden values if there is NaN or infinity."""
        values = self.values.index_select(0, self.of_query)
        return values if self.finite else values.masked_fill_(self.hidden().unsqueeze(1), 0.0)

    def hidden(self) -> torch.Tensor:
        """Return the keys that are hidden from each query: (N, S)."""
        return self.logits_of_queries()[0] == -math.inf

    def add_of_queries(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add x (N, f, S) to a gradient (B, T, h k, f)."""
        self.add_to(gradient, x.new_zeros(len(self.start), *x.shape[1:]).index_add_(0, self.of_query, x))


def _quotients(
    total: torch.Tensor, sums: torch.Tensor, far: Far | None, log_far: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the running sums, whose weight is exp(log_far), to the sums of windows, and divide.

    Returns denominators (N,) relative to the larger of both, and their logs; averages (N, c / k); and the weight of
    the running sum in them, divided by its denominator. All but the logs are 0 for a query that sees no key.
    """
    exponent = torch.zeros_like(total, dtype=torch.float64)
    if log_far is not None:
        exponent = log_far.clamp_min(0.0)
        scale, of_far = (torch.exp(x).to(total.dtype) for x in (-exponent, log_far - exponent))
        total, sums = total * scale + of_far, sums * scale.unsqueeze(-1)
    log_sum = exponent + total.double().log()
    inverse = total.masked_fill(total == 0, 1.0).reciprocal()
    average = sums * inverse.unsqueeze(-1)
    if far is None:
        return total, log_sum, average, torch.zeros_like(total)
    # The weight is computed first, since it may be as small as the running sum is large.
    weight = of_far * inverse
    nothing = weight == 0
    share = (weight / far.denominator).masked_fill_(nothing, 0.0)
    average += (share.unsqueeze(-1) * far.numerator).masked_fill_(nothing.unsqueeze(-1), 0.0)
    return total, log_sum, average, share


def _weights(keys: torch.Tensor, reference: torch.Tensor, biases: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(K - reference + w); overwrites the keys. K - reference comes first, since it is exact where it matters."""
    exponents = keys.sub_(reference.unsqueeze(-1)).add_(biases)
    smallest = SMALLEST_EXPONENT[dtype]
    # exp(-inf) is as slow as a subnormal result.
    weights = exponents.to(dtype).clamp_(min=smallest).exp_()
    return torch.threshold_(weights, 2 * math.exp(smallest), 0.0)
