"""Memory for what the forward passes keep for the backward pass. It does not import Triton."""

import torch

from .options import CHUNK


Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kept_like(name: str, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> Kept:
    """Return memory for averages relative to a center, logarithms of denominators relative to a reference, and these
    centers and references, of the operators `causal`, `grid` and `table`.
    """
    shapes = (_of_causal if name == "causal" else _of_products)(key, value, bias)
    average, logsumexp, center = (torch.empty(shape, dtype=torch.float32, device=value.device) for shape in shapes)
    return average, logsumexp, center


def _of_causal(key, value, bias):  # type: ignore[no-untyped-def]
    """The last entry is of each chunk: reference, center and, for windows, whether it was repaired."""
    batch, length, width = value.shape
    return value.shape, value.shape, (batch, -(-length // CHUNK), 2 if bias is None else 3, width)


def _of_products(key, value, bias):  # type: ignore[no-untyped-def]
    """The log-denominators are relative to the largest key of the row and the largest w. The first two entries are
    transposed to (d, T, B) for heads of one feature.
    """
    shapes = [x.shape[::-1] if len(bias) == value.shape[2] else x.shape for x in (value, key)]
    return *shapes, (len(value) * (value.shape[2] + key.shape[2]),)
