"""The rule that judges a comparison, fixed before any run.

Let D be the mean of ours minus the mean of the other, signed so that more is better, plus the margin that the claim
allows (0 where it says "better"). The comparison holds if D exceeds `FACTOR` standard errors of the difference, it
does not hold if -D does, and otherwise it is not decided at this size. The standard error is that of two means with
their own variances over seeds; where both numbers come from the same runs, it is that of the mean of their
differences.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


FACTOR = 2.0
LEAST_SEEDS = 3

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "not decided at this size", "not run"


@dataclass(frozen=True)
class Judgement:
    """What came of a comparison: ours minus the other as measured, its standard error, and the verdict."""

    difference: float
    error: float
    verdict: str


def judge(
    ours: Mapping[int, float],
    other: Mapping[int, float] | float,
    *,
    higher: bool,
    margin: float = 0.0,
    paired: bool = False,
) -> Judgement:
    """Judge a comparison.

    Args:
        ours: a number for each seed.
        other: likewise, or one number that is known.
        higher: whether more is better.
        margin: by how much ours may be worse.
        paired: whether the numbers of a seed come from the same run.
    """
    if paired and isinstance(other, Mapping):
        ours = {seed: ours[seed] - other[seed] for seed in ours.keys() & other.keys()}
        other = 0.0
    counts = [len(ours), len(other)] if isinstance(other, Mapping) else [len(ours)]
    if min(counts) == 0:
        return Judgement(math.nan, math.nan, NOT_RUN)
    others = list(other.values()) if isinstance(other, Mapping) else [float(other)]
    difference = statistics.fmean(ours.values()) - statistics.fmean(others)
    if min(counts) < LEAST_SEEDS:
        return Judgement(difference, math.nan, UNDECIDED)
    error = math.hypot(standard_error(list(ours.values())), standard_error(others) if len(counts) > 1 else 0.0)
    advantage = (difference if higher else -difference) + margin
    if advantage > FACTOR * error:
        return Judgement(difference, error, HOLDS)
    return Judgement(difference, error, FAILS if -advantage > FACTOR * error else UNDECIDED)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of values, at least two."""
    return statistics.stdev(values) / math.sqrt(len(values))


def together(verdicts: Sequence[str]) -> str:
    """The verdict on a claim of several comparisons: it holds if all of them do, and fails with any of them."""
    for verdict in (FAILS, NOT_RUN, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return HOLDS
