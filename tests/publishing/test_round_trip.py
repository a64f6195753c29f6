"""Saved models load and run: without aft_hf, since the code is saved with the weights, and from earlier versions."""

import json
import tarfile
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import HERE, environment, run
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTModel
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


ARCHIVES = sorted((HERE / "fixtures").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name)
@torch.no_grad()
def test_an_old_checkpoint_gives_its_recorded_logits_with_the_code_of_today(archive, tmp_path):
    """An archive holds what `tiny.save` wrote, without the code, and the values of `tiny.expected_of`."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.2
        files.extractall(tmp_path)
    expected, task = load_file(tmp_path / "expected.safetensors"), archive.name.partition("-")[0]
    model = HEADS[task].from_pretrained(tmp_path).eval()
    logits = model(expected["inputs"]).logits
    if task == "text":
        limit = expected["generated"].shape[1]
        generated = model.generate(expected["inputs"], max_length=limit, do_sample=False)
        assert torch.equal(generated, expected["generated"])
    assert type(model) is CLASSES[task]
    # The logits were recorded in float32 on another processor.
    largest = expected["logits"].abs().max().item()
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
