"""Run the tests that depend most on versions with each supported Python here, or with the newest transformers.

    python tests/audit/matrix.py [--only 3.13] [--newest] [-- PYTEST_ARGUMENTS]

Each Python gets a virtual environment in outputs/matrix with the versions of constraints.txt. There, `smoke.py` runs
in an empty folder, then TESTS. With `--newest`, one environment of this Python gets the newest transformers of the
package index, even if setup.cfg does not allow it yet, and the common model tests of that release run, too. The table
of results is printed and written to outputs/matrix/table.md, row by row; the output goes to log files beside it. The
exit code is 1 if an environment fails or none could be run. The first run downloads torch for each Python, up to 6 GB.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).parents[2]
WORK = ROOT / "outputs" / "matrix"
PYTHONS = ("3.11", "3.12", "3.13")
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


def find_python(version: str) -> str | None:
    """Return a working interpreter of this version: python3.X from PATH, or one of pyenv; None if there is neither."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for command in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if command is not None:
            said = subprocess.run([command, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
            if said.returncode == 0 and said.stdout.startswith(f"{version}."):
                return str(command)
    return None


def install(folder: Path, interpreter: str, newest: bool) -> Path:
    """Install the package with its tests in a virtual environment; return the interpreter of the environment.

    The environment is created anew if setup.cfg or constraints.txt have changed.
    """
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    files = [ROOT / "setup.cfg", ROOT / "constraints.txt"]
    stamp, key = folder / "made-for", hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    run = {"check": True, "stdin": subprocess.DEVNULL, "cwd": ROOT}
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not stamp.exists() or stamp.read_text() != key:
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], **run)
        subprocess.run([*pip, "--constraint", "constraints.txt", "--editable", ".[test]"], **run)
        stamp.write_text(key)
    if newest:  # also a release that setup.cfg does not allow yet
        subprocess.run([*pip, "--upgrade", "transformers"], **run)
    return python


def run_logged(log: Path, *command: str | Path, **options) -> tuple[bool, str]:
    """Run a command with its output in a log file; return whether it succeeded, and the last line of its output."""
    with log.open("w") as file:
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=variables, stdout=file, stderr=subprocess.STDOUT, **options)
    lines = log.read_text(errors="replace").splitlines()
    return done.returncode == 0, lines[-1].strip("= ") if lines else "no output"


def check(name: str, interpreter: str, arguments: list[str], newest: bool) -> tuple[bool, str]:
    """Install and test an environment; return whether it passed, and its row of the table."""
    try:
        python = install(WORK / name, interpreter, newest)
    except subprocess.CalledProcessError:
        return False, f"| {name} | | cannot be installed | |"
    version = [python, "-c", "import importlib.metadata as m; print(m.version('transformers'))"]
    transformers = subprocess.run(version, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as empty:
        checks = [run_logged(WORK / f"{name}.smoke.log", python, ROOT / "tests/audit/smoke.py", cwd=empty)]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *arguments]
    checks.append(run_logged(WORK / f"{name}.tests.log", python, "-m", "pytest", *options, *TESTS, cwd=ROOT))
    if newest:
        fetched = run_logged(WORK / f"{name}.fetch.log", python, "tests/conformance/fetch.py", cwd=ROOT)
        common = ["-W", "ignore::pytest.PytestUnknownMarkWarning", "tests/conformance/test_conformance.py"]
        checks += [
            fetched,
            run_logged(WORK / f"{name}.conformance.log", python, "-m", "pytest", "-q", *common, cwd=ROOT),
        ]
    results = ["ok" if checks[0][0] else checks[0][1], checks[1][1], *(said for _, said in checks[3:])]
    return all(well for well, _ in checks), f"| {name} | {transformers} | {' | '.join(results)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="3.X", help="run only this Python; may be repeated")
    parser.add_argument(
        "--newest",
        action="store_true",
        help="test the newest transformers of the package index on this Python, and run transformers' own model tests",
    )
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    table = ["| environment | transformers | smoke test | tests |", "|---|---|---|---|"]
    if given.newest:
        table = [line + more for line, more in zip(table, (" conformance |", "---|"))]
        environments = {"newest": sys.executable}
    else:
        environments = {f"python{version}": find_python(version) for version in given.only or PYTHONS}
    all_well = []
    for name, interpreter in environments.items():
        if interpreter is None:
            print(f"{name} was not found on this machine: skipped", flush=True)
            continue
        started = time.monotonic()
        well, row = check(name, interpreter, given.arguments, given.newest)
        print(f"{row} {time.monotonic() - started:.0f} s", flush=True)
        table, all_well = [*table, row], [*all_well, well]
        (WORK / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    return 0 if all_well and all(all_well) else 1


if __name__ == "__main__":
    sys.exit(main())
