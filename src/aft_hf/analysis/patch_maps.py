"""Maps of what one patch of an image attends to: keys, position biases, and the weights that they result in."""

from typing import Any, NamedTuple

import torch

from ..mixing_aft import mixing_weights
from ..modeling_aft import AFTForImageClassification
from ..position_biases_aft import widen


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
) -> tuple[torch.Tensor, PatchMaps]:
    """Classify an image, and return the maps of one layer for the query at one patch.

    Args:
        model: an image classifier in evaluation mode.
        pixel_values: pixel values of one image, (1, channels, height, width).
        layer: index of the layer, from 0.
        query: row and column of the patch, from 0. Default: the center.

    Returns:
        The logits, (1, num_labels), and the maps.

    Raises:
        ValueError: the layer or the patch does not exist.
    """
    layers = model.aft.layers
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer must be 0 .. {len(layers) - 1}, got {layer}")
    rows, columns = grid_size = model.config.grid_of(pixel_values.shape[-2:])
    row, column = (rows // 2, columns // 2) if query is None else query
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(f"the patches are {rows} x {columns}: there is none at row {row}, column {column}")

    mixer: Any = layers[layer].mixer
    projected: list[torch.Tensor] = []
    hook = mixer.k_proj.register_forward_hook(lambda module, inputs, output: projected.append(output))
    try:
        logits = model(pixel_values=pixel_values).logits
    finally:
        hook.remove()
    keys = widen(projected[0]).unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)  # (1, h, T, k)
    first = keys.shape[2] - rows * columns  # index of the first patch: 1 after a class token, else 0
    position = first + row * columns + column
    biases = mixer.position_bias(keys.shape[2], grid_size)[:, position : position + 1]  # (h, 1, T)

    def on_grid(x: torch.Tensor) -> torch.Tensor:
        return x[..., first:].unflatten(-1, grid_size).float().cpu()

    weights_alone, weights = (mixing_weights(keys, w)[0, :, :, 0].mean(1) for w in (None, biases))
    return logits, PatchMaps(on_grid(weights_alone), on_grid(biases[:, 0]), on_grid(weights))
