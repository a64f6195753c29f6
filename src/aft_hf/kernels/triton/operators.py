"""The operators of `kernels/operators.py` by Triton kernels, for CUDA devices.

They have not been measured on a GPU yet, so `register` is called only if the environment variable AFT_HF_TRITON is 1.
The kernels take float32 and bfloat16, with sums in float32.

A backward pass computes the forward pass again, so that only the inputs are saved for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..operators import NAMESPACE, new_gradients, portable
from . import launch, product_launch
from .launch import Geometry, Inputs


DTYPES = (torch.float32, torch.bfloat16)

# Positions per chunk. With larger chunks, the sums of one program would need more registers than a thread has.
CHUNK_SIZE = 32


def register(dispatch_key: str = "CUDA") -> torch.library.Library:
    """Register the kernels for a dispatch key, in place of what is registered for it, as long as the result exists."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    for operator in (causal, causal_backward, causal_state):
        library.impl(operator.__name__, operator, dispatch_key, allow_override=True)
    for name in ("grid", "table"):
        library.impl(name, partial(_without_kept, name), dispatch_key, allow_override=True)
        library.impl(f"{name}_backward", partial(_recomputed, name), dispatch_key, allow_override=True)
    return library


def causal(query, key, value, bias, slopes, first, hides_outside):  # type: ignore[no-untyped-def]
    problem = query, key, value, bias, slopes, first, hides_outside
    if value.dtype not in DTYPES or value.numel() == 0:
        return portable("causal", *problem)
    if bias is not None and len(bias) > 1:
        return torch.cat(_row_by_row(causal, problem))
    return launch.forward(*_kernel_arguments(*problem), keep=False)[0]


def causal_backward(gradient, *arguments):  # type: ignore[no-untyped-def]
    *problem, bias_needed = arguments
    value, bias, _, first, _ = problem[2:]
    if value.numel() == 0:
        return tuple(x.zero_() for x in new_gradients(gradient, *arguments))
    if bias is not None and len(bias) > 1:
        return tuple(map(torch.cat, zip(*_row_by_row(causal_backward, (gradient, *arguments)))))
    if bias_needed and first is not None and torch.are_deterministic_algorithms_enabled():
        # The kernel adds the gradients of biases of several documents by atomics.
        raise RuntimeError("the gradient of position biases with packed documents has no deterministic Triton kernel")
    inputs, geometry = _kernel_arguments(*problem)
    _, kept, _ = launch.forward(inputs, geometry, keep=True)
    *found, of_table = launch.backward(gradient, inputs, kept, geometry, of_table=bias_needed)
    return _tensors(*found, None if of_table is None else _by_lag(of_table, bias, geometry))


def causal_state(query, key, value, bias, slopes, first, hides_outside, *state):  # type: ignore[no-untyped-def]
    heads, past = state[0].shape[1:3]
    if value.shape[1] == 1 and first is None:
        of_token = None if bias is None else bias[:, 0].unsqueeze(-1).contiguous()
        of_heads = None if slopes is None else slopes.contiguous()
        return launch.decode(query, key, value, of_token, of_heads, state, heads, alone=hides_outside)
    if bias is not None and len(bias) > 1:
        return torch.cat(_row_by_row(causal_state, (query, key, value, bias, None, first, hides_outside, *state)))
    inputs, geometry = _kernel_arguments(query, key, value, bias, slopes, None, hides_outside, heads, past)
    counts = None if first is None else (first == 0).sum(1)  # padding comes last
    output = launch.prefill(inputs, counts, state, geometry)
    return output if first is None else output.masked_fill(first.ne(0).unsqueeze(-1), 0.0)


def _without_kept(name: str, *problem: Any) -> torch.Tensor:
    """Compute `grid` or `table` and keep nothing for a backward pass."""
    if problem[2].dtype not in DTYPES or problem[2].numel() == 0:
        return portable(name, *problem)
    return getattr(product_launch, name)(*problem, False)[0]


