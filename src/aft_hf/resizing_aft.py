"""AFT-conv for images of another size than it was trained on: kernels stretch with the grid of patches.

A kernel of s x s patches covers a smaller part of a larger image, and fewer of the positions that are averaged. So the
weights exp(w) of a kernel are interpolated, as the position embeddings of a ViT are. The sum of these weights then
grows with the number of patches, as that of the positions outside does, each of which counts 1 (w = 0).
"""

import math

import torch
from torch import nn

from .mixers_aft import AFTConv
from .scaled_sums_aft import widen


def resize_kernels(mixer: AFTConv, ratios: tuple[float, float], longest: int) -> None:
    """Stretch the kernels of a mixer in place.

    Args:
        mixer: on a grid, without `selection`.
        ratios: of the new number of rows and columns of patches to the old one.
        longest: the larger of both new numbers, which bounds the kernel.

    Raises:
        ValueError: the mixer selects one position, which cannot be stretched; or it sees its kernel alone, and the
            ratios differ, so that the new kernel would not be square.
    """
    if mixer.selection is not None:
        raise ValueError("a kernel of which one position is selected (position_bias_selection) cannot be stretched")
    if not mixer.global_connectivity and ratios[0] != ratios[1]:
        raise ValueError("without global_connectivity kernels stretch by the same ratio for rows and columns")
    with torch.no_grad():
        bias = stretched(mixer.kernel_bias(), ratios, longest, outside=0.0 if mixer.global_connectivity else -math.inf)
        kernel = bias / mixer.position_bias_multiplier
        if mixer.kernel_scale is not None and mixer.kernel_shift is not None:
            kernel = _standardize(mixer, kernel)
        mixer.kernel = nn.Parameter(kernel.to(mixer.kernel.dtype), requires_grad=mixer.kernel.requires_grad)
    mixer.window = kernel.shape[-1]


def stretched(kernels: torch.Tensor, ratios: tuple[float, float], longest: int, outside: float) -> torch.Tensor:
    """Kernels w (h, s, s) as (h, s', s'), with s' about s times the larger ratio.

    exp(w) is interpolated linearly, or averaged where a ratio is below 1; w is `outside` beyond the old kernel. Equal
    ratios of 1 change nothing.
    """
    half = kernels.shape[-1] // 2
    reach = max(_reach(half, ratio) for ratio in ratios)
    rows, columns = (_interpolation(half, ratio, min(reach, longest - 1), kernels.device) for ratio in ratios)
    wide = kernels.double()
    top = wide.flatten(1).amax(1).clamp_min(outside)[:, None, None]
    beyond = torch.exp(outside - top)
    weights = rows @ (torch.exp(wide - top) - beyond) @ columns.mT + beyond
    # What is smaller counts nothing beside the largest weight.
    return weights.clamp_min(torch.finfo(torch.float64).tiny).log().add_(top).to(kernels.dtype)


def _reach(half: int, ratio: float) -> int:
    """How far a kernel reaches that reached `half` positions, with what is interpolated between it and the outside."""
    return max(math.ceil((half + max(1.0, 1.0 / ratio)) * ratio - 1e-9) - 1, 0)


def _interpolation(half: int, ratio: float, reach: int, device: torch.device) -> torch.Tensor:
    """The share of each offset of the old kernel in each of the new one, (2 reach + 1, 2 half + 1). Rows sum to less
    than 1 where the outside has a share.
    """
    width = max(1.0, 1.0 / ratio)  # of the triangle, in old positions
    margin = math.ceil(2 * width)  # how far beyond the kernel the triangles of the last rows reach
    old = torch.arange(-half - margin, half + margin + 1, dtype=torch.float64, device=device)
    new = torch.arange(-reach, reach + 1, dtype=torch.float64, device=device) / ratio
    triangle = (1.0 - (old - new.unsqueeze(1)).abs() / width).clamp_min(0.0)
    return (triangle / triangle.sum(1, keepdim=True).clamp_min(1e-12))[:, margin:-margin]


def _standardize(mixer: AFTConv, bias: torch.Tensor) -> torch.Tensor:
    """Kernels, and in place gamma and beta, of which Eq. 8 makes `bias` (h, s', s')."""
    scale, shift = mixer.kernel_scale, mixer.kernel_shift
    assert scale is not None and shift is not None
    deviation, mean = torch.std_mean(bias, (1, 2), correction=0, keepdim=True)
    old = widen(mixer.kernel)
    size = old.std((1, 2), correction=0, keepdim=True)  # as it was, so that an optimizer moves it at the same pace
    size = torch.where(size == 0, deviation, size)
    # A kernel whose gamma is 0 has a shape nonetheless, which is learned once gamma is not.
    shape = nn.functional.interpolate(old.unsqueeze(0), bias.shape[1:], mode="bilinear", align_corners=True).squeeze(0)
    flat = deviation == 0
    kernel = torch.where(flat, shape, (bias - mean) / deviation.masked_fill(flat, 1.0) * size)
    scale.copy_(deviation.flatten())
    shift.copy_(mean.flatten())
    return kernel


__all__ = ["resize_kernels", "stretched"]
