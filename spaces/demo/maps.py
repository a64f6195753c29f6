"""Maps of one layer over the patches of an image: what the query at one patch reads."""

from typing import NamedTuple

import torch

from aft_hf import AFTForImageClassification
from aft_hf.analysis import key_features, on_patches


class PatchMaps(NamedTuple):
    """Maps of one layer over the patches, (h, rows, columns) each, in float32. A class token is left out."""

    keys: torch.Tensor  # exp(K) / sum exp(K): the weights if w were 0, mean over the features of a head
    biases: torch.Tensor  # w from the query; -inf at patches that it does not see
    weights: torch.Tensor  # exp(K + w) / sum exp(K + w) from the query, mean over the features of a head


@torch.no_grad()
def patch_maps(
    model: AFTForImageClassification,
    pixel_values: torch.Tensor,
    *,
    layer: int,
    query: tuple[int, int] | None = None,
) -> PatchMaps:
    """Return the maps of one layer for the query at one patch of an image.

    Args:
        model: an image classifier in evaluation mode.
        pixel_values: pixel values of one image, (1, channels, height, width).
        layer: index of the layer, from 0.
        query: row and column of the patch, from 0. Default: the center.

    Raises:
        ValueError: the layer or the patch does not exist.
    """
    if not 0 <= layer < model.config.num_hidden_layers:
        raise ValueError(f"layer must be 0 .. {model.config.num_hidden_layers - 1}, got {layer}")
    rows, columns = grid_size = model.config.grid_of(pixel_values.shape[-2:])
    row, column = (rows // 2, columns // 2) if query is None else query
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(f"the patches are {rows} x {columns}: there is none at row {row}, column {column}")
    mixer = model.aft.layers[layer].mixer
    keys = key_features(model, pixel_values=pixel_values)[layer].unflatten(0, (mixer.num_heads, -1))  # (h, k, T)
    length = keys.shape[-1]
    position = length - rows * columns + row * columns + column  # after a class token
    biases = mixer.position_bias(length, grid_size)[:, position].float().cpu()  # (h, T)
    maps = keys.softmax(-1).mean(1), biases, (keys + biases[:, None]).softmax(-1).mean(1)
    return PatchMaps(*(on_patches(each, grid_size) for each in maps))
