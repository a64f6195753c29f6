"""Tests of measure_conversion.py: it makes and scores every model, and the page has the numbers of the results."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from transformers import ViTConfig
from typer.testing import CliRunner

from scripts import measure_conversion
from tests.runs import write_images


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_mean_and_the_range_over_the_seeds_of_its_results():
    records = json.loads((DOCS / "conversion.json").read_text())["records"]
    page = (DOCS / "conversion.md").read_text(encoding="utf-8")
    accuracies, _, by_size = measure_conversion.tables(records).split("\n\n")
    assert "distilled for 15 minutes" in accuracies and accuracies in page
    shown = page.partition("| model | 24 px |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(shown) == 2 and {*shown} <= {*by_size.splitlines()}
    seeds = [{"model": "the ViT", "seed": seed, "fine-tuned": True, "x": {"y": 0.5 + seed / 4}} for seed in (0, 1)]
    assert "| the ViT | 62.5 % (50.0-75.0) |" in measure_conversion.table(seeds, "x", ("y",))


@pytest.mark.slow
def test_every_model_is_made_and_scored_once(tmp_path, run_command, monkeypatch):
    """The commands run in this process."""
    ran = []

    def run(*words):
        done = run_command(*words[1:])
        assert done.returncode == 0, done.stderr[-3000:]
        ran.append(words[2])

    monkeypatch.setattr(measure_conversion, "run", run)
    monkeypatch.setattr(measure_conversion, "REPORTED", (0, 1))
    small = {"num_hidden_layers": 1}
    monkeypatch.setattr(measure_conversion, "ViTConfig", lambda **fields: ViTConfig(**fields | small))
    monkeypatch.setattr(measure_conversion, "by_image_size", scored := Mock(wraps=measure_conversion.by_image_size))
    write_images(data := tmp_path / "images.parquet")
    (app := typer.Typer()).command()(measure_conversion.main)
    options = f"--out {tmp_path}/out --source-epochs 1 --images 32 --minutes 0.01 --seed 0"
    for _ in range(2):
        CliRunner().invoke(app, f"{data} {data} {options}", catch_exceptions=False)
        assert (ran.count("finetune"), ran.count("convert"), scored.call_count) == (6, 3, 7)
    records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    assert len(records) == 7 and len({record["model"] for record in records}) == 5
    assert (tmp_path / "out" / "tables.md").read_text().count("distilled for 0.01 minutes") == 4
