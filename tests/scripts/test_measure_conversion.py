"""Tests of measure_conversion.py: it makes and scores every model, and the page has the numbers of the results."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image

from scripts import measure_conversion


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_mean_and_the_range_over_the_seeds_of_its_results():
    records = json.loads((DOCS / "conversion.json").read_text())["records"]
    accuracies = measure_conversion.tables(records).split("\n\n")[0]
    assert "distilled for 15 minutes" in accuracies
    assert accuracies in (DOCS / "conversion.md").read_text(encoding="utf-8")
    seeds = [{"model": "the ViT", "seed": seed, "fine-tuned": True, "x": {"y": 0.5 + seed / 4}} for seed in (0, 1)]
    assert "| the ViT | 62.5 % (50.0-75.0) |" in measure_conversion.table(seeds, "x", ("y",))


@pytest.mark.slow
def test_every_model_is_made_and_scored_once(tmp_path, run_command, monkeypatch):
    """The commands run in this process."""
    ran = []

    def run(*words):
        done = run_command("aft-hf", *words[2:])
        assert done.returncode == 0, done.stderr[-3000:]
        ran.append(words[2])

    monkeypatch.setattr(measure_conversion, "run", run)
    pixels = np.random.default_rng(0).integers(256, size=(64, 32, 32, 3), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    images = Dataset.from_dict({"image": list(pixels), "label": [index % 10 for index in range(64)]}, features)
    images.to_parquet(str(data := tmp_path / "images.parquet"))
    options = {"out": tmp_path / "out", "source_epochs": 1, "images": 64, "minutes": [0.01], "seed": [0]}
    for _ in range(2):
        measure_conversion.main(data, data, **options)
        assert (ran.count("finetune"), ran.count("convert")) == (6, 3)
    records = json.loads((tmp_path / "out" / "results.json").read_text())["records"]
    assert len(records) == 7 and len({record["model"] for record in records}) == 5
    assert (tmp_path / "out" / "tables.md").read_text().count("distilled for 0.01 minutes") == 4
