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


def measure(script, vit, out, seed=(0, 1), images=None):
    """Run the command with `--minutes 2`, and return its trainings and conversions."""
    script["calls"].clear()
    train, validation = Path("train.parquet"), Path("validation.parquet")
    script["main"](train, validation, out, vit, 40, images, [2.0], list(seed), False)
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


def test_another_machine_continues_from_a_copy_of_the_results(script, vit, tmp_path):
    measure(script, vit, tmp_path / "first")
    content = json.loads((tmp_path / "first" / "results.json").read_text())
    lacking = record("distilled for 2 minutes", 1)
    kept = [each for each in content["records"] if any(each[key] != value for key, value in lacking.items())]
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "results.json").write_text(json.dumps(content | {"records": kept}))
    assert measure(script, vit, tmp_path / "second") == ["convert distilled-2-1", "fine-tune distilled-2-1"]
    assert len(json.loads((tmp_path / "second" / "results.json").read_text())["records"]) == len(content["records"])


def test_results_of_other_options_or_another_vit_are_refused(script, vit, tmp_path):
    measure(script, vit, tmp_path / "out", seed=[0])
    with pytest.raises(ValueError, match=r'has results of .*"images": null'):
        measure(script, vit, tmp_path / "out", images=64)
    (vit / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="give another --out"):
        measure(script, vit, tmp_path / "out")


def test_the_page_shows_the_accuracies_of_its_results(script):
    page = (SCRIPT.parents[1] / "docs" / "conversion.md").read_text(encoding="utf-8")
    results = json.loads((SCRIPT.parents[1] / "docs" / "conversion.json").read_text())
    accuracies = script["tables"](results["records"]).split("\n\n")[0]
    assert "distilled for 15 minutes" in accuracies and accuracies in page