def _recomputed(name: str, gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of `grid` or `table`, and before them again what the forward pass did not keep."""
    *problem, bias_needed = arguments
    if problem[2].numel() == 0:
        return tuple(x.zero_() for x in new_gradients(gradient, *arguments))
    kept = getattr(product_launch, name)(*problem, True)[1:]
    return getattr(product_launch, f"{name}_backward")(gradient, *problem, *kept, bias_needed)


# -------------------------------------------------------------------------------------------- arguments of the kernels


def _kernel_arguments(  # type: ignore[no-untyped-def]
    query, key, value, bias, slopes, first, hides_outside, heads=None, past=0
) -> tuple[Inputs, Geometry]:
    """Convert the arguments of `causal` or, with `heads` and the number of tokens in the window, of `causal_state`."""
    if first is not None:
        # Padding becomes documents of one hidden token, so that its position is not negative.
        tokens = torch.arange(value.shape[1], device=value.device)
        padding = first > tokens
        key = key.masked_fill(padding.unsqueeze(-1), -torch.inf)
        value = value.masked_fill(padding.unsqueeze(-1), 0.0)
        first = torch.where(padding, tokens, first).int().contiguous()
    if bias is None:
        geometry = Geometry(int(slopes is not None), heads or (1 if slopes is None else len(slopes)), CHUNK_SIZE)
        return Inputs(query, key, value, None, None if slopes is None else slopes.contiguous(), first), geometry
    reach = bias.shape[3] - 1
    geometry = Geometry(2, bias.shape[2], CHUNK_SIZE, -(-reach // CHUNK_SIZE), reach, int(hides_outside))
    return Inputs(query, key, value, _by_chunk(bias[0], geometry, value.shape[1], past), None, first), geometry


def _by_chunk(bias: torch.Tensor, geometry: Geometry, length: int, past: int) -> torch.Tensor:
    """Convert w by lag, (P, h, s), to w of chunks, (h, chunks or 1, C, (near + 1) C); see `Inputs`."""
    size = geometry.chunk_size
    count = 1 if len(bias) == 1 else -(-(past + length) // size)
    positions = (torch.arange(count * size, device=bias.device) - past).clamp(0, len(bias) - 1)
    of_chunks = bias[positions].movedim(1, 0).unflatten(1, (count, size))  # (h, chunks or 1, C, s)
    row, column = (torch.arange(n * size, device=bias.device) for n in (1, geometry.near + 1))
    lag = row[:, None] + geometry.near * size - column
    index = (geometry.reach - lag).clamp(0, geometry.reach).expand(*of_chunks.shape[:2], -1, -1)
    outside = (lag < 0) | (lag > geometry.reach)
    return of_chunks.gather(3, index).masked_fill(outside, 0.0).contiguous()


def _by_lag(of_chunks: torch.Tensor, bias: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Convert the gradient of w of chunks to that of w by lag, (1, P, h, s)."""
    size, device = geometry.chunk_size, bias.device
    lag = torch.arange(geometry.reach, -1, -1, device=device)
    column = torch.arange(size, device=device)[:, None] + geometry.near * size - lag
    of_positions = of_chunks.gather(3, column.expand(*of_chunks.shape[:2], -1, -1)).flatten(1, 2).movedim(1, 0)
    last = torch.arange(len(of_positions), device=device).clamp_max(bias.shape[1] - 1)
    return torch.zeros_like(bias[0]).index_add_(0, last, of_positions).unsqueeze(0)


def _row_by_row(operator: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Call an operator for each row of the batch, since the kernels take one table of biases for all rows."""
    count = len(arguments[2])
    rows = ([x[i : i + 1] if isinstance(x, torch.Tensor) else x for x in arguments] for i in range(count))
    return [operator(*row) for row in rows]


def _tensors(*gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return detached gradients, with an empty tensor in place of None."""
    device = next(x.device for x in gradients if x is not None)
    return tuple(torch.empty(0, device=device) if x is None else x.detach() for x in gradients)
