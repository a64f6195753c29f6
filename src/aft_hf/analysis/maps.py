"""Position biases, keys and weights (Eq. 3) of the layers of an AFT, also as maps over the patches."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..mixers_aft import AFTConv, AFTMixer
from ..mixing_aft import mixing_weights
from ..modeling_aft import AFTForImageClassification, AFTPreTrainedModel
from ..portable_aft import split_heads
from ..position_biases_aft import widen


# Functions of w that can be drawn: w itself; exp(w), the factor of exp(K); or exp(w) - 1, with which Eq. 6 convolves:
# the difference from 1, the factor outside the window.
VALUES = {"w": lambda w: w, "exp": torch.exp, "expm1": torch.expm1}


@torch.no_grad()
def bias_maps(model: AFTPreTrainedModel, values: str = "w") -> list[torch.Tensor]:
    """Return w, exp(w) or exp(w) - 1 of every layer.

    Args:
        model: any AFT model.
        values: "w", "exp" or "expm1".

    Returns:
        The maps of each layer, (h, rows, columns) in float32: for AFT-conv the kernels (for text, a single row), for
        all other types the T x T biases of the longest sequence of the model, with a row for each query.

    Raises:
        ValueError: `values` is none of these.
    """
    if values not in VALUES:
        raise ValueError(f"values must be one of {', '.join(VALUES)}, got {values!r}")
    maps, layers = [], _layers(model)
    for mixer in (layer.mixer for layer in layers):
        if isinstance(mixer, AFTConv):
            kernels = mixer.kernel_bias()
            w = kernels if kernels.dim() == 3 else kernels.unsqueeze(1)
        else:
            w = mixer.position_bias(model.config.max_positions)
        maps.append(VALUES[values](w).float().cpu())
    return maps


@torch.no_grad()
def key_features(model: AFTPreTrainedModel, **inputs: Any) -> list[torch.Tensor]:
    """Return the keys K of every layer in float32: (h, T) for AFT-conv, which has one key per head, else (d, T).

    Args:
        model: any AFT model in evaluation mode.
        **inputs: inputs of the model for one sequence or image, without padding.

    Raises:
        ValueError: the inputs are a batch of more than one sequence or image.
    """
    return [widen(mixer.k_proj(x))[0].T.float().cpu() for mixer, x in _mixers_with_inputs(model, inputs)]


def on_patches(features: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Reshape features (n, T) to maps (n, rows, columns); a class token before the patches is left out."""
    return features[:, -grid_size[0] * grid_size[1] :].unflatten(-1, grid_size)


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
    mixer, x = list(_mixers_with_inputs(model, {"pixel_values": pixel_values}))[layer]
    keys = split_heads(mixer.k_proj(x), mixer.num_heads)  # (1, h, T, k)
    position = x.shape[1] - rows * columns + row * columns + column  # after a class token
    biases = mixer.position_bias(x.shape[1], grid_size)[:, position : position + 1]  # (h, 1, T)
    alone, weights = (mixing_weights(keys, w)[0, :, :, 0].mean(1) for w in (None, biases))
    return PatchMaps(*(on_patches(each, grid_size).float().cpu() for each in (alone, biases[:, 0], weights)))


def _layers(model: AFTPreTrainedModel) -> Any:
    base: Any = model.base_model
    return base.layers


def _mixers_with_inputs(model: AFTPreTrainedModel, inputs: dict[str, Any]) -> Iterator[tuple[AFTMixer, torch.Tensor]]:
    """Run a model, and yield the mixer of each layer and its input, (1, T, d)."""
    outputs = model(**inputs, output_hidden_states=True)
    for layer, x in zip(_layers(model), outputs.hidden_states):
        if len(x) != 1:
            raise ValueError(f"give one sequence or image, got a batch of {len(x)}")
        yield layer.mixer, layer.layernorm_before(x)
