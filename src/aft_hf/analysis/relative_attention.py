"""Attention of a trained vision transformer, averaged over images and by relative position."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_aft import pair
from ..position_biases_aft import widen


@torch.no_grad()
def mean_attention(model: PreTrainedModel, batches: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Return the attention between patches of every layer and head of a vision transformer, averaged over images.

    Other tokens are left out, and each row is renormalized for each image: A_tt' / sum_t' A_tt' over the remaining
    tokens. Besides the averages, only the maps of one layer and one batch are held in memory.

    Args:
        model: a ViT, DeiT or BEiT of transformers.
        batches: batches of pixel values, (B, channels, height, width) each.

    Returns:
        The mean attention of each layer, (heads, T, T) in float32 with a row for each query, and the number of images.

    Raises:
        ValueError: there are no images.
    """
    num_patches = math.prod(patch_grid(model))
    layers: Any = model.base_model.layers
    totals: list[Any] = [0] * len(layers)

    def add(index: int, attention: torch.Tensor) -> None:
        attention = widen(attention[..., -num_patches:, -num_patches:])
        attention = attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
        totals[index] = totals[index] + attention.sum(0)

    count, implementation = 0, model.config._attn_implementation
    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            hook = layer.attention.register_forward_hook(lambda module, inputs, outputs, i=i: add(i, outputs[1]))
            stack.callback(hook.remove)
        stack.callback(model.set_attn_implementation, implementation)
        model.set_attn_implementation("eager")  # the only implementation that returns attention maps
        for pixels in logging.tqdm(batches, desc="Attention", unit="batch"):
            model(pixels.to(model.device, model.dtype))
            count += len(pixels)
    if count == 0:
        raise ValueError("there are no images to measure attention on; give at least one")
    return [total / count for total in totals], count


def patch_grid(model: PreTrainedModel) -> tuple[int, int]:
    """Return the rows and columns of patches of a vision transformer at the image size of its config."""
    (height, width), patch_size = pair(model.config.image_size), pair(model.config.patch_size)
    return height // patch_size[0], width // patch_size[1]


def relative_attention(attention: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Return the attention between patches, averaged over all queries by the offset from query to key.

    Args:
        attention: attention maps, (heads, T, T) for T = rows * columns patches, with a row for each query.
        grid_size: rows and columns of patches.

    Returns:
        M, (heads, 2 rows - 1, 2 columns - 1): M[:, dr + rows - 1, dc + columns - 1] is the mean of A_tt' over all
        pairs of patches with t' dr rows below and dc columns right of t.
    """
    totals = attention.new_zeros(attention.shape[0], num_offsets(grid_size).numel())
    totals.index_add_(1, offset_index(grid_size).flatten(), attention.flatten(1))
    return totals.unflatten(1, num_offsets(grid_size).shape) / num_offsets(grid_size)


def num_offsets(grid_size: tuple[int, int]) -> torch.Tensor:
    """Return the number of pairs of patches for each offset, (2 rows - 1, 2 columns - 1)."""
    rows, columns = (n - torch.arange(1 - n, n).abs() for n in grid_size)
    return rows[:, None] * columns


def offset_index(grid_size: tuple[int, int]) -> torch.Tensor:
    """Return for each query and key the index of their offset among the flattened offsets, (T, T)."""
    rows, columns = grid_size
    positions = torch.arange(rows * columns)
    row, column = positions // columns, positions % columns
    down = row[None, :] - row[:, None] + rows - 1
    right = column[None, :] - column[:, None] + columns - 1
    return down * (2 * columns - 1) + right
