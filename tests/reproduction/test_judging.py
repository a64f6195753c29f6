"""Tests of the rule that judges a comparison, on numbers with known intervals."""

import math

import pytest

from scripts.reproduction.claims import Claim, Comparison
from scripts.reproduction.judging import FAILS, HOLDS, NOT_RUN, TOO_FEW, UNDECIDED, Records, interval


def made_up(arm, seed, identity="known", **metrics):
    return {"arm": arm, "seed": seed, "identity": identity, "metrics": metrics}


def records(identity="known", **arms):
    """Records with the test scores of each arm by seed."""
    return [made_up(arm, seed, identity, test=x) for arm, scores in arms.items() for seed, x in scores.items()]


def judge(found, ours="a", other="b", metric="test", **options):
    sides = (ours, metric), (other, metric) if isinstance(other, str) else other
    return Records(found).judge(Comparison("", *sides, **options))


# Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3). The quantile of t with 2 degrees is 4.303.
A, B = {0: 1.1, 1: 2.2, 2: 3.3}, {0: 1.0, 1: 2.0, 2: 3.0}
HALF = 4.3027 * 0.1 / math.sqrt(3)


def test_the_interval_is_that_of_students_t_over_the_differences_of_shared_seeds():
    assert interval([0.1, 0.2, 0.3]) == pytest.approx((0.2 - HALF, 0.2 + HALF), abs=1e-4)
    found = judge(records(a=A | {7: 100.0}, b=B | {8: -100.0}))  # seeds that only one arm has do not count
    assert (found.difference, found.low, found.high) == pytest.approx((0.2, 0.2 - HALF, 0.2 + HALF), abs=1e-4)
    assert found.verdict == UNDECIDED  # two standard errors, 0.115, would have decided


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize(("by", "verdict"), [(0.1, HOLDS), (-0.6, FAILS), (-0.2, UNDECIDED)])
def test_the_whole_interval_decides_in_the_direction_of_the_claim(higher, by, verdict):
    sign = 1 if higher else -1
    shifted = {seed: B[seed] + sign * (A[seed] - B[seed] + by) for seed in A}
    assert judge(records(a=shifted, b=B), higher=higher).verdict == verdict


def test_a_margin_is_added_in_favor_of_the_claim():
    assert judge(records(a=A, b=B), higher=True, margin=0.1).verdict == HOLDS
    assert judge(records(a=A, b=B), higher=False, margin=0.1).verdict == UNDECIDED


def test_too_few_seeds_decide_nothing_and_no_seed_is_not_a_run():
    assert judge(records(a=A, b={0: 1.0, 1: 1.0})).verdict == TOO_FEW
    assert judge(records(a=A)).verdict == NOT_RUN
    assert judge(records(a=A, b={5: 1.0, 6: 1.0, 7: 1.0})).verdict == NOT_RUN  # none shared


@pytest.mark.parametrize(("low", "verdict"), [(1.01, HOLDS), (0.99, UNDECIDED)])
def test_a_speed_has_the_interval_of_its_turns(low, verdict):
    run = made_up("a", 0, speed_ratio=1.1, speed_ratio_low=low, speed_ratio_high=1.2)
    found = judge([run], other=1.0, metric="speed_ratio", higher=True)
    assert found.verdict == verdict and found.high == pytest.approx(0.2)


def test_runs_of_unknown_identity_count_only_where_no_others_do_and_are_marked():
    earlier = records(None, a={0: 9.0, 1: 9.1, 2: 9.2}, b=B)
    assert not judge(earlier, higher=True).confirmed
    found = judge([*earlier, *records(a=B, b=A)], higher=True)
    assert found.confirmed and found.verdict == UNDECIDED and found.difference == pytest.approx(-0.2)
    assert judge([*earlier, *records(a=A)], higher=True).verdict == HOLDS  # kinds are not mixed


def test_a_claim_holds_if_all_judged_comparisons_do_and_fails_with_any():
    def verdict(*names):
        sides = {HOLDS: ("b", "c"), FAILS: ("c", "b"), NOT_RUN: ("b", "d"), UNDECIDED: ("b", "b")}
        each = tuple(Comparison(name, *((x, "test") for x in sides[name])) for name in names)
        each += (Comparison("", ("c", "test"), ("b", "test"), judged=False),)
        return Records(records(b=B, c={seed: 9.0 + seed for seed in B})).verdict(Claim(1, "", "", each))

    assert verdict(HOLDS, HOLDS) == HOLDS
    assert verdict(HOLDS, UNDECIDED) == UNDECIDED
    assert verdict(HOLDS, NOT_RUN) == NOT_RUN
    assert verdict(NOT_RUN, FAILS) == FAILS
