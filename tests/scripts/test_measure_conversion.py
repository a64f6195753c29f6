"""Test of measure_conversion.py: the page has the numbers of the results. tests/pages runs the whole command."""

import json
import runpy
from pathlib import Path


SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_conversion.py"


def test_the_page_shows_the_mean_and_the_range_over_the_seeds_of_its_results():
    names, docs = runpy.run_path(str(SCRIPT)), SCRIPT.parents[1] / "docs"
    records = json.loads((docs / "conversion.json").read_text())["records"]
    accuracies = names["tables"](records).split("\n\n")[0]
    assert "distilled for 15 minutes" in accuracies
    assert accuracies in (docs / "conversion.md").read_text(encoding="utf-8")
    seeds = [{"model": "the ViT", "seed": seed, "fine-tuned": True, "x": {"y": 0.5 + seed / 4}} for seed in (0, 1)]
    assert "| the ViT | 62.5 % (50.0-75.0) |" in names["table"](seeds, "x", ("y",))
