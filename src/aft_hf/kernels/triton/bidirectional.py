"""Bidirectional Eq. 2 by Triton kernels with a table of all pairs, as custom operators of PyTorch.

It serves AFT-full, AFT-conv on images, and windows on short sequences. A table has h T^2 entries and takes 4 T
operations per element. So large grids and windows on longer sequences go to the portable backend, which needs none.
"""

from typing import Any

import torch

from ...mixing_aft import Mixing
from ...portable_aft import CHUNK_SIZE as WINDOW_CHUNK
from ...portable_aft import (
    FEW_CHUNKS,
    LARGEST_GRID_TABLE,
    are_plain_tensors,
    differentiable_gradients,
    join_heads,
    pairwise_mixing,
    split_heads,
)
from ...position_biases_aft import Dense, GridKernel, NoBias, PositionBias, SelectedPosition, widen


def table_is_efficient(biases: PositionBias, length: int) -> bool:
    """Whether a table of all pairs is an efficient way to compute these position biases."""
    if isinstance(biases, (NoBias, SelectedPosition)) or biases.hides_outside:
        return False  # sums and gathers suffice, or most of the table is hidden
    if isinstance(biases, GridKernel):
        return len(biases.kernels) * length**2 <= LARGEST_GRID_TABLE
    if biases.reach is not None:
        return length <= FEW_CHUNKS * WINDOW_CHUNK
    return isinstance(biases, Dense)


def mix(problem: Mixing) -> torch.Tensor:
    """As `Backend.mix`, for a bidirectional problem that these kernels support."""
    table = problem.biases.dense(problem.length).float()
    inputs = problem.query, problem.key, problem.value, table
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return mix_bidirectional(*inputs, problem.num_heads, keep)[0]


# ---------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("aft_hf::mix_bidirectional", mutates_args=())
def mix_bidirectional(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute Eq. 2 times sigmoid(query).

    Args:
        query: (B, T, d), or None for no gate.
        key: (B, T, d), or (B, T, h) for one key per head.
        value: (B, T, d).
        table: w, (h, T, T), in float32.
        num_heads: h.
        keep: whether to return the tensors that the backward pass needs.

    Returns:
        The result, (B, T, d); and the averages, the log-denominators and the maxima of chunks for the backward pass,
        which are empty without `keep`.
    """
    from .bidirectional_launch import forward

    output, (context, log_denominator, largest) = forward(query, key, value, table, num_heads, keep=keep)
    return output, context, log_denominator, largest


@mix_bidirectional.register_fake
def _(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    keep: bool,
) -> tuple[torch.Tensor, ...]:
    from .bidirectional_launch import kept_shapes

    kept = (value.new_empty(shape, dtype=torch.float32) for shape in kept_shapes(value, keep))
    return value.new_empty(value.shape), *kept


@torch.library.custom_op("aft_hf::mix_bidirectional_backward", mutates_args=())
def mix_bidirectional_backward(
    gradient: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    context: torch.Tensor,
    log_denominator: torch.Tensor,
    largest: torch.Tensor,
    num_heads: int,
    of_table: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of query, key, value and table from that of the output.

    The gradient of the query is an empty tensor if there is no query, that of the table unless `of_table`.
    """
    from .bidirectional_launch import backward

    kept = context, log_denominator, largest
    gradients = backward(gradient, query, key, value, table, kept, num_heads, of_table=of_table)
    of_query, of_key, of_value, found = (gradient.new_empty(0) if x is None else x for x in gradients)
    return of_query, of_key, of_value, found


@mix_bidirectional_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    context: torch.Tensor,
    log_denominator: torch.Tensor,
    largest: torch.Tensor,
    num_heads: int,
    of_table: bool,
) -> tuple[torch.Tensor, ...]:
    gradients = (query, key, value, table if of_table else None)
    return tuple(gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, table, ctx.num_heads, _ = inputs
    ctx.save_for_backward(query, key, value, table, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *inputs, context, log_denominator, largest = ctx.saved_tensors
    needed = ctx.needs_input_grad[:4]
    if gradient is None:
        return (None,) * 6
    plain = torch.compiler.is_compiling() or are_plain_tensors(gradient)
    if torch.is_grad_enabled() or not plain:  # for gradients of gradients, or batched gradients
        with torch.enable_grad():
            output = _in_plain_operations(*inputs, num_heads=ctx.num_heads)
            gradients = differentiable_gradients(output, tuple(inputs), needed, gradient)
    else:
        kept = context, log_denominator, largest
        found = mix_bidirectional_backward(gradient, *inputs, *kept, ctx.num_heads, needed[3])
        gradients = (x if need else None for x, need in zip(found, needed))
    return *gradients, None, None


mix_bidirectional.register_autograd(_backward, setup_context=_setup_context)


def _in_plain_operations(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, *, num_heads: int
) -> torch.Tensor:
    """The result of `mix_bidirectional`, in differentiable PyTorch operations."""
    keys, values = (widen(split_heads(x, num_heads)) for x in (key, value))
    context = join_heads(pairwise_mixing(keys, values, table.unsqueeze(0), None))
    if query is not None:
        context = context * torch.sigmoid(widen(query))
    return context.to(value.dtype)
