"""The model card: its facts come from the files beside the model and from nowhere else."""

import json
import math
import re
import shutil
import struct
from hashlib import sha256

import pytest
import tiny
import torch
from hub import metadata_errors
from huggingface_hub import ModelCard
from PIL import Image
from saved_models import changed
from tiny import environment, run
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from aft_hf import AFTForSequenceClassification, AFTForTokenClassification
from aft_hf.conversion import ConversionReport
from aft_hf.loading import weights_digest
from aft_hf.publishing import PublishError, build_card, find_problems, write_card
from aft_hf.publishing.card import MARKER, TEMPLATE, card_problems


RESULTS = {
    "metrics": {
        "validation": {"accuracy": 0.7312345, "f1": 0.6543, "loss": 1.0523},
        "test": {"accuracy": 0.7098765},
        "train": {"loss": 0.1357},  # is no result
    },
    "parameters": 999,
    "steps": 4711,
    "seconds": 8123.4,
    "hardware": {"device": "NVIDIA H100", "processes": 3},
    "energy_kwh": 5.317,
    "losses": [{"step": 100, "loss": 2.71828, "learning_rate": 0.00042}],
    "evaluations": [{"step": 100, "accuracy": 0.1111}],
    "recipe": {
        "task": "images",
        "notes": "chosen for 77 reasons",
        "model": {"architecture": "aft", "hidden_size": 54321},
        "data": {"dataset": "someone/pictures", "image_size": 19},
        "optimizer": {"name": "adamw", "learning_rate": 0.00037, "betas": [0.91, 0.987]},
        "epochs": 37,
        "global_batch_size": 257,
        "output_dir": "outputs/13",
    },
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}
TRAINER = {
    "epoch": 6.0,
    "eval_accuracy": 0.8765432,
    "eval_runtime": 3.21,
    "train_loss": 0.2345678,
    "train_runtime": 61.7,
}
REPORT = {
    "source": "someone/deit-tiny",
    "options": {"kernel_size": 3},
    "tensors": [
        {"status": "copied", "target": "a", "shape": [4, 1051]},
        {"status": "copied", "target": "b", "shape": [7]},
        {"status": "new", "target": "c", "shape": [11, 13]},
    ],
}


@pytest.fixture
def filled(directory):
    for name, content in (("results", RESULTS), ("all_results", TRAINER), ("conversion_report", REPORT)):
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])\d+(?:\.\d+)*(?:e[+-]?\d+)?(?![\w])", text))


