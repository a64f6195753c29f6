"""The notebooks of the documentation run from the first cell to the last, and are stored without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
# Trainings of minutes run with fewer steps.
SHORTER = {
    "convert_and_fine_tune": ("num_train_epochs=3", "max_steps=5"),
    "generate_and_fine_tune": ("max_steps=80", "max_steps=5"),
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def program(path):
    """Return the code of all code cells, in order."""
    return "\n\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_nothing_but_python(path):
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path) if "outputs" in cell)
    compile(program(path), path.name, "exec")  # magics and shell commands do not compile
    assert cells(path)[0]["cell_type"] == "markdown" and cells(path)[0]["source"][0].startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    long, short = SHORTER[path.stem]
    assert long in program(path)
    command = [sys.executable, "-c", program(path).replace(long, short)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
