"""The recipes in configs/: they can be read, say what they train, and their models are those of the paper."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageClassification, GPT2Config, GPT2LMHeadModel, ViTConfig

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from aft_hf.training.recipe import load_recipe


CONFIGS = Path(__file__).parents[2] / "configs"
# A name that begins with _ is what recipes share.
RECIPES = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.name[0] != "_" and path.parent.name != "accelerate")
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECIPES]


def model_of(recipe):
    """The full-size model of a recipe, without memory for its weights."""
    fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
    with torch.device("meta"):
        if recipe.task == "images":
            sizes = {"image_size": recipe.data.image_size, "num_labels": 1000, **fields}
            if recipe.model["architecture"] == "vit":
                return AutoModelForImageClassification.from_config(ViTConfig(**sizes))
            return AFTForImageClassification(AFTConfig(modality="image", **sizes))
        length = recipe.data.seq_len if recipe.task == "bytes" else 3 * recipe.data.image_size**2
        if recipe.model["architecture"] == "gpt2":
            config = GPT2Config(vocab_size=256, n_positions=length, bos_token_id=None, eos_token_id=None, **fields)
            return GPT2LMHeadModel(config)
        return AFTForCausalLM(AFTConfig(max_position_embeddings=length, **fields))


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_says_what_was_chosen_and_writes_to_a_place_of_its_own(path):
    recipe = load_recipe(path)
    assert len(recipe.notes) > 20
    assert path.read_text().startswith("# ")
    others = {load_recipe(other).output_dir for other in RECIPES if other != path}
    assert recipe.output_dir not in others


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_smoke_run_is_small(path):
    recipe = load_recipe(path, ["data.train=generated"], smoke=True)
    assert recipe.steps <= 40 and recipe.global_batch_size <= 32
    if "pretrained" not in recipe.model:
        assert sum(p.numel() for p in model_of(recipe).parameters()) < 1e6


# Millions of parameters of the paper's Tables 7 and 8, and of DeiT.
IMAGENET = {
    "aft_full_tiny": 6.3,
    "aft_full_small": 22.6,
    "aft_conv_tiny_11_32": 5.4,
    "aft_conv_tiny_11_192": 5.9,
    "aft_conv_small_11_16": 20.3,
    "aft_conv_small_11_384": 22.5,
    "aft_conv_small_15_384": 23.0,
    "deit_tiny": 5.7,
    "deit_small": 22.1,
}


@pytest.mark.parametrize(("name", "millions"), IMAGENET.items(), ids=IMAGENET)
def test_the_models_of_imagenet_have_the_parameters_of_the_paper(name, millions):
    model = model_of(load_recipe(CONFIGS / "imagenet" / f"{name}.yaml"))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("path", [p for p in RECIPES if p.parent.name == "enwik8"], ids=lambda path: path.stem)
def test_the_recipes_of_enwik8_are_the_paper_s(path):
    recipe = load_recipe(path)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (3e-3, 0.5)
    assert (recipe.schedule.name, recipe.global_batch_size, recipe.epochs) == ("inverse_sqrt", 128, 100)
    words = path.stem.split("_")
    depth = next(int(word[1:]) for word in words if word[0] == "l" and word[1:].isdigit())
    width = next(int(word[1:]) for word in words if word[0] == "d" and word[1:].isdigit())
    length = next((int(word[1:]) for word in words if word[0] == "t" and word[1:].isdigit()), 1024)
    model = model_of(recipe)
    assert (model.config.num_hidden_layers, model.config.hidden_size, recipe.data.seq_len) == (depth, width, length)
    if "aft" in words:
        assert model.config.aft_type == words[1] and model.config.hidden_dropout_prob == 0.1
        if words[1] == "local":
            assert model.config.local_window_size == int(words[2])
    else:
        assert model.config.num_attention_heads == {512: 8, 256: 4}[width]


def test_the_recipes_of_cifar10_are_the_paper_s():
    for path in (CONFIGS / "cifar10").glob("aft_*.yaml"):
        recipe = load_recipe(path)
        assert (recipe.optimizer.weight_decay, recipe.global_batch_size, recipe.epochs) == (0.1, 128, 200)
        assert (recipe.data.image_size, recipe.data.flip, recipe.data.brightness_shift) == (32, True, 10)
        unfactorized = path.stem.endswith("unfactorized")
        assert (recipe.model.get("position_bias_dim", 256) is None) == unfactorized


ABLATIONS = {
    "aft_full_tiny_no_query": {"use_query": False},
    "aft_full_tiny_query_relu": {"query_activation": "relu"},
    "aft_full_tiny_query_linear": {"query_activation": "linear"},
    "aft_full_tiny_unfactorized": {"position_bias_dim": None},
    "aft_conv_small_11_384_no_query": {"use_query": False},
    "aft_conv_small_11_384_naive": {"position_bias_reparameterized": False},
    "aft_conv_small_11_384_no_global": {"global_connectivity": False},
    "aft_conv_small_11_384_entropy": {"position_bias_entropy_weight": 0.001},
    "aft_conv_small_11_384_gumbel": {"position_bias_selection": "gumbel", "gumbel_temperature": 0.5},
}


@pytest.mark.parametrize(("name", "change"), ABLATIONS.items(), ids=ABLATIONS)
def test_an_ablation_differs_from_its_model_in_what_it_is_named_for(name, change):
    recipe = load_recipe(CONFIGS / "imagenet" / f"ablation_{name}.yaml").model_dump()
    base = name.split("_no_")[0].split("_query")[0].split("_unf")[0].split("_naive")[0]
    base = load_recipe(CONFIGS / "imagenet" / f"{base.split('_entropy')[0].split('_gumbel')[0]}.yaml").model_dump()
    assert recipe["model"] == base["model"] | change
    assert {k: v for k, v in recipe.items() if k not in ("model", "output_dir")} == {
        k: v for k, v in base.items() if k not in ("model", "output_dir")
    }
    model_of(load_recipe(CONFIGS / "imagenet" / f"ablation_{name}.yaml"))
