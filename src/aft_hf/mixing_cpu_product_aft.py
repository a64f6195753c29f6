"""One product with a table of exp(w) on a CPU: the averages of Eq. 2 for some queries, and their gradients.

Keys are (G, k, B, T) for G groups of features and values (G, c, B, T), with k = c or 1. `mixing_cpu_sums_aft.py`
computes the queries of a block by one such product or by several.
"""

from enum import IntEnum
from typing import NamedTuple

import torch

from .mixing_cpu_bias_aft import Table, Tables, relative_exp
from .scaled_sums_aft import largest_size, working_dtype


# Values up to this size may be summed with weights of up to exp(LARGEST_EXPONENT), any number of them.
LARGEST_VALUE = 1e12

# The largest exponent of a sum's terms, K + w. It leaves room for values, and for gradients, which are divided by it.
LARGEST_EXPONENT = 40.0

# Numbers in a block of keys of which the weights are written.
WEIGHTS_BLOCK = 2**17


class Size(IntEnum):
    """Of keys and values.

    MODERATE: exponentials can be summed as they are.
    BOUNDED: they can be summed relative to the maximum of a row.
    ANY: there may be NaN, infinity, or values beyond LARGEST_VALUE.
    """

    MODERATE = 0
    BOUNDED = 1
    ANY = 2


class Upstream(NamedTuple):
    """Where the backward pass of some queries begins; those whose reciprocals are 0 have no part in it."""

    of_context: torch.Tensor  # (G, c, B, T), the gradient of the averages
    context: torch.Tensor  # (G, c, B, T)
    inverse: torch.Tensor  # (G, k, B, T), reciprocals of the denominators

    def part(self, start: int, end: int) -> "Upstream":
        """The queries from start to end."""
        return Upstream(*(x[..., start:end] for x in self))


def product_average(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    table: Table,
    size: Size,
    smallest: float,
    context: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """Eq. 2 and the reciprocals of its denominators by one product; both are 0 for queries that are lost, whose
    denominators are less than `smallest`.
    """
    sums = tables.product(_summands(keys, values, table, size), table)
    denominator, numerator = sums.tensor_split((keys.shape[1],), 1)
    if size > Size.MODERATE:
        torch.threshold_(denominator, smallest, torch.inf)
    torch.reciprocal(denominator, out=inverse)
    torch.mul(numerator, inverse, out=context)


def product_gradients(
    upstream: Upstream,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: Table,
    size: Size,
    of_keys: torch.Tensor,
    of_values: torch.Tensor,
    table_needed: bool,
) -> torch.Tensor | None:
    """From the gradient of `product_average` to those of keys and values, written into `of_keys` and `of_values`, and
    to that of the table, if needed.
    """
    of_context, context, inverse = upstream
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
        wide = some_keys.to(working_dtype(keys))  # in which a maximum is found faster than in half precision
        some_weights.copy_(relative_exp(wide, wide.amax(-1, keepdim=True), top))


def _summable(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which all sums are finite. Whole rows are hidden for that, so that their queries are lost."""
    small = (values.abs() <= LARGEST_VALUE).unflatten(1, (keys.shape[1], -1)).all(2)
    summable = (small & (keys < torch.inf)).all(-1, keepdim=True)
    return keys.masked_fill(~summable, -torch.inf), values.masked_fill(~summable, 0.0)


def are_bounded(values: torch.Tensor) -> bool:
    """Whether sums of values with weights are finite; never with NaN."""
    return largest_size(values) <= LARGEST_VALUE
