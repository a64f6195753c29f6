"""Eq. 2 for a block of features on a CPU, by products with a table of exp(w): values and gradients, for keys and
values of any size.

Keys are (G, k, B, T) for G groups of features and values (G, c, B, T), with k = c or 1. Where all of them are
moderate, exp(K) is summed as it is. Otherwise it is taken relative to the maximum over the positions of a row
(b, feature). A query that sees none of the largest keys, or sees them at small biases only, may then lose terms.

- In a causal table few queries do so, because they are done in pieces: the last third with all keys, the last third of
  the others with the keys before the first piece, and so on. The first few have a softmax.
- The denominators show which queries are lost nonetheless. These have a softmax of their own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import nn

from .mixing_cpu_bias_aft import FLOOR, Table, Tables, relative_exp
from .scaled_sums_aft import working_dtype


# Values up to this size may be summed with weights of up to exp(LARGEST_EXPONENT), any number of them.
LARGEST_VALUE = 1e12

# The largest exponent of a sum's terms, K + w. It leaves room for values, and for gradients, which are divided by it.
LARGEST_EXPONENT = 40.0

# The first so many queries of a causal table, where the running maximum of the keys grows fastest, have a softmax; all
# pieces begin at multiples of this.
FIRST = 16

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
            if table is None:
                context[..., queries] = _first_average(*seen, self._visible_bias[:, :end, :end])
                inverse[..., queries] = 1.0
                continue
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
        of_table = of_first = None
        for start, end, table in self._pieces():
            if table is None:
                of_first = self._add_first_gradients(end, of_context, of_keys, of_values, bias_needed)
                continue
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
            of_bias = self._add_lost_gradients(of_context, context, inverse, of_keys, of_values, bias_needed)
        if not bias_needed:
            return None
        through_table = self.tables.bias_gradient(of_table, self.table, self.bias)
        if of_first is not None:
            end = of_first.shape[-1]
            through_table[:, :end, :end] += of_first
        return through_table if of_bias is None else through_table + of_bias

    @cached_property
    def _size(self) -> Size:
        if self.moderate:
            return Size.MODERATE
        return Size.BOUNDED if float(self.keys.amax()) < torch.inf and are_bounded(self.values) else Size.ANY

    def _pieces(self) -> Iterator[tuple[int, int, Table | None]]:
        """Queries from start to end that see keys up to the end, the last ones first, and their part of the table, or
        None for a softmax.
        """
        end = self.keys.shape[-1]
        if not self.tables.causal or self.moderate:
            yield 0, end, self.table
            return
        while end > FIRST:
            start = max(2 * end // 3 // FIRST, 1) * FIRST
            yield start, end, self.table.part(start, end)
            end = start
        by_softmax = end < self.keys.shape[-1] and self._first_are_finite
        yield 0, end, None if by_softmax else self.table.part(0, end)

    @cached_property
    def _first_are_finite(self) -> bool:
        return all(bool(x[..., :FIRST].isfinite().all()) for x in (self.keys, self.values))

    def _add_first_gradients(self, end: int, of_context, of_keys, of_values, bias_needed) -> torch.Tensor | None:
        """Add the gradients of the first queries to those of keys and values, and return that of their biases."""
        seen = self.keys[..., :end], self.values[..., :end], self._visible_bias[:, :end, :end]
        seen = [x.detach().requires_grad_() for x in seen]
        with torch.enable_grad():
            found = _first_average(*seen)
        of_seen_keys, of_seen_values, of_bias = torch.autograd.grad(found, seen, of_context[..., :end].to(found.dtype))
        of_keys[..., :end] += of_seen_keys
        of_values[..., :end] += of_seen_values
        return of_bias if bias_needed else None

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
        if undefined is not None:
            context.masked_fill_(undefined, torch.nan)
        for place, query in self._few_at_once(lost):
            found = _softmax_average(*self._seen(place, query))
            self._of_keys(context)[(*place, slice(None), query)] = found.to(context.dtype)

    def _add_lost_gradients(
        self, of_context, context, inverse, of_keys, of_values, bias_needed
    ) -> torch.Tensor | None:
        """Add the part of lost queries to the gradients of keys and values, and return that of the biases."""
        lost, _ = self._lost(inverse)
        of_bias = torch.zeros_like(self.bias) if bias_needed else None
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

    def _lost(self, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which queries have to be done again, (G, k, B, T), and which of those that were lost see something that is
        not finite, so that their average is not defined. Those that see nothing are neither.
        """
        lost, keys, values = inverse == 0, self.keys, self.values
        if self._size == Size.BOUNDED and float(keys.amin()) > -torch.inf:
            return lost, None
        finite = values.isfinite().unflatten(1, (keys.shape[1], -1)).all(2) & (keys < torch.inf)
        visible = keys > -torch.inf
        if self.tables.causal:
            defined, sighted = (~finite).cumsum(-1) == 0, visible.cumsum(-1) > 0
        else:
            defined, sighted = finite.all(-1, keepdim=True), visible.any(-1, keepdim=True)
        return lost & defined & sighted, lost & ~defined

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
        nn.functional.threshold_(denominator, _smallest_denominator(table), torch.inf)
    torch.reciprocal(denominator, out=inverse)
    torch.mul(numerator, inverse, out=context)


def _smallest_denominator(table: Table) -> float:
    """Below this, a query is lost: next to a larger denominator, terms that were left out because of their key are
    less than a hundredth of a rounding error each.
    """
    dtype = table.entries.dtype
    return math.exp(FLOOR[working_dtype(table.entries)] + table.top + 5.0) / torch.finfo(dtype).eps


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


def _first_average(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 for few queries from keys (G, k, B, T), values (G, c, B, T) and biases (G or 1, T, T)."""
    dtype = working_dtype(keys)
    keys, values, bias = keys.to(dtype), values.to(dtype), bias.to(dtype)
    weights = torch.softmax(keys.unsqueeze(-2) + bias[:, None, None], -1)  # (G, k, B, T, T)
    weights = weights.unsqueeze(2)  # (G, k, 1, B, T, T)
    return (weights @ values.unflatten(1, (keys.shape[1], -1)).unsqueeze(-1)).squeeze(-1).flatten(1, 2)
