"""The operators of `kernels/operators.py` by Triton kernels, for CUDA devices.

They have not been measured on a GPU yet, so `register` is called only if the environment variable AFT_HF_TRITON is 1.
The kernels take float32 and bfloat16, with sums in float32. `grid` has no kernel: small grids go to `table`, larger
ones to the portable form.

A backward pass computes the forward pass again, so that only the inputs are saved for it.
"""

import torch

from ...position_biases_aft import working_dtype
from ..operators import NAMESPACE, new_gradients, portable
from . import bidirectional_launch, causal_launch
from .causal_launch import causal_state


DTYPES = (torch.float32, torch.bfloat16)


def register(dispatch_key: str = "CUDA") -> torch.library.Library:
    """Register the kernels for a dispatch key, in place of what is registered for it, as long as the result exists."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    for operator in (causal, causal_backward, causal_state, band, band_backward, table, table_backward):
        library.impl(operator.__name__, operator, dispatch_key, allow_override=True)
    return library


def causal(query, key, value, bias, slopes, first, hides_outside):  # type: ignore[no-untyped-def]
    problem = query, key, value, bias, slopes, first, hides_outside
    if value.dtype not in DTYPES or value.numel() == 0:
        return portable("causal", *problem)
    return causal_launch.causal(*problem, keep=False)[0]


def causal_backward(gradient, *arguments):  # type: ignore[no-untyped-def]
    *problem, bias_needed = arguments
    if problem[2].numel() == 0:
        return tuple(x.zero_() for x in new_gradients(gradient, *arguments))
    _, *kept = causal_launch.causal(*problem, keep=True)
    return causal_launch.causal_backward(gradient, *problem, *kept, bias_needed)


def band(query, key, *sizes):  # type: ignore[no-untyped-def]
    if query.dtype not in DTYPES:
        return portable("band", query, key, *sizes).to(working_dtype(query))
    return causal_launch.band(query, key, *sizes)


def band_backward(gradient, *problem):  # type: ignore[no-untyped-def]
    return causal_launch.band_backward(gradient, *problem)


def table(query, key, value, bias, causal):  # type: ignore[no-untyped-def]
    if value.dtype not in DTYPES or value.numel() == 0:
        return portable("table", query, key, value, bias, causal)
    w = _checked_table(bias, value)
    if causal:
        return causal_launch.sweep(query, key, value, causal_launch.Window.table(w), None, None)
    return bidirectional_launch.forward(query, key, value, w, len(w), keep=False)[0]


def table_backward(gradient, *arguments):  # type: ignore[no-untyped-def]
    *problem, bias_needed = arguments
    query, key, value, bias, causal = problem
    if value.numel() == 0:
        return tuple(x.zero_() for x in new_gradients(gradient, *arguments))
    w = _checked_table(bias, value)
    if causal:
        window, kept = causal_launch.Window.table(w), causal_launch.kept_like(value, w)
        causal_launch.sweep(query, key, value, window, None, kept)
        given = gradient, query, key, value, window, None, kept, bias_needed
        *found, of_table = causal_launch.sweep_backward(*given)
        of_table = None if of_table is None else of_table.sum(0)
    else:
        _, kept = bidirectional_launch.forward(query, key, value, w, len(w), keep=True)
        given = gradient, query, key, value, w, kept, len(w)
        *found, of_table = bidirectional_launch.backward(*given, of_table=bias_needed)
    return _tensors(*found, of_table)


def _tensors(*gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return detached gradients, with an empty tensor in place of None."""
    device = next(x.device for x in gradients if x is not None)
    return tuple(torch.empty(0, device=device) if x is None else x.detach() for x in gradients)


def _checked_table(bias: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the contiguous w of a table; kernels take its size from the values."""
    if bias.shape[1:] != (value.shape[1], value.shape[1]):
        raise ValueError(f"w {tuple(bias.shape)} does not match the values {tuple(value.shape)}")
    return bias.contiguous()
