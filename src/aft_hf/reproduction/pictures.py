"""Figure of a claim: training losses of its arms, and the compared numbers with a dot for each seed."""

import itertools
import statistics
from typing import TYPE_CHECKING

from ..analysis.pictures import CURVES, new_figure, styled
from .arms import data_of
from .claims import Claim, Row
from .records import Records


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DASHES = ("-", "--", ":")


@styled
def draw_claim(claim: Claim, records: Records) -> "Figure":
    """Draw a panel for each metric on each kind of data, with the training losses of its arms on the left.

    Parameter counts are in the table only, and so are the speeds of a claim that also trains models.
    """
    trained = any(data_of(row.arm) != "speed" for row in claim.rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in claim.rows:
        if "parameters" not in row.metric and not (trained and data_of(row.arm) == "speed"):
            # "test_at_40_px" shares the panel of "test".
            groups.setdefault((data_of(row.arm), row.metric.split("_at_")[0]), []).append(row)
    tall = sum(1.2 + 0.25 * max(6 if trained else 0, len(rows)) for rows in groups.values())
    figure, axes = new_figure(len(groups), 1 + trained, (9 if trained else 6, tall))
    drawn: set[str] = set()
    for panels, ((data, _), rows) in zip(axes, groups.items()):
        _draw_values(panels[-1], rows, records)
        if trained and data in drawn:
            panels[0].set_axis_off()
        elif trained:
            _draw_losses(panels[0], [arm for arm in claim.arms if data_of(arm) == data], records)
        drawn.add(data)
    return figure


def _draw_losses(axis: "Axes", arms: list[str], records: Records) -> None:
    """Draw the training losses of arms, averaged over seeds."""
    kinds = [(dash, colour) for dash in DASHES for colour in CURVES]
    for arm, (dash, colour) in zip(arms, itertools.cycle(kinds)):
        curves = [dict(map(tuple, record["losses"])) for record in records.of(arm)]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
        axis.plot(steps, means, dash, color=colour, linewidth=1, label=arm)
    axis.set(xlabel="step", ylabel="training loss (nats)")
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_values(axis: "Axes", rows: list[Row], records: Records) -> None:
    """Draw a dot for each seed, and a bar at the mean of the seeds."""
    for height, row in enumerate(reversed(rows)):
        values = list(records.values(row.arm, row.metric).values())
        if values:
            axis.plot(values, [height] * len(values), ".", color=CURVES[0])
            axis.plot([statistics.fmean(values)], [height], "|", color=CURVES[1], markersize=14)
    axis.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    axis.set(xlabel=rows[0].unit, ylim=(-0.6, len(rows) - 0.4))
    axis.grid(alpha=0.3, axis="x")
