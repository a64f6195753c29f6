"""Generation by Triton kernels: a decoded token in one launch, and prompts that leave their state where it belongs.

The state is updated in place, so that a static cache can be part of a CUDA graph. Nothing waits for the device.
"""

from typing import TYPE_CHECKING, Any

import torch

from .mixing_backend_aft import OPERATORS
from .mixing_triton_causal_aft import Geometry, Inputs, problem_tensors
from .position_biases_aft import Dense
from .scaled_sums_aft import split_heads, widen


if TYPE_CHECKING:
    from .caching_aft import AFTLayerState
    from .mixing_aft import Mixing


STATE = ("keys", "values", "numerator", "denominator", "maximum")


def step(state: "AFTLayerState", problem: "Mixing") -> torch.Tensor:
    """As `Backend.step`, for a problem that the kernels compute."""
    bias, length = state.next_bias(problem.biases), state.cumulative_length
    counter = length if isinstance(length, torch.Tensor) else None
    tensors, slopes = _writable(state), problem.biases.slopes
    bias, slopes = (x if x is None else x.float().contiguous() for x in (bias, slopes))
    given = problem.query, problem.key, problem.value, bias, slopes
    output = decode_step(*given, *tensors, counter, problem.num_heads, problem.biases.hides_outside)
    if counter is None:
        state.cumulative_length += 1
    return output


def prefill(state: "AFTLayerState", problem: "Mixing", counts: torch.Tensor | None) -> torch.Tensor:
    """As `Backend.prefill`, for a problem that the kernels compute."""
    continued, biases = state.is_initialized, problem.biases
    if not continued:
        one_token = (split_heads(x[:, :1], problem.num_heads) for x in (problem.key, problem.value))
        state.lazy_initialization(*map(widen, one_token))
    positions, before = problem.length, None
    if continued and not biases.relative:
        # Tables hold all positions, of which the rows have seen some: as if all of a row were of one document, which
        # begins where the position is 0
        assert isinstance(biases, Dense) and state.window is not None
        positions, before = biases.query.shape[1], (state.window - state.seen).int()
    query, key, value, table, slopes, _ = problem_tensors(problem, positions)
    tensors, geometry = _writable(state), list(Geometry.of(problem))
    output = causal_prefill(query, key, value, table, slopes, before, counts, *tensors, geometry, continued)
    state.count(problem.length, counts)
    return output


def _writable(state: "AFTLayerState") -> tuple[torch.Tensor, ...]:
    """The tensors of a state, after those that cannot be written in place have been copied."""
    if not torch.compiler.is_compiling():
        read_only = not torch.is_inference_mode_enabled()
        for name in STATE:
            tensor = getattr(state, name)
            # A backward pass that is still to come needs the numbers of before.
            if not tensor.is_contiguous() or tensor.requires_grad or (read_only and tensor.is_inference()):
                setattr(state, name, tensor.detach().clone(memory_format=torch.contiguous_format))
    return tuple(getattr(state, name) for name in STATE)


@torch.library.custom_op(f"{OPERATORS}::decode_step", mutates_args=(*STATE, "length"))
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
    """Causal Eq. 2 of one new token in each row, times sigmoid(query): (B, 1, d). The state takes it in.

    Args:
        query: (B, 1, d) or None for no gate.
        key: (B, 1, d), or (B, 1, h) for one key per head.
        value: (B, 1, d).
        bias: (B or 1, h, W + 1, 1), w of the window and of the token; None where there is no window.
        slopes: (h,) of a decay.
        keys, values, numerator, denominator, maximum: the state.
        length: how many tokens the state has seen, where that is to be counted as well; no dimensions.
        num_heads: h.
        alone: whether nothing is seen beyond the window.
    """
    from .mixing_triton_launch_aft import decode

    state = keys, values, numerator, denominator, maximum
    return decode(query, key, value, bias, slopes, state, length, num_heads, alone=alone)


@decode_step.register_fake
def _(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape)


@torch.library.custom_op(f"{OPERATORS}::causal_prefill", mutates_args=STATE)
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
    """Causal Eq. 2 of new tokens, times sigmoid(query), (B, T, d); the state becomes that after them.

    Args:
        query, key, value, table, slopes, geometry: as of `causal_mix`.
        before: (B,), the position in a row of window and new tokens at which the row begins (negative where it began
            earlier), where biases depend on that; None for the first tokens, and for biases of distances.
        counts: (B,), how many of the new tokens of each row are real; None for all of them.
        keys, values, numerator, denominator, maximum: the state.
        continued: whether the tokens come after those in the state, or are the first.
    """
    from .mixing_triton_launch_aft import prefill

    inputs, state = Inputs(query, key, value, table, slopes, None), (keys, values, numerator, denominator, maximum)
    return prefill(inputs, before, counts, state, Geometry(*geometry), continued=continued)


@causal_prefill.register_fake
def _(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape)
