"""Resize the kernels and the patches of an AFT-conv for images of another size than the training images.

On a larger image, a kernel of s x s patches covers a smaller part of the image. So the weights exp(w) are resampled to
the new grid: each new weight is the mean of the old ones over its area, and the sum of the weights grows like the sum
over the positions outside the kernel, each of which has weight 1 (w = 0). The weights of the patch embedding are
resampled to a larger patch by the pseudoinverse of bilinear interpolation, as in FlexiViT (Beyer et al. 2023,
arXiv:2212.08013): the embedding of an enlarged patch is that of the original patch.
"""

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..configuration_aft import pair
from ..mixers_aft import AFTConv
from ..modeling_aft import AFTImageEmbeddings
from ..position_biases_aft import widen


@torch.no_grad()
def adapt_to_image_size(
    model: PreTrainedModel,
    image_size: int | tuple[int, int],
    *,
    stretch_kernels: bool = True,
    enlarge_patches: bool = True,
) -> None:
    """Adapt an AFT-conv model to images of another size with the same content, in place, and update `config`.

    Without this call, AFT-conv also accepts images of other sizes, but then each kernel and patch covers a
    different part of the image than in training. Patches become larger with the image and then overlap, since their
    stride is unchanged; they become smaller at most until they no longer overlap.

    The resized kernels and patches are new parameters: create the optimizer after the call. Set the new size in
    the image processor too. Resizing loses information: adapt a copy of the original model each time.

    Args:
        model: an image model with only `conv` layers.
        image_size: the new image size in pixels, or (height, width).
        stretch_kernels: False keeps the kernels as trained.
        enlarge_patches: False keeps the patch size. This can be better for models that were trained with crops of a
            small part of the image, in which objects appear larger.

    Raises:
        ValueError: the model has position embeddings, `position_bias_selection` or adapters; the size is no multiple
            of the stride of the patches, too small for kernels that are kept, or of another aspect ratio, without
            `global_connectivity`; or the config is not that of the weights. The model is then unchanged.
    """
    config: Any = model.config  # an `AFTConfig`
    if config.modality != "image" or set(config.layer_aft_types) != {"conv"} or config.use_position_embeddings:
        raise ValueError('only image models of aft_type "conv" without position embeddings can be resized')
    base: Any = model.base_model  # an `AFTModel`
    mixers, embeddings = [layer.mixer for layer in base.layers], base.embeddings
    own = [*mixers, embeddings, getattr(embeddings, "patch_embeddings", None)]
    if [type(module) for module in own] != [AFTConv] * len(mixers) + [AFTImageEmbeddings, nn.Conv2d]:
        raise ValueError("kernels or patches have adapters: merge or remove adapters first")
    if {mixer.window for mixer in mixers} != {config.kernel_size} or embeddings.patch_size != pair(config.patch_size):
        raise ValueError("the config does not match the weights: give each model its own copy of the config")
    target = copy.deepcopy(config)
    target.image_size, target.kernel_size = image_size, 1
    target.validate_image()
    rows, columns = target.grid_size
    ratios = rows / config.grid_size[0], columns / config.grid_size[1]
    if ratios == (1.0, 1.0):
        return
    if stretch_kernels and any(mixer.position_bias_selection is not None for mixer in mixers):
        raise ValueError("kernels with position_bias_selection cannot be resized: each head selects one position")
    if stretch_kernels and not config.global_connectivity and ratios[0] != ratios[1]:
        raise ValueError("without global_connectivity, kernels need the same ratio for rows and columns")
    patch_size = embeddings.patch_size
    if enlarge_patches:  # at least as large as the stride of the grid, so that no pixels are left out
        sizes = zip(patch_size, embeddings.grid_stride, ratios)
        patch_size = tuple(max(stride, math.floor(size * ratio + 0.5)) for size, stride, ratio in sizes)
        if patch_size != embeddings.patch_size:
            target.patch_size, target.patch_stride = one_or_pair(patch_size), one_or_pair(config.grid_stride)
            target.validate_image()  # before the weights of patches that are too large take much time and memory
    # Nothing is written before everything is computed and the new config is valid.
    kernels = [_resized_kernel(mixer, ratios, max(rows, columns)) for mixer in mixers] if stretch_kernels else []
    target.kernel_size = kernels[0][0].shape[-1] if kernels else config.kernel_size
    target.validate_image()
    if patch_size != embeddings.patch_size:
        weight = embeddings.patch_embeddings.weight
        embeddings.patch_embeddings.weight = nn.Parameter(resampled(weight, patch_size), weight.requires_grad)
        embeddings.patch_embeddings.kernel_size = embeddings.patch_size = patch_size
    for mixer, (kernel, scale, shift) in zip(mixers, kernels):
        mixer.kernel = nn.Parameter(kernel.to(mixer.kernel), mixer.kernel.requires_grad)
        mixer.window = kernel.shape[-1]
        if mixer.kernel_scale is not None:
            mixer.kernel_scale.copy_(scale)
            mixer.kernel_shift.copy_(shift)
    for name in ("image_size", "kernel_size", "patch_size", "patch_stride"):
        setattr(config, name, getattr(target, name))


