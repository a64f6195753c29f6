"""Tests of the rule that judges a comparison, on numbers with known intervals."""

import math

import pytest

from scripts.reproduction.claims import Claim, Comparison
from scripts.reproduction.judging import FAILS, HOLDS, NOT_RUN, UNDECIDED, Records


# scipy warns of differences that are equal, which made-up numbers are.
pytestmark = pytest.mark.filterwarnings("ignore:Precision loss")


def made_up(arm, seed, identity="known", **metrics):
    return {"arm": arm, "seed": seed, "identity": identity, "metrics": metrics}


def records(identity="known", **arms):
    """Records with the test scores of each arm by seed."""
    return [made_up(arm, seed, identity, test=x) for arm, scores in arms.items() for seed, x in scores.items()]


def judge(actual, ours="a", other="b", metric="test", **options):
    sides = (ours, metric), (other, metric) if isinstance(other, str) else other
    claim = Claim("1", "", comparisons=(each := Comparison("", *sides, **options),))
    return Records(actual).judge(claim)[each]


# Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3). The quantile of t with 2 degrees is 4.303.
A, B = {0: 1.1, 1: 2.2, 2: 3.3}, {0: 1.0, 1: 2.0, 2: 3.0}
HALF = 4.3027 * 0.1 / math.sqrt(3)


def test_the_interval_is_that_of_students_t_over_the_differences_of_shared_seeds():
    actual = judge(records(a=A | {7: 100.0}, b=B | {8: -100.0}))  # seeds that only one arm has do not count
    assert (actual.difference, actual.low, actual.high) == pytest.approx((0.2, 0.2 - HALF, 0.2 + HALF), abs=1e-4)
    assert actual.verdict == UNDECIDED  # two standard errors, 0.115, would have decided


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(("by", "verdict"), [(0.1, HOLDS), (-0.6, FAILS), (-0.2, UNDECIDED)])
def test_the_whole_interval_decides_in_the_direction_of_the_claim(higher, by, verdict):
    sign = 1 if higher else -1
    shifted = {seed: B[seed] + sign * (A[seed] - B[seed] + by) for seed in A}
    assert judge(records(a=shifted, b=B), higher=higher).verdict == verdict


def test_a_margin_is_added_in_favor_of_the_claim():
    assert judge(records(a=A, b=B), higher=True, margin=0.1).verdict == HOLDS
    assert judge(records(a=A, b=B), higher=False, margin=0.1).verdict == UNDECIDED


def test_p_is_that_of_the_paired_t_test():
    assert judge(records(a=A, b=B)).p == pytest.approx(0.07418, abs=1e-5)  # t = 2 sqrt(3), 2 degrees
    assert judge(records(a={seed: x + 0.5 for seed, x in B.items()}, b=B)).p == 0.0
    same = judge(records(a=B, b=B))
    assert (same.p, same.verdict) == (1.0, UNDECIDED)


def test_too_few_seeds_decide_nothing_and_no_seed_is_not_a_run():
    for b, seeds in ({0: 1.0, 1: 1.0}, 2), ({}, 0), ({5: 1.0, 6: 1.0, 7: 1.0}, 0):  # none shared
        actual = judge(records(a=A, b=b))
        assert (actual.verdict, actual.seeds) == (NOT_RUN, seeds)


def test_a_speed_has_the_interval_and_the_sign_test_of_its_turns():
    turns = [1.01, 1.02, 1.03, 1.1, 1.1, 1.1, 1.2, 1.3, 1.4]
    run = made_up("a", 0, speed_ratio=1.1, speed_turns=turns)
    actual = judge([run], other=1.0, metric="speed_ratio", higher=True)
    assert (actual.low, actual.high, actual.p) == pytest.approx((0.02, 0.3, 2 / 2**9)) and actual.verdict == HOLDS
    slower = made_up("a", 0, speed_ratio=1.1, speed_turns=[0.9, 0.9, *turns[2:]])
    assert judge([slower], other=1.0, metric="speed_ratio", higher=True).verdict == UNDECIDED
    earlier = made_up("a", 0, speed_ratio=1.1)  # without its turns
    assert judge([earlier], other=1.0, metric="speed_ratio", higher=True).verdict == NOT_RUN
    few = made_up("a", 0, speed_ratio=1.1, speed_turns=turns[:5])  # no interval of 95 %
    assert judge([few], other=1.0, metric="speed_ratio", higher=True).verdict == NOT_RUN


