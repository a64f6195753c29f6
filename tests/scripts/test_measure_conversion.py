"""Tests of measure_conversion.py: the tables over several seeds. The command itself is tested in tests/pages."""

import json
import runpy
from pathlib import Path


SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_conversion.py"


def test_the_table_has_the_mean_and_the_range_over_the_seeds():
    table = runpy.run_path(str(SCRIPT))["table"]
    rows = {"`--init paper`": [{0: 0.1, 5: 0.5}, {0: 0.2, 5: 0.75}], "the ViT": [{0: 0.9, 5: 1.0}]}
    assert table(["start", "epoch 0", "epoch 5"], rows, (0, 5)).splitlines() == [
        "| start | epoch 0 | epoch 5 |",
        "|---|---:|---:|",
        "| `--init paper` | 15.0% (10.0-20.0) | 62.5% (50.0-75.0) |",
        "| the ViT | 90.0% | 100.0% |",
    ]


def test_the_losses_of_a_distillation_have_a_column_for_each_layer(tmp_path):
    script = runpy.run_path(str(SCRIPT))
    losses, directories = [], [tmp_path / "distilled-2-0", tmp_path / "distilled-2-1"]
    for directory, steps in zip(directories, (900, 1100)):
        record = {"steps": steps, "divergence": 0.125, "agreement": 0.8, "hidden_state_errors": [0.16, 0.12, 0.13]}
        directory.mkdir()
        (directory / "conversion_report.json").write_text(json.dumps({"options": {"distillation": record}}))
        losses.append(script["distillation_losses"](directory))
    columns = ["steps", "KL (nats)", "agreement", "embeddings", "layer 1", "layer 2"]
    assert [*losses[0]] == columns
    assert script["table"](["distillation", *columns], {"2 minutes": losses}, columns).splitlines()[2] == (
        "| 2 minutes | 1,000 (900-1,100) | 0.125 (0.125-0.125) | 80.0% (80.0-80.0) | 16.0% (16.0-16.0) "
        "| 12.0% (12.0-12.0) | 13.0% (13.0-13.0) |"
    )
