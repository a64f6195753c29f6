"""Tests of the claims and arms: what is compared has equal budgets, and what confounded a claim is controlled."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.reproduction.arms import ARMS, PAIRS, RECALLS, SEARCH_SHARES, SPEEDS, TRAININGS
from scripts.reproduction.claims import CLAIMS, ORDER, SECTIONS
from scripts.reproduction.measures import MEASURES
from scripts.reproduction.running import SEARCH_SEED, Run, Runner


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path, text="generated", images="generated")


def pairs(name, *, control):
    """(ours, other) of the comparisons of two arms' test scores of a claim."""
    sides = [(each.ours, each.other) for each in SECTIONS[name].comparisons if each.control == control]
    return [(a[0], b[0]) for a, b in sides if isinstance(b, tuple) and a[1] == b[1] == "test"]


def test_claims_name_arms_that_exist_and_every_arm_is_used():
    used = {arm for claim in SECTIONS.values() for arm in claim.arms}
    starts = {arm.start for arm in TRAININGS.values() if arm.start}
    assert used | starts == set(ARMS) and sorted(ORDER) == sorted(SECTIONS)
    assert {measure for arm in TRAININGS.values() for measure in arm.measures} <= set(MEASURES)


def test_the_claims_that_count_are_those_of_the_paper():
    for claim in CLAIMS.values():
        assert claim.name.isdigit() and claim.where.startswith(("Table", "Section", "Figure"))
        assert any(not each.control for each in claim.comparisons)
    assert not any(word in claim.says for claim in CLAIMS.values() for word in ("equal size", "stands beside"))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: f"claim {claim.name}")
def test_the_papers_own_numbers_agree_with_every_comparison_of_the_paper(claim):
    for each in claim.comparisons:
        if each.paper is not None and not each.control:
            ours, other = each.paper
            assert (ours - other if each.higher else other - ours) + each.margin > 0, each.says


@pytest.mark.parametrize("name", TRAININGS)
def test_the_recipe_of_an_arm_is_valid(name, runner):
    recipe = runner.recipe(Run(name, 1, 1e-3))
    short = runner.recipe(Run(name, SEARCH_SEED, 1e-3))
    assert (
        recipe.seed == 1
        and recipe.optimizer.learning_rate == 1e-3
        and short.steps == recipe.steps // SEARCH_SHARES[TRAININGS[name].data]
    )
    assert recipe.schedule.name == "cosine"  # which ends
    assert runner.digest(Run(name, 1, 1e-3)) != runner.digest(Run(name, 2, 1e-3))


@pytest.mark.parametrize("name", SECTIONS)
def test_compared_arms_see_equally_many_tokens_or_images(name, runner):
    def samples(arm):
        recipe = runner.recipe(Run(arm))
        length = getattr(recipe.data, "seq_len", 1)
        return recipe.steps * recipe.global_batch_size * length

    for ours, other in pairs(name, control=False):
        assert samples(ours) == samples(other), (ours, other)


def test_claim_6_is_judged_at_equal_steps_as_in_the_paper_beside_equal_operations(runner):
    def operations(name):
        recipe = runner.recipe(Run(name))
        fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("aft", vocab_size=256, **fields))
        weights = sum(x.numel() for key, x in model.named_parameters() if ".layers." in key and "position" not in key)
        return weights * recipe.steps

    judged, controls = pairs("6", control=False), pairs("6", control=True)
    assert len(judged) == len(controls) == 2
    for ours, other in judged:
        assert TRAININGS[ours].steps == TRAININGS[other].steps
        assert 2 * operations(ours) == pytest.approx(operations(other), rel=0.02)
    for ours, other in controls:
        assert operations(ours) == pytest.approx(operations(other), rel=0.02)


def test_models_for_associative_recall_have_similar_sizes_and_share_a_learning_rate_over_pairs():
    assert all(RECALLS[arm.rate_of].model == arm.model for arm in RECALLS.values())
    assert len({arm.rate_of for arm in RECALLS.values()}) * len(PAIRS) == len(RECALLS)
    assert {(arm.model["hidden_size"], arm.model["num_hidden_layers"]) for arm in RECALLS.values()} == {(64, 2)}


def test_both_aft_convs_of_claim_13_learn_their_biases_equally_fast(runner):
    new, long, converted = (TRAININGS[name] for name in ("conv-new", "conv-new-long", "conv-of-vit"))
    assert new.model["position_bias_multiplier"] == converted.convert["position_bias_multiplier"]
    scales = {
        runner.recipe(Run(name)).optimizer.position_bias_scale for name in ("conv-new", "conv-new-long", "conv-of-vit")
    }
    assert scales == {1.0}
    # In all, the converted model has the steps of its ViT and its own: as many as the controls, but not its ViT.
    assert long.steps == converted.steps + TRAININGS["vit"].steps
    continued = TRAININGS["vit-continued"]
    assert continued.start == converted.start == "vit" and continued.steps == converted.steps
    assert pairs("13", control=False) == [("conv-of-vit", "conv-new"), ("conv-of-vit", "vit")]
    assert pairs("13", control=True) == [("conv-of-vit", "conv-new-long"), ("conv-of-vit", "vit-continued")]


def test_both_sides_of_a_speed_arm_have_the_same_width_and_depth():
    assert all(
        arm.ours[key] == arm.peer[key] for arm in SPEEDS.values() for key in ("hidden_size", "num_hidden_layers")
    )
