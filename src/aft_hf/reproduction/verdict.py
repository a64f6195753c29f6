"""The rule that judges a comparison, fixed before any run.

Let D be our mean minus the other mean, signed so that positive is better, plus the margin that the claim allows (0 if
ours has to be better). The comparison holds if D exceeds `FACTOR` standard errors of the difference, does not hold if
-D exceeds them, and is otherwise not decided at this size. Fewer than `LEAST_SEEDS` seeds are too few for a verdict.
The standard error is that of two means with separate variances over seeds or, if both numbers come from the same runs,
that of the mean of the paired differences.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


FACTOR = 2.0
LEAST_SEEDS = 3

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided at this size"
TOO_FEW, NOT_RUN = "too few runs", "not run"


@dataclass(frozen=True)
class Judgement:
    """Result of a comparison: our mean minus the other mean, its standard error, and the verdict."""

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
        ours: our number for each seed.
        other: the number to compare with for each seed, or a constant.
        higher: whether a higher number is better.
        margin: how much worse ours may be.
        paired: whether both numbers of a seed come from the same run.
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
        return Judgement(difference, math.nan, TOO_FEW)
    error = math.hypot(standard_error(list(ours.values())), standard_error(others) if len(counts) > 1 else 0.0)
    advantage = (difference if higher else -difference) + margin
    if advantage > FACTOR * error:
        return Judgement(difference, error, HOLDS)
    return Judgement(difference, error, FAILS if -advantage > FACTOR * error else UNDECIDED)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of at least two values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def together(verdicts: Sequence[str]) -> str:
    """Combine verdicts: a claim holds if all of its comparisons hold, and does not hold if one of them does not."""
    for verdict in (FAILS, NOT_RUN, TOO_FEW, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return HOLDS
