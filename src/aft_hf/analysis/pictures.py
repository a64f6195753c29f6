"""Pictures of the arrays of this package: grids of maps, and curves.

Pictures have no background, and all lines and text are in one gray, so that they are readable on light and dark pages.
matplotlib, from the extra "viz", is imported when a picture is drawn.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..atomic_files import write_atomic
from ..modeling_aft import AFTPreTrainedModel
from .maps import bias_maps


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image


INK = "#797979"  # contrast ratio of more than 4 on white and on the black of dark pages
CURVES = ("#2f7fd0", "#d06a1f", "#3a9150", "#b0569b", "#9a7d1a")  # contrast ratio of at least 3 on both
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "legend.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "legend.frameon": False,
    "text.parse_math": False,  # a name with dollars is no formula
    "svg.hashsalt": "aft-hf",  # the same picture gives the same file
}
FORMATS: dict[str, dict[str, Any]] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}}}
LAYERS_IN_A_ROW = 8
SCALES = {"signed": "RdBu_r", "own signed": "RdBu_r", "own": "viridis"}
OUTLIERS = 0.001  # the share of values that may lie beyond the ends of a scale
# Label and scale for the `values` of `bias_maps`. exp(w) of some heads is a thousand times that of others.
BIASES = {"w": ("position bias w", "signed"), "exp": ("exp(w)", "own"), "expm1": ("exp(w) - 1", "own signed")}
METRICS = ("bits_per_byte", "bits_per_dim", "accuracy")  # a run is scored by the first of them that it has


@contextmanager
def styled() -> Iterator[None]:
    """Context and decorator: draw with matplotlib's defaults and `STYLE`, independent of the user's settings."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def check_path(path: Path) -> None:
    """Raise a ValueError unless the suffix of a path is that of a supported format."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: the name of a picture must end in {' or '.join(FORMATS)}")


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Save a picture as .png or .svg, by the suffix of the path; a ValueError is raised for any other."""
    path = Path(path)
    check_path(path)
    with write_atomic(path) as file, styled():
        figure.savefig(file, format=path.suffix[1:], facecolor="none", **FORMATS[path.suffix])
    figure.set_layout_engine("none")  # the layout, which takes seconds, holds for other files of this picture


@styled()
def draw_maps(
    layers: Sequence[torch.Tensor],
    *,
    scale: str,
    label: str = "",
    names: Sequence[str] | None = None,
    column: str = "head",
    most: int = 16,
    axes_labels: tuple[str, str] = ("", ""),
    picture: "Image.Image | None" = None,
) -> "Figure":
    """Draw maps in a grid of layers (rows) and heads (columns). Layers with a single map each are drawn side by side.

    Args:
        layers: maps of each layer, (n, rows, columns).
        scale: "signed" for one color scale of all maps, symmetric around 0, "own signed" for one of each map, or "own"
            for one of each map from its lowest value.
        label: label of the color scale.
        names: names of the layers. Default: "layer 1", "layer 2" ...
        column: name of a map of a layer, such as "head" or "feature".
        most: maximum number of maps to draw per layer; the first ones are drawn.
        axes_labels: labels of the columns and rows of a map.
        picture: the image that the maps belong to, drawn above them.
    """
    maps, count = [layer[:most].numpy() for layer in layers], max(map(len, layers))
    names = [f"layer {i + 1}" for i in range(len(maps))] if names is None else names
    alone = max(map(len, maps)) == 1
    across = min(len(maps), LAYERS_IN_A_ROW) if alone else max(map(len, maps))
    above = int(picture is not None)  # rows of the grid above the maps
    down = above + (math.ceil(len(maps) / across) if alone else len(maps))
    free = axes_labels != ("", "") or maps[0].shape[-1] > 3 * maps[0].shape[-2]  # aspect ratio
    cell = (2.2 if free else 1.4) if alone else 0.75
    common = not scale.startswith("own")
    figure, axes = new_figure(down, across, (cell * across + (1.2 if common else 0.4), cell * down + 0.5))
    for axis in axes.flat:
        axis.axis("off")
    if picture is not None:
        axes[0, 0].imshow(picture)
    limit = _limit(np.concatenate([values.ravel() for values in maps])) if common else None
    for layer, heads in enumerate(maps):
        for head, values in enumerate(heads):
            axis = axes[above + layer // across, layer % across] if alone else axes[above + layer, head]
            axis.axis("on")
            axis.set(xticks=[], yticks=[])
            end = None if scale == "own" else limit or _limit(values)
            colours = {"cmap": SCALES[scale], "vmin": end and -end, "vmax": end}
            shown = axis.imshow(values, interpolation="nearest", aspect="auto" if free else "equal", **colours)
            if alone:
                axis.set_title(names[layer])
            elif layer == 0:
                axis.set_title(f"{column} 1" if head == 0 else f"{head + 1}")
            if head == 0 and not alone:
                axis.set_ylabel(names[layer])
            elif layer == 0 and alone:
                axis.set(xlabel=axes_labels[0], ylabel=axes_labels[1])
    if count > most:
        figure.supxlabel(f"the first {most} of {count} {column}s", fontsize="medium", wrap=True)
    if common:
        figure.colorbar(shown, ax=axes, label=label, shrink=0.8, extend="both")
    elif label:
        figure.suptitle(f"{label}, each map on its own scale", fontsize="medium", wrap=True)
    return figure


@styled()
def draw_losses(results: Mapping[str, Any]) -> "Figure":
    """Draw the losses and the validation scores of a run over the steps; without evaluations, the final score.

    Args:
        results: the content of its results.json.
    """
    curve = [(row["step"], row["loss"]) for row in results["losses"]]
    final = next(iter(results["metrics"].values()))  # of the first data set
    metric = min(final.keys() & METRICS, key=METRICS.index)
    points = [(row["step"], row[metric]) for row in results["evaluations"]] or [(curve[-1][0], final[metric])]
    figure, axes = new_figure(1, 2, (9, 3.4))
    losses, scores = axes[0]
    scores.sharex(losses)
    losses.plot(*zip(*curve), color=CURVES[0])
    scores.plot(*zip(*points), ".-", color=CURVES[0])
    losses.set(xlabel="step", ylabel="training loss (nats)")
    scores.set(xlabel="step", ylabel=f"validation {metric.replace('_', ' ')}")
    for axis in (losses, scores):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def plot_position_biases(
    model: AFTPreTrainedModel, path: str | os.PathLike[str], *, max_heads: int = 8, values: str = "w"
) -> None:
    """Draw the `bias_maps` of every layer (rows) and the first heads (columns), and save the picture.

    The colors of w and exp(w) - 1 are centered on 0, which is the value outside the window: red positions have more
    weight, blue ones less.

    Args:
        model, values: as for `bias_maps`.
        path: output file, .png or .svg.
        max_heads: maximum number of heads to draw.
    """
    maps = bias_maps(model, values)
    label, scale = BIASES[values]
    save(draw_maps(maps, scale=scale, label=label, most=max_heads), path)


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple["Figure", np.ndarray]:
    """Return a figure without a window, and its (rows, columns) axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _limit(values: np.ndarray) -> float:
    """Return the absolute value that a share of `OUTLIERS` exceeds; 1 if all are 0. Masked values are ignored."""
    sizes = np.abs(values[np.isfinite(values)])
    return float(np.quantile(sizes, 1 - OUTLIERS) if sizes.size else 0) or float(sizes.max(initial=0)) or 1.0
