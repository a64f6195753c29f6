"""Test of measure_large_keys.py, which prints a row for each mixer and task."""

import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_large_keys.py"


@pytest.mark.slow
@pytest.mark.parametrize("what", [[], ["--layers"]])
def test_the_table_has_a_row_for_inference_and_one_for_training(what):
    command = [sys.executable, str(SCRIPT), "--repeats", "1", "--only", "alibi", *what]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["inference", "training"]
    assert all(len(line.split(" | ")) == 6 for line in lines[2:])
