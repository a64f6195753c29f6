"""Test of compare_versions.py: two versions take turns, and measured cases are kept."""

import json
import shutil
from pathlib import Path

import pytest


SOURCE = Path(__file__).parents[2] / "src"
CASE = "AFT-simple L2 d64 T=64 inference fp32"


@pytest.mark.slow
def test_a_case_of_two_versions_is_measured_once(tmp_path, run_command):
    other = tmp_path / "src"
    shutil.copytree(SOURCE, other, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    path = tmp_path / "versions.json"
    options = (other, "--smoke", "--repeats", "2", "--only", CASE, "--json", path)
    ended = run_command("compare_versions.py", *options)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(path.read_text())[CASE]
    assert min(row.values()) > 0 and f"| {CASE} |" in ended.stdout and "Cases: 1" in ended.stdout
    path.write_text(json.dumps({CASE: {"before": 2.0, "now": 1.0, "ratio": 0.5}}))
    assert f"| {CASE} | 2,000.0 ms | 1,000.0 ms | 0.50 |" in run_command("compare_versions.py", *options).stdout


@pytest.mark.slow
def test_a_directory_without_the_package_is_refused(tmp_path, run_command):
    ended = run_command("compare_versions.py", tmp_path, "--smoke", "--json", tmp_path / "versions.json")
    assert ended.returncode == 2 and "contains no package" in " ".join(ended.stderr.split())
