"""Loading untrusted models: the config cannot describe a much larger model, and the weights are finite numbers."""

import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import changed
from tiny_models import image_model, language_model, vit_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, GPT2Config, GPT2LMHeadModel

from aft_hf import loading
from aft_hf.errors import InputError
from aft_hf.loading import load, load_trained
from aft_hf.publishing.checks import check_model


GPT2 = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9, n_positions=9)
MODELS = {
    "aft": (AutoModelForCausalLM, language_model(hidden_size=8, num_heads=2)),
    "aft image": (AutoModelForImageClassification, image_model(hidden_size=8, num_heads=2)),
    "gpt2": (AutoModelForCausalLM, GPT2LMHeadModel(GPT2)),
    "vit": (AutoModelForImageClassification, vit_model(patch_size=8)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, (_, model) in MODELS.items():
        model.save_pretrained(root / name)
    return root


def copied(source, directory, fields):
    """Copy a saved model, with other values of fields of its config."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    changed(**fields)(directory / "config.json")
    return directory


TOO_LARGE = [
    ("aft", {"num_hidden_layers": 4096}),
    ("aft", {"hidden_size": 2**16, "num_hidden_layers": 96}),
    ("aft", {"max_position_embeddings": 2**27}),
    ("aft", {"intermediate_size": 2**20, "hidden_size": 2**12}),
    ("aft", {"vocab_size": 2**24, "hidden_size": 2**12}),
    ("aft image", {"num_hidden_layers": 4096}),
    ("aft image", {"hidden_size": 2**16}),
    ("vit", {"num_hidden_layers": 4096}),
    ("vit", {"hidden_size": 2**16, "intermediate_size": 2**18}),
    ("vit", {"image_size": 2**17}),
    ("vit", {"num_channels": 2**20, "patch_size": 2**6, "image_size": 2**6}),
    ("vit", {"model_type": "resnet", "depths": [100_000, 1, 1, 1]}),
    ("gpt2", {"n_layer": 4096}),
    ("gpt2", {"n_embd": 2**16}),
    ("gpt2", {"vocab_size": 2**26, "n_embd": 64}),
    ("gpt2", {"model_type": "mixtral", "num_local_experts": 2**20}),
]


@pytest.mark.parametrize(("name", "fields"), TOO_LARGE, ids=[f"{name} {fields}" for name, fields in TOO_LARGE])
def test_a_config_of_a_much_larger_model_than_its_weights_is_refused_while_it_is_built(saved, tmp_path, name, fields):
    directory = copied(saved / name, tmp_path, fields)
    with pytest.raises(InputError, match=r"config\.json: describes a model of over .* have only .* bytes"):
        load_trained(MODELS[name][0], str(directory))
    if name.startswith("aft"):
        with pytest.raises(InputError, match="describes a model of over"):
            check_model(directory, type(MODELS[name][1]))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_the_size_of_its_weights_is_loaded_and_a_hundred_times_that_is_not(
    saved, tmp_path, name, monkeypatch
):
    monkeypatch.setattr(loading, "FREE_TENSORS", 0)
    monkeypatch.setattr(loading, "FREE_ELEMENTS", 0)
    # 4-bit weights have two elements in each byte.
    for dtype in ("float32", "bfloat16"):
        load_trained(MODELS[name][0], str(saved / name), dtype=dtype)
    width, layers = ("n_embd", "n_layer") if name == "gpt2" else ("hidden_size", "num_hidden_layers")
    for free, fields in (("FREE_TENSORS", {width: 512}), ("FREE_ELEMENTS", {layers: 400})):
        with monkeypatch.context() as patch:
            patch.setattr(loading, free, 10**12)  # only the other bound counts
            directory = copied(saved / name, tmp_path, fields)
            with pytest.raises(InputError, match="describes a model of over"):
                load(MODELS[name][0], str(directory))


def test_a_large_model_is_built_if_the_weights_beside_it_are_large(saved, tmp_path):
    copied(saved / "gpt2", tmp_path, {"n_layer": 200})
    with pytest.raises(InputError, match="describes a model of over"):
        load(AutoModelForCausalLM, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").touch()
    os.truncate(tmp_path / "model-00002-of-00002.safetensors", 30 * 10**9)
    assert load(AutoModelForCausalLM, tmp_path).config.n_layer == 200


def test_tensors_that_are_built_after_a_load_do_not_count_towards_its_limit(saved, monkeypatch):
    monkeypatch.setattr(loading, "FREE_TENSORS", 0)
    load(MODELS["vit"][0], saved / "vit")
    with torch.device("meta"):
        assert len(vit_model(num_hidden_layers=200).vit.layers) == 200


# Weights that no training gives.


def rewritten(directory, change, pickled=False):
    """Replace the tensors of a saved model by those of a function of their names and values."""
    weights = load_file(directory / "model.safetensors")
    changed_weights = {name: change(name, tensor) for name, tensor in weights.items()}
    if pickled:
        torch.save(changed_weights, directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    else:
        save_file(changed_weights, directory / "model.safetensors", {"format": "pt"})


def first_weight(directory) -> str:
    return min(name for name in load_file(directory / "model.safetensors") if name.endswith("weight"))


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_not_finite_are_refused_by_name(saved, tmp_path, name, value, pickled):
    directory = copied(saved / name, tmp_path, {})
    damaged = first_weight(directory)
    rewritten(directory, lambda key, x: x.index_fill(0, torch.tensor(0), value) if key == damaged else x, pickled)
    for loader in (load, load_trained):
        with pytest.raises(InputError, match=r"weight holds NaN or infinity \(\d+ of \d+ values\)"):
            loader(MODELS[name][0], directory)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_integers_in_the_file_are_refused_by_name(saved, tmp_path, name, dtype, pickled):
    for part in (first_weight(saved / name), ""):  # one weight, and all of them
        directory = copied(saved / name, tmp_path / part, {})
        rewritten(directory, partial(lambda part, key, x: x.to(dtype) if part in key else x, part), pickled)
        with pytest.raises(InputError, match=r"has the dtype torch\..*; give floating-point weights"):
            load(MODELS[name][0], directory)


def test_parameters_of_other_names_are_weights_and_buffers_may_be_integers(saved, tmp_path):
    directory = copied(saved / "aft", tmp_path / "aft", {})
    rewritten(directory, lambda key, x: x.long() if key.endswith("position_bias_query") else x)
    for kind in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(InputError, match=r"position_bias_query has the dtype torch\.int64; give"):
            load(kind, directory)
    directory = copied(saved / "gpt2", tmp_path / "gpt2", {})
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 9, 9, dtype=torch.uint8) for i in range(2)}
    weights = load_file(directory / "model.safetensors") | masks  # as in earlier versions
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    load_trained(AutoModelForCausalLM, directory)
