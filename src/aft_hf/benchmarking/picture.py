"""Figure of the growth of time and memory."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..data.atomic_files import write_atomic
from .growth import Line, Row, lines


OURS = {
    "AFT-local": "tab:blue",
    "AFT-simple": "tab:green",
    "AFT-alibi": "tab:purple",
    "AFT-conv base 25/32": "tab:blue",
}
LABEL_POINTS, LABEL_SIZE = 11, 9  # distance of two labels in points, and font size of a label


def plot_growth(path: Path, rows: list[Row]) -> bool:
    """Plot time and memory against length (a training step) and image size (inference).

    Only rows with the device and the sizes of the last row are drawn.

    Returns:
        Whether there was anything to draw.
    """
    measured = [row for row in rows if row["suite"] == "growth" and "seconds" in row]
    if not measured:
        return False
    device, sizes = measured[-1]["machine"]["device"], measured[-1]["sizes"]
    found = {group[2:]: models for group, models in lines(rows).items() if group[:2] == (device, sizes)}
    columns = {"tokens": [["time", "memory"]] * 2, "images": [["image time"], ["image memory"]]}
    shown = [columns[unit] for unit in columns if any(group[0] == unit for group in found)]
    figure = Figure(figsize=(4.7 * sum(len(column[0]) for column in shown), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([[name for column in shown for name in column[i]] for i in range(2)])
    for name, unit, task, quantity, title in (
        ("time", "tokens", "training", "seconds", "Training step: seconds"),
        ("memory", "tokens", "training", "peak_bytes", "Training step: peak memory, MiB"),
        ("image time", "images", "inference", "seconds", "One image: seconds"),
        ("image memory", "images", "inference", "peak_bytes", "One image: peak memory, MiB"),
    ):
        if name not in panels:
            continue
        axes, models = panels[name], found.get((unit, task, quantity), {})
        scale = 2**20 if quantity == "peak_bytes" else 1
        models = {model: [(size, value / scale) for size, value in line] for model, line in models.items()}
        axes.set_title(title, loc="left", fontsize=10)
        _draw(axes, models)
        if models:
            axes.set_xlabel("tokens" if unit == "tokens" else "side of the image, pixels")
    note = f"{device}, fp32, two blocks" + (" (smoke sizes: the numbers say nothing)" if sizes == "smoke" else "")
    figure.suptitle(note, fontsize=9, color="0.4", x=0.005, ha="left")
    figure.draw_without_rendering()  # places the axes, whose positions the labels need
    for axes in panels.values():
        _label(axes)
    with write_atomic(path) as file:
        figure.savefig(file, dpi=110, format="png")
    return True


def _draw(axes: Axes, models: dict[str, Line]) -> None:
    if not models:
        axes.text(0.5, 0.5, "not measured", ha="center", color="0.5", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for model, line in models.items():
        style: dict[str, Any] = {"color": OURS[model]} if model in OURS else {"color": "0.45", "linestyle": "--"}
        axes.plot(*zip(*line), marker=".", label=model, **style)
    axes.set(xscale="log", yscale="log")
    ticks = sorted({size for line in models.values() for size, _ in line})
    in_thousands = all(x % 1024 == 0 for x in ticks)
    axes.set_xticks(ticks, [f"{x // 1024}k" if in_thousands else str(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, highest = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 * lowest else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(right=ticks[-1] * (ticks[-1] / ticks[0]) ** 0.45)  # room for the labels
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _label(axes: Axes) -> None:
    """Write the name of each line at its end, moved up where it would overlap another label."""
    points_per_pixel = 72 / axes.figure.dpi
    taken: list[tuple[float, float]] = []
    for line in sorted(axes.lines, key=_end_in_pixels):
        x, y = (pixels * points_per_pixel for pixels in reversed(_end_in_pixels(line)))
        place = max([y, *(other + LABEL_POINTS for other_x, other in taken if abs(other_x - x) < 60)])
        taken.append((x, place))
        end_x, end_y = (float(np.asarray(values)[-1]) for values in line.get_data())
        axes.annotate(
            str(line.get_label()),
            (end_x, end_y),
            xytext=(5, place - y),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_SIZE,
            color=line.get_color(),
        )


def _end_in_pixels(line: Any) -> tuple[float, float]:
    """(y, x) of the last point in pixels."""
    x, y = line.axes.transData.transform([values[-1] for values in line.get_data()])
    return y, x
