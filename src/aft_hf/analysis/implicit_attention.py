"""Keys and implicit attention (Eq. 3) of every layer for one input, and both as maps over the patches of an image."""

from typing import Any

import torch

from ..mixers_aft import AFTMixer
from ..mixing_aft import mixing_weights
from ..modeling_aft import AFTPreTrainedModel
from ..portable_aft import split_heads
from ..position_biases_aft import widen
from .recording import mixer_inputs


def key_features(model: AFTPreTrainedModel, **inputs: Any) -> list[torch.Tensor]:
    """Return the keys K of every layer in float32: (h, T) for AFT-conv, which has one key per head, else (d, T).

    Args:
        model: any AFT model in evaluation mode.
        **inputs: inputs of the model for one sequence or image, without padding.

    Raises:
        ValueError: the inputs are a batch of more than one sequence or image.
    """
    mixers, hidden = _mixers(model), _one(mixer_inputs(model, **inputs))
    with torch.no_grad():
        return [widen(mixer.k_proj(x))[0].T.float().cpu() for mixer, x in zip(mixers, hidden)]


@torch.no_grad()
def implicit_attention(model: AFTPreTrainedModel, position: int, **inputs: Any) -> list[torch.Tensor]:
    """Return Eq. 3 for one query in every layer: a_t' = sigma(Q_t) exp(K_t' + w_tt') / sum exp(K_t'' + w_tt'').

    The weights differ by feature. They need O(d T) memory; `output_attentions` returns them for all queries.

    Args:
        model: any AFT model in evaluation mode.
        position: index t of the query; a class token counts as position 0.
        **inputs: inputs of the model for one sequence or image, without padding.

    Returns:
        The weights of each layer, (d, T) in float32; in causal models they are 0 after t.

    Raises:
        ValueError: the position does not exist, or the inputs are a batch of more than one sequence or image.
    """
    hidden = _one(mixer_inputs(model, **inputs))
    length = hidden[0].shape[1]
    if not 0 <= position < length:
        raise ValueError(f"position must be 0 .. {length - 1}, got {position}")
    grid_size = model.config.grid_of(inputs["pixel_values"].shape[-2:]) if "pixel_values" in inputs else None
    return [_implicit(mixer, x, position, grid_size).float().cpu() for mixer, x in zip(_mixers(model), hidden)]


def on_patches(features: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Reshape features (n, T) to maps (n, rows, columns); a class token before the patches is left out."""
    return features[:, -grid_size[0] * grid_size[1] :].unflatten(-1, grid_size)


def _implicit(mixer: AFTMixer, x: torch.Tensor, position: int, grid_size: tuple[int, int] | None) -> torch.Tensor:
    """Return the weights (d, T) of one layer."""
    length = x.shape[1]
    biases = mixer.position_bias(length, grid_size)[:, position : position + 1]  # (h, 1, T)
    visible = (torch.arange(length, device=x.device) <= position).view(1, 1, 1, -1) if mixer.causal else None
    weights = mixing_weights(split_heads(mixer.k_proj(x), mixer.num_heads), biases, visible)[0, :, :, 0]  # (h, k, T)
    weights = weights.expand(-1, mixer.hidden_size // mixer.num_heads, -1).flatten(0, 1)
    if mixer.q_proj is None:
        return weights
    return weights * widen(mixer.query_activation(mixer.q_proj(x[0, position])))[:, None]


def _mixers(model: AFTPreTrainedModel) -> list[AFTMixer]:
    layers: Any = getattr(model, model.base_model_prefix, model).layers
    return [layer.mixer for layer in layers]


def _one(hidden: list[torch.Tensor]) -> list[torch.Tensor]:
    if hidden[0].shape[0] != 1:
        raise ValueError(f"give one sequence or image, got a batch of {hidden[0].shape[0]}")
    return hidden