def numbers_of_files(directory) -> set[float]:
    """Return all numbers in the JSON files, and the counts of tensors and parameters in the weights and the report."""
    number = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    found = {float(each) for path in directory.glob("*.json") for each in re.findall(number, path.read_text())}
    content = (directory / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    found.add(sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__"))
    for status in ("copied", "new"):
        chosen = [math.prod(each["shape"]) for each in REPORT["tensors"] if each["status"] == status]
        found |= {len(chosen), sum(chosen)}
    return found | {len(tiny.LABELS["id2label"])}


def is_from(number: str, sources: set[float], written: str) -> bool:
    """Return whether a number on the card is in the files, rounded to four digits or literally."""
    if number in written:
        return True
    value = float(number)
    return any(math.isclose(value, source, rel_tol=5.01e-4) for source in sources)


def test_every_number_on_the_card_comes_from_a_file(filled):
    text = str(build_card(filled, repo_id="me/tiny"))
    own = numbers_in(TEMPLATE.read_text()) | {"20"}  # of the citation; 20 tokens that the example generates
    code_free = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    sources = numbers_of_files(filled)
    versions = " ".join(RESULTS["versions"].values())
    unknown = {each for each in numbers_in(code_free) - own if not is_from(each, sources, versions)}
    assert unknown == set()
    assert {"0.7312", "0.7099", "0.8765", "8123", "5.317", "4211", "143"} <= numbers_in(code_free)
    assert not is_from("0.7412", sources, versions)  # the test notices a number that is made up


def test_what_was_not_measured_is_not_on_the_card(directory):
    text = str(build_card(directory, repo_id="me/tiny"))
    assert "## Training" not in text and "## Conversion" not in text
    assert "No evaluation is recorded" in text
    assert "**Training is not recorded here.**" in text and "untrained" not in text  # nobody knows whether it is
    assert "losses.png" not in text
    metadata = ModelCard(text).data.to_dict()
    assert not {"model-index", "metrics", "datasets", "base_model"} & metadata.keys()


def test_results_stand_beside_the_file_that_holds_them_and_pictures_below(filled):
    (filled / "losses.png").write_bytes(b"")
    text = str(build_card(filled, repo_id="me/tiny"))
    assert "| accuracy | 0.7312 | someone/pictures, validation | `results.json` |" in text
    assert "| accuracy | 0.7099 | someone/pictures, test | `results.json` |" in text
    assert "| accuracy | 0.8765 | validation | `all_results.json` |" in text
    assert "| energy kwh | 5.317 | `results.json` |" in text
    assert "| hardware: device | NVIDIA H100 | `results.json` |" in text
    assert "![losses](losses.png)" in text and "position_biases.png" not in text
    for hidden in ("outputs/13", "2.718", "0.1111", "54321", "77 reasons", "0.1357", "untrained"):
        assert hidden not in text


@pytest.mark.parametrize(
    ("name", "content", "trained"),
    [
        ("all_results.json", {"eval_accuracy": 0.5, "eval_runtime": 3.2, "eval_samples": 9, "epoch": 0}, False),
        ("results.json", {"as trained": {"accuracy": 0.5}}, False),  # a file of `aft-hf evaluate --out`
        ("trainer_state.json", {"global_step": 0, "epoch": 0, "log_history": [{"eval_accuracy": 0.5}]}, False),
        ("all_results.json", TRAINER, True),
        ("results.json", RESULTS, True),
        ("trainer_state.json", {"global_step": 7, "log_history": [{"step": 7, "eval_accuracy": 0.5}]}, True),
    ],
)
def test_training_is_recorded_if_a_file_describes_it_and_an_evaluation_is_none(directory, name, content, trained):
    (directory / name).write_text(json.dumps(content))
    text = str(build_card(directory))
    assert ("Training is not recorded here" in text) != trained and "untrained" not in text
    assert ("| accuracy | 0." in text) == (content.get("global_step") != 0)


def test_a_file_of_evaluate_counts_under_any_name_and_shows_its_image_sizes(filled):
    content = {"as trained": {"accuracy": 0.625, "loss": 1.5}, "48 px": {"accuracy": 0.5, "loss": math.inf}}
    (filled / "cifar10-test.json").write_text(json.dumps(content))
    (filled / "notes.json").write_text(json.dumps({"as trained": {"accuracy": 0.1}, "mine": {}}))
    (filled / "list.json").write_text("[1]")
    (filled / "damaged.json").write_text("{")
    card = build_card(filled)
    for row in ("accuracy | 0.6250", "loss | 1.500", "accuracy, 48 px | 0.5000"):
        assert f"| {row} | not recorded | `cifar10-test.json` |" in card.text
    assert "notes.json" not in card.text and "inf" not in card.text.split("## Results")[1]
    assert card.data.metrics == ["accuracy", "f1", "loss"]


def test_results_of_earlier_weights_are_not_shown_as_those_of_the_present_ones(directory):
    weights = {"weights": weights_digest(directory)}
    (directory / "results.json").write_text(json.dumps(RESULTS | weights))
    (directory / "test.json").write_text(json.dumps({"48 px": {"accuracy": 0.625}} | weights))
    (directory / "undated.json").write_text(json.dumps({"48 px": {"accuracy": 0.125}}))
    text = str(build_card(directory))
    assert all(row in text for row in ("| accuracy | 0.7312 |", "| accuracy, 48 px | 0.6250 |", "| steps | 4711 |"))
    assert "| weights |" not in text
    model = AutoModelForImageClassification.from_pretrained(directory)
    model.classifier.bias.data += 1
    model.save_pretrained(directory)
    card = build_card(directory)
    assert not any(each in card.text for each in ("0.7312", "0.6250", "4711", "someone/pictures", "2.13.0"))
    assert "Training is not recorded here" in card.text and "| accuracy, 48 px | 0.1250 |" in card.text
    assert "datasets" not in card.data.to_dict()


def test_a_digest_of_weights_is_of_the_files_that_are_loaded_and_so_is_the_number_of_parameters(directory):
    model = AutoModelForImageClassification.from_pretrained(directory)
    whole, row = weights_digest(directory), f"| parameters | {model.num_parameters()} |"
    (directory / "model-00001-of-00002.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert weights_digest(directory) == whole and row in str(build_card(directory))
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="4KB")
    assert row in str(build_card(directory)) and weights_digest(directory) not in (whole, None)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    assert weights_digest(directory) is None and "| parameters | None |" in str(build_card(directory))


def test_a_model_of_plain_trainer_has_its_training_on_the_card(directory, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(directory)
    rows = [{"pixel_values": torch.zeros(3, 16, 16), "labels": label} for label in (0, 1)]
    options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path / "out"), save_strategy="no", disable_tqdm=True, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_model()
    assert "**Training is not recorded here.**" in str(build_card(tmp_path / "out"))
    trainer.save_state()
    text = str(build_card(tmp_path / "out"))
    assert "not recorded here" not in text and "| global step | 3 | `trainer_state.json` |" in text
    assert "| train loss | " in text and re.search(r"\| loss \| .* \| validation \| `trainer_state.json`", text)
    # Trainer loads the best checkpoint at the end, of which the last evaluation need not be.
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    (tmp_path / "out" / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": "checkpoint-2"}))
    assert "No evaluation is recorded" in str(build_card(tmp_path / "out"))


def test_a_conversion_whose_weights_were_trained_is_not_called_untrained(directory):
    digest = sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    report = REPORT | {"files": {"model.safetensors": digest}}
    (directory / "conversion_report.json").write_text(json.dumps(report))
    assert "take the weights as untrained" in str(build_card(directory))
    model = AutoModelForImageClassification.from_pretrained(directory)
    model.classifier.bias.data += 1
    model.save_pretrained(directory)
    text = str(build_card(directory))
    assert "**Training after the conversion is not recorded here.**" in text
    assert "untrained" not in text and "train the new tensors" not in text


@pytest.mark.parametrize("conversion", [{"source": 3}, {"options": {}}, {"source": "a/b", "options": []}])
def test_a_damaged_record_of_a_conversion_in_the_config_is_named(directory, conversion):
    changed(conversion=conversion)(directory / "config.json")
    with pytest.raises(PublishError, match=r"config\.json: conversion cannot be read"):
        build_card(directory)


def test_the_metadata_is_what_the_hub_wants(filled):
    path = write_card(filled, repo_id="me/tiny", license="mit")
    assert card_problems(path.read_text(), filled) == [] and path.read_text() == str(
        build_card(filled, repo_id="me/tiny")
    )
    metadata = ModelCard.load(path).data.to_dict()
    assert metadata_errors(metadata) == []
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "image-classification"
    assert metadata["license"] == "mit" and metadata["datasets"] == ["someone/pictures"]
    assert metadata["base_model"] == "someone/deit-tiny" and metadata["base_model_relation"] == "finetune"
    assert metadata["metrics"] == ["accuracy", "f1", "loss"] and "aft-conv" in metadata["tags"]
    results = metadata["model-index"][0]["results"]
    values = {(each["dataset"]["split"], each["metrics"][0]["value"]) for each in results}
    assert ("test", 0.7098765) in values and ("validation", 0.7312345) in values
    assert 0.8765432 not in {
        metric["value"] for each in results for metric in each["metrics"]
    }  # its dataset is unknown


def test_what_is_new_is_to_be_trained_unless_it_was(directory):
    (directory / "conversion_report.json").write_text(json.dumps(REPORT))
    link = "Converted from [someone/deit-tiny](https://huggingface.co/someone/deit-tiny)"
    text = str(build_card(directory))
    assert f"{link}: 2 tensors" in text and "; train the new tensors before you use the model." in text
    (directory / "results.json").write_text(json.dumps(RESULTS))
    text = str(build_card(directory))
    assert f"{link}, before the fine-tuning: 2 tensors" in text and "train the new tensors" not in text
    (directory / "results.json").unlink()
    assert "take the weights as untrained" in str(build_card(directory))
    done = {"images": 24, "steps": 3, "agreement": 0.5, "divergence": 0.25}
    report = ConversionReport(source="someone/vit", options={"distillation": done})
    (directory / "conversion_report.json").write_text(report.model_dump_json())
    text = str(build_card(directory))
    assert "distilled from its source on 24 unlabeled images in 3 steps" in text and "untrained" not in text


def test_the_architecture_is_what_differs_from_the_default(directory):
    changed(use_query=False, position_bias_multiplier=10.0)(directory / "config.json")
    table = str(build_card(directory)).split("## Architecture")[1].split("## Results")[0]
    assert "| position bias multiplier | 10.0 |" in table and "| use query | False |" in table
    assert "| hidden size | 8 |" in table and "query activation" not in table and "label" not in table


def test_a_source_that_is_a_directory_is_no_base_model(filled, monkeypatch):
    (filled.parent / "someone" / "deit-tiny").mkdir(parents=True)
    monkeypatch.chdir(filled.parent)
    card = build_card(filled)
    assert card.data.base_model is None and "`deit-tiny`" in card.text


@pytest.mark.parametrize(
    ("head", "task", "what"),
    [
        (AFTForSequenceClassification, "text-classification", "texts"),
        (AFTForTokenClassification, "token-classification", "tokens"),
    ],
)
def test_a_classifier_of_text_is_called_one_and_its_code_loads_it(tmp_path, head, task, what):
    config = tiny.build("text", "conv").config
    config.num_labels = 3
    tiny.save(head(config), tmp_path)
    text = write_card(tmp_path, repo_id="me/tiny").read_text()
    assert f"pipeline_tag: {task}" in text and f"A classifier of {what} into 3 classes: AFT-conv" in text
    assert f'run = pipeline("{task}", model=name' in text and "Takes texts of any length" in text
    assert find_problems(tmp_path) == []


def test_a_card_of_ours_is_written_anew_and_one_of_the_users_stays(directory):
    path = write_card(directory, repo_id="me/one")
    assert "me/two" in write_card(directory, repo_id="me/two").read_text()
    path.write_text(path.read_text().replace(MARKER, "Mine."))
    assert "me/three" not in write_card(directory, repo_id="me/three").read_text()
    with pytest.raises(PublishError, match="write the license into it"):
        write_card(directory, license="mit")
    path.write_text("---\ntags:\n- generated_from_trainer\n---\n# outputs\n")
    assert MARKER in write_card(directory).read_text()


def test_a_license_is_never_chosen_for_the_user_and_stays_until_another_is_given(directory):
    # The last one is written as SPDX does.
    for given, expected in ((None, None), ("mit", "mit"), (None, "mit"), ("CC-BY-4.0", "cc-by-4.0")):
        text = write_card(directory, license=given).read_text()
        assert ModelCard(text).data.license == expected and card_problems(text, directory) == []
        assert ("No license is given" in text) == (expected is None)
    with pytest.raises(PublishError, match=r"put the text of the license into .*LICENSE"):
        write_card(directory, license="other")
    assert card_problems("---\ntags:\n- mine\n---\n", directory)[-1] == "the metadata lacks license"  # a user's card
    (directory / "LICENSE").write_text("Do as you like.")
    for given in ("other", None):
        write_card(directory, license=given)
        metadata = ModelCard.load(directory / "README.md").data.to_dict()
        assert metadata["license"] == "other" and metadata["license_link"] == "LICENSE"
        assert metadata_errors(metadata) == []


def test_a_dry_run_of_the_command_shows_the_card_with_the_license(directory, run_command):
    done = run_command("aft-hf", "publish", directory, "me/tiny", "--license", "mit", "--dry-run")
    assert done.returncode == 0 and "license mit" in done.stdout and "nothing was uploaded" in done.stdout
    assert "license: mit\n" in done.stdout and "## Limits and risks" in done.stdout
    assert not (directory / "README.md").exists()
    done = run_command("aft-hf", "publish", directory, "me/tiny", "--dry-run")
    assert done.returncode == 0 and "card, no license" in done.stdout and "apache" not in done.stdout
    assert "no license is given, and the card says so; --license mit gives one" in done.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no metadata", "lacks library_name"),
        ("---\nmodel-index:\n- name: x\n  results: 3\n---\n", "the metadata cannot be read"),
        ("---\nlicense: mit\n---\n![x](missing.png)\n", "shows missing.png"),
    ],
)
def test_missing_metadata_and_pictures_of_a_card_are_problems(tmp_path, text, told):
    assert any(told in problem for problem in card_problems(text, tmp_path))


def test_results_in_other_forms_leave_the_card_whole(directory):
    odd = {
        "metrics": {"accuracy": None, "loss": "low"},
        "recipe": "a.yaml",
        "versions": [],
        "a|b": "c|d\ne",
        "n": 1e400,
    }
    (directory / "results.json").write_text(json.dumps(odd))
    text = str(build_card(directory))
    assert "| a\\|b | c\\|d e |" in text and "No evaluation is recorded" in text and "inf" not in text
    (directory / "results.json").write_text("[1, 2]")
    with pytest.raises(PublishError, match=r"results\.json"):
        build_card(directory)


@pytest.mark.slow
def test_the_code_on_the_cards_runs_without_and_with_the_package(saved, tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "picture.png")
    blocks = []
    for task in ("text", "image"):
        shutil.copytree(saved / task, tmp_path / "me" / task)
        blocks += re.findall(
            r"```python\n(.*?)```", str(build_card(tmp_path / "me" / task, repo_id=f"me/{task}")), re.S
        )
    lines = [f"import os, sys\nos.chdir({str(tmp_path)!r})", *blocks, "assert 'aft_hf' not in sys.modules"]
    lines += ["import aft_hf", *blocks, "assert type(run.model).__module__.startswith('aft_hf')"]
    (tmp_path / "code.py").write_text("\n".join(lines))
    run(tmp_path / "code.py", env=environment(tmp_path / "cache"))
