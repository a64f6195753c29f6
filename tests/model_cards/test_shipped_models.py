"""The models in model_cards load right after the install, are what their cards say, and can be published."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from aft_hf.loading import weights_digest
from aft_hf.publishing import publish
from aft_hf.publishing.card import card_problems
from aft_hf.training.recipe import load_recipe


ROOT = Path(__file__).parents[2]
CARDS = ROOT / "model_cards"
FOLDERS = sorted(path.parent for path in CARDS.glob("*/config.json"))
AFTS = [path for path in FOLDERS if json.loads((path / "config.json").read_text())["model_type"] == "aft"]
CLASSIFIER, WRITER = CARDS / "cifar10-aft-conv", CARDS / "shakespeare-bytes"


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.name)
def test_a_model_is_small_and_its_card_is_complete(path):
    assert sum(each.stat().st_size for each in path.iterdir()) <= 8e6
    assert not list(path.glob("*.py")) and card_problems((path / "README.md").read_text(), path) == []
    card = ModelCard.load(path / "README.md")
    assert card.data.datasets or "scikit-learn" in card.text or "public domain" in card.text
    assert all(weight.isfinite().all() for weight in load_file(path / "model.safetensors").values())
    assert f"[{path.name}]({path.name}/README.md)" in (CARDS / "README.md").read_text()


@pytest.mark.parametrize("path", AFTS, ids=lambda path: path.name)
def test_results_and_recipe_are_those_of_the_training_and_the_model_can_be_published_as_it_is(path):
    results = json.loads((path / "results.json").read_text())
    told = ModelCard.load(path / "README.md").data.eval_results
    assert told and results["weights"] == weights_digest(path)
    for each in told:
        assert abs(results["metrics"][each.dataset_split][each.metric_type] - each.metric_value) < 5e-4
    recipe = load_recipe(sorted(path.glob("recipe*.yaml"))[-1], ["data.train=generated"])  # of the last part
    for section in ("model", "optimizer", "schedule"):
        assert json.loads(recipe.model_dump_json())[section] == results["recipe"][section]
    files = publish(path, f"someone/{path.name}", dry_run=True).files
    assert {"README.md", "config.json", "model.safetensors", "modeling_aft.py"} <= set(files)


def test_the_cat_is_a_cat():
    classify = pipeline("image-classification", str(CLASSIFIER))
    assert classify(Image.open(CLASSIFIER / "cat.jpg"))[0]["label"] == "cat"


@torch.no_grad()
def test_the_writer_goes_on_past_65536_tokens_with_a_cache_of_constant_size():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(WRITER).eval(), AutoTokenizer.from_pretrained(WRITER)
    line = "KING RICHARD:\nNow is the winter of our discontent.\n"
    sizes, losses = [], []
    for repetitions in (10, 1400):
        tokens = tokenizer(line * repetitions, return_tensors="pt").input_ids
        cache = model(tokens, use_cache=True, logits_to_keep=1).cache
        outputs = model(tokens[:, : len(line)], cache=cache, use_cache=True)
        sizes.append(outputs.cache.nbytes())
        losses.append(torch.nn.functional.cross_entropy(outputs.logits[0, :-1], tokens[0, 1 : len(line)]).item())
    assert tokens.shape[1] > 65_536 and sizes[0] == sizes[1]
    assert losses[1] < losses[0] + 0.1  # as good as after a short text
    text = pipeline("text-generation", model=model, tokenizer=tokenizer)("ROMEO:", max_new_tokens=40)
    assert len(text[0]["generated_text"]) > 30
