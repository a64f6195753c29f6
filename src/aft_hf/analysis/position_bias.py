"""Pictures of position biases."""

import os

import torch

from ..mixers_aft import AFTConv, AFTMixer
from ..modeling_aft import AFTPreTrainedModel


@torch.no_grad()
def plot_position_biases(model: AFTPreTrainedModel, path: str | os.PathLike, *, max_heads: int = 8) -> None:
    """Draw w for every layer (rows) and the first heads (columns), and save the picture.

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
    figure, axes = plt.subplots(
        len(maps), columns, figsize=(1.1 * columns + 1.2, 1.1 * len(maps) + 0.6), squeeze=False, layout="constrained"
    )
    for row, (heads, line) in enumerate(zip(maps, axes)):
        for head, axis in enumerate(line):
            axis.set(xticks=[], yticks=[])
            if head >= len(heads):
                axis.axis("off")
                continue
            image = axis.imshow(heads[head], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            if row == 0:
                axis.set_title(f"head {head + 1}", fontsize=8)
            if head == 0:
                axis.set_ylabel(f"layer {row + 1}", fontsize=8)
    figure.colorbar(image, ax=axes, label="position bias w", shrink=0.8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _maps(mixer: AFTMixer, length: int) -> torch.Tensor:
    """(h, rows, columns) of biases."""
    if not isinstance(mixer, AFTConv):
        return mixer.position_bias(length)
    kernel = mixer.kernel_bias()
    return kernel if kernel.dim() == 3 else kernel.unsqueeze(1)
