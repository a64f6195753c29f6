"""The targets of the Makefile that install packages, without running them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def commands(target: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_newest_holds_everything_at_the_versions_of_ci_but_torch_and_transformers():
    newest = commands("newest")
    (filtered,) = re.findall(r"^(grep .*) > \S+$", newest, re.MULTILINE)
    kept = subprocess.run(["bash", "-c", filtered], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {line.partition("==")[0] for line in kept.splitlines()}
    assert "numpy" in names and not {"torch", "triton", "transformers"} & names
    assert "--constraint constraints.txt" not in newest


def test_make_install_says_first_what_it_does_and_how_long_it_takes():
    first, second = commands("install").splitlines()[:2]
    assert "PyTorch" in first and "minutes" in second
