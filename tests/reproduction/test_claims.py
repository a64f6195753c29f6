"""Tests of the claims and arms: what is compared has equal budgets, and what confounded a claim is controlled."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.reproduction.arms import ARMS, SPEEDS, TRAININGS
from scripts.reproduction.claims import CLAIMS, ORDER
from scripts.reproduction.measures import MEASURES
from scripts.reproduction.running import SEARCH_SEED, Run, Runner


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path, text="generated", images="generated")


def pairs(number):
    """(ours, other, judged) of the comparisons of two arms' test scores of a claim."""
    sides = [(each.ours, each.other, each.judged) for each in CLAIMS[number].comparisons]
    return [(a[0], b[0], judged) for a, b, judged in sides if isinstance(b, tuple) and a[1] == b[1] == "test"]


def test_claims_name_arms_that_exist_and_every_arm_is_used():
    used = {arm for claim in CLAIMS.values() for arm in claim.arms}
    starts = {arm.start for arm in TRAININGS.values() if arm.start}
    assert used | starts == set(ARMS) and sorted(ORDER) == sorted(CLAIMS)
    assert {measure for arm in TRAININGS.values() for measure in arm.measures} <= set(MEASURES)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: f"claim {claim.number}")
def test_the_papers_own_numbers_agree_with_every_comparison_of_the_paper(claim):
    for each in claim.comparisons:
        if each.paper is not None and not each.control:
            ours, other = each.paper
            assert (ours - other if each.higher else other - ours) + each.margin > 0, each.says


@pytest.mark.parametrize("name", TRAININGS)
def test_the_recipe_of_an_arm_is_valid(name, runner):
    recipe = runner.recipe(Run(name, 1, 1e-3))
    short = runner.recipe(Run(name, SEARCH_SEED, 1e-3))
    assert recipe.seed == 1 and recipe.optimizer.learning_rate == 1e-3 and short.steps * 4 == recipe.steps
    assert recipe.schedule.name == "cosine"  # which ends
    assert runner.digest(Run(name, 1, 1e-3)) != runner.digest(Run(name, 2, 1e-3))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: f"claim {claim.number}")
def test_compared_arms_see_equally_many_tokens_or_images(claim, runner):
    def samples(name):
        recipe = runner.recipe(Run(name))
        length = getattr(recipe.data, "seq_len", 1)
        return recipe.steps * recipe.global_batch_size * length

    for ours, other, judged in pairs(claim.number):
        if judged and claim.number not in (6, 13):
            assert samples(ours) == samples(other), (ours, other)


def test_claim_6_is_judged_at_equal_operations(runner):
    """The wide models have twice the operations of the deep ones, and half the steps."""

    def operations(name):
        recipe = runner.recipe(Run(name))
        fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("aft", vocab_size=256, **fields))
        weights = sum(x.numel() for key, x in model.named_parameters() if ".layers." in key and "position" not in key)
        return weights * recipe.steps

    judged = [(ours, other) for ours, other, judged in pairs(6) if judged]
    assert len(judged) == 2
    for ours, other in judged:
        assert operations(ours) == pytest.approx(operations(other), rel=0.02)


def test_both_aft_convs_of_claim_13_learn_their_biases_equally_fast(runner):
    new, long, converted = (TRAININGS[name] for name in ("conv-new", "conv-new-long", "conv-of-vit"))
    assert new.model["position_bias_multiplier"] == converted.convert["position_bias_multiplier"]
    scales = {
        runner.recipe(Run(name)).optimizer.position_bias_scale for name in ("conv-new", "conv-new-long", "conv-of-vit")
    }
    assert scales == {1.0}
    # In all, the converted model has the steps of its ViT and its own: as many as the controls.
    assert long.steps == converted.steps + TRAININGS["vit"].steps
    continued = TRAININGS["vit-continued"]
    assert continued.start == converted.start == "vit" and continued.steps == converted.steps
    assert {("conv-of-vit", name, True) for name in ("conv-new", "conv-new-long", "vit-continued")} == set(pairs(13))


def test_both_sides_of_a_speed_arm_have_the_same_width_and_depth():
    assert all(
        arm.ours[key] == arm.peer[key] for arm in SPEEDS.values() for key in ("hidden_size", "num_hidden_layers")
    )
