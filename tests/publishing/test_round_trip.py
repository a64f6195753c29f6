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
)

from aft_hf import (
    AFTConfig,
    AFTForCausalLM,
    AFTForImageClassification,
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


@pytest.mark.slow
def test_every_type_makes_the_round_trip_where_there_is_no_aft_hf(tmp_path):
    """`without_aft_hf.py` checks, trains and saves each model twice; then they load here."""
    path = tiny.write_all_cases(tmp_path)
    done = run(HERE / "without_aft_hf.py", path, env=environment(tmp_path / "cache"))
    for case in json.loads(path.read_text()):
        source, out = Path(case["source"]), Path(case["out"])
        assert f"checked {source}" in done.stdout and {each.name for each in source.glob("*.py")} == set(CODE)
        places = json.loads((source / "config.json").read_text())["auto_map"]
        for directory in (out / "second", out / "third", out / "backbone"):
            assert json.loads((directory / "config.json").read_text())["auto_map"] == places
            assert all((directory / name).read_text() == (source / name).read_text() for name in CODE)
        inputs, expected = (
            load_file(each)[name]
            for each, name in ((case["expected"], "inputs"), (out / "logits.safetensors", "logits"))
        )
        for generation in ("second", "third"):
            model = HEADS[case["task"]].from_pretrained(out / generation).eval()
            assert type(model) is CLASSES[case["task"]]
            with torch.no_grad():
                logits = model(inputs) if case["task"] == "text" else model(pixel_values=inputs)
            # The other process may round differently.
            torch.testing.assert_close(logits.logits, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("task", ["text", "image"])
@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_with_aft_hf_imported_the_local_classes_serve(saved, task, trust_remote_code):
    options = {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    assert type(AutoConfig.from_pretrained(saved / task, **options)) is AFTConfig
    assert type(AutoModel.from_pretrained(saved / task, **options)) is AFTModel
    assert type(HEADS[task].from_pretrained(saved / task, **options)) is CLASSES[task]


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
