"""The code is saved with the weights: a saved model loads, runs and can be saved again without aft_hf."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from processes import HERE, environment, run
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from aft_hf import (
    AFTConfig,
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    AFTModel,
)
from aft_hf.publishing.checks import CODE


HEADS = {"text": AutoModelForCausalLM, "image": AutoModelForImageClassification}
CLASSES = {"text": AFTForCausalLM, "image": AFTForImageClassification}


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    def ask(*_):
        raise AssertionError("the user was asked whether to run code")

    monkeypatch.setattr("builtins.input", ask)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Models of all types of both tasks; `without_aft_hf.py` has checked, trained and saved each of them twice."""
    directory = tmp_path_factory.mktemp("cases")
    path = tiny.write_all_cases(directory)
    listed = json.loads(path.read_text())
    done = run(HERE / "without_aft_hf.py", path, env=environment(directory / "cache"))
    return listed, done.stdout


@pytest.mark.slow
def test_every_type_makes_the_round_trip_where_there_is_no_aft_hf(cases):
    listed, said = cases
    types = {tuple(case["source"].split("-")[-2:]) for case in listed}
    assert {("text", each) for each in tiny.TEXT_TYPES} | {("image", each) for each in tiny.IMAGE_TYPES} <= types
    assert all(f"checked {case['source']}" in said for case in listed)
    assert "pipelines of images: run" in said


@pytest.mark.slow
def test_language_models_become_classifiers_where_there_is_no_aft_hf(cases):
    new = [case for case in cases[0] if (Path(case["source"]).name.startswith("aft-text-"))]
    assert len(new) == len(tiny.TEXT_TYPES)
    for case in new:
        text = AutoModelForSequenceClassification.from_pretrained(f"{case['out']}/text-classification")
        token = AutoModelForTokenClassification.from_pretrained(f"{case['out']}/token-classification")
        assert (type(text), type(token)) == (AFTForSequenceClassification, AFTForTokenClassification)


def test_what_was_trained_and_saved_without_aft_hf_loads_with_it(cases):
    for case in cases[0]:
        inputs = load_file(case["expected"])["inputs"]
        for generation in ("second", "third"):
            model = HEADS[case["task"]].from_pretrained(f"{case['out']}/{generation}").eval()
            assert type(model) is CLASSES[case["task"]]
            with torch.no_grad():
                logits = model(inputs) if case["task"] == "text" else model(pixel_values=inputs)
            expected = load_file(f"{case['out']}/logits.safetensors")["logits"]
            # The other process may round differently.
            torch.testing.assert_close(logits.logits, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_every_generation_has_the_code_and_the_places_of_its_classes(cases):
    for case in cases[0]:
        code = {path.name for path in Path(case["source"]).glob("*.py")}
        assert code == set(CODE)
        places = json.loads(AutoConfig.from_pretrained(case["source"]).to_json_string())["auto_map"]
        for directory in (case["source"], f"{case['out']}/second", f"{case['out']}/third", f"{case['out']}/backbone"):
            for name in code:
                with open(f"{directory}/{name}") as copy, open(f"{case['source']}/{name}") as first:
                    assert copy.read() == first.read(), f"{directory}/{name}"
            with open(f"{directory}/config.json") as file:
                assert json.load(file)["auto_map"] == places


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_with_aft_hf_imported_the_local_classes_serve(saved, task, trust_remote_code):
    options = {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    assert type(AutoConfig.from_pretrained(saved / task, **options)) is AFTConfig
    assert type(AutoModel.from_pretrained(saved / task, **options)) is AFTModel
    assert type(HEADS[task].from_pretrained(saved / task, **options)) is CLASSES[task]


def test_an_auto_class_that_does_not_fit_is_refused_as_for_any_model(saved):
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        AutoModelForMaskedLM.from_pretrained(saved / "text")


def test_a_reference_to_another_repository_does_not_survive_saving(tmp_path):
    config = tiny.build("text", "simple").config
    config.auto_map = {"AutoModel": "someone/else--modeling_aft.AFTModel", "AutoTokenizer": "mine.Tokenizer"}
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_aft.AFTConfig",
        "AutoModel": "modeling_aft.AFTModel",
        "AutoModelForCausalLM": "modeling_aft.AFTForCausalLM",
        "AutoModelForSequenceClassification": "modeling_aft.AFTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_aft.AFTForTokenClassification",
        "AutoTokenizer": "mine.Tokenizer",
    }


def test_a_large_model_is_saved_in_shards_of_safetensors(tmp_path):
    tiny.save(tiny.build("text", "full"), tmp_path, max_shard_size="4KB")
    names = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors.index.json" in names and "model.safetensors" not in names
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json", *CODE} <= names
    loaded = AFTForCausalLM.from_pretrained(tmp_path).eval()
    expected = tiny.expected_of(tiny.build("text", "full"))
    with torch.no_grad():  # the expected logits were computed without gradients, too
        logits = loaded(expected["inputs"]).logits
    largest = expected["logits"].abs().max().item()
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
