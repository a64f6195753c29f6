"""Tests of the claims as data: claims are complete, their arms exist, and recipes are valid at every scale."""

import re
from pathlib import Path

import pytest

from aft_hf.reproduction.arms import ARMS, SCALED, Speed, Training
from aft_hf.reproduction.claims import CLAIMS
from aft_hf.reproduction.running import RECIPES, Settings, recipe_of, with_starts
from aft_hf.reproduction.verdict import HOLDS


# The metrics of all runs, of runs with a measure, and of speed measurements.
METRICS = {"test", "train", "parameters", "seconds"}
MEASURED = {
    "lengths": {"test_at_1x", "test_at_2x", "test_at_4x", "test_at_8x"},
    "image_sizes": {"test_at_40_px", "test_at_48_px", "test_at_56_px"},
    "kernels": {"kernel_use"},
    "position_biases": {"bias_parameters"},
}
SPEED = {"speed_ratio", "memory_ratio"}

TRAININGS = [name for name, arm in ARMS.items() if isinstance(arm, Training)]
GENERATED = {"text": "generated", "images": "generated"}


def test_claims_have_numbers_and_every_arm_has_a_claim():
    assert list(CLAIMS) == list(range(1, 19))
    assert {arm for claim in CLAIMS.values() for arm in with_starts(claim.arms)} == set(ARMS)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: f"claim {claim.number}")
def test_a_claim_judges_something_and_shows_every_number_that_it_judges(claim):
    assert any(comparison.judged for comparison in claim.comparisons)
    shown = {(row.arm, row.metric) for row in claim.rows}
    for name, metric in shown:
        arm = ARMS[name]
        known = SPEED if isinstance(arm, Speed) else METRICS.union(*(MEASURED[each] for each in arm.measures))
        assert metric in known, name
    for comparison in claim.comparisons:
        sides = [side for side in (comparison.ours, comparison.other) if isinstance(side, tuple)]
        assert shown.issuperset(sides), comparison.says


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: f"claim {claim.number}")
def test_the_papers_own_numbers_agree_with_every_comparison_that_is_judged(claim):
    from aft_hf.reproduction.report import papers_difference

    for comparison in claim.comparisons:
        difference = papers_difference(claim, comparison)
        if comparison.judged and difference is not None:
            advantage = difference if comparison.higher else -difference
            assert advantage + comparison.margin > 0, f"{comparison.says}: {difference}, not {HOLDS}"


@pytest.mark.parametrize("name", TRAININGS)
def test_the_recipe_of_an_arm_is_valid_at_every_size(name, tmp_path):
    small = recipe_of(name, 1, Settings(tmp_path, **GENERATED))
    large = recipe_of(name, 1, Settings(tmp_path, scale=4, **GENERATED))
    smoke = recipe_of(name, 1, Settings(tmp_path, smoke=True, **GENERATED))
    assert small.seed == 1 and large.steps == 4 * small.steps and smoke.steps == 4
    if "hidden_size" in small.model:
        assert large.model["hidden_size"] == 4 * small.model["hidden_size"]
    assert large.data.image_size == small.data.image_size if small.task != "bytes" else True


@pytest.mark.parametrize("name", [name for name in TRAININGS if name.startswith("characters")])
def test_models_of_characters_have_equal_budgets(name, tmp_path):
    recipe = recipe_of(name, 0, Settings(tmp_path, **GENERATED))
    # The first two are compared only with each other; the third is twice as wide and has half the steps.
    steps = 250 if name in ("characters-alibi", "characters-bloom", "characters-wide-short") else 500
    assert (recipe.steps, recipe.data.seq_len * recipe.global_batch_size) == (steps, 256 * 32)


def test_every_recipe_has_the_sizes_that_scale_and_is_used():
    recipes = {path.stem for path in RECIPES.glob("[!_]*.yaml")}
    assert recipes == set(SCALED) == {ARMS[name].recipe for name in TRAININGS}


def test_data_that_are_missing_are_named(tmp_path):
    with pytest.raises(ValueError, match="--text"):
        recipe_of("characters", 0, Settings(tmp_path))
    with pytest.raises(ValueError, match="--images"):
        recipe_of("conv", 0, Settings(tmp_path, text="generated"))


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if isinstance(arm, Speed)])
def test_both_sides_of_a_speed_arm_have_the_same_width_and_depth(name):
    arm = ARMS[name]
    for field in ("hidden_size", "num_hidden_layers"):
        assert arm.ours[field] == arm.peer[field]


def test_recipes_are_part_of_the_package():
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert re.search(r"^aft_hf\.reproduction = recipes/\*\.yaml$", setup, re.MULTILINE)
