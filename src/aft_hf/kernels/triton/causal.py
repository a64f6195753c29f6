"""Causal Eq. 2 by Triton kernels: the conversion of a problem to kernel arguments, and custom operators of PyTorch
with gradients.
"""

from typing import Any, NamedTuple

import torch

from ...mixing_aft import Mixing
from ...portable_aft import are_plain_tensors, differentiable_gradients, join_heads, pairwise_mixing, split_heads
from ...position_biases_aft import Dense, LinearDecay, NoBias, PositionBias, widen


# Positions per chunk. With larger chunks, the sums of one program would need more registers than a thread has.
CHUNK_SIZE = 32


class Geometry(NamedTuple):
    """The structure of a problem as integers, which custom operators can take.

    Attributes:
        mode: the structure of w: w = 0, a linear decay, a window, or all pairs (the constants of `kernels_aft.py`).
        num_heads: h; 1 if all features have the same structure.
        chunk_size: C.
        near: how many chunks before a query's own one have position biases. Not used for all pairs, where it follows
            from the length.
        reach: the largest distance within the window.
        alone: whether positions beyond the window are hidden.
    """

    mode: int
    num_heads: int
    chunk_size: int
    near: int = 0
    reach: int = 0
    alone: int = 0

    @classmethod
    def of(cls, problem: Mixing) -> "Geometry":
        biases, heads = problem.biases, problem.num_heads
        if isinstance(biases, NoBias):
            return cls(0, heads if problem.key.shape != problem.value.shape else 1, CHUNK_SIZE)
        if isinstance(biases, LinearDecay):
            return cls(1, heads, CHUNK_SIZE)
        if biases.reach is None:
            return cls(3, heads, CHUNK_SIZE)
        near = -(-biases.reach // CHUNK_SIZE)
        return cls(2, heads, CHUNK_SIZE, near, biases.reach, int(biases.hides_outside))

    @property
    def is_full(self) -> bool:
        return self.mode == 3


class Inputs(NamedTuple):
    """The tensors of a causal problem.

    Attributes:
        query: (B, T, d), or None for no gate.
        key: (B, T, d), or (B, T, h) for one key per head.
        value: (B, T, d).
        table: w of all pairs, (h, P, P), or w from each chunk of C positions to the near chunks and itself,
            (h, n, C, (near + 1) C), with n = 1 if all chunks have the same biases. None if w is 0 or a linear decay.
        slopes: (h,), the slopes of a linear decay; otherwise None.
        first: (B, T), for packed documents: the index in its row of the first token of each token's document. None
            if each row is one sequence.
    """

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor | None
    slopes: torch.Tensor | None
    first: torch.Tensor | None


def has_table(biases: PositionBias) -> bool:
    return not isinstance(biases, (NoBias, LinearDecay))


def problem_tensors(problem: Mixing, positions: int | None = None) -> Inputs:
    """Convert a problem to the tensors that the kernels take.

    Args:
        problem: the problem.
        positions: the number of positions in the table. Default: one for each token.
    """
    biases, documents = problem.biases, problem.documents
    table = _table(biases, Geometry.of(problem), positions or problem.length) if has_table(biases) else None
    slopes = None if biases.slopes is None else biases.slopes.float()
    first = None if documents is None else documents.first_positions().int()
    return Inputs(problem.query, problem.key, problem.value, table, slopes, first)


def _table(biases: PositionBias, geometry: Geometry, length: int) -> torch.Tensor:
    """The table of position biases, see `Inputs.table`."""
    size, near = geometry.chunk_size, geometry.near
    if isinstance(biases, Dense):
        length = min(length, biases.query.shape[1])
    if geometry.is_full:
        return biases.dense(length).float().contiguous()
    count = 1 if biases.relative else -(-length // size)
    if near == 1:
        return biases.of_chunks(count, size).float().contiguous()
    starts = torch.arange(count, device=biases.device)[:, None] * size
    queries = starts + torch.arange(size, device=biases.device)
    keys = starts + torch.arange(-near * size, size, device=biases.device)
    return biases.between(queries, keys).movedim(-3, 0).float().contiguous()


def mix(problem: Mixing) -> torch.Tensor:
    """As `Backend.mix`, for a causal problem."""
    inputs = problem_tensors(problem)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return causal_mix(*inputs, list(Geometry.of(problem)), keep)[0]


# ---------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("aft_hf::causal_mix", mutates_args=())
def causal_mix(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    geometry: list[int],
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute causal Eq. 2 times sigmoid(query).

    Args:
        query, key, value, table, slopes, first: the fields of `Inputs`, since custom operators take no named tuples.
        geometry: the fields of `Geometry`.
        keep: whether to return the tensors that the backward pass needs.

    Returns:
        The result, (B, T, d); and for the backward pass the averages, the log-denominators and three numbers per chunk
        and feature (`kept_tensors`), which are empty without `keep`.
    """
    from .launch import forward

    inputs = Inputs(query, key, value, table, slopes, first)
    output, kept, _ = forward(inputs, Geometry(*geometry), keep=keep)
    context, log_denominator, largest = (value.new_empty(0, dtype=torch.float32) if x is None else x for x in kept)
    return output, context, log_denominator, largest


@causal_mix.register_fake
def _(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    geometry: list[int],
    keep: bool,
) -> tuple[torch.Tensor, ...]:
    from .launch import kept_tensors

    kept = kept_tensors(value, Geometry(*geometry)) if keep else [(torch.float32, (0,))] * 3
    return value.new_empty(value.shape), *(value.new_empty(shape, dtype=dtype) for dtype, shape in kept)


@torch.library.custom_op("aft_hf::causal_mix_backward", mutates_args=())
def causal_mix_backward(
    gradient: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    context: torch.Tensor,
    log_denominator: torch.Tensor,
    largest: torch.Tensor,
    geometry: list[int],
    of_table: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of query, key, value and table from that of the output.

    The gradient of the query is an empty tensor if there is no query, that of the table unless `of_table`.
    """
    from .launch import backward

    kept, inputs = (context, log_denominator, largest), Inputs(query, key, value, table, slopes, first)
    gradients = backward(gradient, inputs, kept, Geometry(*geometry), of_table=of_table)
    of_query, of_key, of_value, found = (gradient.new_empty(0) if x is None else x for x in gradients)
    return of_query, of_key, of_value, found


@causal_mix_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    context: torch.Tensor,
    log_denominator: torch.Tensor,
    largest: torch.Tensor,
    geometry: list[int],
    of_table: bool,
) -> tuple[torch.Tensor, ...]:
    gradients = (query, key, value, table if of_table else None)
    return tuple(gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, table, slopes, first, ctx.geometry, _ = inputs
    ctx.save_for_backward(query, key, value, table, slopes, first, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *inputs, context, log_denominator, largest = ctx.saved_tensors
    needed = ctx.needs_input_grad[:4]
    if gradient is None:
        return (None,) * 8
    plain = torch.compiler.is_compiling() or are_plain_tensors(gradient)
    if torch.is_grad_enabled() or not plain:  # for gradients of gradients, or batched gradients
        gradients = _differentiable_gradients(Inputs(*inputs), needed, gradient, Geometry(*ctx.geometry))
    else:
        kept = context, log_denominator, largest
        found = causal_mix_backward(gradient, *inputs, *kept, ctx.geometry, needed[3])
        gradients = tuple(x if need else None for x, need in zip(found, needed))
    return *gradients, None, None, None, None


causal_mix.register_autograd(_backward, setup_context=_setup_context)


# -------------------------------------------------------------------------------------------- gradients of gradients


def _differentiable_gradients(
    inputs: Inputs, needed: tuple[bool, ...], gradient: torch.Tensor, geometry: Geometry
) -> tuple[torch.Tensor | None, ...]:
    """Gradients that can be differentiated again, computed from w of all pairs in PyTorch operations."""
    with torch.enable_grad():
        output = _by_pairs(inputs, geometry)
        return tuple(differentiable_gradients(output, inputs[:4], needed, gradient))


def _by_pairs(inputs: Inputs, geometry: Geometry) -> torch.Tensor:
    """The result of `causal_mix`, from w of all pairs in differentiable PyTorch operations."""
    query, key, value, table, slopes, first = inputs
    length, size = value.shape[1], geometry.chunk_size
    t = torch.arange(length, device=value.device)
    start = torch.zeros_like(t).unsqueeze(0) if first is None else first.long()  # (B or 1, T)
    visible = (t <= t[:, None]) & (t >= start.unsqueeze(-1))  # (B or 1, T, T)
    lags = t[:, None] - t
    if geometry.alone:
        visible = visible & (lags <= geometry.reach)
    if slopes is not None:
        bias = (-slopes[:, None, None] * lags).unsqueeze(0)
    elif table is None:
        bias = value.new_zeros(1, geometry.num_heads, length, length, dtype=torch.float32)
    else:
        position = t - start  # (B or 1, T)
        if geometry.is_full:
            row, column, inside = position, position[:, None, :], visible
        else:
            column = geometry.near * size + (position % size)[:, :, None] - lags
            inside = visible & (column >= 0)
            chunk = position // size if table.shape[1] > 1 else torch.zeros_like(position)
            row = chunk * size + position % size
        rows = table.flatten(1, -2)  # (h, P, columns)
        row, column = row.clamp_max(rows.shape[1] - 1)[:, :, None], column.clamp(0, rows.shape[2] - 1)
        bias = rows[:, row, column].movedim(0, 1)  # (B or 1, h, T, T)
        bias = torch.where(inside.unsqueeze(1), bias, 0.0)
    keys, values = (widen(split_heads(x, geometry.num_heads)) for x in (key, value))
    context = join_heads(pairwise_mixing(keys, values, bias, visible.unsqueeze(1)))
    if query is not None:
        context = context * torch.sigmoid(widen(query))
    return context.to(value.dtype)
