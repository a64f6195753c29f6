"""Run the round trip in a new virtual environment that has only torch and transformers.

    python tests/publishing/fresh_environment.py [DIRECTORY]

The script saves a model of every type in the current environment, installs torch and transformers at the versions of
constraints.txt into a new environment in DIRECTORY (by default a temporary directory), and runs `without_aft_hf.py`
there: first without Pillow, then with Pillow, which image pipelines need.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import tiny
from processes import HERE
from processes import environment as environment_of


CONSTRAINTS = HERE.parents[1] / "constraints.txt"


def main(directory: Path) -> None:
    environment = directory / "environment"
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    venv.create(environment, with_pip=True, clear=True)
    with tempfile.TemporaryDirectory(dir=directory) as work:
        cases = tiny.write_all_cases(Path(work))
        for packages in (["torch", "transformers"], ["pillow"]):
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
            subprocess.run([python, *install, *packages], check=True)
            subprocess.run([python, "-m", "pip", "list", "--disable-pip-version-check"], check=True)
            variables = environment_of(Path(work) / "cache") | {"PYTHONPATH": ""}
            subprocess.run([python, HERE / "without_aft_hf.py", cases], env=variables, cwd=work, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
