"""The Triton backend: causal Eq. 2 by fused kernels on a GPU, as custom operators of PyTorch.

The kernels compute causal problems in float32, bfloat16 or float16 with every structure of w, one key per feature or
per head, packed documents, and the sigmoid gate of the query. The portable backend computes what they do not:
bidirectional problems, float64, pair masks and positions that are not in order, tensors of torch.func and of
forward-mode differentiation, and gradients of gradients.

Kernels run on CUDA devices where Triton is installed, and interpreted (`TRITON_INTERPRET=1`) on a CPU, for tests.
"""

import os
import re
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from .activations_aft import differentiable_gradients, runs_as_written
from .mixing_backend_aft import Backend
from .mixing_portable_aft import pairwise_mixing
from .position_biases_aft import Dense, LagKernel, LinearDecay, NoBias, PositionBias, SelectedPosition, Window
from .scaled_sums_aft import join_heads, split_heads, widen


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState
    from .mixing_aft import Mixing


DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Positions per chunk. Of larger chunks, the sums of one program take more registers than a thread has.
CHUNK_SIZE = 32

# Operators of a copy of this file that came with a checkpoint are not those of the installed package.
NAMESPACE = re.sub(r"\W", "_", __package__ or "aft_hf")


@cache
def triton_is_installed() -> bool:
    return find_spec("triton") is not None


class TritonBackend(Backend):
    """Fused kernels for causal problems on a GPU."""

    name = "triton"
    # Not measured on a GPU yet: taken only where a user names it.
    only_by_name = True
    applies_gate = True
    takes_documents = True

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        """Whether this is a causal problem of sequences in order, on a device that runs the kernels."""
        if not problem.causal or problem.is_pairwise or problem.padding_mask is not None:
            return False
        key, value, tensors = problem.key, problem.value, problem.biases.tensors()
        given = [key, value, *tensors] if problem.query is None else [key, value, problem.query, *tensors]
        if any(x.dtype not in DTYPES for x in given if x.is_floating_point()) or key.dtype != value.dtype:
            return False
        if any(x.device != value.device or x.numel() == 0 for x in given) or not _runs_kernels(value.device):
            return False
        learned = _has_table(problem.biases)
        if learned and problem.documents is not None and torch.are_deterministic_algorithms_enabled():
            return False
        return torch.compiler.is_compiling() or runs_as_written(*given)

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """(B, T, d) in the dtype of the values, times the sigmoid of the query."""
        inputs = problem_tensors(problem)
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return causal_mix(*inputs, list(Geometry.of(problem)), keep)[0]

    @staticmethod
    def step(state: "AFTLayerState", problem: "Mixing") -> torch.Tensor | None:
        """(B, 1, d) in the dtype of the values, times the sigmoid of the query."""
        from .mixing_triton_decoding_aft import step

        return step(state, problem) if _can_be_taken_in(state, problem) else None

    @staticmethod
    def prefill(state: "AFTLayerState", problem: "Mixing", counts: torch.Tensor | None) -> torch.Tensor | None:
        """(B, T, d) in the dtype of the values, times the sigmoid of the query."""
        from .mixing_triton_decoding_aft import prefill

        return prefill(state, problem, counts) if _can_be_taken_in(state, problem) else None


def _can_be_taken_in(state: "AFTLayerState", problem: "Mixing") -> bool:
    """Whether kernels update this state: one of constant size, of which no gradients are asked for."""
    if state.window is None or not TritonBackend.supports(problem):
        return False
    given = problem.query, problem.key, problem.value, *problem.biases.tensors()
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _runs_kernels(device: torch.device) -> bool:
    """Whether kernels run there, or are interpreted; on meta tensors, whether they would."""
    if not triton_is_installed():
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type in ("cuda", "meta") or (device.type == "cpu" and interpreted)


def _has_table(biases: PositionBias) -> bool:
    return not isinstance(biases, (NoBias, LinearDecay))


class Geometry(NamedTuple):
    """What a problem looks like to the kernels, as integers.

    Attributes:
        mode: the structure of w: 0, a decay, a window, or all pairs (the constants of `kernels_aft.py`).
        num_heads: h, 1 where heads do not differ.
        chunk_size: C.
        near: how many chunks before a query's own one have biases; those of all pairs follow from the length.
        reach: the largest distance within the window.
        alone: whether nothing is seen beyond the window.
    """

    mode: int
    num_heads: int
    chunk_size: int
    near: int = 0
    reach: int = 0
    alone: int = 0

    @classmethod
    def of(cls, problem: "Mixing") -> "Geometry":
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


