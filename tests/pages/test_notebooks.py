"""The notebooks of the documentation run from the first cell to the last, and are stored without outputs."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.runs import finish, launch, run_file


ROOT = Path(__file__).parents[2]
# Trainings of minutes run with fewer steps.
SHORTER = {
    "convert_and_fine_tune": {"num_train_epochs=3": "max_steps=5"},
    "generate_and_fine_tune": {
        "max_steps=80": "max_steps=5",
        "test = tokens[split:]": "test = tokens[-2560:]",
        "arguments.max_steps = 3, -1": "arguments.max_steps = 1, 2",
    },
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
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """The process has imported aft_hf, so the text is searched for the import, which registers the Auto classes."""
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(folder)
    code = program(path)
    assert re.search(r"^(import|from) aft_hf", code, re.MULTILINE)
    for long, short in SHORTER[path.stem].items():
        assert long in code
        code = code.replace(long, short)
    Path("notebook.py").write_text(code)
    ended = finish(launch(run_file, ("output.txt", "notebook.py"), **os.environ))
    output = Path("output.txt").read_text()
    assert ended == [0], output[-2000:]
    assert output.strip()
