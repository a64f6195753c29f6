"""Eq. 2 for a block of features on a CPU, by products with a table of exp(w): values and gradients, for keys and
values of any size.

Keys are (G, k, B, T) for G groups of features and values (G, c, B, T), with k = c or 1. Where all of them are
moderate, exp(K) is summed as it is. Otherwise it is taken relative to the maximum over the positions of a row
(b, feature). The denominators show afterwards which queries are lost because what they see is dwarfed by what they do
not see, or hardly see, and these are done again. That happens

- in a causal table, where a larger key is still to come. There the second half of the queries is done with all keys,
  the second quarter with the first half of the keys, and so on, and lost queries are first done again without the keys
  behind them;
- with biases whose span is beyond float32's range. Such queries end in a softmax of their own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from .mixing_cpu_bias_aft import FLOOR, Table, Tables, relative_exp
from .scaled_sums_aft import working_dtype


# Values up to this size may be summed with weights of up to exp(LARGEST_EXPONENT), any number of them.
LARGEST_VALUE = 1e12

# The largest exponent of a sum's terms, K + w. It leaves room for values, and for gradients, which are divided by it.
LARGEST_EXPONENT = 40.0

# Causal queries are done in halves of halves, of which none is shorter than this, where the first so many keys of rows
# are by this much smaller than the largest one, on average: then queries would be lost.
SHORTEST_HALF = 32
GROWTH = 60.0

# Lost queries are done again by a product, a few times over, but for this many in a row of the batch or less.
FEW_LOST = 2
LEVELS = 3

# Numbers in a block of keys of which the weights are written.
WEIGHTS_BLOCK = 2**17

# Numbers in a block of lost queries, each with the keys and values that it sees.
LOST_BLOCK = 2**19


class Size(IntEnum):
    """Of keys and values.

    MODERATE: exponentials can be summed as they are.
    BOUNDED: they can be summed relative to the maximum of a row.
    ANY: there may be NaN, infinity, or values beyond LARGEST_VALUE.
    """

    MODERATE = 0
    BOUNDED = 1
    ANY = 2


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
            _average(*seen, self.tables, table, self._size, context[..., queries], inverse[..., queries])
        if not self.moderate and not float(inverse.amin()) > 0:
            self._restore_lost(context, inverse)

    def gradients(
        self,
        of_context: torch.Tensor,
        context: torch.Tensor,
        inverse: torch.Tensor,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
        bias_needed: bool,
    ) -> torch.Tensor | None:
        """From the gradient of `average` to those of keys and values, written into `of_keys` and `of_values`, and to
        that of the biases, if needed.
        """
        of_table = None
        for start, end, table in self._pieces():
            of_queries = (x[..., start:end] for x in (of_context, context, inverse))
            upstream = *of_queries, self.keys[..., :end], self.values[..., :end], table, self._size
            if end == self.keys.shape[-1]:
                of_part = _gradients(*upstream, of_keys, of_values, bias_needed)
                if bias_needed:
                    of_table = of_part if start == 0 else nn.functional.pad(of_part, (0, 0, start, 0))
            else:
                self._add_gradients(upstream, start, of_keys, of_values, of_table)
        of_bias = None
        if not self.moderate and not float(inverse.amin()) > 0:
            of_bias = self._add_lost_gradients(of_context, context, inverse, of_keys, of_values, of_table)
        if not bias_needed:
            return None
        through_table = self.tables.bias_gradient(of_table, self.table, self.bias)
        return through_table if of_bias is None else through_table + of_bias

    @cached_property
    def _size(self) -> Size:
        if self.moderate:
            return Size.MODERATE
        return Size.BOUNDED if float(self.keys.amax()) < torch.inf and are_bounded(self.values) else Size.ANY

    def _pieces(self) -> Iterator[tuple[int, int, Table]]:
        """Queries from start to end that see keys up to the end, and their part of the table; the last ones first."""
        end = self.keys.shape[-1]
        while self._halved and end >= 2 * SHORTEST_HALF:
            yield end // 2, end, self.table.part(end // 2, end)
            end //= 2
        yield 0, end, self.table.part(0, end) if self.tables.causal else self.table

    @cached_property
    def _halved(self) -> bool:
        if not self.tables.causal or self.moderate:
            return False
        keys = self.keys.to(working_dtype(self.keys))
        first, largest = keys[..., :SHORTEST_HALF].amax(-1), keys.amax(-1)
        return not float((largest - first).mean()) < GROWTH

    @staticmethod
    def _add_gradients(upstream: tuple, start: int, of_keys, of_values, of_table) -> None:
        """Add the gradients of a part of a causal table, whose queries begin at `start`."""
        keys, values = upstream[3:5]
        of_seen, end = (torch.empty_like(keys), torch.empty_like(values)), keys.shape[-1]
        of_part = _gradients(*upstream, *of_seen, of_table is not None)
        for of_all, of_some in zip((of_keys, of_values), of_seen):
            of_all[..., :end] += of_some
        if of_table is not None:
            of_table[:, start:end, :end] += of_part

    # ----------------------------------------------------------------------------------------------- lost queries

    def _restore_lost(self, context: torch.Tensor, inverse: torch.Tensor) -> None:
        """Write the averages of lost queries."""
        lost, undefined = self._lost(inverse)
        context.masked_fill_(undefined, torch.nan)
        levels, lost = self._levels(lost)
        for level in levels:
            context[..., level.start : level.start + level.context.shape[-1]] += level.context
        for place, query in self._few_at_once(lost):
            found = _softmax_average(*self._seen(place, query))
            self._of_keys(context)[(*place, slice(None), query)] = found.to(context.dtype)

    def _add_lost_gradients(self, of_context, context, inverse, of_keys, of_values, of_table) -> torch.Tensor | None:
        """Add the part of lost queries to the gradients of keys, values and table, and return that of the biases, if
        there is any that does not come through the table.
        """
        lost, _ = self._lost(inverse)
        levels, lost = self._levels(lost)
        for level in levels:
            queries = slice(level.start, level.start + level.context.shape[-1])
            upstream = of_context[..., queries], context[..., queries], level.inverse, level.keys, level.values
            part = self.table.part(queries.start, queries.stop)
            self._add_gradients((*upstream, part, self._size), level.start, of_keys, of_values, of_table)
        if not lost.any():
            return None
        of_bias = None if of_table is None else torch.zeros_like(self.bias)
        dtype = context.dtype
        sums = [torch.zeros_like(x, dtype=dtype) for x in (self.keys, self.values)]  # rounded once
        for place, query in self._few_at_once(lost):
            *seen, bias = (x.detach().requires_grad_() for x in self._seen(place, query))
            with torch.enable_grad():
                found = _softmax_average(*seen, bias)
            gradient = self._of_keys(of_context)[(*place, slice(None), query)].to(dtype)
            of_seen_keys, of_seen_values, of_rows = torch.autograd.grad(found, (*seen, bias), gradient)
            end = bias.shape[1]
            sums[0][..., :end].index_put_(place, of_seen_keys, accumulate=True)
            self._of_keys(sums[1])[..., :end].index_put_(place, of_seen_values, accumulate=True)
            if of_bias is not None:
                self.tables.add_rows(of_bias, place[0], query, of_rows)
        of_keys += sums[0]
        of_values += sums[1]
        return of_bias

    def _lost(self, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which queries have to be done again, (G, k, B, T), and which of those that were lost see something that is
        not finite, so that their average is not defined. Those that see nothing are neither.
        """
        lost, keys, values = inverse == 0, self.keys, self.values
        if self._size == Size.BOUNDED and float(keys.amin()) > -torch.inf:
            return lost, torch.zeros_like(lost[..., :1])
        finite = values.isfinite().unflatten(1, (keys.shape[1], -1)).all(2) & (keys < torch.inf)
        visible = keys > -torch.inf
        if self.tables.causal:
            defined, sighted = (~finite).cumsum(-1) == 0, visible.cumsum(-1) > 0
        else:
            defined, sighted = finite.all(-1, keepdim=True), visible.any(-1, keepdim=True)
        return lost & defined & sighted, lost & ~defined

    def _levels(self, lost: torch.Tensor) -> tuple[list["_Level"], torch.Tensor]:
        """Products for lost queries of causal tables, and the queries that are still lost after them.

        No lost query of a row sees the keys behind the last of them. Without these, the maximum falls by exp(80) or
        more where biases are moderate, and with every level the number of lost queries.
        """
        levels: list[_Level] = []
        for start, end, _ in self._pieces() if self.tables.causal else ():
            for _ in range(LEVELS):
                stop = start + _count_to_last(lost[..., start:end])
                if stop == start:
                    break
                here = lost[..., start:stop]
                position = torch.arange(stop, device=here.device, dtype=torch.float32)
                behind = position > (here * position[start:]).amax(-1, keepdim=True)
                keys = self.keys[..., :stop].masked_fill(behind, -torch.inf)
                values = self.values[..., :stop].masked_fill(behind, 0.0)
                dtype = self.table.entries.dtype
                context, inverse = (torch.empty_like(x[..., start:], dtype=dtype) for x in (values, keys))
                _average(keys, values, self.tables, self.table.part(start, stop), self._size, context, inverse)
                levels.append(_Level(start, keys, values, context.mul_(here), inverse.mul_(here)))
                lost = lost.clone()
                lost[..., start:stop] &= inverse == 0
        return levels, lost

    def _few_at_once(self, lost: torch.Tensor) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
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

    def _seen(self, place: tuple[torch.Tensor, ...], query: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The keys (N, T), values (N, c / k, T) and biases (N, T) of N queries, up to the last one if causal."""
        end = int(query.max()) + 1 if self.tables.causal else self.keys.shape[-1]
        keys, values = self.keys[..., :end][place], self._of_keys(self.values)[..., :end][place]
        bias = self.tables.rows(self._visible_bias, place[0], query, end)
        dtype = working_dtype(keys)
        return keys.to(dtype), values.to(dtype), bias.to(dtype)


class _Level(NamedTuple):
    """A product for lost queries, from `start` on."""

    start: int
    keys: torch.Tensor  # without those behind the last lost query of a row
    values: torch.Tensor
    context: torch.Tensor  # 0 but for queries that are found
    inverse: torch.Tensor


def _average(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    table: Table,
    size: Size,
    context: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """Eq. 2 and the reciprocals of its denominators by one product; both are 0 for queries that are lost."""
    sums = tables.product(_summands(keys, values, table, size), table)
    denominator, numerator = sums.tensor_split((keys.shape[1],), 1)
    if size > Size.MODERATE:
        nn.functional.threshold_(denominator, _smallest_denominator(table, working_dtype(keys)), torch.inf)
    torch.reciprocal(denominator, out=inverse)
    torch.mul(numerator, inverse, out=context)


def _smallest_denominator(table: Table, dtype: torch.dtype) -> float:
    """Below this, a query is lost: next to a larger denominator, terms that were left out because of their key are
    less than a hundredth of a rounding error each.
    """
    return math.exp(FLOOR[dtype] + table.top + 5.0) / torch.finfo(dtype).eps


def _gradients(
    of_context: torch.Tensor,
    context: torch.Tensor,
    inverse: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: Table,
    size: Size,
    of_keys: torch.Tensor,
    of_values: torch.Tensor,
    table_needed: bool,
) -> torch.Tensor | None:
    """From the gradient of `_average` to those of keys and values, written into `of_keys` and `of_values`, and to that
    of the table, if needed. Queries whose `inverse` is 0 have no part in them.
    """
    dtype, count = table.entries.dtype, keys.shape[1]
    summands = _summands(keys, values, table, size)
    of_sums = summands.new_empty(*summands.shape[:3], context.shape[-1])
    of_denominator, of_numerator = of_sums.tensor_split((count,), 1)
    torch.mul(of_context.to(dtype), inverse, out=of_numerator)
    if of_denominator.shape == of_numerator.shape:
        torch.mul(of_numerator, context, out=of_denominator)
    else:
        torch.sum(of_numerator * context, 1, keepdim=True, out=of_denominator)
    of_denominator.neg_()
    if size > Size.MODERATE:  # where there is no average, 0 times it may be NaN
        of_denominator.masked_fill_(inverse == 0, 0.0)
    of_table = torch.bmm(of_sums.flatten(1, 2).mT, summands.flatten(1, 2)) if table_needed else None
    of_summands = torch.bmm(of_sums.flatten(1, 2), table.entries).view_as(summands)
    weights, weighted = summands.tensor_split((count,), 1)
    of_weights, of_weighted = of_summands.tensor_split((count,), 1)
    torch.mul(of_weighted, weights, out=of_values)
    from_values = of_weighted.mul_(weighted)
    if weights.shape != weighted.shape:
        from_values = from_values.sum(1, keepdim=True)
    torch.addcmul(from_values, of_weights, weights, out=of_keys)
    return of_table


def _summands(keys: torch.Tensor, values: torch.Tensor, table: Table, size: Size) -> torch.Tensor:
    """exp(K), then exp(K) V, up to a factor for each row: (G, k + c, B, T)."""
    groups, count, *positions = keys.shape
    dtype = table.entries.dtype
    summands = keys.new_empty(groups, count + values.shape[1], *positions, dtype=dtype)
    weights, weighted = summands.tensor_split((count,), 1)
    if size == Size.MODERATE:
        torch.exp(keys.to(dtype), out=weights)
    else:
        if size == Size.ANY:
            keys, values = _summable(keys, values)
        write_weights(keys, weights, LARGEST_EXPONENT - table.top)
    torch.mul(values.to(dtype), weights, out=weighted)
    return summands


def write_weights(keys: torch.Tensor, weights: torch.Tensor, top: float) -> None:
    """exp(K) with exp(top) for the largest key of each row, written into `weights`, which may be the keys."""
    dim = 1 if len(keys) == 1 else 0
    step = max(1, WEIGHTS_BLOCK * keys.shape[dim] // keys.numel())
    for some_keys, some_weights in zip(keys.split(step, dim), weights.split(step, dim)):
        wide = some_keys.to(working_dtype(keys))
        some_weights.copy_(relative_exp(wide, wide.amax(-1, keepdim=True), top))


def _summable(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which all sums are finite. Whole rows are hidden for that, so that their queries are lost."""
    small = (values.abs() <= LARGEST_VALUE).unflatten(1, (keys.shape[1], -1)).all(2)
    summable = (small & (keys < torch.inf)).all(-1, keepdim=True)
    return keys.masked_fill(~summable, -torch.inf), values.masked_fill(~summable, 0.0)


def are_bounded(values: torch.Tensor) -> bool:
    """Whether sums of values with weights are finite; never with NaN."""
    lowest, highest = values.aminmax()
    return float(lowest) >= -LARGEST_VALUE and float(highest) <= LARGEST_VALUE


def _softmax_average(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 for N queries from keys (N, T), values (N, c, T) and biases (N, T), -inf where they must not look."""
    logits = keys + bias
    if not math.isfinite(float(values.detach().sum() + keys.detach().sum())):
        hidden = bias == -torch.inf
        logits, values = logits.masked_fill(hidden, -torch.inf), values.masked_fill(hidden.unsqueeze(1), 0.0)
    return (values @ torch.softmax(logits, -1).unsqueeze(-1)).squeeze(-1)


def _count_to_last(lost: torch.Tensor) -> int:
    """How many positions of (G, k, B, T) it takes to have all lost queries but a few."""
    from_here_on = lost.flatten(0, -2).to(torch.float32).mean(0).flip(0).cumsum(0)
    return int((from_here_on > FEW_LOST).sum())
