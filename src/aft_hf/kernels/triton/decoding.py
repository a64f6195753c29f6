"""Generation by Triton kernels: a decoding step in one launch, and prompts that are written into the cached state.

The state is updated in place, so that a static cache can be part of a CUDA graph. Nothing here waits for the device.
"""

from typing import Any

import torch

from ...caching_aft import AFTLayerState
from ...mixing_aft import Mixing
from ...portable_aft import split_heads
from ...position_biases_aft import Dense, widen
from .causal import Geometry, Inputs, problem_tensors


STATE = ("keys", "values", "numerator", "denominator", "maximum")


def step(state: AFTLayerState, problem: Mixing) -> torch.Tensor:
    """As `Backend.step`, for a problem that the kernels support."""
    bias, length = state.next_bias(problem.biases), state.cumulative_length
    counter = length if isinstance(length, torch.Tensor) else None
    tensors, slopes = _writable(state), problem.biases.slopes
    bias, slopes = (x if x is None else x.float().contiguous() for x in (bias, slopes))
    given = problem.query, problem.key, problem.value, bias, slopes
    output = decode_step(*given, *tensors, counter, problem.num_heads, problem.biases.hides_outside)
    if counter is None:
        state.cumulative_length += 1
    return output


def prefill(state: AFTLayerState, problem: Mixing, counts: torch.Tensor | None) -> torch.Tensor:
    """As `Backend.prefill`, for a problem that the kernels support."""
    continued, biases = state.is_initialized, problem.biases
    if not continued:
        one_token = (split_heads(x[:, :1], problem.num_heads) for x in (problem.key, problem.value))
        state.lazy_initialization(*map(widen, one_token))
    positions, before = problem.length, None
    if continued and not biases.relative:
        # Tables contain all positions, and each row continues at its own one. So each row counts as one document that
        # starts where its position is 0.
        assert isinstance(biases, Dense) and state.window is not None
        positions, before = biases.query.shape[1], (state.window - state.seen).int()
    query, key, value, table, slopes, _ = problem_tensors(problem, positions)
    tensors, geometry = _writable(state), list(Geometry.of(problem))
    output = causal_prefill(query, key, value, table, slopes, before, counts, *tensors, geometry, continued)
    state.count(problem.length, counts)
    return output


def _writable(state: AFTLayerState) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a state. Those that must not be written in place are replaced by copies first."""
    if not torch.compiler.is_compiling():
        read_only = not torch.is_inference_mode_enabled()
        for name in STATE:
            tensor = getattr(state, name)
            # A tensor that requires gradients is copied, because a later backward pass needs its current values.
            if not tensor.is_contiguous() or tensor.requires_grad or (read_only and tensor.is_inference()):
                setattr(state, name, tensor.detach().clone(memory_format=torch.contiguous_format))
    return tuple(getattr(state, name) for name in STATE)


@torch.library.custom_op("aft_hf::decode_step", mutates_args=(*STATE, "length"))
def decode_step(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    numerator: torch.Tensor,
    denominator: torch.Tensor,
    maximum: torch.Tensor,
    length: torch.Tensor | None,
    num_heads: int,
    alone: bool,
) -> torch.Tensor:
    """Compute causal Eq. 2 of one new token in each row, times sigmoid(query), (B, 1, d), and add it to the state.

    Args:
        query: (B, 1, d), or None for no gate.
        key: (B, 1, d), or (B, 1, h) for one key per head.
        value: (B, 1, d).
        bias: (B or 1, h, W + 1, 1), w from the token to the window and to itself; None if there is no window.
        slopes: (h,), for w = -slope * distance; otherwise None.
        keys, values, numerator, denominator, maximum: the tensors of the state.
        length: the length of a static state, a tensor without dimensions, which is incremented; None to count on the
            host.
        num_heads: h.
        alone: whether positions beyond the window are hidden.
    """
    from .launch import decode

    state = keys, values, numerator, denominator, maximum
    return decode(query, key, value, bias, slopes, state, length, num_heads, alone=alone)


@decode_step.register_fake
def _(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape)


@torch.library.custom_op("aft_hf::causal_prefill", mutates_args=STATE)
def causal_prefill(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    slopes: torch.Tensor | None,
    before: torch.Tensor | None,
    counts: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    numerator: torch.Tensor,
    denominator: torch.Tensor,
    maximum: torch.Tensor,
    geometry: list[int],
    continued: bool,
) -> torch.Tensor:
    """Compute causal Eq. 2 of new tokens, times sigmoid(query), (B, T, d), and add them to the state.

    Args:
        query, key, value, table, slopes, geometry: as in `causal_mix`.
        before: (B,), for biases that depend on absolute positions: the index of position 0 of each row within its
            window and new tokens (negative if it lies before the window). None if the state is empty, and for biases
            that depend on distances only.
        counts: (B,), how many of the new tokens of each row are real; None if all are.
        keys, values, numerator, denominator, maximum: the tensors of the state.
        continued: whether the tokens continue the state, or are the first ones.
    """
    from .launch import prefill

    inputs, state = Inputs(query, key, value, table, slopes, None), (keys, values, numerator, denominator, maximum)
    return prefill(inputs, before, counts, state, Geometry(*geometry), continued=continued)


@causal_prefill.register_fake
def _(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape)
