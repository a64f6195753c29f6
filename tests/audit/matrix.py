"""Run the tests that depend most on versions with each supported Python on this machine and two transformers versions.

    python tests/audit/matrix.py [--only 3.13] [-- PYTEST_ARGUMENTS]

Each Python gets a virtual environment in outputs/matrix with the versions of constraints.txt. transformers is
installed in turn in the lowest version that setup.cfg allows and in that of constraints.txt. For each version,
`smoke.py` runs in an empty folder, then TESTS. The table of results is printed and written to outputs/matrix/table.md,
row by row; the output of each pair of versions goes to log files beside it. The exit code is 1 if a pair fails or none
could be run. The first run downloads torch for each Python, up to 6 GB each.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[2]
WORK = ROOT / "outputs" / "matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# Tests that depend on classes, files and messages of transformers and Python. The tests of the sums (test_mixing*,
# test_backend_contract_aft.py and others) are left out: they only call torch, which has the same version in all pairs.
TESTS = (
    "tests/test_activations_aft.py",
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
    "tests/scripts/test_finetune.py",
    "tests/training/test_checkpoints.py",
    "tests/training/test_loop.py",
    "tests/training/test_tasks.py",
)


@dataclass(frozen=True)
class Pair:
    """A version of Python and a version of transformers."""

    python: str
    transformers: str

    @property
    def environment(self) -> Path:
        return WORK / f"python{self.python}"

    def log(self, what: str) -> Path:
        return WORK / f"python{self.python}-transformers{self.transformers}.{what}.log"


def find_python(version: str) -> str | None:
    """Return a working interpreter of this version: python3.X from PATH, or one of pyenv; None if there is neither."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for command in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if command is not None:
            said = subprocess.run([command, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
            if said.returncode == 0 and said.stdout.startswith(f"{version}."):
                return str(command)
    return None


def transformers_versions(python: str) -> list[str]:
    """Return the lowest version that setup.cfg allows and the version in constraints.txt for this Python."""
    lowest = re.search(r"^ *transformers>=([\d.]+)", (ROOT / "setup.cfg").read_text(), re.MULTILINE)[1]
    pins = re.findall(r"^transformers==([\d.]+)(?:; (.*))?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    newer = 'python_version >= "3.11"' if python != "3.10" else 'python_version < "3.11"'
    return sorted({lowest, next(version for version, marker in pins if marker in ("", newer))})


def install(pair: Pair, interpreter: str) -> Path:
    """Install the pair's versions in the environment of its Python; return the interpreter of the environment.

    The environment is created anew if setup.cfg or the other versions of constraints.txt have changed.
    """
    folder = pair.environment
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = re.sub(r"^transformers==.*\n", "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    stamp, key = folder / "made-for", hashlib.sha256((pins + (ROOT / "setup.cfg").read_text()).encode()).hexdigest()
    run = {"check": True, "stdin": subprocess.DEVNULL}
    if not stamp.exists() or stamp.read_text() != key:
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], **run)
    (folder / "constraints.txt").write_text(f"{pins}transformers=={pair.transformers}\n")
    options = ["--quiet", "--disable-pip-version-check", "--constraint", folder / "constraints.txt"]
    subprocess.run([python, "-m", "pip", "install", *options, "--editable", ".[test]"], cwd=ROOT, **run)
    stamp.write_text(key)
    return python


def run_logged(log: Path, *command: str | Path, **options) -> tuple[bool, str]:
    """Run a command with its output in a log file; return whether it succeeded, and the last line of its output."""
    with log.open("w") as file:
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=variables, stdout=file, stderr=subprocess.STDOUT, **options)
    lines = log.read_text(errors="replace").splitlines()
    return done.returncode == 0, lines[-1].strip("= ") if lines else "no output"


def check(pair: Pair, interpreter: str, arguments: list[str]) -> tuple[bool, str]:
    """Install and test a pair; return whether it passed, and its row of the table."""
    try:
        python = install(pair, interpreter)
    except subprocess.CalledProcessError:
        return False, f"| {pair.python} | {pair.transformers} | cannot be installed | |"
    with tempfile.TemporaryDirectory() as empty:
        smoke = run_logged(pair.log("smoke"), python, ROOT / "tests/audit/smoke.py", cwd=empty)
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *arguments]
    tests = run_logged(pair.log("tests"), python, "-m", "pytest", *options, *TESTS, cwd=ROOT)
    row = f"| {pair.python} | {pair.transformers} | {'ok' if smoke[0] else smoke[1]} | {tests[1]} |"
    return smoke[0] and tests[0], row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="3.X", help="run only this Python; may be repeated")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    table, all_well = ["| Python | transformers | smoke test | tests |", "|---|---|---|---|"], []
    for version in given.only or PYTHONS:
        if (interpreter := find_python(version)) is None:
            print(f"Python {version} was not found on this machine: skipped", flush=True)
            continue
        for transformers in transformers_versions(version):
            started = time.monotonic()
            well, row = check(Pair(version, transformers), interpreter, given.arguments)
            print(f"{row} {time.monotonic() - started:.0f} s", flush=True)
            table, all_well = [*table, row], [*all_well, well]
            (WORK / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    return 0 if all_well and all(all_well) else 1


if __name__ == "__main__":
    sys.exit(main())
