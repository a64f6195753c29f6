"""Test, tune and measure the Triton kernels on a GPU, in about ten minutes: `make gpu`.

Each result is printed and saved as soon as it is known: tests.log, options.json (what is faster than
`kernels/triton/options.py`) and benchmark.json, whose rows are measured with these options, the most important ones
first. The same command measures the rows that are missing. It needs no network, and no other package than those of
aft-hf, pytest and, for tests in parallel, pytest-xdist:

    PYTHONPATH=src:. python -m scripts.gpu --out outputs/gpu
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from aft_hf.kernels.triton.options import OPTIONS

from .benchmark.cases import Case, all_cases
from .benchmark.page import read_records, write_records
from .tune_kernels import tune


TESTS = [*map(str, sorted(Path("tests/kernels").glob("test_triton*.py"))), "tests/test_host_waits.py"]
ON_GPU = torch.cuda.is_available()
SIZES = (32, 2048, 768)  # of the problem that is tuned
WORKERS = 10  # processes that test


def test(log: Path, seconds: float) -> bool:
    """Run the tests of the kernels in parallel; print the last lines, and return whether all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    if find_spec("xdist"):
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    with log.open("w") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=file, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = 1
            print(f"the tests did not end within {seconds:.0f} s", file=file)
    print(*log.read_text().splitlines()[-12:], sep="\n", flush=True)
    return code == 0


def use_best_options(file: Path, seconds: float, jobs: int) -> None:
    """Tune the kernels, save the options that are faster by more than 2 %, and use them in this process."""
    best: dict[str, dict[str, Any]] = {}
    for kernel, entry, options, milliseconds, now in tune("", SIZES, jobs, seconds):
        print(f"{kernel} {entry} {milliseconds:.3f} ms (now {now:.3f}) {options}", flush=True)
        if milliseconds < 0.98 * now:
            best.setdefault(kernel, {})[entry] = OPTIONS[kernel][entry] = options
            file.write_text(json.dumps(best, indent=1) + "\n")


def measure(file: Path, cases: list[Case], seconds: float, turns: int) -> None:
    """Measure the cases that have no record yet, and begin none after some seconds."""
    end = time.monotonic() + seconds
    records = {record["case"]: record for record in read_records(file)}
    for case in cases:
        if case.key().items() <= records.get(case.name, {}).items():
            continue
        if time.monotonic() > end:
            print(f"no time for {case.name} and what follows it", flush=True)
            break
        try:
            records[case.name] = record = case.measure(turns)
        except torch.OutOfMemoryError as error:
            print(f"{case.name}: {error}"[:300], flush=True)
            continue
        write_records(file, records.values())
        times = ", ".join(f"{name} {1000 * x:.1f} ms" for name, x in record["seconds"].items())
        memory = ", ".join(f"{name} {x / 2**20:.0f} MiB" for name, x in record["bytes"].items())
        print(f"{case.name}: {times}; times the speed: {record['ratio']}; {memory}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the results")
    parser.add_argument("--tests", type=float, default=150, help="seconds for the tests, 0 for none")
    parser.add_argument("--tuning", type=float, default=60, help="seconds for the options, 0 for those of the code")
    parser.add_argument("--rows", type=float, default=360, help="seconds for the rows, 0 for none")
    parser.add_argument("--only", default="*", help="only the rows whose names match this pattern")
    parser.add_argument("--turns", type=int, default=7, help="timed turns of each row")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    arguments = parser.parse_args()
    if not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"):
        print("scripts.gpu: PyTorch finds no GPU", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    passed = arguments.tests == 0 or test(arguments.out / "tests.log", arguments.tests)
    if arguments.tuning:
        try:
            use_best_options(arguments.out / "options.json", arguments.tuning, arguments.jobs)
        except BrokenProcessPool as error:  # a compiler that crashes; the rows matter more
            print(f"tuning ended: {error}", flush=True)
    cases = [case for case in all_cases() if fnmatch.fnmatchcase(case.name, arguments.only)]
    if arguments.rows:
        measure(arguments.out / "benchmark.json", cases, arguments.rows, arguments.turns)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
