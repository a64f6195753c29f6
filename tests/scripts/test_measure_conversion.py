"""Test of measure_conversion.py: the table over several seeds. The command itself is tested in tests/pages."""

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