def problem_tensors(problem: "Mixing", positions: int | None = None) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a problem as `causal_mix` takes them: query, key, value, table, slopes and first positions.

    Args:
        positions: how many the table is to have, by default one for each token.
    """
    biases, documents = problem.biases, problem.documents
    table = _table(biases, Geometry.of(problem), positions or problem.length) if _has_table(biases) else None
    slopes = None if biases.slopes is None else biases.slopes.float()
    first = None if documents is None else documents.first_positions().int()
    return problem.query, problem.key, problem.value, table, slopes, first


def _table(biases: Window | LagKernel | SelectedPosition | Dense, geometry: Geometry, length: int) -> torch.Tensor:
    """w of all pairs, (h, P, P), or from each chunk to the near ones and itself, (h, n, C, (near + 1) C)."""
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


# ---------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op(f"{NAMESPACE}::causal_mix", mutates_args=())
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
    """Causal Eq. 2 times sigmoid(query), and what its backward pass needs if that is kept (empty tensors if not).

    Args:
        query: (B, T, d) or None for no gate.
        key: (B, T, d), or (B, T, h) for one key per head.
        value: (B, T, d).
        table: as of `_table`; None where w is 0 or a decay.
        slopes: (h,) of the decay.
        first: (B, T), the position of the first token of each token's document; None where a row is one.
        geometry: a `Geometry`.
        keep: whether gradients will be asked for.
    """
    from .mixing_triton_launch_aft import forward

    output, kept, _ = forward(query, key, value, table, slopes, first, Geometry(*geometry), keep=keep)
    return output, *(value.new_empty(0, dtype=torch.float32) if x is None else x for x in kept)


@causal_mix.register_fake
def _(query, key, value, table, slopes, first, geometry, keep):
    batch, length, width = value.shape
    chunks = -(-length // Geometry(*geometry).chunk_size)
    shapes = ((batch, length, width),) * 2 + ((batch, chunks, width),) if keep else ((0,),) * 3
    kept = (value.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return value.new_empty(value.shape), *kept


@torch.library.custom_op(f"{NAMESPACE}::causal_mix_backward", mutates_args=())
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
    """The gradients of query, key, value and table by that of the output; an empty tensor where there is none."""
    from .mixing_triton_launch_aft import backward

    kept, inputs = (context, log_denominator, largest), (query, key, value, table, slopes, first)
    gradients = backward(gradient, *inputs, kept, Geometry(*geometry), of_table=of_table)
    return tuple(gradient.new_empty(0) if x is None else x for x in gradients)


@causal_mix_backward.register_fake
def _(gradient, query, key, value, table, slopes, first, context, log_denominator, largest, geometry, of_table):
    gradients = (query, key, value, table if of_table else None)
    return tuple(gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in gradients)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, table, slopes, first, ctx.geometry, _ = inputs
    ctx.save_for_backward(query, key, value, table, slopes, first, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, *_) -> tuple:
    *inputs, context, log_denominator, largest = ctx.saved_tensors
    needed = ctx.needs_input_grad[:4]
    if gradient is None:
        return (None,) * 8
    plain = torch.compiler.is_compiling() or runs_as_written(gradient)
    if torch.is_grad_enabled() or not plain:  # the gradient of this gradient is wanted, or several at once
        gradients = _differentiable_gradients(inputs, needed, gradient, Geometry(*ctx.geometry))
    else:
        kept = context, log_denominator, largest
        gradients = causal_mix_backward(gradient, *inputs, *kept, ctx.geometry, needed[3])
        gradients = (x if need else None for x, need in zip(gradients, needed))
    return *gradients, None, None, None, None


causal_mix.register_autograd(_backward, setup_context=_setup_context)


# -------------------------------------------------------------------------------------------- gradients of gradients


def _differentiable_gradients(inputs: list, needed: tuple[bool, ...], gradient: torch.Tensor, geometry: Geometry):
    """Gradients that can be differentiated: by a table of all pairs, in plain operations."""
    with torch.enable_grad():
        output = _by_pairs(*inputs, geometry)
        return tuple(differentiable_gradients(output, tuple(inputs[:4]), needed, gradient))


def _by_pairs(query, key, value, table, slopes, first, geometry: Geometry) -> torch.Tensor:
    """What `causal_mix` computes, from w of all pairs."""
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
    by_head = (widen(split_heads(x, geometry.num_heads)) for x in (key, value))
    context = join_heads(pairwise_mixing(*by_head, bias, visible.unsqueeze(1)))
    if query is not None:
        context = context * torch.sigmoid(widen(query))
    return context.to(value.dtype)
