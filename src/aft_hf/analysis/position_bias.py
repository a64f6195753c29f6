"""Position biases of every layer and head as maps."""

from typing import Any

import torch

from ..mixers_aft import AFTConv
from ..modeling_aft import AFTPreTrainedModel


# What of w is looked at: itself, the factor that it puts on exp(K), or how far that is from 1, the factor outside the
# window: what Eq. 6 convolves with.
VALUES = {"w": lambda w: w, "exp": torch.exp, "expm1": torch.expm1}


@torch.no_grad()
def bias_maps(model: AFTPreTrainedModel, values: str = "w") -> list[torch.Tensor]:
    """w, exp(w) or exp(w) - 1 of every layer.

    Args:
        model: any AFT model.
        values: "w", "exp" or "expm1".

    Returns:
        For each layer (h, rows, columns) in float32: the kernels of AFT-conv (of text in one row), and of all other
        types the T x T biases for the longest sequence of the model, rows being queries.

    Raises:
        ValueError: other values.
    """
    if values not in VALUES:
        raise ValueError(f"values must be one of {', '.join(VALUES)}, got {values!r}")
    layers: Any = getattr(model, model.base_model_prefix, model).layers
    maps = []
    for mixer in (layer.mixer for layer in layers):
        if isinstance(mixer, AFTConv):
            kernels = mixer.kernel_bias()
            w = kernels if kernels.dim() == 3 else kernels.unsqueeze(1)
        else:
            w = mixer.position_bias(model.config.max_positions)
        maps.append(VALUES[values](w).float().cpu())
    return maps
