"""Tests of measure_conversion.py: records, tables and what is measured again. tests/pages runs the whole command."""

import json
import runpy
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_conversion.py"
SIZES = {f"{side} px": 0.75 for side in (24, 32, 40, 48, 64)}


@pytest.fixture
def script():
    """The names of the script, with a list `calls` of the trainings and conversions, which do not run."""
    names = runpy.run_path(str(SCRIPT))["main"].__globals__
    calls = []

    def convert(vit, out, *options, bf16=False):
        calls.append(f"convert {out.name}")
        return True

    names["calls"] = calls
    names["convert"] = convert
    names["fine_tune"] = lambda model, out, *options: calls.append(f"fine-tune {out.name}")
    names["new_aft"] = lambda like, out, seed: calls.append(f"new {out.name}")
    names["by_epoch"] = lambda out: {f"epoch {epoch}": 0.5 for epoch in (0, 1, 2, 5)}
    names["by_image_size"] = lambda model, data: SIZES
    names["distillation_losses"] = lambda out: {"steps": 3, "KL (nats)": 0.125}
    return names


@pytest.fixture
def vit(tmp_path):
    """Directory with weights of a ViT, which are not read as such."""
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "vit"


def measure(script, vit, out, earlier=None, seed=(0, 1), images=None):
    """Run the command with `--minutes 2`, and return its trainings and conversions."""
    script["calls"].clear()
    train, validation = Path("train.parquet"), Path("validation.parquet")
    script["main"](train, validation, out, vit, 40, images, [2.0], list(seed), False, earlier)
    return list(script["calls"])


def record(model, seed, fine_tuned=True, **scores):
    return {"model": model, "seed": seed, "fine-tuned": fine_tuned, **scores}


def test_the_table_has_the_mean_and_the_range_over_the_seeds(script):
    records = [
        record("`--init paper`", 0, **{"by epoch": {"epoch 0": 0.1, "epoch 5": 0.5}}),
        record("`--init paper`", 1, **{"by epoch": {"epoch 0": 0.2, "epoch 5": 0.75}}),
        record("the ViT", 0, **{"by epoch": {"epoch 0": 0.9, "epoch 5": 1.0}}),
        record("random weights", 0, **{"by image size": {"32 px": 0.1}}),
    ]
    assert script["table"](records, "by epoch", ("epoch 0", "epoch 5")).splitlines() == [
        "| model | epoch 0 | epoch 5 |",
        "|---|---:|---:|",
        "| `--init paper` | 15.0 % (10.0-20.0) | 62.5 % (50.0-75.0) |",
        "| the ViT | 90.0 % | 100.0 % |",
    ]


def test_the_losses_of_a_distillation_have_a_column_for_each_layer(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    losses, directories = [], [tmp_path / "distilled-2-0", tmp_path / "distilled-2-1"]
    for directory, steps in zip(directories, (900, 1100)):
        report = {"steps": steps, "divergence": 0.125, "agreement": 0.8, "hidden_state_errors": [0.16, 0.12, 0.13]}
        directory.mkdir()
        (directory / "conversion_report.json").write_text(json.dumps({"options": {"distillation": report}}))
        losses.append(script["distillation_losses"](directory))
    columns = ["steps", "KL (nats)", "agreement", "embeddings", "layer 1", "layer 2"]
    assert [*losses[0]] == columns
    name = script["distilled_name"](2)
    records = [record(name, seed, False, distillation=loss) for seed, loss in enumerate(losses)]
    assert script["table"](records, "distillation", columns).splitlines()[2] == (
        "| distilled for 2 minutes | 1,000 (900-1,100) | 0.125 (0.125-0.125) | 80.0 % (80.0-80.0) "
        "| 16.0 % (16.0-16.0) | 12.0 % (12.0-12.0) | 13.0 % (13.0-13.0) |"
    )


def test_tables_begin_with_models_before_fine_tuning_and_are_ordered_by_minutes(script):
    name = script["distilled_name"]
    records = [record(name(15), 0), record("`--init paper`", 1), record(name(2), 0), record("the ViT", 0)]
    records += [record("`--init paper`", 0), record(name(2), 0, False), record("the ViT", 0, False)]
    ordered = sorted(records, key=script["table_order"])
    assert [(each["model"], each["seed"], each["fine-tuned"]) for each in ordered] == [
        ("the ViT", 0, False),
        (name(2), 0, False),
        ("the ViT", 0, True),
        ("`--init paper`", 0, True),
        ("`--init paper`", 1, True),
        (name(2), 0, True),
        (name(15), 0, True),
    ]


def test_everything_is_measured_once(script, vit, tmp_path):
    calls = measure(script, vit, tmp_path / "out", seed=[0])
    assert calls == [
        "convert paper",
        "new random-0",
        "convert attention",
        "convert distilled-2-0",
        *(f"fine-tune {name}-0" for name in ("vit", "random", "paper", "attention", "distilled-2")),
    ]
    assert measure(script, vit, tmp_path / "out", seed=[0]) == []
    table = (tmp_path / "out" / "tables.md").read_text()
    assert "| distilled for 2 minutes | 3 | 0.125 |" in table
    assert "| distilled for 2 minutes, fine-tuned | 75.0 % |" in table and "| the ViT | 50.0 % |" in table


def test_another_machine_measures_only_what_an_earlier_run_lacks(script, vit, tmp_path):
    measure(script, vit, tmp_path / "first")
    earlier = tmp_path / "first" / "results.json"
    assert measure(script, vit, tmp_path / "second", earlier) == []
    assert (tmp_path / "second" / "results.json").read_text() == earlier.read_text()

    content = json.loads(earlier.read_text())
    lacking = record("distilled for 2 minutes", 1)
    content["records"] = [
        each for each in content["records"] if any(each[key] != value for key, value in lacking.items())
    ]
    part = tmp_path / "part.json"
    part.write_text(json.dumps(content))
    script["distillation_losses"] = lambda out: {"steps": 4, "KL (nats)": 0.25}
    assert measure(script, vit, tmp_path / "third", part) == ["convert distilled-2-1", "fine-tune distilled-2-1"]
    third = json.loads((tmp_path / "third" / "results.json").read_text())
    assert len(third["records"]) == len(content["records"]) + 1
    steps = {each["seed"]: each["distillation"]["steps"] for each in third["records"] if "distillation" in each}
    assert steps == {0: 3, 1: 4}  # the losses are of the model that is fine-tuned


def test_results_of_other_options_or_another_vit_are_refused(script, vit, tmp_path):
    measure(script, vit, tmp_path / "first", seed=[0])
    earlier = tmp_path / "first" / "results.json"
    with pytest.raises(ValueError, match="was begun with"):
        measure(script, vit, tmp_path / "first", images=64)
    with pytest.raises(ValueError, match=r'"images": null.* but this run has .*"images": 64'):
        measure(script, vit, tmp_path / "second", earlier, images=64)
    (vit / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="but this run has"):
        measure(script, vit, tmp_path / "third", earlier)
    (vit / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"contains no model\.safetensors"):
        measure(script, vit, tmp_path / "fourth")


def test_the_page_shows_the_tables_of_its_results(script):
    page = (SCRIPT.parents[1] / "docs" / "conversion.md").read_text(encoding="utf-8")
    results = json.loads((SCRIPT.parents[1] / "docs" / "conversion.json").read_text())
    tables = script["tables"](results["records"])
    assert "distilled for 15 minutes" in tables and all(table in page for table in tables.split("\n\n"))
    assert results["options"]["ViT"] == script["checksum"](SCRIPT.parents[1] / "model_cards/results/cifar10_vit")
