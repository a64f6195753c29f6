"""Run a command whose numbers a page gives, and keep its output.

    python -m scripts.record docs/scale.md "torchrun ... scripts/measure_context_parallel.py --tokens 1048576"

The record in docs/outputs.json names the commit, the machine, the versions and the date. It replaces an earlier one of
the same command.
"""

import os
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from aft_hf.benchmarking import machine
from aft_hf.console import reported
from scripts.benchmark.cases import versions
from scripts.benchmark.page import read_records, write_records
from scripts.build import git


ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "outputs.json"


def record(page: str, command: str, records: Path = RECORDS) -> None:
    """Run a command of bash in the root of the repository, and keep its output and its exit status.

    Commands of Python are those of the running environment, whose versions the record names.

    Raises:
        ValueError: there is no such page, or a file of the code is not as in the commit that the record would name.
        CalledProcessError: git fails.
    """
    if not (ROOT / page).is_file():
        raise ValueError(f"there is no page {page}")
    commit = git("rev-parse", "--short", "HEAD").decode().strip()
    if changed := git("diff", "--name-only", "HEAD", "--", "src", "scripts").decode().split():
        raise ValueError(f"commit first: {', '.join(changed)}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # bash is found in the PATH, because its location differs between machines.
    done = subprocess.run(  # nosec B607
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, end="")
    known = versions() | {name: version(name) for name in ("triton",) if find_spec(name)}
    entry = {"page": page, "command": command, "status": done.returncode, "commit": commit, "machine": machine()}
    entry |= {"versions": known, "date": str(date.today()), "output": done.stdout.splitlines()}
    write_records(records, [*(x for x in read_records(records) if x["command"] != command), entry])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with reported("scripts.record"):
        record(*sys.argv[1:])
