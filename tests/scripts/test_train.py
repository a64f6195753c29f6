"""The training script as a user calls it."""

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
RECIPE = "configs/examples/bytes_aft_local.yaml"


def train(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_smoke_run_trains_and_a_second_one_has_nothing_left_to_do(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, that is the question. " * 200)
    arguments = [RECIPE, f"data.train={text}", "steps=4", f"output_dir={tmp_path / 'out'}", "--smoke"]
    first, second = train(*arguments), train(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    # Lines of a log, and no bars.
    assert "step 4/4: loss" in first.stdout and "tokens/s" in first.stdout and "GiB" in first.stdout
    assert "it/s" not in first.stderr and "step/s" not in first.stderr and "\r" not in first.stderr
    assert "resuming from" in second.stdout
    assert first.stdout.splitlines()[-2:] == second.stdout.splitlines()[-2:]
    metrics, place = first.stdout.splitlines()[-2:]
    assert metrics.startswith("test: bits_per_byte") and place == f"the model is in {tmp_path / 'out'}"
    assert "already complete" in second.stdout and "already complete" not in first.stdout


def test_print_config_prints_the_resolved_recipe_and_trains_nothing(tmp_path, run_command):
    result = run_command(
        "train.py", RECIPE, "--print-config", f"output_dir={tmp_path / 'out'}", "optimizer.learning_rate=1e-4"
    )
    assert (
        result.returncode == 0 and "learning_rate: 0.0001" in result.stdout and "keep_checkpoints: 2" in result.stdout
    )
    assert not (tmp_path / "out").exists()


def test_a_wrong_key_ends_in_one_line(run_command):
    result = run_command("train.py", RECIPE, "optimizer.learning_rat=1")
    assert result.returncode == 1 and result.stdout == ""
    message = "aft-hf: unknown key optimizer.learning_rat; did you mean optimizer.learning_rate?\n"
    assert result.stderr == message
