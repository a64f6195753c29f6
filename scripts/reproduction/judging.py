"""The rule that judges a comparison, fixed before any run, and the records that it reads.

Two arms are compared seed by seed: with d the differences of the seeds that both have, the interval is mean(d) ± t
sd(d) / sqrt(n), with the quantile t of Student's distribution for 95 %. A comparison holds if the whole interval is on
the claimed side, does not hold if it is on the other side, and is otherwise not decided. Fewer than `LEAST_SEEDS`
shared seeds are too few. Seeds do not judge what they do not change: a count of parameters is exact, and the interval
of a speed or of memory is that of repeated turns in one process.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import t as student

from .claims import Claim, Comparison


CONFIDENCE = 0.95
SEEDS, LEAST_SEEDS = 5, 3
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
TOO_FEW, NOT_RUN = "too few runs", "not run"
EXACT, TIMED = ("parameters", "bias_parameters"), ("speed_ratio", "memory_ratio")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """Our number minus the other one: both means, the interval of the difference, and the verdict.

    `confirmed` is whether the identity of all runs is known (see `running.identity`).
    """

    ours: float = math.nan
    other: float = math.nan
    low: float = math.nan
    high: float = math.nan
    verdict: str = NOT_RUN
    confirmed: bool = True

    @property
    def difference(self) -> float:
        """Our mean minus the other one."""
        return self.ours - self.other


class Records:
    """Records of runs; a later record replaces an earlier one with the same arm, seed and kind of identity."""

    def __init__(self, records: Iterable[Record]):
        self._of = {(x["arm"], x["seed"], x["identity"] is not None): x for x in records}

    def all(self) -> list[Record]:
        """All records, ordered by arm and seed."""
        return [self._of[key] for key in sorted(self._of)]

    def of(self, arm: str, *, confirmed: bool = True) -> dict[int, Record]:
        """The records of an arm by seed, of runs whose identity is known, or of earlier ones."""
        return {seed: x for (name, seed, known), x in sorted(self._of.items()) if (name, known) == (arm, confirmed)}

    def judge(self, comparison: Comparison) -> Judgement:
        """Judge a comparison by the runs whose identity is known or, if there are none, by earlier ones."""
        found = [self._judged(comparison, known) for known in (True, False)]
        return next((x for x in found if x.verdict not in (NOT_RUN, TOO_FEW)), found[0])

    def _judged(self, comparison: Comparison, known: bool) -> Judgement:
        ours, constant = self._values(comparison.ours, known), not isinstance(comparison.other, tuple)
        other = dict.fromkeys(ours, comparison.other) if constant else self._values(comparison.other, known)
        seeds = sorted(ours.keys() & other.keys())
        if not seeds:
            return Judgement(confirmed=known)
        pairs = [(ours[seed], other[seed]) for seed in seeds]
        means = [statistics.fmean(values) for values in zip(*pairs)]
        if comparison.metric in TIMED:
            runs = self.of(comparison.ours[0], confirmed=known).values()
            ends = [[x["metrics"].get(f"{comparison.metric}_{end}") for x in runs] for end in ("low", "high")]
            repeated = [x["metrics"][comparison.metric] for x in runs]
            low, high = (end(x or y for x, y in zip(xs, repeated)) for end, xs in zip((min, max), ends))
            low, high = low - means[1], high - means[1]
        elif comparison.metric in EXACT:
            low = high = means[0] - means[1]
        elif len(seeds) < LEAST_SEEDS:
            return Judgement(*means, verdict=TOO_FEW, confirmed=known)
        else:
            low, high = interval([a - b for a, b in pairs])
        ends = sorted((low, high) if comparison.higher else (-low, -high))
        verdict = HOLDS if ends[0] + comparison.margin > 0 else FAILS if ends[1] + comparison.margin < 0 else UNDECIDED
        return Judgement(*means, low, high, verdict, known)

    def _values(self, side: tuple[str, str], known: bool) -> dict[int, float]:
        arm, metric = side
        return {seed: x["metrics"][metric] for seed, x in self.of(arm, confirmed=known).items()}

    def verdict(self, claim: Claim) -> str:
        """A claim holds if all judged comparisons do, and does not hold if one of them does not."""
        verdicts = [self.judge(each).verdict for each in claim.comparisons if each.judged]
        return next((x for x in (FAILS, NOT_RUN, TOO_FEW, UNDECIDED) if x in verdicts), HOLDS)


def interval(differences: list[float]) -> tuple[float, float]:
    """The interval of the mean of paired differences by Student's t."""
    count, mean = len(differences), statistics.fmean(differences)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    half = quantile * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half
