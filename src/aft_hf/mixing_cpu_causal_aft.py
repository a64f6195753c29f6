"""Causal mixing on a CPU in linear time, forward and backward, for keys and position biases of any size.

Positions are cut into chunks. A query sums over its own chunk and the chunk before by products with exp(w), and over
everything further back by one running sum. Exponentials are taken relative to a reference: 0 where keys are moderate,
otherwise the largest key so far, chunk by chunk and feature by feature. A few queries may still see nothing but keys
far below that reference, for instance the first tokens of a chunk in which a much larger key comes later. They are
found by their denominators and computed again in float64, each as one softmax over its own window, so large keys cost
little more time than moderate ones, and no query depends on what comes after it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .activations_aft import differentiable_gradients, runs_as_written
from .mixing_cpu_lost_aft import SMALLEST_EXPONENT, Lost, LostQueries
from .scaled_sums_aft import EMPTY, working_dtype


# Bytes of the features in a block: what stays in a processor's cache, and is worth starting all passes over it.
BLOCK_SIZE = 2**23

# Chunks in a block.
MOST_CHUNKS = 128

# The largest size of keys for which exponentials need no reference.
MODERATE = 20.0

# A reference lies this far below the largest key. What is left of float32's range above it, exp(88 - 60), is for sums
# over tokens, biases and values; the range below it for keys that are smaller than the largest.
HEADROOM = 60.0

# In denominators from exp(x) on, that is nothing: 64 terms of exp(-87) add less than float32 resolves.
LOST_EXPONENT = -65.0

# Position biases above this are taken relative to the largest one of their query.
LARGEST_BIAS = 20.0

# Sums over a window alone have few terms, so references lie this much lower there, and biases are this much smaller.
WINDOW_MARGIN = 10.0

# exp(w) is 0 for biases that are less than this above the smallest exponent, relative to the largest of the query. The
# bound on denominators is then higher.
BIAS_MARGIN = 7.0


def causal_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor | None,
    slopes: torch.Tensor | None,
    *,
    num_heads: int,
    chunk_size: int,
    differentiable: Callable[..., torch.Tensor],
    global_connectivity: bool = True,
) -> torch.Tensor:
    """Causal Eq. 2: sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt') over t' <= t; 0 for a query that sees
    nothing.

    Args:
        key: (B, T, h k) with k = c, or k = 1 for one key per head; -inf where a token is hidden from all queries.
        value: (B, T, h c).
        tables: w as (h, n or 1, C, 2 C) from each of n chunks to the chunk before it and to itself, and 0 further
            back. None for w = 0, or with `slopes`. Entries for t' > t and for t' < 0 are not used.
        slopes: (h,), for w = -slope (t - t'); None otherwise.
        num_heads: h.
        chunk_size: C.
        differentiable: the same function of (key, value, tables) made of differentiable operations, for gradients of
            gradients and batched gradients.
        global_connectivity: False if a query sees nothing beyond the two chunks.

    Returns:
        (B, T, h c) in the dtype of `value`.
    """
    options = _Options(slopes, num_heads, chunk_size, global_connectivity)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (key, value, tables)):
        return _CausalMixing.apply(options, differentiable, key, value, tables)
    return CausalSums(key, value, tables, options).forward(for_backward=False).context


class _Options(NamedTuple):
    slopes: torch.Tensor | None
    num_heads: int
    chunk_size: int
    global_connectivity: bool


class _CausalMixing(torch.autograd.Function):
    """`CausalSums` to autograd."""

    @staticmethod
    def forward(ctx: Any, options: _Options, differentiable: Callable, key, value, tables) -> torch.Tensor:
        result = CausalSums(key, value, tables, options).forward(for_backward=True)
        ctx.options, ctx.differentiable = options, differentiable
        ctx.save_for_backward(key, value, tables, *result.tensors())
        return result.context.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        key, value, tables, *result = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not runs_as_written(gradient):
            with torch.enable_grad():
                inputs = key, value, tables
                output = ctx.differentiable(*inputs)
                return None, None, *differentiable_gradients(output, inputs, needed, gradient)
        with torch.autocast("cpu", enabled=False):
            sums = CausalSums(key, value, tables, ctx.options)
            return None, None, *sums.backward(_Result.of_tensors(result), gradient, needed[2])


class _Result(NamedTuple):
    """The context, and what the backward pass needs of the forward pass."""

    context: torch.Tensor  # (B, T, d), in float32 at least where there is a backward pass
    inverse: torch.Tensor | None  # (B, T, h k), reciprocals of the denominators, 0 for lost queries
    lost: Lost

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.context, self.inverse, *self.lost

    @classmethod
    def of_tensors(cls, tensors: list[torch.Tensor | None]) -> "_Result":
        return cls(*tensors[:2], Lost(*tensors[2:]))


class Rows(NamedTuple):
    """Some rows of the batch. Tensors are as (h, R, ...), and h is 1 where one table serves all heads."""

    slice: slice
    key: torch.Tensor  # (h, R, T, k)
    value: torch.Tensor  # (h, R, T, c)
    own: torch.Tensor | None  # (h, R, n, k), the references of chunks; None for 0
    seen: torch.Tensor | None  # (h, R, n, k), of what each chunk of queries sees, >= those of all these chunks

    def first_visible(self) -> torch.Tensor | None:
        """The first token that is not hidden, T where all are: (h, R, 1, k). None where no token is hidden."""
        if float(self.key.amin()) > -math.inf:
            return None
        visible = self.key != -math.inf
        return visible.byte().argmax(2, keepdim=True).masked_fill_(~visible.any(2, keepdim=True), self.key.shape[2])

    def references_of_far(self, segment: "Segment", before: int) -> torch.Tensor | None:
        """What the running sums that chunks of a segment see are relative to: (h, R, n, k), None for 0."""
        return None if self.seen is None else _at(self.seen, segment.start - 1 - before, segment.chunks)


class Segment(NamedTuple):
    """Consecutive chunks of C positions in a sequence, of which the last one may be cut short."""

    start: int
    chunks: int
    size: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.chunks

    @property
    def positions(self) -> slice:
        return slice(self.start * self.size, min(self.length, self.stop * self.size))

    def of(self, tables: torch.Tensor) -> torch.Tensor:
        """The part of (h, n, ...) for these chunks; all have one where n is 1."""
        return tables[:, self.start : self.stop] if tables.shape[1] > 1 else tables


class CausalSums:
    """The sums of `causal_mixing` and their gradients.

    Features, exp(K) V and exp(K), lie apart in G = 2 groups where they are equally wide, and side by side (G = 1)
    where the features of a head share a key: (G, h, R, chunks, C, W / G).
    """

    def __init__(self, key, value, tables: torch.Tensor | None, options: _Options):
        self.key, self.value, self.tables = key.contiguous(), value.contiguous(), tables
        self.slopes, self.num_heads, self.chunk_size, self.global_connectivity = options
        self.headroom = HEADROOM if self.global_connectivity else HEADROOM + WINDOW_MARGIN
        self.dtype, self.length = working_dtype(value), value.shape[1]
        per_feature = key.shape == value.shape
        # One product serves all heads where they have no tables of their own.
        self.heads = 1 if tables is None and per_feature else self.num_heads
        self.groups, self.width = 2 if per_feature else 1, value.shape[-1] // self.heads
        self.before = 0 if tables is None else 1  # chunks before its own that a table reaches
        self.biases = _Biases(self)
        self.lost = LostQueries(self)
        self.fall = None if self.slopes is None else self.slope_of_features() * self.chunk_size  # (k,), per chunk

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, for_backward: bool) -> _Result:
        # What the backward pass subtracts is not rounded.
        context = torch.empty_like(self.value, dtype=self.dtype if for_backward else None)
        inverse = torch.empty_like(self.key, dtype=self.dtype) if for_backward else None
        none = torch.empty(0, dtype=torch.float64)
        lost = [Lost(none.long(), none, none.to(self.dtype))]
        for rows, segments in self._blocks():
            here = [None if x is None else self._by_head(x)[:, rows.slice] for x in (context, inverse)]
            lost += self._forward_rows(rows, segments, *here)
        return _Result(context, inverse, Lost(*map(torch.cat, zip(*lost))))

    def _forward_rows(self, rows: Rows, segments: list[Segment], context, inverse) -> Iterator[Lost]:
        """Some rows from left to right."""
        carry = None  # the running sum at the last chunk that lies further back than those of a segment
        for segment in segments:
            here = segment.positions
            features = self._features(rows, segment)
            far = None
            if self.global_connectivity:
                far = self._running_sums(rows, segment, features, carry)  # (G, h, R, n + 1, W / G)
                carry = far[:, :, :, -1]
            sums = self._sums(rows, segment, features, far)
            numerator, denominator = self._parts(_tokens(sums)[:, :, :, : here.stop - here.start])
            reciprocal = denominator if inverse is None else inverse[:, :, here]
            torch.reciprocal(denominator, out=reciprocal)
            exact = context[:, :, here] if context.dtype == self.dtype else numerator
            torch.mul(numerator, reciprocal, out=exact)
            found = self.lost.find(rows, segment, reciprocal, exact, far, for_backward=inverse is not None)
            if found is not None:
                places, index = found
                redone, average = self.lost.redo(index, self.lost.far(rows, segment, places, far))
                exact.unflatten(-1, (rows.key.shape[-1], -1))[places] = average
                yield redone
            if exact is numerator:
                context[:, :, here] = exact

    def _sums(self, rows: Rows, segment: Segment, features, far) -> torch.Tensor:
        """What each query of a segment sums over, relative to the references of `seen`: (G, h, R, n, C, W / G).

        The features are overwritten.
        """
        if far is not None:
            far = far[:, :, :, :-1]
            start = segment.start - 1 - self.before
            far = _scaled(far, self._decay(rows.seen, start, segment.start, segment.chunks))
        if self.tables is None:
            # Without position biases the first token counts for all of its chunk: what is far is added to it.
            features[..., 0, :] += far
            return _products(self.biases.own, features)
        start, chunks = segment.start, segment.chunks
        own, previous = features[:, :, :, 1:], features[:, :, :, :-1]
        if rows.own is not rows.seen:
            own = _scaled(own, _difference(rows.own, start, rows.seen, start, chunks).unsqueeze(-2))
        sums = _products(segment.of(self.biases.own), own)
        if rows.own is not None:
            _scale(previous, _difference(rows.own, start - 1, rows.seen, start, chunks).unsqueeze(-2))
        _products(segment.of(self.biases.previous), previous, sums)
        if far is not None:
            weight = self.biases.far_weight
            far = far.unsqueeze(-2)
            sums += far if weight is None else far * segment.of(weight).unsqueeze(1)
        return sums

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, result: _Result, gradient: torch.Tensor, tables_needed: bool) -> tuple:
        """The gradients of key, value and tables (None unless needed)."""
        gradient = gradient.contiguous()
        any_lost = len(result.lost.index) > 0
        # What is added for lost queries is not rounded after each of them.
        key_gradient, value_gradient = (
            torch.empty_like(x, dtype=self.dtype if any_lost else x.dtype) for x in (self.key, self.value)
        )
        of_tables = self.biases.zeros() if tables_needed else None
        of_far = (
            self.lost.gradient_of_far(result.lost, result.context, gradient)
            if any_lost and self.global_connectivity
            else None
        )
        for rows, segments in self._blocks():
            whole = result.context, result.inverse, gradient, key_gradient, value_gradient
            here = [None if x is None else self._by_head(x)[:, rows.slice] for x in whole]
            self._backward_rows(rows, segments, *here, of_tables, of_far)
        tables_gradient = self.biases.gradient(of_tables) if tables_needed else None
        if any_lost:
            self.lost.add_gradients(
                result.lost, result.context, gradient, key_gradient, value_gradient, tables_gradient
            )
        tables_gradient = None if tables_gradient is None else tables_gradient.to(self.tables.dtype)
        return key_gradient.to(self.key.dtype), value_gradient.to(self.value.dtype), tables_gradient

    def _backward_rows(
        self, rows, segments, context, inverse, gradient, key_gradient, value_gradient, of_tables, of_far
    ) -> None:
        """Some rows from right to left, since a key counts for the queries after it."""
        carry = None
        following = ahead = 0.0  # gradients of the sums of the next chunk, and their totals for all that see a chunk
        for segment in reversed(segments):
            here = segment.positions
            count = here.stop - here.start
            features = self._features(rows, segment)
            of_sums = torch.empty_like(features)  # of the chunks, then of the one that follows
            tokens = _tokens(of_sums)
            tokens[:, :, :, count:] = 0
            of_sums[:, :, :, segment.chunks :] = following
            self._gradient_of_sums(
                gradient[:, :, here], context[:, :, here], inverse[:, :, here], tokens[:, :, :, :count]
            )
            following = of_sums[:, :, :, : self.before].clone()
            later = None
            if self.global_connectivity:
                extra = None if of_far is None else of_far[:, :, rows.slice, segment.start : segment.stop]
                later, ahead = self._later_sums(rows, segment, of_sums, ahead, carry, extra)
                carry = later[:, :, :, :1]
            of_features = self._gradient_of_features(rows, segment, of_sums, later, features, of_tables)
            parts = (_tokens(x)[:, :, :, :count] for x in (of_features, features[:, :, :, self.before :]))
            self._gradient_of_inputs(*parts, key_gradient[:, :, here], value_gradient[:, :, here])

    def _gradient_of_features(self, rows: Rows, segment: Segment, of_sums, later, features, of_tables):
        """The transpose of `_sums`; adds to the gradients of the tables. `of_sums` is overwritten."""
        start, chunks = segment.start, segment.chunks
        if self.tables is None:
            of_sums[..., -1, :] += later
            return _products(self.biases.own.mT, of_sums)
        own, previous = of_sums[:, :, :, :-1], of_sums
        if rows.own is not rows.seen:
            own = _scaled(own, _difference(rows.own, start, rows.seen, start, chunks).unsqueeze(-2))
        of_features = _products(segment.of(self.biases.own_of_keys), own)
        if of_tables is not None:
            _add_products(segment.of(of_tables[0]), features[:, :, :, 1:], own)
        if rows.own is not None:
            _scale(previous, _difference(rows.own, start - 1, rows.seen, start, chunks + 1).unsqueeze(-2))
        _products(segment.of(self.biases.previous_of_keys), previous[:, :, :, 1:], of_features)
        if of_tables is not None:
            _add_products(segment.of(of_tables[1]), features[:, :, :, :-1], previous[:, :, :, :-1])
        return of_features if later is None else of_features.add_(later.unsqueeze(-2))

    def _later_sums(self, rows: Rows, segment: Segment, of_sums, ahead, carry, extra):
        """The gradients of the running sums at each chunk of a segment, (G, h, R, n, W / G), and the totals of the
        first chunks, which the segment before needs.
        """
        reach, chunks = 1 + self.before, segment.chunks
        totals = of_sums.new_empty(*of_sums.shape[:3], chunks + reach, of_sums.shape[-1])
        here = of_sums[:, :, :, :chunks]
        weight = self.biases.far_weight
        torch.sum(here if weight is None else here * segment.of(weight).unsqueeze(1), -2, out=totals[:, :, :, :chunks])
        totals[:, :, :, chunks:] = ahead
        ahead, later = totals[:, :, :, :reach].clone(), totals[:, :, :, reach:]
        later = _scaled(later, self._decay(rows.seen, segment.start, segment.start + reach, chunks))
        if extra is not None:
            later += extra
        if carry is not None:
            later[:, :, :, -1:] += _scaled(carry, self._decay(rows.seen, segment.stop - 1, segment.stop, 1))
        self._accumulate(later, rows.seen, segment.start, reverse=True)
        return later, ahead

    def _gradient_of_sums(self, gradient, context, inverse, of_sums) -> None:
        """From the gradient of the quotients to those of both sums."""
        of_numerator, of_denominator = self._parts(of_sums)
        torch.mul(gradient, inverse, out=of_numerator)
        if self.groups == 2:
            torch.mul(of_numerator, context, out=of_denominator)
        else:
            torch.sum(of_numerator * context, -1, keepdim=True, out=of_denominator)
        of_denominator.neg_()

    def _gradient_of_inputs(self, of_features, features, key_gradient, value_gradient) -> None:
        """From the gradients of exp(K) V and exp(K), which are overwritten, to those of K and V."""
        (of_weighted, of_weights), (weighted, weights) = self._parts(of_features), self._parts(features)
        torch.mul(of_weighted, weights, out=value_gradient)
        from_values = of_weighted.mul_(weighted)
        if self.groups == 1:
            from_values = from_values.sum(-1, keepdim=True)
        torch.addcmul(from_values, of_weights, weights, out=key_gradient)

    # -------------------------------------------------------------------------------------------- building blocks

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, h c) as (h, B, T, c)."""
        return x.view(*x.shape[:2], self.heads, -1).permute(2, 0, 1, 3)

    def _blocks(self) -> Iterator[tuple[Rows, list[Segment]]]:
        """Rows that are taken at once, and the segments into which they are cut."""
        batch, size = self.value.shape[0], self.chunk_size
        position_size = (self.key.shape[-1] + self.value.shape[-1]) * self.dtype.itemsize
        at_once = min(batch, max(1, BLOCK_SIZE // max(1, self.length * position_size)))
        total = -(-self.length // size)
        chunks = max(1, min(MOST_CHUNKS, BLOCK_SIZE // (at_once * size * position_size)))
        segments = [Segment(i, min(chunks, total - i), size, self.length) for i in range(0, total, chunks)]
        key, value = self._by_head(self.key), self._by_head(self.value)
        own, seen = self._references()
        for row in range(0, batch, at_once):
            here = slice(row, row + at_once)
            highest = seen[:, here]
            moderate = ((highest.abs() <= MODERATE) | (highest == EMPTY)).all()
            references = [None, None] if moderate else [x[:, here] - self.headroom for x in (own, seen)]
            if own is seen:
                references[0] = references[1]
            yield Rows(here, key[:, here], value[:, here], *references), segments

    def _references(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest keys of each chunk, and of all that its queries see: (h, B, n, k). EMPTY where all is hidden.

        Whole numbers, so that differences of keys and references are not rounded. Under global connectivity a chunk
        takes the second for the first.
        """
        size = self.chunk_size
        whole = self.length // size * size
        highest = [self.key[:, :whole].unflatten(1, (-1, size)).amax(2)]
        if whole < self.length:
            highest.append(self.key[:, whole:].amax(1, keepdim=True))
        # What is not finite is found by its results.
        highest = torch.cat(highest, 1).to(self.dtype).nan_to_num_(EMPTY, EMPTY, EMPTY)
        own = self._by_head(highest).contiguous()
        if not self.global_connectivity:
            own = own.round_()
            return own, torch.cat([own[:, :, :1], torch.maximum(own[:, :, 1:], own[:, :, :-1])], 2)
        if self.fall is not None:
            # In units of the start of a chunk, where its last key counts more by up to a chunk's fall.
            fallen = torch.arange(own.shape[2], dtype=self.dtype, device=own.device)[:, None] * self.fall  # (n, k)
            own += fallen + self.fall / 2
        seen = own.cummax(2).values
        if self.fall is not None:
            seen = (seen - fallen).masked_fill_(seen < EMPTY / 2, EMPTY)
        seen = seen.round_()
        return seen, seen

    def _features(self, rows: Rows, segment: Segment) -> torch.Tensor:
        """exp(K) V and exp(K) of a segment, and of the chunk before it if tables reach there, relative to the
        references of their chunks, 0 where there is no token: (G, h, R, chunks, C, W / G).
        """
        size, here = self.chunk_size, segment.positions
        slots = segment.chunks + self.before
        shape = *rows.key.shape[:2], slots, size
        width = rows.value.shape[-1] + (2 - self.groups) * rows.key.shape[-1]
        features = rows.value.new_empty(self.groups, *shape, width, dtype=self.dtype)
        # exp is several times slower on rows that are apart
        weights = features[1] if self.groups == 2 else features.new_empty(*shape, rows.key.shape[-1])
        first, start = here.start - self.before * size, max(here.start - self.before * size, 0)
        tokens, filled = slice(start, here.stop), slice(start - first, here.stop - first)
        flat = weights.flatten(2, 3)
        flat[:, :, filled] = rows.key[:, :, tokens]
        if rows.own is not None:
            weights -= _at(rows.own, segment.start - self.before, slots).unsqueeze(-2)
            weights.clamp_(min=SMALLEST_EXPONENT[self.dtype])
        flat[:, :, filled].exp_()
        flat[:, :, : filled.start], flat[:, :, filled.stop :] = 0, 0
        if self.slopes is not None:
            # In units of a weight at the start of its chunk: what a later token counts more than an earlier one.
            place = torch.arange(size, device=weights.device, dtype=self.dtype)
            weights *= torch.exp(place[:, None] * self.slope_of_features())  # (C, k)
        weighted, copy = self._parts(features)
        if self.groups == 1:
            copy.copy_(weights)
        weighted = weighted.flatten(2, 3)
        weighted[:, :, : filled.start], weighted[:, :, filled.stop :] = 0, 0
        torch.mul(flat[:, :, filled], rows.value[:, :, tokens], out=weighted[:, :, filled])
        return features

    def _parts(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(G, ..., W / G) as the part of the numerators (..., c) and that of the denominators (..., k)."""
        return features.unbind() if self.groups == 2 else features[0].tensor_split((self.width,), -1)

    def far_parts(self, far: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Running sums as numerators (h, R, n, k, c / k) and denominators (h, R, n, k)."""
        numerator, denominator = self._parts(far)
        return numerator.unflatten(-1, (denominator.shape[-1], -1)), denominator

    def _running_sums(self, rows: Rows, segment: Segment, features, carry) -> torch.Tensor:
        """The sums over all that lies further back than a segment's first chunk, then each of the other chunks, and
        than the chunk that follows: (G, h, R, n + 1, W / G), relative to the last chunk that is summed.
        """
        totals = features.new_empty(*features.shape[:3], segment.chunks + 1, features.shape[-1])
        totals[:, :, :, 0] = 0 if carry is None else carry
        torch.sum(features[:, :, :, : segment.chunks], -2, out=totals[:, :, :, 1:])
        self._accumulate(totals, rows.seen, segment.start - 1 - self.before)
        return totals

    def _accumulate(self, totals: torch.Tensor, seen: torch.Tensor | None, start: int, reverse: bool = False) -> None:
        """Running sums along the chunks from `start` on, (G, h, R, n, W / G), in place, in log2(n) steps."""
        step, count = 1, totals.shape[3]
        while step < count:
            earlier, later = totals[:, :, :, :-step], totals[:, :, :, step:]
            source, target = (later, earlier) if reverse else (earlier, later)
            target += _scaled(source, self._decay(seen, start, start + step, count - step)).clone()
            step *= 2

    def _decay(self, seen: torch.Tensor | None, start: int, later_start: int, count: int) -> torch.Tensor | None:
        """The log of what the running sums at chunks from `start` on count at those from `later_start` on:
        (h, R, count, k), None for 0.
        """
        exponent = None if seen is None else _difference(seen, start, seen, later_start, count)
        if self.fall is None:
            return exponent
        fallen = self.fall * (start - later_start)
        return fallen.view(1, 1, 1, -1) if exponent is None else exponent.add_(fallen)

    def slope_of_features(self) -> torch.Tensor:
        slopes = self.slopes.to(self.dtype)
        return slopes.repeat_interleave(self.key.shape[-1] // self.num_heads)


class _Biases:
    """exp(w), 0 where a key comes after the query: (h, n or 1, C, C) for a chunk itself and for the chunk before."""

    def __init__(self, sums: CausalSums):
        size, dtype, tables = sums.chunk_size, sums.dtype, sums.tables
        self.far_weight, self.wide, self.headroom = None, False, sums.headroom
        if tables is None:
            self.own = torch.ones(1, 1, size, size, dtype=dtype, device=sums.value.device).tril()
            return
        hidden = torch.ones(size, 2 * size, dtype=torch.bool, device=tables.device).triu(size + 1)
        bias = tables.detach().to(dtype).masked_fill(hidden, -math.inf)
        if bias.shape[1] > 1:
            bias[:, 0, :, :size] = -math.inf
        largest = bias.amax(-1, keepdim=True)  # (h, n or 1, C, 1)
        if sums.global_connectivity:
            largest.clamp_(min=0.0)
        if not float(largest.abs().amax()) <= LARGEST_BIAS - (sums.headroom - HEADROOM):
            largest.nan_to_num_(0.0, 0.0, 0.0)
            bias -= largest
            self.far_weight = self._exp(-largest) if sums.global_connectivity else None
        self.previous, self.own = (x.contiguous() for x in self._exp(bias).split(size, -1))
        self.own_of_keys = self.own.mT.contiguous()
        self.previous_of_keys = self._of_following().mT.contiguous()

    def _exp(self, bias: torch.Tensor) -> torch.Tensor:
        negligible = (bias < SMALLEST_EXPONENT[bias.dtype] + BIAS_MARGIN) & (bias > -math.inf)
        if not negligible.any():
            return torch.exp(bias)
        self.wide = True
        return torch.exp(bias).masked_fill_(negligible, 0)

    def _of_following(self) -> torch.Tensor:
        """For each chunk of keys the table of the chunk after it."""
        if self.previous.shape[1] == 1:
            return self.previous
        return torch.cat([self.previous[:, 1:], torch.zeros_like(self.previous[:, :1])], 1)

    def zeros(self) -> list[torch.Tensor]:
        """For gradients of exp(w), a pair of (h, n or 1, C', C)."""
        return [x.new_zeros(*x.shape[:2], *x.shape[:1:-1]) for x in (self.own, self.previous)]

    def gradient(self, of_tables: list[torch.Tensor]) -> torch.Tensor:
        """From gradients as in `zeros` to that of w."""
        # A pair of tokens that do not see each other may have overflowed.
        own, previous = (torch.where(x > 0, x * of_x.mT, 0.0) for x, of_x in zip((self.own, self.previous), of_tables))
        return torch.cat([previous, own], -1)

    def lost_exponent(self, moderate: bool) -> float:
        """The exponent of the smallest denominator that is precise."""
        if not self.wide:
            return LOST_EXPONENT
        return LOST_EXPONENT + BIAS_MARGIN + (MODERATE if moderate else self.headroom)


def _tokens(features: torch.Tensor) -> torch.Tensor:
    """(G, h, R, chunks, C, w) as (G, h, R, T, w)."""
    return features.flatten(3, 4)


def _at(references: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` chunks from `start` on; beyond the first and the last one, these."""
    last = references.shape[2] - 1
    if start >= 0 and start + count <= last + 1:
        return references[:, :, start : start + count]
    places = torch.arange(start, start + count, device=references.device).clamp_(0, last)
    return references.index_select(2, places)


def _difference(own: torch.Tensor, start: int, seen: torch.Tensor, seen_start: int, count: int) -> torch.Tensor:
    """The log of what features relative to `own` count in sums relative to `seen`: (h, R, count, k), at most 0."""
    return _at(own, start, count) - _at(seen, seen_start, count)


def _scaled(x: torch.Tensor, exponent: torch.Tensor | None) -> torch.Tensor:
    """x exp(exponent), precise where that is a number though the exponential alone would be too small for one."""
    if exponent is None:
        return x
    return _scale(x.clone(), exponent)


def _scale(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`_scaled` in place."""
    root = torch.exp(exponent / 2)
    return x.mul_(root).mul_(root)


def _products(tables: torch.Tensor, features: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Tables (h or 1, n or 1, C, C) with the features of chunks (G, h, R, n, C, w)."""
    rows, chunks, size = features.shape[2:5]
    out = features.new_empty(features.shape) if add_to is None else add_to
    # Rows may be apart in memory, so there is a batch of products for each row, or for each chunk if these are fewer.
    dim, others = (0, chunks) if rows <= chunks else (1, rows)
    tables = tables.expand(features.shape[1], chunks, size, size)
    for head, of_chunks in enumerate(tables):
        batches = [of_chunks] * rows if dim == 0 else [table.expand(others, size, size) for table in of_chunks]
        for x, y in zip(features[:, head], out[:, head]):
            for table, here, product in zip(batches, x.unbind(dim), y.unbind(dim)):
                torch.baddbmm(product, table, here, beta=0 if add_to is None else 1, out=product)
    return out


def _add_products(of_tables: torch.Tensor, features: torch.Tensor, of_sums: torch.Tensor) -> None:
    """Adds the gradient of each chunk's table, summed over rows, to (h, n or 1, C', C)."""
    chunks, size = features.shape[3:5]
    for head, of_table in enumerate(of_tables):
        products = features.new_zeros(chunks, size, size)
        for x, of_x in zip(features[:, head].flatten(0, 1), of_sums[:, head].flatten(0, 1)):
            products.baddbmm_(x, of_x.mT)
        of_table += products if len(of_table) > 1 else products.sum(0)