def resampled(weight: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Resample the weight of a patch embedding, (d, channels, rows, columns), to another patch size.

    For larger patches, the embedding of a bilinearly enlarged patch is equal to that of the original patch. For
    smaller patches, it has the least squared error.
    """
    wide = weight.cpu().double()  # not all devices have float64
    rows, columns = (_inverse_interpolation(*sizes) for sizes in zip(weight.shape[2:], patch_size))
    return (rows @ wide @ columns.mT).to(weight)


def _inverse_interpolation(old: int, new: int) -> torch.Tensor:
    """Return the pseudoinverse of the transposed matrix that interpolates `old` pixels to `new` ones, (new, old)."""
    pixels = torch.eye(old, dtype=torch.float64, device="cpu").unsqueeze(1)
    return torch.linalg.pinv(nn.functional.interpolate(pixels, new, mode="linear", align_corners=False).squeeze(1))


def _resized_kernel(mixer: AFTConv, ratios: tuple[float, float], longest: int) -> tuple[torch.Tensor, ...]:
    """Compute the kernel (h, s', s'), gamma (h,) and beta (h,) of a mixer for another grid size; see `stretched`."""
    bias = stretched(mixer.kernel_bias(), ratios, longest, outside=0.0 if mixer.global_connectivity else -math.inf)
    bias = bias / mixer.position_bias_multiplier
    deviation, mean = torch.std_mean(bias, (1, 2), correction=0, keepdim=True)
    if mixer.kernel_scale is None:
        return bias, deviation, mean
    # The inverse of Eq. 8. Where gamma is 0, w is constant, and the shape of the kernel is left to training.
    flat = deviation == 0
    standard = torch.where(flat, torch.randn_like(bias), (bias - mean) / deviation.masked_fill(flat, 1.0))
    # The kernel keeps its standard deviation, so that an optimizer changes it at the same rate as before.
    size = widen(mixer.kernel).std((1, 2), correction=0, keepdim=True)
    kernel = standard * torch.where(size == 0, mixer.position_bias_init_std / mixer.position_bias_multiplier, size)
    return kernel, deviation.flatten(), mean.flatten()


def stretched(kernels: torch.Tensor, ratios: tuple[float, float], longest: int, outside: float) -> torch.Tensor:
    """Resize kernels w (h, s, s) to (h, s', s'), with s' about s times the larger ratio.

    A new position covers 1 / ratio of an old position in each direction. Its exp(w) is the mean of the old exp(w) over
    the area that it covers; w is `outside` beyond the old kernel.
    """
    half = kernels.shape[-1] // 2
    reach = min(max(math.ceil((half + 0.5) * ratio - 0.5 - 1e-9) for ratio in ratios), longest - 1)
    rows, columns = (_shares(half, reach, ratio) for ratio in ratios)
    wide = kernels.cpu().double()  # not all devices have float64
    top = wide.amax((1, 2), keepdim=True).clamp_min(outside)
    beyond = (outside - top).exp()
    weights = rows @ ((wide - top).exp() - beyond) @ columns.mT + beyond
    return (weights.clamp_min(torch.finfo(weights.dtype).tiny).log() + top).to(kernels)  # rounding could make it 0


def _shares(half: int, reach: int, ratio: float) -> torch.Tensor:
    """Return the share of each old offset in each new offset, (2 reach + 1, 2 half + 1).

    The rest of a row, up to 1, is the share outside the old kernel.
    """
    old = torch.arange(-half, half + 1, dtype=torch.float64, device="cpu")
    new = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu").unsqueeze(1)
    end = torch.minimum(old + 0.5, (new + 0.5) / ratio)
    start = torch.maximum(old - 0.5, (new - 0.5) / ratio)
    return ratio * (end - start).clamp_min(0.0)


def one_or_pair(size: tuple[int, int]) -> int | tuple[int, int]:
    """Return (rows, columns) as one integer if they are equal: the inverse of `pair`."""
    return size[0] if size[0] == size[1] else size
