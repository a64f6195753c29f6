"""Run the tests that depend most on versions with each supported Python here, or with the newest transformers.

    python tests/audit/matrix.py [--newest] [PYTEST_ARGUMENTS]

Each Python gets a virtual environment in outputs/matrix with the versions of constraints.txt. There, `smoke.py` runs
in an empty folder, then TESTS. With `--newest`, one environment of this Python gets the newest transformers of the
package index, even if setup.cfg does not allow it yet, and the common model tests of that release run, too. The exit
code is 1 if an environment fails or none could be run. The first run downloads torch for each Python, up to 6 GB.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13")
# Tests that depend on classes, files and messages of transformers and Python. The tests of the sums (test_mixing*,
# test_backend_contract_aft.py and others) are left out: they only call torch, which has one version everywhere.
TESTS = (
    "tests/test_caching_aft.py",
    "tests/test_cli.py",
    "tests/test_compile_and_export.py",
    "tests/test_configuration_aft.py",
    "tests/test_flat_rule.py",
    "tests/test_modeling_aft.py",
    "tests/test_payloads.py",
    "tests/test_reading.py",
    "tests/test_static_cache_aft.py",
    "tests/configs",
    "tests/conversion/test_sources.py",
    "tests/conversion/test_targets.py",
    "tests/publishing/test_round_trip.py",
    "tests/publishing/test_upload.py",
    "tests/training/test_finetune.py",
    "tests/training/test_checkpoints.py",
    "tests/training/test_loop.py",
    "tests/training/test_tasks.py",
)


def check(name: str, interpreter: str, arguments: list[str], newest: bool) -> bool:
    """Install the package with its tests in an environment, and test it there; return whether all passed."""
    folder = ROOT / "outputs" / "matrix" / name
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[interpreter, "-m", "venv", str(folder)]]
    commands += [[*pip, "--constraint", "constraints.txt", "--editable", ".[test]"]]
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if newest:  # also a release that setup.cfg does not allow yet
        commands += [[*pip, "--upgrade", "transformers"], [python, "tests/conformance/fetch.py"]]
        unknown = ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        commands += [[*tests, *unknown, "tests/conformance/test_conformance.py"]]
    commands += [[*tests, "-m", "not slow", *arguments, *TESTS]]
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as empty:
        places = [*((command, ROOT) for command in commands), ([python, ROOT / "tests/audit/smoke.py"], empty)]
        # The first command that fails ends the check.
        return all(subprocess.run(command, cwd=place, env=variables).returncode == 0 for command, place in places)


def main() -> int:
    newest, arguments = "--newest" in sys.argv, [each for each in sys.argv[1:] if each != "--newest"]
    pythons = {"newest": sys.executable} if newest else {name: shutil.which(name) for name in PYTHONS}
    results = {name: check(name, python, arguments, newest) for name, python in pythons.items() if python}
    for name in pythons:
        print(f"{name}: {'not found here' if name not in results else 'passed' if results[name] else 'FAILED'}")
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
