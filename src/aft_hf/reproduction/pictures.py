"""A picture of a claim: training losses of its arms, and the numbers that are compared, a dot for each seed."""

import itertools
import statistics
from typing import TYPE_CHECKING

from ..analysis.pictures import CURVES, new_figure, styled
from .claims import Claim
from .records import Records


if TYPE_CHECKING:
    from matplotlib.figure import Figure


DASHES = ("-", "--", ":")


@styled
def draw_claim(claim: Claim, records: Records) -> "Figure":
    """Losses on the left, where there are any: the mean over seeds. On the right what each comparison compares."""
    arms = [arm for arm in claim.arms if any(record["losses"] for record in records.of(arm))]
    figure, axes = new_figure(1, 1 + bool(arms), (9 if arms else 5, 1.2 + 0.3 * max(6, len(claim.rows))))
    if arms:
        _draw_losses(axes[0, 0], arms, records)
    _draw_values(axes[0, -1], claim, records)
    return figure


def _draw_losses(axis, arms: list[str], records: Records) -> None:
    kinds = itertools.product(DASHES, CURVES)
    for arm, (dash, colour) in zip(arms, itertools.cycle(kinds)):
        curves = [dict(map(tuple, record["losses"])) for record in records.of(arm)]
        steps = sorted(set.intersection(*map(set, curves)))
        means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
        axis.plot(steps, means, dash, color=colour, linewidth=1, label=arm)
    axis.set(xlabel="step", ylabel="training loss (nats)")
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_values(axis, claim: Claim, records: Records) -> None:
    """Each row of the metric that most rows have, as dots, with a bar at their mean."""
    metrics = [row.metric for row in claim.rows]
    # "test_at_40_px" is the test metric, too.
    kinds = [metric.split("_at_")[0] for metric in metrics]
    shown = [row for row, kind in zip(claim.rows, kinds) if kind == statistics.mode(kinds)]
    for height, row in enumerate(reversed(shown)):
        values = list(records.values(row.arm, row.metric).values())
        if values:
            axis.plot(values, [height] * len(values), ".", color=CURVES[0])
            axis.plot([statistics.fmean(values)], [height], "|", color=CURVES[1], markersize=14)
    axis.set_yticks(range(len(shown)), [row.name for row in reversed(shown)])
    axis.set(xlabel=statistics.mode(kinds).replace("_", " "), ylim=(-0.6, len(shown) - 0.4))
    axis.grid(alpha=0.3, axis="x")
