"""Run a command whose numbers a page gives, and keep its output.

    python -m scripts.record docs/scale.md "torchrun ... scripts/measure_context_parallel.py --tokens 1048576"

The record in docs/outputs.json names the commit, the machine, the versions and the date. It replaces an earlier one of
the same command.
"""

import subprocess
import sys
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from aft_hf.benchmarking import machine
from scripts.benchmark.cases import versions
from scripts.benchmark.page import read_records, write_records
from scripts.build import git


ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "outputs.json"


def record(page: str, command: str, records: Path = RECORDS) -> None:
    """Run a command of bash in the root of the repository, and keep what it prints.

    Raises:
        CalledProcessError: the command or git fails; then nothing is written.
    """
    # bash is found in the PATH, because its location differs between machines.
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # nosec B607
    found = {"page": page, "command": command, "commit": git("rev-parse", "--short", "HEAD").decode().strip()}
    known = versions() | {name: version(name) for name in ("triton",) if find_spec(name)}
    found |= {"machine": machine(), "versions": known, "date": str(date.today()), "output": done.stdout.splitlines()}
    print(*found["output"], sep="\n")
    write_records(records, [*(x for x in read_records(records) if x["command"] != command), found])


if __name__ == "__main__":
    record(*sys.argv[1:])
