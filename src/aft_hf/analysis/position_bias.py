"""Pictures of position biases."""

import math
import os

import torch

from ..mixers_aft import AFTConv, AFTMixer
from ..modeling_aft import AFTPreTrainedModel


LAYERS_IN_A_ROW = 8


@torch.no_grad()
def plot_position_biases(model: AFTPreTrainedModel, path: str | os.PathLike, *, max_heads: int = 8) -> None:
    """Draw w for every layer (rows) and the first heads (columns), and save the picture. Layers of a single head stand
    side by side.

    Of AFT-conv the kernels are drawn, of all other types the whole T x T biases. Colours are centred on 0, where
    exp(w) = 1 and a position counts like one outside the window; red counts more, blue less.

    Args:
        model: any AFT model.
        path: where to write; the suffix gives the format.
        max_heads: the most heads to draw.
    """
    import matplotlib.pyplot as plt  # an extra ("viz"), needed here only

    layers = getattr(model, model.base_model_prefix, model).layers
    maps = [_maps(layer.mixer, model.config.max_positions)[:max_heads].float().cpu() for layer in layers]
    columns = max(len(heads) for heads in maps)
    limit = max(float(heads.abs().nan_to_num(posinf=0.0).max()) for heads in maps) or 1.0
    alone = columns == 1
    shape = (
        (math.ceil(len(maps) / LAYERS_IN_A_ROW), min(len(maps), LAYERS_IN_A_ROW)) if alone else (len(maps), columns)
    )
    size = (1.1 * shape[1] + 1.2, 1.1 * shape[0] + 0.6)
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.axis("off")
    for layer, heads in enumerate(maps):
        for head, biases in enumerate(heads):
            axis = axes[divmod(layer, LAYERS_IN_A_ROW) if alone else (layer, head)]
            axis.axis("on")
            image = axis.imshow(biases.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            if alone:
                axis.set_title(f"layer {layer + 1}", fontsize=8)
            elif layer == 0:
                axis.set_title(f"head {head + 1}", fontsize=8)
            if head == 0 and not alone:
                axis.set_ylabel(f"layer {layer + 1}", fontsize=8)
    figure.colorbar(image, ax=axes, label="position bias w", shrink=0.8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _maps(mixer: AFTMixer, length: int) -> torch.Tensor:
    """(h, rows, columns) of biases."""
    if not isinstance(mixer, AFTConv):
        return mixer.position_bias(length)
    kernel = mixer.kernel_bias()
    return kernel if kernel.dim() == 3 else kernel.unsqueeze(1)
