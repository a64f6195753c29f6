"""Test of measure_multipliers.py: finished runs are not repeated, and the table has the mean over the seeds.

The runs themselves are tested with the command of docs/conversion.md in tests/pages.
"""

import json


def test_the_table_has_the_mean_and_the_range_over_the_seeds(tmp_path, run_command):
    path = tmp_path / "multipliers.json"
    path.write_text(json.dumps({"20 0.001 0": 0.5, "20 0.001 1": 0.75, "1000 0.001 0": 0.9, "1000 0.001 1": 1.0}))
    options = ("--multiplier", 20, "--multiplier", 1000, "--learning-rate", 1e-3, "--seed", 0, "--seed", 1)
    ended = run_command("measure_multipliers.py", tmp_path / "vit", tmp_path / "digits", *options, "--json", path)
    assert ended.returncode == 0, ended.stderr
    assert "| 20 | 62.5 % (50.0-75.0) |" in ended.stdout and "| 1000 | 95.0 % (90.0-100.0) |" in ended.stdout
