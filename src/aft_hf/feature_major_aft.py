"""A whole mixer with the positions last in memory: Eq. 2 and its projections, and their gradients, without a
transposition.

A linear layer usually writes (B, T, d), while the sums over positions are products of rows of positions. Computed from
the left, W X^T, one product writes key, value and query as (features, B T), those of a group of features side by side.
Everything else happens where they lie: exp(K), exp(K) V, the average and the gate of the query. The gradient of the
output comes back in the same way, as W^T G^T.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .activations_aft import differentiable_gradients, is_linear, is_untouched, runs_as_written
from .dense_sums_aft import DenseSums
from .direct_mixing_aft import LARGEST_VALUE, MODERATE, TableSums, gradient_of_inputs, gradient_of_sums, largest_size
from .mixing_aft import working_dtype


# Bytes of the features and tables in a block. More than where positions come first: what is read and written lies in
# long rows, and a product has more heads.
BLOCK_SIZE = 3 * 2**22

# The numbers that features may be. For gradients, features of bfloat16 are summed in float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

# Features that a product should have at least, if their number can be divided.
FEWEST_FEATURES = 16


class Projections(NamedTuple):
    """The modules of a mixer; a query of None is no gate."""

    query: nn.Module | None
    activation: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    def of_input(self) -> list[nn.Module]:
        return [self.key, self.value] if self.query is None else [self.key, self.value, self.query]

    def are_plain(self, width: int, heads: int) -> bool:
        """Whether they do no more than their weights and a sigmoid say, so that no call of theirs is missed, and are
        of the usual sizes.
        """
        layers = self.of_input()
        gated = self.query is None or (type(self.activation) is nn.Sigmoid and is_untouched(self.activation))
        ends = is_linear(self.output) or (type(self.output) is nn.Identity and is_untouched(self.output))
        if not (gated and ends and all(map(is_linear, layers))):
            return False
        key_shape, *others = (tuple(layer.weight.shape) for layer in layers)
        usual = key_shape in ((width, width), (heads, width)) and all(shape == (width, width) for shape in others)
        biases = [layer.bias for layer in layers]
        whole = all(b is not None and b.shape == y.weight.shape[:1] for b, y in zip(biases, layers))
        return usual and (whole or all(b is None for b in biases))


def runs_by_feature(x: torch.Tensor, projections: Projections, heads: int) -> bool:
    """Whether `feature_major_mixing` can take the place of these modules for an input (B, T, d)."""
    if x.device.type != "cpu" or x.numel() == 0 or not runs_as_written(x):
        return False
    layers = [*projections.of_input(), projections.output]
    if not projections.are_plain(x.shape[-1], heads):
        return False
    dtypes = {x.dtype, *(p.dtype for y in layers for p in y.parameters())}
    if torch.is_autocast_enabled("cpu"):  # which leaves float64 as it is
        return projected_dtype(x) == torch.bfloat16 and dtypes <= {torch.float32, torch.bfloat16}
    return len(dtypes) == 1 and x.dtype in DTYPES


def projected_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of what a linear layer makes of x."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


class _Layout(NamedTuple):
    """Features as they lie in memory, (groups, features, B, T): in each group its keys, then its values, then its
    queries. A group is a head, or a part of one.
    """

    heads: int
    groups: int
    keys: int
    values: int

    def split(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The keys, values and queries."""
        return features.tensor_split((self.keys, self.keys + self.values), 1)

    def blocks(self, sums: TableSums, exp_bias: torch.Tensor, features: torch.Tensor) -> Iterator[tuple]:
        """Groups that are taken at once, their heads, and the tables of these.

        A part of a head at once, or as many heads as fit into a block with their tables, and one for each thread: a
        product is not split well.
        """
        batch, length = features.shape[2:]
        parts, table_heads, table = self.groups // self.heads, None, None
        size = sums.size((self.keys + self.values) * batch, length) * features.element_size()
        step = 1 if parts > 1 else max(BLOCK_SIZE // size, torch.get_num_threads())
        for first in range(0, self.groups, step):
            block = slice(first, min(first + step, self.groups))
            heads = slice(first // parts, (block.stop - 1) // parts + 1)
            if heads != table_heads:
                table, table_heads = sums.table(exp_bias[heads]), heads
            yield block, heads, table


def feature_major_mixing(
    x: torch.Tensor,
    projections: Projections,
    sums: TableSums,
    bias: torch.Tensor,
    safe: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """The output of a mixer for which `runs_by_feature`; None where a tensor turns out not to be a plain one.

    Args:
        x: (B, T, d), query, key and value in one, of the type in which they shall be projected.
        projections: d -> d, but d -> h for a key per head.
        sums: how positions are summed where keys, values and biases are moderate.
        bias: position biases as `sums` takes them.
        safe: the same context (B, h, T, c) from any keys (B, h, T, k), values (B, h, T, c) and biases.

    Returns:
        (B, T, d).
    """
    batch, length, width = x.shape
    heads, key_features = len(bias), projections.key.weight.shape[0]
    groups = _count_groups(heads, width, key_features, batch * length * x.element_size())
    layout = _Layout(heads, groups, key_features // groups, width // groups)
    weights = [getattr(projections.output, name, None) for name in ("weight", "bias")]
    weights = [None if y is None else y.to(x.dtype) for y in weights]
    features = _project(projections.of_input(), groups, x.flatten(0, 1)).view(groups, -1, batch, length)
    if not runs_as_written(features, bias):
        return None
    if not _are_moderate(features.detach(), bias.detach(), layout):
        output = _gated_safely(features, bias, *weights, layout, safe)
    elif torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (features, bias, *weights)):
        output = _GatedAverage.apply(features, bias, *weights, layout, sums, safe)
    else:
        output = _output(_gated_in_place(features, bias, layout, sums), *weights)
    return output.view(batch, length, -1)


def _are_moderate(features: torch.Tensor, bias: torch.Tensor, layout: _Layout) -> bool:
    """Whether the sums may be taken as they are written; never with NaN."""
    if not largest_size(bias) <= MODERATE:
        return False
    if largest_size(features) <= MODERATE:  # one look at everything in a row, and usually so
        return True
    keys, values, _ = layout.split(features)
    return largest_size(keys) <= MODERATE and largest_size(values) <= LARGEST_VALUE


def _gated_in_place(features: torch.Tensor, bias: torch.Tensor, layout: _Layout, sums: TableSums) -> torch.Tensor:
    """Eq. 2 without gradients, in the memory of the features: (groups, values, B, T)."""
    keys, values, queries = layout.split(features)
    values.mul_(keys.exp_())
    for block, _, table in layout.blocks(sums, torch.exp(bias).to(features.dtype), features):
        summands = features[block, : layout.keys + layout.values]
        denominator, numerator, _ = layout.split(sums.product(summands, table))
        torch.mul(numerator, denominator.reciprocal_(), out=values[block])
    if queries.shape[1] == 0:
        return values
    return nn.functional.glu(features[:, layout.keys :], 1)  # values sigmoid(Q), with Q right behind the values


class _GatedAverage(torch.autograd.Function):
    """Eq. 2 and the output projection to autograd. What is kept beside the features is the average and the reciprocals
    of its denominators.
    """

    @staticmethod
    def forward(ctx: Any, features, bias, weight, weight_bias, layout: _Layout, sums: DenseSums, safe) -> torch.Tensor:
        keys, values, queries = layout.split(features)
        dtype = working_dtype(features)
        context, inverse = values.new_empty(values.shape), keys.new_empty(keys.shape, dtype=dtype)
        gated = context if queries.shape[1] == 0 else torch.empty_like(context)
        for block, _, table in layout.blocks(sums, torch.exp(bias).to(dtype), features):
            summands = _summands(keys[block], values[block], dtype)
            denominator, numerator, _ = layout.split(sums.product(summands, table))
            torch.reciprocal(denominator, out=inverse[block])
            torch.mul(numerator, inverse[block], out=context[block])
            if gated is not context:
                torch.mul(context[block], torch.sigmoid(queries[block]), out=gated[block])
        ctx.layout, ctx.sums, ctx.safe = layout, sums, safe
        ctx.save_for_backward(features, bias, weight, weight_bias, context, inverse)
        return _output(gated, weight, weight_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        *inputs, context, inverse = ctx.saved_tensors
        needed = ctx.needs_input_grad[: len(inputs)]
        if torch.is_grad_enabled():  # the gradient of this gradient is wanted
            output = _gated_safely(*inputs, ctx.layout, ctx.safe)
            return *differentiable_gradients(output, inputs, needed, gradient), None, None, None
        with torch.autocast("cpu", enabled=False):
            return *_gradients(*inputs, context, inverse, gradient, needed, ctx.layout, ctx.sums), None, None, None


def _gradients(
    features, bias, weight, weight_bias, context, inverse, gradient, needed, layout: _Layout, sums: DenseSums
) -> tuple[torch.Tensor | None, ...]:
    """Those of the first four, where `needed`, from that of the output (B T, d)."""
    dtype = working_dtype(features)
    # A copy: what is overwritten here must not be the caller's.
    of_gated = gradient.mT.clone(memory_format=torch.contiguous_format) if weight is None else weight.mT @ gradient.mT
    of_gated = of_gated.view_as(context)
    of_features, gated = torch.empty_like(features), torch.empty_like(context)
    of_bias = torch.zeros_like(bias) if needed[1] else None
    parts = layout.split(features), layout.split(of_features)
    exp_bias = torch.exp(bias).to(dtype)
    for block, heads, table in layout.blocks(sums, exp_bias, features):
        (keys, values, queries), gradients = ([x[block] for x in y] for y in parts)
        of_context = of_gated[block]
        if queries.shape[1]:
            gate = torch.sigmoid(queries)
            torch.mul(context[block], gate, out=gated[block])
            of_gate = of_context * context[block]
            torch.ops.aten.sigmoid_backward.grad_input(of_gate, gate, grad_input=gradients[2])
            of_context.mul_(gate)
        else:
            gated[block] = context[block]
        summands = _summands(keys, values, dtype)
        of_sums = torch.empty_like(summands)
        of_denominator, of_numerator, _ = layout.split(of_sums)
        factors = of_context.to(dtype), context[block].to(dtype), inverse[block]
        gradient_of_sums(*factors, of_numerator, of_denominator, 1)
        if needed[1]:
            of_table = sums.gradient_of_table(of_sums, summands)
            of_bias[heads] += sums.collect(of_table) * exp_bias[heads]
        of_summands = sums.product(of_sums, table.mT)
        of_weights, of_weighted, _ = layout.split(of_summands)
        weights, weighted, _ = layout.split(summands)
        gradient_of_inputs((of_weighted, of_weights), (weighted, weights), *gradients[:2], 1)
    of_weight = gradient.mT @ gated.view(-1, len(gradient)).mT if needed[2] else None
    of_weight_bias = gradient.sum(0) if needed[3] else None
    return of_features if needed[0] else None, of_bias, of_weight, of_weight_bias


def _gated_safely(features, bias, weight, weight_bias, layout: _Layout, safe: Callable) -> torch.Tensor:
    """The same for features of any size, by differentiable operations."""
    keys, values, queries = layout.split(features)
    by_head = (y.reshape(layout.heads, -1, *y.shape[2:]).permute(2, 0, 3, 1) for y in (keys, values))
    context = safe(*by_head, bias).permute(1, 3, 0, 2).reshape(values.shape)
    return _output(context * torch.sigmoid(queries) if queries.shape[1] else context, weight, weight_bias)


def _summands(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(K), then exp(K) V, of some groups."""
    count = keys.shape[1]
    summands = keys.new_empty(len(keys), count + values.shape[1], *keys.shape[2:], dtype=dtype)
    weights, weighted = summands.tensor_split((count,), 1)
    torch.mul(values.to(dtype), torch.exp(keys.to(dtype), out=weights), out=weighted)
    return summands


def _output(gated: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """(groups, values, B, T) as (B T, d), projected."""
    rows = gated.flatten(2).flatten(0, 1).mT
    if weight is None:  # a copy even where none is needed: what is kept for gradients must not be changed
        return rows.clone(memory_format=torch.contiguous_format)
    return nn.functional.linear(rows, weight, bias)


def _count_groups(heads: int, width: int, keys: int, size: int) -> int:
    """Into how many groups the features are cut: heads where these have one key each, or else parts of them that are
    small enough to be summed at once.

    Args:
        size: bytes of one feature.
    """
    if keys == heads:
        return heads
    of_head = width // heads
    divisors = [n for n in range(1, of_head // FEWEST_FEATURES + 1) if of_head % n == 0] or [1]
    return heads * next((n for n in divisors if 2 * (of_head // n) * size <= BLOCK_SIZE), divisors[-1])


def _project(layers: list[nn.Linear], groups: int, x: torch.Tensor) -> torch.Tensor:
    """What the layers make of (B T, d), of one group of features after the other: (features, B T)."""
    weight = torch.cat([layer.weight.view(groups, -1, x.shape[1]) for layer in layers], 1).flatten(0, 1).to(x.dtype)
    if layers[0].bias is None:
        return torch.mm(weight, x.mT)
    bias = torch.cat([layer.bias.view(groups, -1, 1) for layer in layers], 1).flatten(0, 1).to(x.dtype)
    return torch.addmm(bias, weight, x.mT)  # rounded once, after the bias
