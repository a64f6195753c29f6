"""Tests of the rule that judges a comparison, on numbers with known means and standard errors."""

import math

import pytest

from aft_hf.reproduction.verdict import FAILS, HOLDS, NOT_RUN, TOO_FEW, UNDECIDED, judge, together


# Mean 2, standard deviation 1, standard error 1 / sqrt(3).
SPREAD = {0: 1.0, 1: 2.0, 2: 3.0}
# Standard error of the difference of two such means.
ERROR = math.sqrt(2 / 3)


def shifted(by: float) -> dict[int, float]:
    return {seed: value + by for seed, value in SPREAD.items()}


@pytest.mark.parametrize(
    ("by", "verdict"),
    [(2.01 * ERROR, HOLDS), (1.99 * ERROR, UNDECIDED), (-1.99 * ERROR, UNDECIDED), (-2.01 * ERROR, FAILS)],
)
@pytest.mark.parametrize("higher", [True, False])
def test_two_standard_errors_decide_in_the_direction_of_the_claim(by, verdict, higher):
    by = by if higher else -by
    judgement = judge(shifted(by), SPREAD, higher=higher)
    assert judgement.verdict == verdict
    assert judgement.difference == pytest.approx(by) and judgement.error == pytest.approx(ERROR)


def test_a_margin_moves_the_place_where_the_difference_counts_from():
    assert judge(shifted(-0.5), SPREAD, higher=True, margin=0.5 + 2.01 * ERROR).verdict == HOLDS
    assert judge(shifted(0.5), SPREAD, higher=False, margin=0.5 + 1.99 * ERROR).verdict == UNDECIDED
    assert judge(shifted(0.5 + 2.01 * ERROR), SPREAD, higher=False, margin=0.5).verdict == FAILS


def test_numbers_of_one_run_are_compared_seed_by_seed():
    ours = {0: 1.1, 1: 2.2, 2: 3.3}  # differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3)
    assert judge(ours, SPREAD, higher=True).verdict == UNDECIDED
    judgement = judge(ours, SPREAD, higher=True, paired=True)
    assert judgement.verdict == HOLDS and judgement.error == pytest.approx(0.1 / math.sqrt(3))
    assert judge(ours, SPREAD, higher=False, paired=True).verdict == FAILS


def test_a_number_that_is_known_has_no_error_of_its_own():
    assert judge(SPREAD, 2 - 2.01 / math.sqrt(3), higher=True).verdict == HOLDS
    assert judge(SPREAD, 2 - 1.99 / math.sqrt(3), higher=True).verdict == UNDECIDED


def test_equal_numbers_decide_nothing_and_exact_ones_are_decided_by_their_order():
    same = dict.fromkeys(range(3), 5.0)
    assert judge(same, same, higher=True).verdict == UNDECIDED
    assert judge(same, dict.fromkeys(range(3), 6.0), higher=False).verdict == HOLDS


def test_too_few_seeds_decide_nothing_and_no_seed_is_not_a_run():
    one = judge({0: 9.0}, SPREAD, higher=True)
    assert one.verdict == TOO_FEW and one.difference == 7.0 and math.isnan(one.error)
    assert judge({}, SPREAD, higher=True).verdict == NOT_RUN
    assert judge(SPREAD, {}, higher=True, paired=True).verdict == NOT_RUN


def test_a_claim_holds_if_all_comparisons_do_and_fails_with_any():
    assert together([HOLDS, HOLDS]) == HOLDS
    assert together([HOLDS, UNDECIDED]) == UNDECIDED
    assert together([HOLDS, UNDECIDED, FAILS, NOT_RUN]) == FAILS
    assert together([HOLDS, UNDECIDED, TOO_FEW]) == TOO_FEW
    assert together([HOLDS, UNDECIDED, TOO_FEW, NOT_RUN]) == NOT_RUN
