"""The rule that judges a comparison, and the records that it reads.

Two arms are compared seed by seed: with d the differences of the seeds that both have, the interval is mean(d) ± t
sd(d) / sqrt(n), with the quantile t of Student's distribution for 95 %, and p is that of the t test against 0, or the
margin. The p of the n comparisons of a claim are adjusted by Holm: the smallest is multiplied by n, the next by n - 1,
and so on. A comparison holds if p is at most 5 % and the mean is on the claimed side, does not hold if it is on the
other side, and is otherwise not decided. Fewer than `LEAST_SEEDS` shared seeds are too few.

Seeds do not judge what they do not change: counts of parameters and peaks of memory are exact, and a speed has the
median over turns, with its interval by order statistics and a sign test.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scipy.stats import quantile_test, ttest_1samp

from .arms import ARMS, RATES
from .claims import Claim, Comparison


LEVEL = 0.05
SEEDS, LEAST_SEEDS = 5, 3
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
NOT_RUN = "incomplete"  # without runs, or with too few seeds
EXACT = ("parameters", "bias_parameters", "memory_ratio")
TIMED = "speed_ratio"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """Our number minus the other one: both means, the interval, p (adjusted), the number of seeds, and the verdict."""

    ours: float = math.nan
    other: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = 1.0
    seeds: int = 0
    verdict: str = NOT_RUN

    @property
    def difference(self) -> float:
        """Our mean minus the other one."""
        return self.ours - self.other


class Records:
    """Records of runs; a later record replaces an earlier one with the same arm, seed and kind of identity.

    A run is confirmed if its identity is known (see `running.identity`). Earlier runs decide nothing.
    """

    def __init__(self, records: Iterable[Record]):
        self._of = {(x["arm"], x["seed"], x["identity"] is not None): x for x in records}

    def all(self) -> list[Record]:
        """All records, ordered by arm and seed."""
        return [self._of[key] for key in sorted(self._of)]

    def of(self, arm: str, *, confirmed: bool = True) -> dict[int, Record]:
        """The records of an arm by seed."""
        return {seed: x for (name, seed, known), x in sorted(self._of.items()) if (name, known) == (arm, confirmed)}

    def rate_is_inside(self, arm: str) -> bool:
        """Whether the runs of an arm have the best of the learning rates that were tried, and a lower and a higher one
        were tried; an arm may have no rate.
        """
        rates = {x["rate"] for x in self.of(arm).values()} - {None}
        chosen = f"{getattr(ARMS[arm], 'rate_of', arm)}@"
        searches = (x for name, _, _ in self._of if name.startswith(chosen) for x in self.of(name).values())
        tried = {x["rate"]: x["metrics"]["train"] for x in searches}
        best = min(tried, key=tried.__getitem__, default=None)
        return ARMS[arm].data not in RATES or (best is not None and rates <= {best} and min(tried) < best < max(tried))

    def judge(self, claim: Claim) -> dict[Comparison, Judgement]:
        """Judge the comparisons of a claim by confirmed runs. Those of the paper are adjusted together, and controls
        together. A comparison that is not run counts in the number of comparisons.
        """
        effects = {each: self.effect(each) for each in claim.comparisons}
        for control in (False, True):
            family = [each for each in effects if each.control == control and each.metric not in EXACT]
            smallest = 0.0
            for rank, each in enumerate(sorted(family, key=lambda each: effects[each].p)):
                smallest = max(smallest, min(1.0, effects[each].p * (len(family) - rank)))
                effects[each] = replace(effects[each], p=smallest)
        return {each: replace(x, verdict=_verdict(each, x)) for each, x in effects.items()}

    def effect(self, comparison: Comparison, *, confirmed: bool = True) -> Judgement:
        """Means, interval and p before the adjustment."""
        ours = self._values(comparison.ours, confirmed)
        constant = not isinstance(comparison.other, tuple)
        other = dict.fromkeys(ours, comparison.other) if constant else self._values(comparison.other, confirmed)
        pairs = [(ours[seed], other[seed]) for seed in sorted(ours.keys() & other.keys())]
        if not pairs:
            return Judgement()
        means = [statistics.fmean(values) for values in zip(*pairs)]
        judgement = Judgement(*means, seeds=len(pairs))
        differences = [a - b for a, b in pairs]
        side = comparison.margin * (1 if comparison.higher else -1)
        if comparison.metric in EXACT:
            return replace(judgement, low=judgement.difference, high=judgement.difference, p=0.0)
        if comparison.metric == TIMED:
            turns = self.of(comparison.ours[0], confirmed=confirmed)[0]["metrics"].get("speed_turns")
            return (
                judgement if turns is None else _with(judgement, quantile_test([ratio - means[1] for ratio in turns]))
            )
        if len(pairs) < LEAST_SEEDS:
            return judgement
        p = float(ttest_1samp([each + side for each in differences], 0).pvalue)
        return replace(
            _with(judgement, ttest_1samp(differences, 0)), p=1.0 if math.isnan(p) else p
        )  # all of them are 0

    def _values(self, side: tuple[str, str], confirmed: bool) -> dict[int, float]:
        arm, metric = side
        metrics = {seed: x["metrics"] for seed, x in self.of(arm, confirmed=confirmed).items()}
        return {seed: x[metric] for seed, x in metrics.items() if metric in x}  # earlier runs may lack it

    def verdict(self, claim: Claim) -> str:
        """A claim holds if all comparisons of the paper do, and does not hold if one of them does not."""
        verdicts = [judgement.verdict for each, judgement in self.judge(claim).items() if not each.control]
        return next((x for x in (FAILS, NOT_RUN, UNDECIDED) if x in verdicts), HOLDS)


def _with(judgement: Judgement, test: Any) -> Judgement:
    """Add the interval and p of a test of scipy. Fewer than six turns have no interval of 95 %."""
    low, high = map(float, test.confidence_interval(1 - LEVEL))
    return replace(judgement, low=low, high=high, p=float(test.pvalue))


def _verdict(comparison: Comparison, judgement: Judgement) -> str:
    if math.isnan(judgement.low):
        return NOT_RUN
    good = (judgement.difference if comparison.higher else -judgement.difference) + comparison.margin
    return UNDECIDED if judgement.p > LEVEL or good == 0 else HOLDS if good > 0 else FAILS
