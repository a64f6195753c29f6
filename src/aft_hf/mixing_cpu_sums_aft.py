"""Eq. 2 for a block of features on a CPU, by products with a table of exp(w): values and gradients, for keys and
values of any size.

Keys are (G, k, B, T) for G groups of features and values (G, c, B, T), with k = c or 1. Where all of them are
moderate, exp(K) is summed as it is. Otherwise it is taken relative to the maximum over the positions of a row
(b, feature). A query that sees none of the largest keys, or sees them at small biases only, may then lose terms.

- In a causal table few queries do so, because they are done in pieces: the last ones with all keys, the last ones of
  the others with the keys before the first piece, and so on. A piece holds at least the last third of the queries, and
  more where few of them would be lost. The first few may have a softmax.
- The denominators show which queries are lost nonetheless. In a causal table with moderate biases they see none of the
  largest keys, so their rows are summed again without these. What is left has a softmax for each query.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from .mixing_cpu_bias_aft import FLOOR, DenseTables, Table, Tables, is_moderate
from .mixing_cpu_product_aft import (
    LARGEST_EXPONENT,
    LARGEST_VALUE,
    Size,
    Upstream,
    are_bounded,
    product_average,
    product_gradients,
)
from .scaled_sums_aft import largest_size, working_dtype


# Rows by the indices of their groups, features of the keys and rows of the batch; and an index of more dimensions.
Place = tuple[torch.Tensor, ...]
Index = tuple[torch.Tensor | slice, ...]

# The log of the largest upstream gradient for which there is room beside values.
GRADIENT_MARGIN = 12.0

# The first so many queries of a causal table, where the running maximum of the keys grows fastest, have a softmax; all
# pieces begin at multiples of this.
FIRST = 16

# The part of all keys that may be summed again after a piece, because the first queries of their rows are lost.
SUMMED_AGAIN = 1 / 32

# Rows by which pieces are chosen.
SAMPLED_ROWS = 128

# How often the rows with lost queries are summed again, without the keys that these do not see.
ROUNDS = 3

# Numbers in a block of lost queries, each with the keys and values that it sees.
LOST_BLOCK = 2**19


@dataclass(frozen=True)
class Block:
    """Keys, values and position biases that are taken at once.

    Args:
        keys: (G, k, B, T), -inf where hidden from all queries.
        values: (G, c, B, T).
        bias: of their heads, as `tables` takes them: one for each group, or one for the only group.
        table: made of `bias`.
        moderate: whether keys and values can be summed as they are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    tables: Tables
    table: Table
    moderate: bool

    def average(self, context: torch.Tensor, inverse: torch.Tensor) -> None:
        """Eq. 2, written into `context` (G, c, B, T), and the reciprocals of its denominators, into `inverse`
        (G, k, B, T): these are 0 for queries that were lost or see nothing.
        """
        for start, end, table in self._pieces():
            queries = slice(start, end)
            seen = self.keys[..., :end], self.values[..., :end]
            if table is None:
                context[..., queries] = _first_average(*seen, self._visible_bias[:, :end, :end])
                inverse[..., queries] = 1.0
                continue
            product_average(
                *seen, self.tables, table, self._size, self._smallest, context[..., queries], inverse[..., queries]
            )
            if self._sums_again:
                self._sum_again(start, end, table, context, inverse)
        if not self.moderate and not self._sums_again and not float(inverse.amin()) > 0:
            self._restore(*self._lost(inverse), context)

    def gradients(
        self, upstream: Upstream, of_keys: torch.Tensor, of_values: torch.Tensor, bias_needed: bool
    ) -> torch.Tensor | None:
        """From the gradient of `average` to those of keys and values, written into `of_keys` and `of_values`, and to
        that of the biases, if needed.
        """
        of_table = of_first = of_bias = None
        results, dtype = (of_keys, of_values), upstream.context.dtype
        if not self.moderate and of_keys.dtype != dtype:  # sums of several parts, rounded once
            of_keys, of_values = (torch.empty_like(x, dtype=dtype) for x in results)
        downstream = of_keys, of_values
        for start, end, table in self._pieces():
            if table is None:
                of_first = self._add_first_gradients(end, upstream.of_context, *downstream, bias_needed)
            elif end == self.keys.shape[-1]:
                of_table = self._gradients_of_part(upstream, start, end, table, *downstream, bias_needed)
                if of_table is not None and start > 0:
                    of_table = nn.functional.pad(of_table, (0, 0, start, 0))
            else:
                self._add_gradients(upstream, start, end, table, *downstream, of_table)
        if self._sums_again:
            of_bias = self._add_gradients_again(upstream, *downstream, of_table)
        elif not self.moderate and not float(upstream.inverse.amin()) > 0:
            lost, _ = self._lost(upstream.inverse)
            of_bias = self._add_lost_gradients(lost, upstream.of_context, *downstream, bias_needed)
        for result, total in zip(results, downstream):
            if result is not total:
                result.copy_(total)
        if of_table is None:
            return None
        assert isinstance(self.tables, DenseTables)  # bands have no gradients
        through_table = self.tables.bias_gradient(of_table, self.table, self.bias)
        if of_first is not None:
            end = of_first.shape[-1]
            through_table[:, :end, :end] += of_first
        return through_table if of_bias is None else through_table + of_bias

    @cached_property
    def _size(self) -> Size:
        if self.moderate:
            return Size.MODERATE
        return Size.BOUNDED if self._range_of_keys[1] < torch.inf and are_bounded(self.values) else Size.ANY

    @cached_property
    def _range_of_keys(self) -> tuple[float, float]:
        lowest, highest = self.keys.aminmax()
        return float(lowest), float(highest)

    @cached_property
    def _smallest(self) -> float:
        """Queries with smaller denominators are lost."""
        dtype, top = self.table.entries.dtype, self.table.top
        # Next to larger ones, terms that were left out because of their key are less than a hundredth of a rounding
        # error each.
        precise = FLOOR[working_dtype(self.table.entries)] + 5.0 - math.log(torch.finfo(dtype).eps)
        # Gradients are sums of products of values, and of a gradient, with what the denominators divide.
        largest = largest_size(self.values)
        if not math.isfinite(largest):
            largest = float(self.values.abs().nan_to_num_(0.0).amax())
        largest = min(max(largest, 1.0), LARGEST_VALUE)
        finite = math.log(largest * self.keys.shape[-1]) + GRADIENT_MARGIN - math.log(torch.finfo(dtype).max)
        return math.exp(top + max(precise, finite))

    @property
    def _reach(self) -> float:
        """How far below the largest key the keys of a query with w = 0 may lie for it not to be lost."""
        return LARGEST_EXPONENT - self.table.top - math.log(self._smallest)

    @cached_property
    def _sums_again(self) -> bool:
        """Whether rows with lost queries are summed again."""
        return self.tables.causal and self._size == Size.BOUNDED and is_moderate(self.bias)

    def _pieces(self) -> Iterator[tuple[int, int, Table | None]]:
        """Queries from start to end that see keys up to the end, the last ones first, and their part of the table, or
        None for a softmax.
        """
        end = self.keys.shape[-1]
        if not self.tables.causal or self.moderate:
            yield 0, end, self.table
            return
        while end > FIRST:
            start = self._start_of_piece(end)
            yield start, end, self.table.part(start, end)
            end = start
        by_softmax = end < self.keys.shape[-1] and not self._sums_again and self._first_are_finite
        if end > 0:
            yield 0, end, None if by_softmax else self.table.part(0, end)

    def _start_of_piece(self, end: int) -> int:
        """The first query of a piece. Where lost rows are summed again, a piece begins as early as these are few."""
        latest = max(2 * end // 3 // FIRST, 1) * FIRST
        if not self._sums_again:
            return latest
        allowed = SUMMED_AGAIN * self.keys.shape[-1] / end
        if allowed >= 1:
            return 0
        starts, peaks = self._peaks
        below = peaks[len([x for x in starts if x < end])] - self._reach
        early = (x for x, peak in zip(starts, peaks) if x < latest and (peak < below).float().mean() <= allowed)
        return next(early, latest)

    @cached_property
    def _peaks(self) -> tuple[list[int], list[torch.Tensor]]:
        """Multiples of `FIRST`, and the largest key of some rows before each of them and before the end."""
        length, starts = self.keys.shape[-1], [FIRST]
        while 3 * starts[-1] // 2 < length:
            starts.append(-(-3 * starts[-1] // 2 // FIRST) * FIRST)
        starts = [x for x in starts if x < length]
        rows = self.keys.flatten(0, 2)
        pieces = rows[:: max(1, len(rows) // SAMPLED_ROWS)].tensor_split(starts, -1)
        peaks = [pieces[0].amax(-1)]
        for piece in pieces[1:]:
            peaks.append(torch.maximum(peaks[-1], piece.amax(-1)))
        return starts, peaks

    @cached_property
    def _first_are_finite(self) -> bool:
        return all(bool(x[..., :FIRST].isfinite().all()) for x in (self.keys, self.values))

    def _add_first_gradients(
        self, end: int, of_context: torch.Tensor, of_keys: torch.Tensor, of_values: torch.Tensor, bias_needed: bool
    ) -> torch.Tensor | None:
        """Add the gradients of the first queries to those of keys and values, and return that of their biases."""
        inputs = self.keys[..., :end], self.values[..., :end], self._visible_bias[:, :end, :end]
        seen = [x.detach().to(of_keys.dtype).requires_grad_() for x in inputs]
        with torch.enable_grad():
            found = _first_average(*seen)
        of_seen_keys, of_seen_values, of_bias = torch.autograd.grad(found, seen, of_context[..., :end].to(found.dtype))
        of_keys[..., :end] += of_seen_keys
        of_values[..., :end] += of_seen_values
        return of_bias if bias_needed else None

    def _gradients_of_part(
        self,
        upstream: Upstream,
        start: int,
        end: int,
        table: Table,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
        table_needed: bool,
    ) -> torch.Tensor | None:
        """`product_gradients` of the queries from start to end, which see the keys before the end."""
        seen = self.keys[..., :end], self.values[..., :end]
        return product_gradients(upstream.part(start, end), *seen, table, self._size, of_keys, of_values, table_needed)

    def _add_gradients(
        self,
        upstream: Upstream,
        start: int,
        end: int,
        table: Table,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
        of_table: torch.Tensor | None,
    ) -> None:
        """Add the gradients of a part of a causal table, whose queries go from start to end."""
        of_seen_keys = torch.empty_like(self.keys[..., :end], dtype=of_keys.dtype)
        of_seen_values = torch.empty_like(self.values[..., :end], dtype=of_values.dtype)
        table_needed = of_table is not None
        of_part = self._gradients_of_part(upstream, start, end, table, of_seen_keys, of_seen_values, table_needed)
        of_keys[..., :end] += of_seen_keys
        of_values[..., :end] += of_seen_values
        if of_table is not None and of_part is not None:
            of_table[:, start:end, :end] += of_part

    # ------------------------------------------------------------------------------- rows that are summed once more

    def _sum_again(self, start: int, end: int, table: Table, context: torch.Tensor, inverse: torch.Tensor) -> None:
        """Write the averages of the lost queries from start to end."""
        left = []
        for rows in self._rows_with_lost(start, end, table, inverse):
            found = self._of_keys(context)[rows.queries]
            for again in self._rounds(rows):
                found = torch.where(again.here.unsqueeze(1), again.context, found)
            self._of_keys(context)[rows.queries] = found
            left.append(rows)
        lost = self._left(left, inverse)
        if lost is not None:
            self._restore(lost, None, context)

    def _add_gradients_again(
        self, upstream: Upstream, of_keys: torch.Tensor, of_values: torch.Tensor, of_table: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the part of lost queries to the gradients of keys, values and table; that of the biases, for queries
        that have a softmax.
        """
        left, of_context_by_key = [], self._of_keys(upstream.of_context)
        for start, end, table in self._pieces():
            assert table is not None  # a softmax is only for what is not summed again
            for rows in self._rows_with_lost(start, end, table, upstream.inverse):
                of_queries = of_context_by_key[rows.queries].to(upstream.context.dtype).transpose(0, 1).unsqueeze(0)
                for again in self._rounds(rows):
                    of_rows = torch.empty_like(rows.values, dtype=of_values.dtype).transpose(0, 1).unsqueeze(0)
                    of_row_keys = torch.empty_like(again.keys, dtype=of_keys.dtype)[None, None]
                    of_part = product_gradients(
                        Upstream(
                            of_queries,
                            again.context.transpose(0, 1).unsqueeze(0),
                            again.inverse.masked_fill(~again.here, 0.0)[None, None],
                        ),
                        again.keys[None, None],
                        rows.values.transpose(0, 1).unsqueeze(0),
                        rows.table,
                        Size.BOUNDED,
                        of_row_keys,
                        of_rows,
                        of_table is not None,
                    )
                    of_keys[..., :end][rows.place] += of_row_keys[0, 0]
                    self._of_keys(of_values)[..., :end][rows.place] += of_rows[0].transpose(0, 1)
                    if of_table is not None and of_part is not None:
                        of_table[rows.group, start:end, :end] += of_part[0]
                left.append(rows)
        lost = self._left(left, upstream.inverse)
        if lost is None:
            return None
        return self._add_lost_gradients(lost, upstream.of_context, of_keys, of_values, of_table is not None)

    def _rows_with_lost(self, start: int, end: int, table: Table, inverse: torch.Tensor) -> Iterator["_Rows"]:
        """The rows in which queries from start to end are lost, of one group at a time."""
        part = inverse[..., start:end].to(working_dtype(inverse))  # in which a minimum is found faster
        if self._first_visible is not None:
            query = torch.arange(start, end, device=part.device)
            part = part.masked_fill(query < self._first_visible, 1.0)
        rows = (part.amin(-1) == 0).nonzero()  # (N, 3)
        for group in rows[:, 0].unique().tolist():
            place = rows[rows[:, 0] == group].unbind(1)
            keys, values = self.keys[..., :end][place], self._of_keys(self.values)[..., :end][place]
            of_group = table._replace(entries=table.entries[group : group + 1])
            queries: Index = (*place, slice(None), slice(start, end))
            yield _Rows(group, start, place, queries, keys, values, of_group, part[place] == 0)

    def _rounds(self, rows: "_Rows") -> Iterator["_Again"]:
        """Sum rows without their largest keys.

        A query is lost if all keys that it sees, with their biases, are far below the largest key of its row. So it
        sees none of those that are near that one, and its sums are the same without them.
        """
        near, keys = self._reach + float(self.bias.amin()), rows.keys
        values, (count, size) = rows.values.transpose(0, 1).unsqueeze(0), rows.lost.shape
        for _ in range(ROUNDS):
            keys = keys.masked_fill(keys > keys.amax(-1, keepdim=True) - near, -torch.inf)
            context = rows.table.entries.new_empty(1, values.shape[1], count, size)
            inverse = rows.table.entries.new_empty(1, 1, count, size)
            product_average(
                keys[None, None], values, self.tables, rows.table, Size.BOUNDED, self._smallest, context, inverse
            )
            again = _Again(keys, context[0].transpose(0, 1), inverse[0, 0], rows.lost & (inverse[0, 0] > 0))
            yield again
            rows.lost = rows.lost ^ again.here
            rows.any_lost = bool(rows.lost.any())
            if not rows.any_lost:
                break

    @cached_property
    def _first_visible(self) -> torch.Tensor | None:
        """The first position of each row that is not hidden, (G, k, B, 1); None where no position is hidden."""
        if self._range_of_keys[0] > -torch.inf:
            return None
        visible = self.keys > -torch.inf
        return visible.byte().argmax(-1, keepdim=True).masked_fill_(~visible.any(-1, keepdim=True), visible.shape[-1])

    # ----------------------------------------------------------------------------------------------- lost queries

    def _left(self, summed: list["_Rows"], inverse: torch.Tensor) -> torch.Tensor | None:
        """Which queries are lost still, (G, k, B, T); None where none is."""
        if not any(rows.any_lost for rows in summed):
            return None
        lost = torch.zeros_like(inverse, dtype=torch.bool)
        for rows in summed:  # those of a piece lie in no other
            lost[..., rows.start : rows.start + rows.lost.shape[-1]][rows.place] = rows.lost
        return lost

    def _restore(self, lost: torch.Tensor, undefined: torch.Tensor | None, context: torch.Tensor) -> None:
        """Write the averages of lost queries, and NaN where they are undefined."""
        if undefined is not None:
            context.masked_fill_(undefined, torch.nan)
        for place, query in self._few_at_once(lost):
            found = _softmax_average(*self._seen(place, query))
            index: Index = (*place, slice(None), query)
            self._of_keys(context)[index] = found.to(context.dtype)

    def _add_lost_gradients(
        self,
        lost: torch.Tensor,
        of_context: torch.Tensor,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
        bias_needed: bool,
    ) -> torch.Tensor | None:
        """Add the part of lost queries to the gradients of keys and values, and return that of the biases."""
        of_bias = torch.zeros_like(self.bias) if bias_needed else None
        for place, query in self._few_at_once(lost):
            seen = [x.detach().requires_grad_() for x in self._seen(place, query)]
            with torch.enable_grad():
                found = _softmax_average(*seen)
            index: Index = (*place, slice(None), query)
            gradient = self._of_keys(of_context)[index].to(of_keys.dtype)
            of_seen_keys, of_seen_values, of_rows = torch.autograd.grad(found, seen, gradient)
            end = of_seen_keys.shape[1]
            of_keys[..., :end].index_put_(place, of_seen_keys, accumulate=True)
            self._of_keys(of_values)[..., :end].index_put_(place, of_seen_values, accumulate=True)
            if of_bias is not None:
                assert isinstance(self.tables, DenseTables)
                self.tables.add_rows(of_bias, place[0], query, of_rows)
        return of_bias

    def _lost(self, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which queries have to be done again, (G, k, B, T), and which of those that were lost see something that is
        not finite, so that their average is not defined. Those that see nothing are neither.
        """
        lost, keys, values = inverse == 0, self.keys, self.values
        if self._size == Size.BOUNDED and self._range_of_keys[0] > -torch.inf:
            return lost, None
        finite = values.isfinite().unflatten(1, (keys.shape[1], -1)).all(2) & (keys < torch.inf)
        visible = keys > -torch.inf
        if self.tables.causal:
            defined, sighted = (~finite).cumsum(-1) == 0, visible.cumsum(-1) > 0
        else:
            defined, sighted = finite.all(-1, keepdim=True), visible.any(-1, keepdim=True)
        return lost & defined & sighted, lost & ~defined

    def _few_at_once(self, lost: torch.Tensor) -> Iterator[tuple[Place, torch.Tensor]]:
        """The indices of lost queries: (group, feature of the keys, row of the batch) and query."""
        size = (self.values.shape[1] // self.keys.shape[1] + 2) * lost.shape[-1]
        indices = lost.nonzero()
        indices = indices[indices[:, -1].argsort()]  # those that see few keys together
        for few in indices.split(max(1, LOST_BLOCK // size)) if len(indices) else ():
            *place, query = few.unbind(1)
            yield tuple(place), query

    @cached_property
    def _visible_bias(self) -> torch.Tensor:
        return self.tables.visible(self.bias)

    def _of_keys(self, values: torch.Tensor) -> torch.Tensor:
        """(G, c, B, T) as (G, k, B, c / k, T): the values of each key."""
        return values.unflatten(1, (self.keys.shape[1], -1)).permute(0, 1, 3, 2, 4)

    def _seen(self, place: Place, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys (N, T), values (N, c / k, T) and biases (N, T) of N queries, up to the last one if causal."""
        end = int(query.max()) + 1 if self.tables.causal else self.keys.shape[-1]
        keys, values = self.keys[..., :end][place], self._of_keys(self.values)[..., :end][place]
        bias = self.tables.rows(self._visible_bias, place[0], query, end)
        dtype = working_dtype(keys)
        return keys.to(dtype), values.to(dtype), bias.to(dtype)


@dataclass
class _Rows:
    """Rows in which queries are lost, of one group of features.

    Args:
        group, start: which group, and the first of the queries.
        place: the rows in (G, k, B).
        queries: the same as an index of (G, k, B, c / k, T) for (N, c / k, C).
        keys: (N, T') for the T' keys before the end of the queries.
        values: (N, c / k, T').
        table: of that group.
        lost, any_lost: (N, C), which queries are lost, fewer in each round; and whether there are any.
    """

    group: int
    start: int
    place: Place
    queries: Index
    keys: torch.Tensor
    values: torch.Tensor
    table: Table
    lost: torch.Tensor
    any_lost: bool = True


class _Again(NamedTuple):
    """What a round finds: the keys (N, T') that it sums, averages (N, c / k, C) and reciprocals of the denominators
    (N, C), and for which queries these are right.
    """

    keys: torch.Tensor
    context: torch.Tensor
    inverse: torch.Tensor
    here: torch.Tensor


def _softmax_average(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 for N queries from keys (N, T), values (N, c, T) and biases (N, T), -inf where they must not look."""
    logits = keys + bias
    if not math.isfinite(float(values.detach().sum() + keys.detach().sum())):
        hidden = bias == -torch.inf
        logits, values = logits.masked_fill(hidden, -torch.inf), values.masked_fill(hidden.unsqueeze(1), 0.0)
    return (values @ torch.softmax(logits, -1).unsqueeze(-1)).squeeze(-1)


def _first_average(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 for few queries from keys (G, k, B, T), values (G, c, B, T) and biases (G or 1, T, T)."""
    dtype = working_dtype(keys)
    keys, values, bias = keys.to(dtype), values.to(dtype), bias.to(dtype)
    weights = torch.softmax(keys.unsqueeze(-2) + bias[:, None, None], -1)  # (G, k, B, T, T)
    weights = weights.unsqueeze(2)  # (G, k, 1, B, T, T)
    return (weights @ values.unflatten(1, (keys.shape[1], -1)).unsqueeze(-1)).squeeze(-1).flatten(1, 2)
