"""Pictures of the arrays of this package: grids of maps, rows of images, curves.

They have no background and draw all lines and letters in one grey, so that they can be read on light and dark pages.
matplotlib, an extra ("viz"), is imported when something is drawn.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.whole_files import write_whole
from ..modeling_aft import AFTPreTrainedModel
from .losses import metric_of
from .position_bias import bias_maps


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image


INK = "#797979"  # a contrast of more than 4 to white and to the black of dark pages
CURVES = ("#2f7fd0", "#d06a1f", "#3a9150", "#b0569b", "#9a7d1a")  # at least 3 to both
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "legend.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "legend.frameon": False,
    "svg.hashsalt": "aft-hf",  # the same picture is the same file
}
FORMATS: dict[str, dict[str, Any]] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}}}
LAYERS_IN_A_ROW = 8
# How maps are coloured: on one scale around 0 or from 0 on; or each on its own, around 0 or from its lowest value on.
SCALES = {"signed": "RdBu_r", "positive": "viridis", "own signed": "RdBu_r", "own": "viridis"}
OUTLIERS = 0.001  # the share of values that lie beyond the ends of a common scale
# Of `bias_maps`: the label and the scale of values. Some heads' exp(w) are a thousand times those of others.
BIASES = {"w": ("position bias w", "signed"), "exp": ("exp(w)", "own"), "expm1": ("exp(w) - 1", "own signed")}


def _style() -> AbstractContextManager[None]:
    """Our settings, whatever the user's are."""
    import matplotlib

    kept: dict[Any, Any] = {
        name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")
    }
    return matplotlib.rc_context(kept | STYLE)


def styled(draw: Callable[..., "Figure"]) -> Callable[..., "Figure"]:
    """Have a function draw in our style."""

    @wraps(draw)
    def in_style(*args: Any, **kwargs: Any) -> "Figure":
        with _style():
            return draw(*args, **kwargs)

    return in_style


def check_path(path: Path) -> None:
    """Raise a ValueError unless a picture can be written in the format that the suffix says."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: the name of a picture must end in {' or '.join(FORMATS)}")


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a picture; the suffix gives the format.

    Raises:
        ValueError: a suffix that is neither .png nor .svg.
    """
    path = Path(path)
    check_path(path)
    with write_whole(path) as file, _style():
        figure.savefig(file, format=path.suffix[1:], facecolor="none", **FORMATS[path.suffix])


@styled
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
    """Maps of layers (rows) and heads (columns). Layers of a single map stand side by side.

    Args:
        layers: (n, rows, columns) for each layer.
        scale: of the colours, one of `SCALES`.
        label: what the colours show.
        names: of the layers; "layer 1", "layer 2" ... by default.
        column: what the maps of a layer are.
        most: the most maps of a layer that are drawn, the first ones.
        axes_labels: of columns and rows of a map.
        picture: the image that the maps are of, to be drawn above them.
    """
    maps = [layer[:most].numpy() for layer in layers]
    names = [f"layer {i + 1}" for i in range(len(maps))] if names is None else names
    alone = max(map(len, maps)) == 1
    across = min(len(maps), LAYERS_IN_A_ROW) if alone else max(map(len, maps))
    above = int(picture is not None)  # rows of the grid
    down = above + (math.ceil(len(maps) / across) if alone else len(maps))
    free = axes_labels != ("", "") or maps[0].shape[-1] > 3 * maps[0].shape[-2]  # of the aspect ratio
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
            colours = _colours(scale, _limit(values) if limit is None else limit)
            shown = axis.imshow(values, interpolation="nearest", aspect="auto" if free else "equal", **colours)
            if alone:
                axis.set_title(names[layer])
            elif layer == 0:
                axis.set_title(f"{column} 1" if head == 0 else f"{head + 1}")
            if head == 0 and not alone:
                axis.set_ylabel(names[layer])
            elif layer == 0 and alone:
                axis.set(xlabel=axes_labels[0], ylabel=axes_labels[1])
    if common:
        figure.colorbar(shown, ax=axes, label=label, shrink=0.8, extend="both" if scale == "signed" else "max")
    elif label:
        figure.suptitle(f"{label}, each map on its own scale", fontsize="medium")
    return figure


@styled
def draw_images(rows: Mapping[str, torch.Tensor]) -> "Figure":
    """Rows of images, (N, H, W, 3) bytes each, by the name of the row."""
    across = max(map(len, rows.values()))
    figure, axes = new_figure(len(rows), across, (1.0 * across + 0.5, 1.0 * len(rows) + 0.1))
    for (name, images), row in zip(rows.items(), axes):
        for axis, image in zip(row, images):
            axis.set(xticks=[], yticks=[])
            axis.imshow(image.numpy(), interpolation="nearest")
        row[0].set_ylabel(name)
        for axis in row[len(images) :]:
            axis.axis("off")
    return figure


@styled
def draw_losses(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> "Figure":
    """Training losses, and what the runs are scored by on the validation data, over the steps.

    Args:
        runs: the name of each run, and the content of its results.json.
    """
    figure, axes = new_figure(1, 2, (9, 3.4))
    losses, scores = axes[0]
    for colour, (name, results) in zip(itertools.cycle(CURVES), runs):
        curve, points, metric = results["losses"], results["evaluations"], metric_of(results)
        losses.plot([row["step"] for row in curve], [row["loss"] for row in curve], color=colour, label=name)
        scores.plot([row["step"] for row in points], [row[metric] for row in points], ".-", color=colour, label=name)
    metrics = sorted({metric_of(results) for _, results in runs})
    losses.set(xlabel="step", ylabel="training loss (nats)")
    scores.set(xlabel="step", ylabel=f"validation {', '.join(metrics)}".replace("_", " "))
    for axis in (losses, scores):
        axis.grid(alpha=0.3)
        axis.legend()
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def plot_position_biases(
    model: AFTPreTrainedModel, path: str | os.PathLike[str], *, max_heads: int = 8, values: str = "w"
) -> None:
    """Draw the position biases of every layer (rows) and the first heads (columns), and save the picture.

    Of AFT-conv the kernels are drawn, of all other types the whole T x T biases. Colours of w and exp(w) - 1 are
    centred on 0, where a position counts like one outside the window; red counts more, blue less.

    Args:
        model: any AFT model.
        path: where to write; .png or .svg.
        max_heads: the most heads to draw.
        values: "w", "exp" or "expm1", see `bias_maps`.
    """
    maps = bias_maps(model, values)
    label, scale = BIASES[values]
    save(draw_maps(maps, scale=scale, label=label, most=max_heads), path)


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple["Figure", np.ndarray]:
    """A figure that no window shows, and its (rows, columns) axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _limit(values: np.ndarray) -> float:
    """The size that hardly a value exceeds; 1 where all are 0. What is hidden (w = -inf) does not count."""
    sizes = np.abs(values[np.isfinite(values)])
    return float(np.quantile(sizes, 1 - OUTLIERS) if sizes.size else 0) or float(sizes.max(initial=0)) or 1.0


def _colours(scale: str, limit: float) -> dict[str, Any]:
    """Options of imshow. What is hidden has the colour of the lowest value."""
    ends = {"signed": (-limit, limit), "own signed": (-limit, limit), "positive": (0.0, limit), "own": (None, None)}
    return {"cmap": SCALES[scale], "vmin": ends[scale][0], "vmax": ends[scale][1]}
