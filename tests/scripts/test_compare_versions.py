"""Test of compare_versions.py: two versions take turns, and measured cases are kept."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
CASE = "AFT-simple L2 d64 T=64 inference fp32"


def run(*arguments):
    """Run the script in a process of its own, since it registers two versions with the Auto classes."""
    command = [sys.executable, str(ROOT / "scripts" / "compare_versions.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_a_case_of_two_versions_is_measured_once(tmp_path):
    other = tmp_path / "src"
    shutil.copytree(ROOT / "src", other, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    with (other / "aft_hf" / "mixing_aft.py").open("a") as file:  # only one of the versions prints a line
        file.write('print("the other version")\n')
    path = tmp_path / "versions.json"
    options = (other, "--smoke", "--repeats", "2", "--only", CASE, "--json", path)
    ended = run(*options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the other version") == 1
    row = json.loads(path.read_text())[CASE]
    assert min(row.values()) > 0 and f"| {CASE} |" in ended.stdout and "Cases: 1" in ended.stdout
    path.write_text(json.dumps({CASE: {"before": 2.0, "now": 1.0, "ratio": 0.5}}))
    assert f"| {CASE} | 2,000.0 ms | 1,000.0 ms | 0.50 |" in run(*options).stdout


@pytest.mark.slow
def test_a_directory_without_the_package_is_refused(tmp_path):
    ended = run(tmp_path, "--smoke", "--json", tmp_path / "versions.json")
    assert ended.returncode == 2 and "contains no package" in " ".join(ended.stderr.split())
