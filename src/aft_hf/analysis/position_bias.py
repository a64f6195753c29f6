"""Maps of the position biases of every layer and head."""

from typing import Any

import torch

from ..mixers_aft import AFTConv
from ..modeling_aft import AFTPreTrainedModel


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
