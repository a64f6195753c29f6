"""Compare the speed of two versions of aft_hf: the AFT models of the benchmark, which take turns.

    git worktree add ../before COMMIT
    python scripts/compare_versions.py ../before/src --json outputs/versions.json

Each version runs in a process of its own, and only one of them computes at a time. The ratio of a case is the median
over the turns of the time now over the time before. Cases that only one version has and compiled models are left out.
Do not run it with real-time priority (`chrt`): waiting threads of one version then take time from the other.
Results are written after each case, and cases that the JSON file has are not measured again.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer


HERE = Path(__file__).resolve()
SHORTEST_TURN = 0.3  # seconds; shorter calls are repeated within a turn
LONG_CALL = 5.0  # seconds; longer calls are not warmed up a second time
MOST_CALLS = 90  # of a model; each call of a decoding case takes a position, of which its model has 100


class Version:
    """A process that imports aft_hf from a source directory and times its models.

    Args:
        source: directory that contains the package `aft_hf`.
        sizes: name of the sizes of the cases, "FULL" or "SMOKE".

    Raises:
        typer.BadParameter: the directory does not contain the package.
    """

    def __init__(self, source: Path, sizes: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(source.resolve())}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--serve", sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        if Path(self.answer()).parents[1] != source.resolve():
            self.stop()
            raise typer.BadParameter(f"{source} contains no package aft_hf")

    def ask(self, command: str, *values: object) -> Any:
        """Send a command of `serve`, and wait for its answer."""
        assert self.process.stdin is not None
        print(json.dumps([command, *values]), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process ended; its error is on stderr.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a version stopped with exit code {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(sizes: str) -> None:
    """Answer each command from stdin with a line of JSON.

    The first line is the path of the imported package. "names" answers with the names of the cases, "build" makes the
    model of a case, and "call" calls it a number of times and answers with the mean seconds of a call.
    """
    import aft_hf
    from aft_hf.benchmarking import cases, suites
    from aft_hf.benchmarking.measuring import keep_freed_memory

    answers, sys.stdout = sys.stdout, sys.stderr
    keep_freed_memory()
    known = {}
    for name in ("vision", "causal", "decode"):
        known |= {case.name: case for case in suites.SUITES[name](getattr(cases, sizes))}
    call: Callable[[], object] | None = None
    print(json.dumps(aft_hf.__file__), file=answers, flush=True)
    for line in sys.stdin:
        command, *values = json.loads(line)
        answer: object = None
        if command == "names":
            answer = [name for name in known if "compiled" not in name]
        elif command == "build":
            call = None
            gc.collect()
            call = known[values[0]].builders["ours"](torch.device("cpu"))
        elif command == "call":
            assert call is not None
            started = time.perf_counter()
            for _ in range(values[0]):
                call()
            answer = (time.perf_counter() - started) / values[0]
        print(json.dumps(answer), file=answers, flush=True)


def compare(before: Version, now: Version, name: str, repeats: int) -> dict[str, float]:
    """Seconds of a call of each version, medians over the turns, and the ratio."""
    for version in (before, now):
        version.ask("build", name)
    first = max(version.ask("call", 1) for version in (before, now))
    if first < LONG_CALL:  # the first call also allocates memory
        first = max(version.ask("call", 1) for version in (before, now))
    count = max(1, min(round(SHORTEST_TURN / first), (MOST_CALLS - 2) // repeats))
    turns = [(before.ask("call", count), now.ask("call", count)) for _ in range(repeats)]
    return {
        "before": statistics.median(a for a, _ in turns),
        "now": statistics.median(b for _, b in turns),
        "ratio": statistics.median(b / a for a, b in turns),
    }


def main(
    source: Annotated[Path | None, typer.Argument(help="Source directory of the version to compare with.")] = None,
    only: Annotated[str, typer.Option(help="Measure only cases whose name contains this.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=40, help="Turns of each case.")] = 5,
    path: Annotated[Path, typer.Option("--json", help="File of the results.")] = Path("outputs", "versions.json"),
    smoke: Annotated[bool, typer.Option("--smoke", help="Measure tiny models, as a test.")] = False,
    serving: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure the AFT models of the benchmark with two versions, which take turns."""
    if serving:
        serve(serving)
        return
    if source is None:
        raise typer.BadParameter("missing: the source directory of the version to compare with")
    results = json.loads(path.read_text()) if path.exists() else {}
    versions: list[Version] = []
    try:
        for each in (source, HERE.parents[1] / "src"):
            versions.append(Version(each, "SMOKE" if smoke else "FULL"))
        before, now = versions
        known = before.ask("names")
        names = [name for name in now.ask("names") if name in known and only in name]
        print("| case | before | now | now / before |\n|---|---:|---:|---:|")
        for name in names:
            if name not in results:
                results[name] = compare(before, now, name, repeats)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(results, indent=1) + "\n")
            row = results[name]
            milliseconds = " | ".join(f"{1000 * row[key]:,.1f} ms" for key in ("before", "now"))
            print(f"| {name} | {milliseconds} | {row['ratio']:.2f} |", flush=True)
    finally:
        for version in versions:
            version.stop()
    ratios = sorted(results[name]["ratio"] for name in names)
    if ratios:
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        print(f"\nCases: {len(ratios)}; now / before: {span}")


if __name__ == "__main__":
    typer.run(main)
