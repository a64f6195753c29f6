"""Initialization of AFT-conv from the attention of a teacher: position biases and keys.

In Eq. 2, exp(w_tt') is the unnormalized weight of position t' in an AFT layer whose keys are all equal. So w is the
logarithm of the teacher's mean attention, up to a constant for each row, which the normalization of Eq. 2 cancels.

The keys are fitted to the dependence of the attention on the content. A head of the teacher has the scores
q_t . k_t' / sqrt(d_head). AFT has the same score K_t' for all queries, so q_t is replaced by its mean over patches and
images: K_t' = mean(q) . k_t' / sqrt(d_head), a linear function of the hidden state. A dependence of K on the position
counts in w, too, but little: w is a mean over all pairs with an offset.

AFT head i owns the features [i d/h, (i+1) d/h), and each teacher head owns its features likewise. AFT head i is fitted
to the mean over the teacher's heads, weighted by the number of features that the two heads share.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from PIL import Image
from torch import nn

from ..analysis.maps import mean_attention, num_offsets, relative_attention
from ..configuration_aft import pair
from ..data.image_size import pixel_values, resized_processor
from ..mixers_aft import AFTConv
from ..modeling_aft import AFTForImageClassification
from .source import VisionTransformerSource


# Bound of |w|: the logarithm diverges where the attention of the teacher is (nearly) 0, and training could not recover
# from factors beyond e^10 = 22026.
LARGEST_BIAS = 10.0


@torch.no_grad()
def fit_to_attention(
    model: AFTForImageClassification, source: VisionTransformerSource, images: Iterable[Image.Image]
) -> tuple[set[str], int]:
    """Fit the position biases and keys of the AFT-conv layers of a model converted from `source`, in place.

    Returns the names of the fitted parameters, and the number of images.
    """
    teacher: Any = source.to_transformers().float()
    queries: dict[nn.Module, Any] = {}  # sums over the images, by the projection

    def add(projection: nn.Module, _: Any, query: torch.Tensor) -> None:
        mean = query[:, -math.prod(source.grid_size) :].double().mean(1)
        queries[projection] = queries.get(projection, 0) + mean.sum(0)

    for layer in teacher.base_model.layers:
        layer.attention.q_proj.register_forward_hook(add)
    processor = resized_processor(source.image_processor, pair(source.config.image_size))
    maps, num_images = mean_attention(teacher, (pixel_values(processor, [image]) for image in images))
    fitted = set()
    for i, (layer, of_teacher, attention) in enumerate(zip(model.aft.layers, teacher.base_model.layers, maps)):
        mixer, projections = layer.mixer, of_teacher.attention
        if not isinstance(mixer, AFTConv):
            continue
        weights = head_weights(mixer.num_heads, len(attention), source.config.hidden_size).double()
        bias = conv_bias(torch.einsum("ij,jts->its", weights, attention.double()), source.grid_size, mixer.window)
        # Kernel, gamma and beta for which Eq. 8 gives w. They undo the standardization of the kernel, for which
        # `AFTConv` adds 1e-12 / multiplier^2 to the variance.
        multiplier = mixer.position_bias_multiplier
        kernel = bias / multiplier
        variance, mean = torch.var_mean(kernel.flatten(1), -1, correction=0)
        values = {"kernel": kernel, "kernel_scale": (variance + 1e-12 / multiplier**2).sqrt(), "kernel_shift": mean}
        # mean(q) . k_t' / sqrt(d_head) for each head of the teacher, up to a constant
        query = (queries[projections.q_proj] / num_images).unflatten(0, (len(attention), -1))
        key = projections.k_proj.weight.double().unflatten(0, query.shape)
        values["k_proj.weight"] = weights @ torch.einsum("hc,hcd->hd", query, key) / math.sqrt(query.shape[1])
        for name, value in values.items():
            mixer.get_parameter(name).copy_(value)
            fitted.add(f"aft.layers.{i}.mixer.{name}")
    return fitted, num_images


def head_weights(num_heads: int, num_teacher_heads: int, width: int) -> torch.Tensor:
    """(h, H): the share of the features of AFT head i that belong to teacher head j; rows sum to 1."""
    feature = torch.arange(width)
    mine = nn.functional.one_hot(feature * num_heads // width, num_heads).float()
    theirs = nn.functional.one_hot(feature * num_teacher_heads // width, num_teacher_heads).float()
    return mine.mT @ theirs * num_heads / width


def conv_bias(attention: torch.Tensor, grid_size: tuple[int, int], kernel_size: int) -> torch.Tensor:
    """Return w(offset) = log(M(offset) / M_outside) for AFT-conv.

    M is the attention by offset, averaged over all queries. M_outside is the mean attention per position outside the
    window, where Eq. 6 has w = 0. If the window covers the grid, the constant is free, and w is centered. Offsets
    that no two patches of the grid have get 0. `attention` is (h, T, T) with T = rows * columns, w (h, s, s).
    """
    relative, counts = relative_attention(attention, grid_size), num_offsets(grid_size)
    centre = kernel_size // 2
    # Crop or pad the grid of offsets to the window: its center moves from n - 1 to s // 2.
    margins = [centre - (n - 1) for n in reversed(grid_size) for _ in range(2)]
    window, window_counts = (nn.functional.pad(x, margins) for x in (relative, counts))
    mass = (relative * counts).sum((1, 2)) - (window * window_counts).sum((1, 2))
    pairs = int(counts.sum() - window_counts.sum())
    tiny = torch.finfo(window.dtype).tiny
    bias, inside = window.clamp_min(tiny).log(), window_counts > 0
    constant = (mass / pairs).clamp_min(tiny).log() if pairs else bias[:, inside].mean(-1)
    # Without attention outside the window, the constant diverges to -inf; it is bounded so that the largest w is
    # `LARGEST_BIAS`.
    constant = constant.maximum(bias[:, inside].amax(-1) - LARGEST_BIAS)
    return (bias - constant[:, None, None]).clamp(-LARGEST_BIAS, LARGEST_BIAS) * inside
