"""The averages of Eq. 2 for some queries by one product with a table of exp(w) on a CPU, and their gradients.

Keys are (G, k, B, T) and values (G, c, B, T) for G groups of features, with k = c or 1. `mixing_cpu_sums_aft.py`
computes the queries of a block by one or several such products.
"""

from enum import IntEnum
from itertools import repeat
from typing import NamedTuple

import torch

from .mixing_cpu_bias_aft import LARGEST_INCREASE, Table, Tables, relative_exp
from .scaled_sums_aft import largest_size, working_dtype


# Sums of values up to this size with weights up to exp(LARGEST_EXPONENT) do not overflow, whatever their number.
LARGEST_VALUE = 1e12

# The largest exponent K + w in a sum. It leaves room for the values, and for gradients, which are divided by the sums.
LARGEST_EXPONENT = 40.0

# Numbers in the blocks of keys in which `write_weights` proceeds.
WEIGHTS_BLOCK = 2**17


class Size(IntEnum):
    """The range of keys and values.

    MODERATE: exponentials can be summed without a shift.
    BOUNDED: exponentials can be summed relative to the maximum of a row.
    ANY: keys and values may include NaN, infinity, or values beyond LARGEST_VALUE.
    """

    MODERATE = 0
    BOUNDED = 1
    ANY = 2


class Upstream(NamedTuple):
    """Inputs of the backward pass of some queries. Queries whose reciprocals are 0 contribute nothing to it."""

    of_context: torch.Tensor  # (G, c, B, T), the gradient of the averages
    context: torch.Tensor  # (G, c, B, T)
    inverse: torch.Tensor  # (G, k, B, T), reciprocals of the denominators

    def part(self, start: int, end: int) -> "Upstream":
        """Return the inputs of the queries from start to end."""
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
    """Compute Eq. 2 and the reciprocals of its denominators by one product, written into `context` and `inverse`.

    Both are 0 for lost queries, whose denominators are less than `smallest`.
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
    target: float,
    of_keys: torch.Tensor,
    of_values: torch.Tensor,
    table_needed: bool,
) -> torch.Tensor | None:
    """Compute the gradients of `product_average` for keys and values, written into `of_keys` and `of_values`, and
    return the gradient of the table, if needed.

    Gradients are products of exp(K) with g / D, for upstream gradients g and denominators D. If keys are not moderate,
    they are computed as exp(K - r) and exp(r) g / D, with an r for each row that brings its smallest denominator down
    to exp(target). Negligible exponentials then are 0, and hardly any product is subnormal.
    """
    of_context, context, inverse = upstream
    dtype, count = table.entries.dtype, keys.shape[1]
    increase = None
    if size > Size.MODERATE:
        smallest = inverse.amax(-1, keepdim=True).to(working_dtype(keys)).log_().neg_()
        increase = smallest.sub_(target).clamp_(0.0, LARGEST_INCREASE).floor_()  # (G, k, B, 1)
    summands = _summands(keys, values, table, size, increase)
    of_sums = summands.new_empty(*summands.shape[:3], context.shape[-1])
    of_denominator, of_numerator = of_sums.tensor_split((count,), 1)
    torch.mul(of_context.to(dtype), inverse, out=of_numerator)
    if increase is not None:
        of_numerator *= torch.exp(increase).to(dtype)
    if of_denominator.shape == of_numerator.shape:
        torch.mul(of_numerator, context, out=of_denominator)
    else:
        torch.sum(of_numerator * context, 1, keepdim=True, out=of_denominator)
    of_denominator.neg_()
    if size > Size.MODERATE:  # the context of lost queries may be NaN, and so its product with 0
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


def _summands(
    keys: torch.Tensor, values: torch.Tensor, table: Table, size: Size, increase: torch.Tensor | None = None
) -> torch.Tensor:
    """Return exp(K) and exp(K) V, up to a factor per row: (G, k + c, B, T). For keys that are not moderate, the factor
    includes exp(-increase), with (G, k, B, 1).
    """
    groups, count, *positions = keys.shape
    dtype = table.entries.dtype
    summands = keys.new_empty(groups, count + values.shape[1], *positions, dtype=dtype)
    weights, weighted = summands.tensor_split((count,), 1)
    if size == Size.MODERATE:
        torch.exp(keys.to(dtype), out=weights)
    else:
        if size == Size.ANY:
            keys, values = _summable(keys, values)
        write_weights(keys, weights, LARGEST_EXPONENT - table.top, increase)
    torch.mul(values.to(dtype), weights, out=weighted)
    return summands


def write_weights(keys: torch.Tensor, weights: torch.Tensor, top: float, increase: torch.Tensor | None = None) -> None:
    """Write exp(K), scaled to exp(top - increase) for the largest key of a row, to `weights`; it may be the keys."""
    dim = 1 if len(keys) == 1 else 0
    step = max(1, WEIGHTS_BLOCK * keys.shape[dim] // keys.numel())
    increases = repeat(None) if increase is None else increase.split(step, dim)
    for some_keys, some_weights, some_increase in zip(keys.split(step, dim), weights.split(step, dim), increases):
        wide = some_keys.to(working_dtype(keys))  # a maximum is computed faster than in half precision
        some_weights.copy_(relative_exp(wide, wide.amax(-1, keepdim=True), top, some_increase))


def _summable(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide whole rows with NaN, infinity or large values, so that all sums are finite and their queries are lost."""
    small = (values.abs() <= LARGEST_VALUE).unflatten(1, (keys.shape[1], -1)).all(2)
    summable = (small & (keys < torch.inf)).all(-1, keepdim=True)
    return keys.masked_fill(~summable, -torch.inf), values.masked_fill(~summable, 0.0)


def are_bounded(values: torch.Tensor) -> bool:
    """Whether weighted sums of the values are finite; False if they contain NaN."""
    return largest_size(values) <= LARGEST_VALUE
