"""Eq. 2 for a block of features on a CPU, by products with a table of exp(w): averages and gradients, for keys of
any size.

Keys are (G, k, B, T) and values (G, c, B, T) for G groups of features, with k = c or 1. If all of them are moderate,
exp(K) is summed without a shift. Otherwise it is relative to the maximum over the positions of a row (b, feature). A
query that sees none of the largest keys, or sees them at small biases only, may then lose its terms to underflow: it
is lost.

- A causal table is computed in pieces, so that few queries are lost: the last queries with all keys, the last of the
  remaining queries with the keys before the first piece, and so on. A piece holds at least the last third of the
  queries, and more if few of them would be lost. The first queries may be a piece of their own, which is computed by a
  softmax (`mixing_cpu_first_aft.py`).
- Lost queries are detected by their denominators. In a causal table with moderate biases they see none of the largest
  keys, so their rows are summed again without these keys. Queries that are still lost are computed by a softmax each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from .mixing_cpu_bias_aft import FLOOR, INCREASE_MARGIN, DenseTables, Table, Tables, is_moderate
from .mixing_cpu_first_aft import FIRST, first_averages, first_gradients
from .mixing_cpu_product_aft import (
    LARGEST_EXPONENT,
    LARGEST_VALUE,
    Size,
    Upstream,
    are_bounded,
    product_average,
    product_gradients,
)
from .scaled_sums_aft import flush_subnormals, largest_size, working_dtype


# Indices of rows: their groups, features of the keys, and rows of the batch; and an index with more dimensions.
Place = tuple[torch.Tensor, ...]
Index = tuple[torch.Tensor | slice, ...]

# The log of the largest upstream gradient whose products with the values do not overflow.
GRADIENT_MARGIN = 12.0

# The share of all keys that may be summed again after a piece, because the first queries of their rows are lost.
SUMMED_AGAIN = 1 / 32

# Approximate number of rows from which the pieces are chosen.
SAMPLED_ROWS = 128

# Maximum number of times that rows with lost queries are summed again, each time without their largest keys.
ROUNDS = 3

# Numbers in a block of lost queries, including the keys and values that each of them sees.
LOST_BLOCK = 2**19


@dataclass(frozen=True)
class Block:
    """Keys, values and position biases that are computed together.

    Args:
        keys: (G, k, B, T), -inf where hidden from all queries.
        values: (G, c, B, T).
        bias: position biases of the head of each group, in the form that `tables` requires.
        tables: the kind of table.
        table: the table made from `bias`.
        moderate: whether keys, values and biases are so moderate that sums need no shift.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    tables: Tables
    table: Table
    moderate: bool

    def average(self, context: torch.Tensor, inverse: torch.Tensor) -> None:
        """Write Eq. 2 into `context` (G, c, B, T) and the reciprocals of its denominators into `inverse` (G, k, B, T).

        The reciprocals are 0 for queries that were lost or see no key.
        """
        for start, end, table in self._pieces():
            queries = slice(start, end)
            seen = self.keys[..., :end], self.values[..., :end]
            if table is None:
                context[..., queries] = first_averages(*seen, self._bias_of_first(end))
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
        """Write the gradients of keys and values into `of_keys` and `of_values`, and return that of the biases, if
        needed.
        """
        of_table = of_first = of_bias = None
        results, dtype = (of_keys, of_values), upstream.context.dtype
        if not self.moderate and of_keys.dtype != dtype:  # gradients are sums of several parts and are rounded once
            of_keys, of_values = (torch.empty_like(x, dtype=dtype) for x in results)
        downstream = of_keys, of_values
        for start, end, table in self._pieces():
            if table is None:
                of_first = self._add_first_gradients(end, upstream.of_context, *downstream)
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
            elif not self.moderate:
                flush_subnormals(result)
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
    def _lowest_bias(self) -> float:
        return float(self.bias.amin())

    @cached_property
    def _smallest(self) -> float:
        """The smallest precise denominator: queries with smaller denominators are lost."""
        return math.exp(self._smallest_exponent(0.0))

    def _smallest_exponent(self, margin: float) -> float:
        """Return the exponent of the smallest denominator that is precise by a margin, and by which sums and gradients
        can be divided without overflow.
        """
        dtype, top = self.table.entries.dtype, self.table.top
        # In larger denominators, each term that underflowed because of its key is less than a hundredth of a rounding
        # error.
        precise = FLOOR[working_dtype(self.table.entries)] + 5.0 - math.log(torch.finfo(dtype).eps)
        # Gradients sum products of values with upstream gradients divided by denominators, which must not overflow.
        largest = largest_size(self.values)
        if not math.isfinite(largest):
            largest = float(self.values.abs().nan_to_num_(0.0).amax())
        largest = min(max(largest, 1.0), LARGEST_VALUE)
        finite = math.log(largest * self.keys.shape[-1]) + GRADIENT_MARGIN - math.log(torch.finfo(dtype).max)
        return top + max(precise + margin, finite)

    @cached_property
    def _target(self) -> float:
        """The exponent of the smallest denominators in the backward pass."""
        return 0.0 if self.moderate else self._smallest_exponent(INCREASE_MARGIN)

    @property
    def _reach(self) -> float:
        """The largest distance below the largest key of its row at which a key with w = 0 keeps a query precise."""
        return LARGEST_EXPONENT - self.table.top - math.log(self._smallest)

    @cached_property
    def _sums_again(self) -> bool:
        """Whether rows with lost queries are summed again."""
        return self.tables.causal and self._size == Size.BOUNDED and is_moderate(self.bias)

    def _pieces(self) -> Iterator[tuple[int, int, Table | None]]:
        """Yield pieces, the last one first: queries from start to end, which see the keys before the end, and their
        part of the table, or None if they are computed by a softmax.
        """
        end = self.keys.shape[-1]
        if not self.tables.causal or self.moderate:
            yield 0, end, self.table
            return
        while end > FIRST:
            start = self._start_of_piece(end)
            yield start, end, self.table.part(start, end)
            end = start
        by_softmax = end < self.keys.shape[-1] and self._first_are_finite
        if end > 0:
            yield 0, end, None if by_softmax else self.table.part(0, end)

    def _start_of_piece(self, end: int) -> int:
        """Return the first query of a piece: if lost rows are summed again, the earliest one with few such rows."""
        latest = max(2 * end // 3 // FIRST, 1) * FIRST
        if not self._sums_again:
            return latest
        allowed = SUMMED_AGAIN * self.keys.shape[-1] / end
        if allowed >= 1:
            return 0
        starts, peaks = self._peaks
        lowest = peaks[len([x for x in starts if x < end])] - self._reach
        shares = (peaks < lowest).mean(1, dtype=torch.float32).tolist()
        early = (x for x, share in zip(starts, shares) if x < latest and share <= allowed)
        return next(early, latest)

    @cached_property
    def _peaks(self) -> tuple[list[int], torch.Tensor]:
        """Possible starts of pieces, S multiples of `FIRST`, and the largest keys of R sampled rows before each start
        and before the end, (S + 1, R).
        """
        length, starts = self.keys.shape[-1], [FIRST]
        while 3 * starts[-1] // 2 < length:
            starts.append(-(-3 * starts[-1] // 2 // FIRST) * FIRST)
        starts = [x for x in starts if x < length]
        rows = self.keys.flatten(0, 2)
        sampled = rows[:: max(1, len(rows) // SAMPLED_ROWS)]
        pieces = sampled.to(working_dtype(rows)).tensor_split(starts, -1)  # a maximum is computed faster in this dtype
        return starts, torch.stack([piece.amax(-1) for piece in pieces]).cummax(0).values

    @cached_property
    def _first_are_finite(self) -> bool:
        if self._size == Size.BOUNDED and self._range_of_keys[0] > -torch.inf:
            return True
        return all(bool(x[..., :FIRST].isfinite().all()) for x in (self.keys, self.values))

    def _bias_of_first(self, end: int) -> torch.Tensor:
        """Return the biases of the first queries, (G or 1, end, end), with -inf for later keys."""
        return self.tables.visible(self.bias[:, :end, :end])

    def _add_first_gradients(
        self, end: int, of_context: torch.Tensor, of_keys: torch.Tensor, of_values: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients from the first queries to those of keys and values, and return that of their biases."""
        inputs = self.keys[..., :end], self.values[..., :end], self._bias_of_first(end)
        of_seen_keys, of_seen_values, of_bias = first_gradients(*inputs, of_context[..., :end])
        of_keys[..., :end] += of_seen_keys
        of_values[..., :end] += of_seen_values
        return of_bias

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
        return product_gradients(
            upstream.part(start, end), *seen, table, self._size, self._target, of_keys, of_values, table_needed
        )

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
        """Add the gradients from the queries from start to end of a causal table."""
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
        """Compute the lost queries from start to end again, and write their averages into `context`."""
        left: list[torch.Tensor] = []
        for rows in self._rows_with_lost(start, end, table, inverse):
            found = self._of_keys(context)[rows.queries]
            for again in self._rounds(rows):
                found = torch.where(again.here.unsqueeze(1), again.context, found)
            self._of_keys(context)[rows.queries] = found
            left += rows.indices_of_lost()
        if left:
            self._restore(torch.cat(left), None, context)

    def _add_gradients_again(
        self, upstream: Upstream, of_keys: torch.Tensor, of_values: torch.Tensor, of_table: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the gradients from lost queries to those of keys, values and table, and return the gradient of the
        biases from the lost queries that are computed by a softmax each.
        """
        left: list[torch.Tensor] = []
        of_context_by_key = self._of_keys(upstream.of_context)
        for start, end, table in self._pieces():
            if table is None:  # computed by a softmax, so no query is lost
                continue
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
                        self._target,
                        of_row_keys,
                        of_rows,
                        of_table is not None,
                    )
                    of_keys[..., :end][rows.place] += of_row_keys[0, 0]
                    self._of_keys(of_values)[..., :end][rows.place] += of_rows[0].transpose(0, 1)
                    if of_table is not None and of_part is not None:
                        of_table[rows.group, start:end, :end] += of_part[0]
                left += rows.indices_of_lost()
        if not left:
            return None
        return self._add_lost_gradients(torch.cat(left), upstream.of_context, of_keys, of_values, of_table is not None)

    def _rows_with_lost(self, start: int, end: int, table: Table, inverse: torch.Tensor) -> Iterator["_Rows"]:
        """Yield the rows in which queries from start to end are lost, one group at a time."""
        part = inverse[..., start:end].to(working_dtype(inverse))  # a minimum is computed faster in this dtype
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
        """Sum rows again without their largest keys, up to `ROUNDS` times.

        A query is lost if all keys that it sees, with their biases, are far below the largest key of its row. So it
        does not see the keys near the largest one, and its sums are the same without them.
        """
        near, keys = self._reach + self._lowest_bias, rows.keys
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
        """The first visible position of each row, (G, k, B, 1); None if no position is hidden."""
        if self._range_of_keys[0] > -torch.inf:
            return None
        visible = self.keys > -torch.inf
        return visible.byte().argmax(-1, keepdim=True).masked_fill_(~visible.any(-1, keepdim=True), visible.shape[-1])

    # ----------------------------------------------------------------------------------------------- lost queries

    def _restore(self, lost: torch.Tensor, undefined: torch.Tensor | None, context: torch.Tensor) -> None:
        """Write the averages of lost queries (N, 4) into `context`, and NaN where they are undefined, (G, k, B, T)."""
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
        """Add the gradients from lost queries (N, 4) to those of keys and values, and return that of the biases."""
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
        """Return the indices of the queries that have to be computed again, (N, 4), and which lost queries see NaN or
        infinity, so that their average is undefined, (G, k, B, T); None if none does. Queries that see no key are
        neither.
        """
        lost, keys, values = inverse == 0, self.keys, self.values
        if self._size == Size.BOUNDED and self._range_of_keys[0] > -torch.inf:
            return lost.nonzero(), None
        finite = values.isfinite().unflatten(1, (keys.shape[1], -1)).all(2) & (keys < torch.inf)
        visible = keys > -torch.inf
        if self.tables.causal:
            defined, sighted = (~finite).cumsum(-1) == 0, visible.cumsum(-1) > 0
        else:
            defined, sighted = finite.all(-1, keepdim=True), visible.any(-1, keepdim=True)
        return (lost & defined & sighted).nonzero(), lost & ~defined

    def _few_at_once(self, indices: torch.Tensor) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield the indices of a few lost queries at a time: (group, feature of the keys, row), and query."""
        size = (self.values.shape[1] // self.keys.shape[1] + 2) * self.keys.shape[-1]
        indices = indices[indices[:, -1].argsort()]  # queries that see few keys are computed together
        for few in indices.split(max(1, LOST_BLOCK // size)) if len(indices) else ():
            *place, query = few.unbind(1)
            yield tuple(place), query

    @cached_property
    def _visible_bias(self) -> torch.Tensor:
        return self.tables.visible(self.bias)

    def _of_keys(self, values: torch.Tensor) -> torch.Tensor:
        """View (G, c, B, T) as (G, k, B, c / k, T): the values of each key."""
        return values.unflatten(1, (self.keys.shape[1], -1)).permute(0, 1, 3, 2, 4)

    def _seen(self, place: Place, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys (N, T), values (N, c / k, T) and biases (N, T) of N queries, up to the last query if causal."""
        end = int(query.max()) + 1 if self.tables.causal else self.keys.shape[-1]
        keys, values = self.keys[..., :end][place], self._of_keys(self.values)[..., :end][place]
        bias = self.tables.rows(self._visible_bias, place[0], query, end)
        dtype = working_dtype(keys)
        return keys.to(dtype), values.to(dtype), bias.to(dtype)


@dataclass
class _Rows:
    """N rows of one group of features in which some of the C queries of a piece are lost.

    Args:
        group, start: the index of the group, and the first query.
        place: the indices of the rows in (G, k, B).
        queries: the index of the rows and queries in (G, k, B, c / k, T), which selects (N, c / k, C).
        keys: (N, T') for the T' keys before the end of the queries.
        values: (N, c / k, T').
        table: the part of the table for that group.
        lost, any_lost: (N, C), which queries are lost, fewer after each round; and whether any query is lost.
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

    def indices_of_lost(self) -> list[torch.Tensor]:
        """Return the indices of the queries that are still lost, (N, 4); an empty list if no query is."""
        if not self.any_lost:
            return []
        row, query = self.lost.nonzero().unbind(1)
        return [torch.stack([*(x[row] for x in self.place), query + self.start], 1)]


class _Again(NamedTuple):
    """The result of a round: the keys (N, T') that it sums, the averages (N, c / k, C) and reciprocals of the
    denominators (N, C), and the lost queries for which these are precise (N, C).
    """

    keys: torch.Tensor
    context: torch.Tensor
    inverse: torch.Tensor
    here: torch.Tensor


def _softmax_average(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 for N queries from keys (N, T), values (N, c, T) and biases (N, T), which are -inf for hidden keys."""
    hidden = bias == -torch.inf
    if not math.isfinite(float(values.detach().sum())):
        values = values.masked_fill(hidden.unsqueeze(1), 0.0)
    # Biases are added to differences of keys, so that they are not rounded away next to large keys.
    keys = keys.masked_fill(hidden, -torch.inf)
    logits = (keys - keys.detach().amax(-1, keepdim=True)) + bias
    return (values @ torch.softmax(logits, -1).unsqueeze(-1)).squeeze(-1)
