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
    records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    better = [{**each, "seed": 1, "by epoch": {"epoch 0": 0.75}} for each in records if "by epoch" in each]
    assert "| the ViT | 62.5 % (50.0-75.0) |" in script["table"]([*records, *better], "by epoch", ("epoch 0",))
    table = (tmp_path / "out" / "tables.md").read_text()
    assert "| distilled for 2 minutes | 3 | 0.125 |" in table
    assert "| distilled for 2 minutes, fine-tuned | 75.0 % |" in table and "| the ViT | 50.0 % |" in table


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
