"""Position biases and keys of the layers of an AFT, and the mean attention of a vision transformer, as maps."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration_aft import pair
from ..mixers_aft import AFTConv
from ..modeling_aft import AFTPreTrainedModel
from ..position_biases_aft import widen


# Functions of w that can be drawn: w itself; exp(w), the factor of exp(K); or exp(w) - 1, with which Eq. 6 convolves:
# the difference from 1, the factor outside the window.
VALUES = {"w": lambda w: w, "exp": torch.exp, "expm1": torch.expm1}
UNLIMITED_LENGTH = 256  # of the maps of a text model without a length limit


@torch.no_grad()
def bias_maps(model: AFTPreTrainedModel, values: str = "w") -> list[torch.Tensor]:
    """Return w, exp(w) or exp(w) - 1 of every layer of an AFT: `values` is "w", "exp" or "expm1".

    Returns:
        The maps of each layer, (h, rows, columns) in float32: for AFT-conv the kernels (for text, a single row), for
        all other types the T x T biases of the longest sequence of the model, with a row for each query. Without a
        longest sequence, T is 256. The biases of the future, which a text model does not use, are NaN.

    Raises:
        ValueError: `values` is none of these, or an adapter changes w.
    """
    if values not in VALUES:
        raise ValueError(f"values must be one of {', '.join(VALUES)}, got {values!r}")
    maps = []
    for mixer in _mixers(model):
        if isinstance(mixer, AFTConv):
            kernels = mixer.kernel_bias()
            w = kernels if kernels.dim() == 3 else kernels.unsqueeze(1)
        else:
            w = mixer.position_bias(getattr(model.config, "max_positions", UNLIMITED_LENGTH))
            if mixer.causal:
                w = w.masked_fill(torch.ones_like(w, dtype=torch.bool).triu(1), torch.nan)
        maps.append(VALUES[values](w).float().cpu())
    return maps


@torch.no_grad()
def key_features(model: AFTPreTrainedModel, **inputs: Any) -> list[torch.Tensor]:
    """Return the keys K of every layer in float32: (h, T) for AFT-conv, which has one key per head, else (d, T).

    The model is in evaluation mode, and the inputs are those for one sequence or image, without padding.

    Raises:
        ValueError: the inputs are a batch of more than one sequence or image, or an adapter changes a layer.
    """
    mixers = _mixers(model)  # before the model runs: an adapter is an error
    states = model(**inputs, output_hidden_states=True).hidden_states
    if len(states[0]) != 1:
        raise ValueError(f"give one sequence or image, got a batch of {len(states[0])}")
    layers = cast(Any, model.base_model).layers
    keys = [mixer.k_proj(layer.layernorm_before(x)) for layer, mixer, x in zip(layers, mixers, states)]
    return [widen(each)[0].T.float().cpu() for each in keys]


def _mixers(model: AFTPreTrainedModel) -> list[Any]:
    mixers = [layer.mixer for layer in cast(Any, model.base_model).layers]
    if any(hasattr(mixer, "get_base_layer") for mixer in mixers):  # that of an adapter of a parameter
        raise ValueError("position biases have adapters: merge or remove adapters first (`merge_and_unload`)")
    return mixers


def on_patches(features: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Reshape features (n, T) to maps (n, rows, columns); a class token before the patches is left out."""
    return features[:, -grid_size[0] * grid_size[1] :].unflatten(-1, grid_size)


@torch.no_grad()
def mean_attention(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Return the attention between patches of every layer and head of a vision transformer, averaged over images.

    Other tokens are left out, and each row is renormalized for each image: A_tt' / sum_t' A_tt' over the rest.

    Args:
        model: a ViT, DeiT or BEiT of transformers.
        batches: batches of pixel values, (B, channels, height, width) each.

    Returns:
        The mean attention of each layer, (heads, T, T) in float32 with a row for each query, and the number of images.

    Raises:
        ValueError: there are no images.
    """
    num_patches, implementation = math.prod(patch_grid(model.config)), model.config._attn_implementation
    totals: list[Any] = [0] * model.config.num_hidden_layers
    count = 0
    model.set_attn_implementation("eager")  # the only implementation that returns attention maps
    try:
        for pixels in logging.tqdm(batches, desc="Attention", unit="batch"):
            maps = model(pixels.to(model.device, model.dtype), output_attentions=True).attentions
            for i, attention in enumerate(maps):
                patches = widen(attention[..., -num_patches:, -num_patches:])
                patches = patches / patches.sum(-1, keepdim=True).clamp_min(torch.finfo(patches.dtype).tiny)
                totals[i] = totals[i] + patches.sum(0)
            count += len(pixels)
    finally:
        model.set_attn_implementation(implementation)
    if count == 0:
        raise ValueError("there are no images to measure attention on; give at least one")
    return [total / count for total in totals], count


def patch_grid(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the rows and columns of patches of a vision transformer at the image size of its config."""
    (height, width), (rows, columns) = pair(config.image_size), pair(config.patch_size)
    return height // rows, width // columns


def relative_attention(attention: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Return the attention between patches, averaged over all queries by the offset from query to key.

    Args:
        attention: attention maps, (heads, T, T) for T = rows * columns patches, with a row for each query.
        grid_size: rows and columns of patches.

    Returns:
        M, (heads, 2 rows - 1, 2 columns - 1): M[:, dr + rows - 1, dc + columns - 1] is the mean of A_tt' over all
        pairs of patches with t' dr rows below and dc columns right of t.
    """
    (rows, columns), counts = grid_size, num_offsets(grid_size)
    positions = torch.arange(rows * columns)
    down, right = (x - x[:, None] for x in (positions // columns, positions % columns))  # (T, T), from query to key
    index = (down + rows - 1) * counts.shape[1] + right + columns - 1
    totals = attention.new_zeros(attention.shape[0], counts.numel())
    return totals.index_add_(1, index.flatten(), attention.flatten(1)).unflatten(1, counts.shape) / counts


def num_offsets(grid_size: tuple[int, int]) -> torch.Tensor:
    """Return the number of pairs of patches for each offset, (2 rows - 1, 2 columns - 1)."""
    rows, columns = (n - torch.arange(1 - n, n).abs() for n in grid_size)
    return rows[:, None] * columns
