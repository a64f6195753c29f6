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
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from aft_hf.kernels.triton.operators import FAILED
from aft_hf.kernels.triton.options import OPTIONS
from aft_hf.mixing_aft import provides

from .benchmark.cases import Case, all_cases
from .benchmark.page import read_records, write_records
from .tune_kernels import tune


TESTS = [*map(str, sorted(Path("tests/kernels").glob("test_triton*.py"))), "tests/test_host_waits.py"]
ON_GPU = torch.cuda.is_available()
SIZES = (32, 2048, 768)  # of the problem that is tuned
WORKERS = 10  # processes that test
REPORTING, LAST_ROW = 15, 60  # seconds for the report of tests that are interrupted, and for the last row
STALLED = 120  # seconds without a new row after which a row counts as one that does not end


def test(log: Path, seconds: float) -> bool:
    """Run the tests of the kernels in parallel; print the last lines, and return whether all passed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *TESTS]
    if find_spec("xdist"):
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 1
            process.send_signal(signal.SIGINT)  # prints the failures so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(REPORTING)
            print(f"the tests did not end within {seconds:.0f} s", file=file)
        finally:
            _end_group(process.pid)  # also the workers, which would disturb what is measured next
    print(*log.read_text().splitlines()[-12:], sep="\n", flush=True)
    return code == 0


def in_process(
    function: Callable[..., None], *arguments: Any, seconds: float, changes: Callable[[], Any] = time.monotonic
) -> bool:
    """Run a function in a process of its own, and return whether it ended in time and without an error.

    It must change what `changes` returns within each `STALLED` seconds. An error of a kernel on a GPU makes all later
    calls of its process fail, and a kernel may not end.
    """
    process = get_context("spawn").Process(target=_leading, args=(function, *arguments))
    process.start()
    end, before = time.monotonic() + seconds, None
    try:
        while process.exitcode is None and time.monotonic() < end and (now := changes()) != before:
            before = now
            process.join(max(0, min(STALLED, end - time.monotonic())))
    finally:
        _end_group(process.pid)
        process.kill()  # if it has no group yet
    process.join()
    return process.exitcode == 0


def _leading(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a new group of processes."""
    os.setsid()
    function(*arguments)


def _end_group(leader: int | None) -> None:
    """Kill the processes of a group that still run."""
    assert leader is not None
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def find_best_options(file: Path, seconds: float, jobs: int) -> None:
    """Tune the kernels, and save the options that are faster by more than 2 %."""
    best: dict[str, dict[str, Any]] = {}
    file.unlink(missing_ok=True)
    for kernel, entry, options, milliseconds, now in tune("", SIZES, jobs, seconds):
        print(f"{kernel} {entry} {milliseconds:.3f} ms (now {now:.3f}) {options}", flush=True)
        if milliseconds < 0.98 * now:
            best.setdefault(kernel, {})[entry] = OPTIONS[kernel][entry] = options
            file.write_text(json.dumps(best, indent=1) + "\n")


def remaining(file: Path, cases: list[Case]) -> list[Case]:
    """The cases that have no record yet."""
    records = {record["case"]: record for record in read_records(file)}
    return [case for case in cases if not case.key().items() <= records.get(case.name, {}).items()]


def measure_all(file: Path, cases: list[Case], options: Path | None, seconds: float, turns: int) -> None:
    """Measure the cases that have no record yet, and leave out those that fail or do not end."""
    end = time.monotonic() + seconds
    cases = remaining(file, cases)
    while cases:
        left = max(0, end - time.monotonic())
        arguments, watched = (file, cases, options, left, turns), partial(remaining, file, cases)
        if in_process(measure, *arguments, seconds=left + LAST_ROW, changes=watched):
            break
        cases = remaining(file, cases)
        print(f"{cases[0].name}: failed" if cases else "the process of the rows failed", flush=True)
        cases = cases[1:] if time.monotonic() < end else []


def measure(file: Path, cases: list[Case], options: Path | None, seconds: float, turns: int) -> None:
    """Measure cases with the saved options, and begin none after some seconds."""
    end = time.monotonic() + seconds
    if options is not None and options.exists():
        for kernel, entries in json.loads(options.read_text()).items():
            OPTIONS[kernel] |= entries
    records = {record["case"]: record for record in read_records(file)}
    for case in cases:
        if time.monotonic() > end:
            print(f"no time for {case.name} and what follows it", flush=True)
            break
        try:
            records[case.name] = record = case.measure(turns)
        except torch.OutOfMemoryError as error:
            print(f"{case.name}: {error}"[:300], flush=True)
            continue
        if FAILED:
            failed = ", ".join(sorted(f"{kernel} in {dtype}" for kernel, dtype, _ in FAILED))
            raise RuntimeError(f"{case.name} is not saved: PyTorch operations computed it, since {failed} failed")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the other processes too
    arguments.out.mkdir(parents=True, exist_ok=True)
    passed = arguments.tests == 0 or test(arguments.out / "tests.log", arguments.tests)
    if not provides("causal", "cuda" if ON_GPU else "cpu"):
        print("the Triton kernels are off: unset AFT_HF_TRITON, and check that Triton is installed", file=sys.stderr)
        return 1
    options = arguments.out / "options.json" if arguments.tuning else None
    if options is not None and not in_process(
        find_best_options, options, arguments.tuning, arguments.jobs, seconds=2 * arguments.tuning
    ):
        print("tuning ended early", flush=True)
    cases = [case for case in all_cases() if fnmatch.fnmatchcase(case.name, arguments.only)]
    if arguments.rows:
        measure_all(arguments.out / "benchmark.json", cases, options, arguments.rows, arguments.turns)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