def test_peaks_of_memory_and_counts_are_exact():
    run = [made_up("a", 0, memory_ratio=0.9, parameters=10), made_up("b", 0, parameters=10)]
    assert judge(run, other=1.0, metric="memory_ratio").verdict == HOLDS
    assert judge(run, metric="parameters").verdict == UNDECIDED


def test_runs_of_unknown_identity_decide_nothing():
    earlier = records(None, a={0: 9.0, 1: 9.1, 2: 9.2}, b=B)
    assert judge(earlier, higher=True).verdict == NOT_RUN
    assert judge([*earlier, *records(a=A)], higher=True).verdict == NOT_RUN  # kinds are not mixed
    actual = Records(earlier).effect(Comparison("", ("a", "test"), ("b", "test")), confirmed=False)
    assert actual.ours == pytest.approx(9.1) and actual.seeds == 3


def claim_of(*names, control=()):
    """A claim on arms whose comparisons have known verdicts, without an adjustment."""
    sides = {HOLDS: ("b", "c"), FAILS: ("c", "b"), NOT_RUN: ("b", "d"), UNDECIDED: ("b", "b")}
    each = [Comparison(f"{i}", *((x, "test") for x in sides[name])) for i, name in enumerate(names)]
    each += [Comparison(f"control {i}", *((x, "test") for x in sides[x]), control=True) for i, x in enumerate(control)]
    return Claim("1", "", comparisons=tuple(each))


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        ((HOLDS, HOLDS), HOLDS),
        ((HOLDS, UNDECIDED), UNDECIDED),
        ((HOLDS, NOT_RUN), NOT_RUN),
        ((NOT_RUN, FAILS), FAILS),
    ],
)
@pytest.mark.parametrize("control", [(), (HOLDS,), (FAILS,), (NOT_RUN,)])
def test_a_claim_holds_if_all_comparisons_of_the_paper_do_and_controls_do_not_count(names, control, verdict):
    actual = Records(records(b=B, c={seed: 9.0 + seed for seed in B}))
    assert actual.verdict(claim_of(*names, control=control)) == verdict


def test_the_p_of_the_comparisons_of_a_claim_are_adjusted_by_holm():
    """Of three comparisons, with p of 0.02, 0.024 and 0.5, none is decided: 3 x 0.02 > 0.05."""

    def shifted(p):  # differences m - 0.1, m, m + 0.1 with this p
        from scipy.stats import t

        mean = t.isf(p / 2, 2) * 0.1 / math.sqrt(3)
        return {seed: B[seed] - mean + 0.1 * (seed - 1) for seed in B}

    def judged(*ps, control=False):
        arms = {f"x{i}": shifted(p) for i, p in enumerate(ps)}
        each = tuple(Comparison(arm, (arm, "test"), ("b", "test"), control=control) for arm in arms)
        return Records(records(b=B, **arms)).judge(Claim("1", "", comparisons=each))

    actual = list(judged(0.02, 0.5, 0.024).values())
    assert [x.p for x in actual] == pytest.approx([0.06, 0.5, 0.06]) and {x.verdict for x in actual} == {UNDECIDED}
    actual = list(judged(0.04, 0.01, 0.024).values())
    assert [x.p for x in actual] == pytest.approx([0.048, 0.03, 0.048]) and {x.verdict for x in actual} == {HOLDS}
    # One that is not run counts, so that the adjustment does not depend on what was run.
    both = Claim("1", "", comparisons=tuple(Comparison(x, (x, "test"), ("b", "test")) for x in ("a", "d")))
    actual = Records(records(b=B, a=shifted(0.03))).judge(both)
    assert actual[both.comparisons[0]].p == pytest.approx(0.06)


def test_a_rate_is_inside_the_grid_if_it_is_the_best_and_a_lower_and_a_higher_one_were_tried():
    def tried(*rates, best, used=None, arm="conv", searched="conv"):
        losses = {rate: abs(rate - best) for rate in rates}
        searches = [made_up(f"{searched}@{rate:g}", 1000, train=losses[rate]) | {"rate": rate} for rate in rates]
        return Records([*searches, made_up(arm, 0) | {"rate": used or best}]).rate_is_inside(arm)

    assert tried(1e-3, 2e-3, 4e-3, best=2e-3)
    assert not tried(1e-3, 2e-3, 4e-3, best=4e-3) and not tried(1e-3, 2e-3, 4e-3, best=1e-3)
    assert not tried(1e-3, 2e-3, 4e-3, 8e-3, best=4e-3, used=2e-3)  # chosen before the grid was extended
    assert tried(1e-3, 2e-3, 4e-3, best=2e-3, arm="recall-aft-conv-2", searched="recall-aft-conv-4")
