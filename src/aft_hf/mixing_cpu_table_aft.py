"""Eq. 2 on a CPU by products with a table of exp(w), or by a convolution (`ConvolutionTables`): `table_mixing` for
keys and values, and `table_layer` for a whole mixer with its projections.

Both use a layout with the positions last in memory. A linear layer usually writes (B, T, d), but the sums over
positions are products of rows of positions. So the projections are computed as W X^T: one product writes key, value
and query as (features, B T), with the keys, values and queries of a group of features side by side. All further steps
work in this layout: exp(K), exp(K) V, the average and the gate of the query. The backward pass starts in the same way,
with W^T G^T for the gradient G of the output.

The backward pass recomputes exp(K). Besides keys, values and queries, training keeps the average, in float32 at least,
and the reciprocals of its denominators.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .activations_aft import are_plain_tensors, differentiable_gradients, is_linear
from .mixing_cpu_bias_aft import MODERATE, Table, Tables, is_moderate
from .mixing_cpu_product_aft import Upstream, are_bounded, write_weights
from .mixing_cpu_sums_aft import Block
from .projections_aft import Projections
from .scaled_sums_aft import EMPTY, working_dtype


# Bytes of the features and tables in a block, chosen to stay in a processor's cache.
BLOCK_SIZE = 3 * 2**22

# Minimum number of features in a product, where the features of a head are split into parts.
FEWEST_FEATURES = 16

# The same function of key (B, T, h k), value (B, T, d) and biases, composed of differentiable operations.
Differentiable = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def table_layer(
    x: torch.Tensor,
    projections: Projections,
    bias: torch.Tensor,
    tables: Tables,
    *,
    num_heads: int,
    differentiable: Differentiable,
) -> torch.Tensor:
    """Compute the output of a mixer whose projections can be replaced (`Projections.can_be_replaced`).

    Args:
        x: (B, T, d), the input of all projections, in the dtype in which they are computed.
        projections: d -> d, but d -> h for one key per head.
        bias: position biases in the form that `tables` requires.
        tables: the kind of table.
        num_heads: h.
        differentiable: computes the context (B, T, d) for gradients of gradients and batched gradients.

    Returns:
        (B, T, d).
    """
    batch, length, width = x.shape
    layers = [layer for layer in projections.of_input() if is_linear(layer)]  # all are; this narrows their type
    layout = _choose_layout(num_heads, width, layers[0].weight.shape[0], batch * length * x.element_size())
    of_output = (getattr(projections.output, name, None) for name in ("weight", "bias"))
    weight, weight_bias = (None if y is None else y.to(x.dtype) for y in of_output)
    features = _project(layers, layout.groups, x.flatten(0, 1)).view(layout.groups, -1, batch, length)
    return _gated_average(_Inputs(features, bias, weight, weight_bias), layout, tables, differentiable)


def table_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    tables: Tables,
    *,
    num_heads: int,
    differentiable: Differentiable,
) -> torch.Tensor:
    """Compute Eq. 2 before the query's gate.

    Args:
        key: (B, T, h k) with k = c or 1, -inf where a position is hidden from all queries.
        value: (B, T, d), finite at hidden positions.
        bias: position biases in the form that `tables` requires.
        tables: the kind of table.
        num_heads: h.
        differentiable: computes the same function for gradients of gradients and batched gradients.

    Returns:
        (B, T, d) in the dtype of `value`.
    """
    dtype = torch.float32 if value.dtype == torch.float16 else value.dtype
    batch, length, width = value.shape
    layout = _choose_layout(num_heads, width, key.shape[-1], batch * length * dtype.itemsize)
    parts = (x.to(dtype).unflatten(-1, (layout.groups, -1)).permute(2, 3, 0, 1) for x in (key, value))
    features = torch.cat(list(parts), 1).contiguous()
    return _gated_average(_Inputs(features, bias), layout, tables, differentiable).to(value.dtype)


class _Inputs(NamedTuple):
    """The tensors for which gradients are computed."""

    features: torch.Tensor  # keys, values and queries in a `_Layout`
    bias: torch.Tensor  # position biases
    weight: torch.Tensor | None = None  # of the output projection; None without an output projection
    weight_bias: torch.Tensor | None = None


class _Layout(NamedTuple):
    """The layout of features in memory, (groups, features, B, T): the keys of each group, then its values, then its
    queries. A group is a head, or a part of a head.
    """

    heads: int
    groups: int
    keys: int
    values: int

    def split(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of the keys, values and queries."""
        keys, values, queries = features.tensor_split((self.keys, self.keys + self.values), 1)
        return keys, values, queries

    def by_position(self, features: torch.Tensor) -> torch.Tensor:
        """View keys, values or queries (groups, features, B, T) as (B, T, all features)."""
        return features.flatten(0, 1).permute(1, 2, 0)

    def blocks(
        self, tables: Tables, bias: torch.Tensor, features: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, slice, Table]]:
        """Yield the groups of each block, their heads, and the table of these heads.

        A block is one part of a head, or as many heads as fit into `BLOCK_SIZE` with their tables, but at least one
        head per thread, since threads do not divide a single product well.
        """
        batch, length = features.shape[2:]
        parts, table_heads = self.groups // self.heads, None
        table: Table | None = None
        size = tables.size((self.keys + self.values) * batch, length) * features.element_size()
        step = 1 if parts > 1 else max(BLOCK_SIZE // size, torch.get_num_threads())
        for first in range(0, self.groups, step):
            block = slice(first, min(first + step, self.groups))
            heads = slice(first // parts, (block.stop - 1) // parts + 1)
            if table is None or heads != table_heads:
                table, table_heads = tables.table(bias[heads], dtype), heads
            yield block, heads, table

    def are_moderate(self, features: torch.Tensor, bias: torch.Tensor) -> bool:
        """Whether exponentials can be summed without a shift; False if there is NaN."""
        if not is_moderate(bias):
            return False
        if is_moderate(features):  # one pass over contiguous memory, which is usually enough
            return True
        keys, values, _ = self.split(features)
        return is_moderate(keys) and are_bounded(values)


def _choose_layout(heads: int, width: int, keys: int, size: int) -> _Layout:
    """Choose the groups: heads if there is one key per head, else parts of heads that are small enough for a block.

    Args:
        heads: the number of heads.
        width: d.
        keys: the number of key features, `heads` or `width`.
        size: bytes of one feature.
    """
    if keys == heads:
        return _Layout(heads, heads, 1, width // heads)
    of_head = width // heads
    divisors = [n for n in range(1, of_head // FEWEST_FEATURES + 1) if of_head % n == 0] or [1]
    parts = next((n for n in divisors if 2 * (of_head // n) * size <= BLOCK_SIZE), divisors[-1])
    return _Layout(heads, heads * parts, of_head // parts, of_head // parts)


def _project(layers: list[nn.Linear], groups: int, x: torch.Tensor) -> torch.Tensor:
    """Apply the layers to x (B T, d), with their output features ordered by group: (features, B T)."""
    weight = torch.cat([layer.weight.view(groups, -1, x.shape[1]) for layer in layers], 1).flatten(0, 1).to(x.dtype)
    if layers[0].bias is None:
        return torch.mm(weight, x.mT)
    bias = torch.cat([layer.bias.view(groups, -1, 1) for layer in layers], 1).flatten(0, 1).to(x.dtype)
    return torch.addmm(bias, weight, x.mT)  # rounded once, after the bias


def _gated_average(inputs: _Inputs, layout: _Layout, tables: Tables, differentiable: Differentiable) -> torch.Tensor:
    """Compute Eq. 2, the gate if there are queries, and the output projection if there is a weight: (B, T, d)."""
    features, bias, weight, weight_bias = inputs
    moderate = layout.are_moderate(features.detach(), bias.detach())
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _GatedAverage.apply(*inputs, layout, tables, moderate, differentiable)
    return _output(_gated_in_place(features, bias, layout, tables, moderate), weight, weight_bias)


def _gated_in_place(
    features: torch.Tensor, bias: torch.Tensor, layout: _Layout, tables: Tables, moderate: bool
) -> torch.Tensor:
    """Compute Eq. 2 and the gate without gradients, in the memory of the features: (groups, values, B, T)."""
    keys, values, queries = layout.split(features)
    kept = moderate or (not tables.causal and is_moderate(bias) and _are_shown(keys) and are_bounded(values))
    if kept:  # no query can be lost
        if moderate:
            keys.exp_()
        else:
            write_weights(keys, keys, MODERATE)
        values.mul_(keys)
    for block, heads, table in layout.blocks(tables, bias, features, features.dtype):
        if kept:
            sums = tables.product(features[block, : layout.keys + layout.values], table)
            denominator, numerator, _ = layout.split(sums)
            torch.mul(numerator, denominator.reciprocal_(), out=values[block])
        else:
            context, inverse = torch.empty_like(values[block]), torch.empty_like(keys[block])
            Block(keys[block], values[block], bias[heads], tables, table, False).average(context, inverse)
            values[block] = context
    if queries.shape[1] == 0:
        return values
    return nn.functional.glu(features[:, layout.keys :], 1)  # values * sigmoid(Q); Q follows the values in memory


def _are_shown(keys: torch.Tensor) -> bool:
    """Whether all keys are finite and above `EMPTY`, so that none counts as hidden."""
    lowest, highest = keys.aminmax()
    return float(lowest) > EMPTY and float(highest) < torch.inf


class _GatedAverage(torch.autograd.Function):
    """The autograd function of `_gated_average`."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor | None,
        weight_bias: torch.Tensor | None,
        layout: _Layout,
        tables: Tables,
        moderate: bool,
        differentiable: Differentiable,
    ) -> torch.Tensor:
        keys, values, queries = layout.split(features)
        dtype = working_dtype(features)
        context, inverse = (torch.empty_like(x, dtype=dtype) for x in (values, keys))
        gated = torch.empty_like(values) if queries.shape[1] or dtype != values.dtype else context
        for block, heads, table in layout.blocks(tables, bias, features, dtype):
            inputs = Block(keys[block], values[block], bias[heads], tables, table, moderate)
            inputs.average(context[block], inverse[block])
            if queries.shape[1]:
                torch.mul(context[block], torch.sigmoid(queries[block]), out=gated[block])
            elif gated is not context:
                gated[block] = context[block]
        ctx.options = layout, tables, moderate
        ctx.differentiable = differentiable
        ctx.save_for_backward(features, bias, weight, weight_bias, context, inverse)
        return _output(gated, weight, weight_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, context, inverse = ctx.saved_tensors
        inputs = _Inputs(*saved)
        needed = ctx.needs_input_grad[: len(inputs)]
        with torch.autocast("cpu", enabled=False):
            batched = not are_plain_tensors(gradient)
            if batched or torch.is_grad_enabled():
                gradients = _differentiable_gradients(inputs, needed, gradient, ctx.options[0], ctx.differentiable)
            else:
                gradients = _gradients(inputs, context, inverse, gradient, needed, *ctx.options)
        return *gradients, None, None, None, None


def _gradients(
    inputs: _Inputs,
    context: torch.Tensor,
    inverse: torch.Tensor,
    gradient: torch.Tensor,
    needed: tuple[bool, ...],
    layout: _Layout,
    tables: Tables,
    moderate: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs that are `needed`, from the gradient of the output (B, T, d)."""
    features, bias, weight, _ = inputs
    rows = gradient.reshape(-1, gradient.shape[-1])
    # A copy, since it is overwritten below and the gradient belongs to the caller.
    of_gated = rows.mT.clone(memory_format=torch.contiguous_format) if weight is None else weight.mT @ rows.mT
    of_gated = of_gated.view_as(context)
    of_features, gated = torch.empty_like(features), torch.empty_like(context, dtype=features.dtype)
    of_bias = torch.zeros_like(bias) if needed[1] else None
    parts = layout.split(features), layout.split(of_features)
    for block, heads, table in layout.blocks(tables, bias, features, context.dtype):
        (keys, values, queries), (of_keys, of_values, of_queries) = ([x[block] for x in y] for y in parts)
        of_context = of_gated[block]
        if queries.shape[1]:
            gate = torch.sigmoid(queries)
            torch.mul(context[block], gate, out=gated[block])
            of_gate = torch.mul(of_context, context[block], out=torch.empty_like(gate))
            torch.ops.aten.sigmoid_backward.grad_input(of_gate, gate, grad_input=of_queries)
            of_context.mul_(gate)
        else:
            gated[block] = context[block]
        upstream = Upstream(of_context, context[block], inverse[block])
        averages = Block(keys, values, bias[heads], tables, table, moderate)
        of_heads = averages.gradients(upstream, of_keys, of_values, needed[1])
        if of_bias is not None and of_heads is not None:
            of_bias[heads] += of_heads
    of_weight = rows.mT @ gated.flatten(2).flatten(0, 1).mT if needed[2] else None
    of_weight_bias = rows.sum(0) if needed[3] else None
    return of_features if needed[0] else None, of_bias, of_weight, of_weight_bias


def _differentiable_gradients(
    inputs: _Inputs,
    needed: tuple[bool, ...],
    gradient: torch.Tensor,
    layout: _Layout,
    differentiable: Differentiable,
) -> tuple[torch.Tensor | None, ...]:
    """Like `_gradients`, by differentiable operations, for a gradient that may be batched."""
    with torch.enable_grad():
        features, bias, weight, weight_bias = inputs
        keys, values, queries = layout.split(features)
        context = differentiable(layout.by_position(keys), layout.by_position(values), bias)  # (B, T, d)
        if queries.shape[1]:
            context = context * torch.sigmoid(layout.by_position(queries))
        output = context if weight is None else nn.functional.linear(context, weight, weight_bias)
        return tuple(differentiable_gradients(output, inputs, needed, gradient))


def _output(gated: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Return (groups, values, B, T) as (B, T, d), projected if there is a weight; never a view."""
    rows = gated.flatten(0, 1).permute(1, 2, 0)  # (B, T, d)
    if weight is None:
        return rows.clone(memory_format=torch.contiguous_format)
    output = torch.empty(rows.shape, dtype=gated.dtype, device=gated.device)
    flat = gated.flatten(2).flatten(0, 1).mT
    if bias is None:
        torch.mm(flat, weight.mT, out=output.view(flat.shape))
    else:
        torch.addmm(bias, flat, weight.mT, out=output.view(flat.shape))
    return output
