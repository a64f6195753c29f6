"""Compare the speed of two versions of aft_hf: the AFT models of the benchmark, which take turns in one process.

    git worktree add ../before COMMIT
    python scripts/compare_versions.py ../before/src --json outputs/versions.json

Both versions are imported into the same process, so that their models get the same memory: the time of a product
depends on the physical pages of its operands, and differs by up to 10 % between processes. The ratio of a case is the
median over the turns of the time now over the time before. Cases that only one version has and compiled models are
left out. Results are written after each case, and cases that the JSON file has are not measured again.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer


PACKAGE = "aft_hf"
LONG_CALL = 5.0  # seconds; longer calls are not warmed up a second time
LEAST_SECONDS = 4.0  # of each version in a case, as far as MOST_TURNS allows: short calls take more turns
MOST_TURNS = 40  # each call of a decoding case takes a position, of which its model has 100


class Version:
    """A version of aft_hf that is imported beside other versions.

    Args:
        source: directory that contains the package `aft_hf`.
        sizes: name of the sizes of the cases, "FULL" or "SMOKE".

    Raises:
        typer.BadParameter: the directory does not contain the package.
    """

    def __init__(self, source: Path, sizes: str) -> None:
        self.source = str(source.resolve())
        if not (source / PACKAGE / "__init__.py").is_file():
            raise typer.BadParameter(f"{source} contains no package {PACKAGE}")
        self.modules: dict[str, ModuleType] = {}
        self.cases: dict[str, Any] = {}
        self.call: Callable[[], object] | None = None
        with self.imported():
            from aft_hf.benchmarking import cases, suites
            from aft_hf.benchmarking.measuring import keep_freed_memory

            keep_freed_memory()
            for name in ("vision", "causal", "decode"):
                found = suites.SUITES[name](getattr(cases, sizes))
                self.cases |= {case.name: case for case in found if "compiled" not in case.name}

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Within this context, imports of the package find this version."""
        others = take_modules()
        sys.modules.update(self.modules)
        sys.path.insert(0, self.source)
        try:
            yield
        finally:
            sys.path.remove(self.source)
            self.modules = take_modules()
            sys.modules.update(others)

    def build(self, name: str) -> None:
        """Make the model of a case."""
        with self.imported():
            self.call = self.cases[name].builders["ours"](torch.device("cpu"))

    def seconds(self) -> float:
        """Call the model, and return the seconds that it takes."""
        assert self.call is not None
        with self.imported():
            started = time.perf_counter()
            self.call()
            return time.perf_counter() - started


def take_modules() -> dict[str, ModuleType]:
    """Remove the modules of the package from `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}


def compare(before: Version, now: Version, name: str, repeats: int) -> dict[str, float]:
    """Seconds of a call of each version, medians over the turns, and the ratio."""
    before.call = now.call = None  # frees the models of the case before
    gc.collect()
    for version in (before, now):
        version.build(name)
    first = max(version.seconds() for version in (before, now))
    if first < LONG_CALL:  # the first call also allocates memory
        first = max(version.seconds() for version in (before, now))
    turns = []
    for turn in range(max(repeats, min(round(LEAST_SECONDS / first), MOST_TURNS))):
        order = (before, now) if turn % 2 == 0 else (now, before)
        taken = {version: version.seconds() for version in order}
        turns.append((taken[before], taken[now]))
    return {
        "before": statistics.median(a for a, _ in turns),
        "now": statistics.median(b for _, b in turns),
        "ratio": statistics.median(b / a for a, b in turns),
    }


def main(
    source: Annotated[Path, typer.Argument(help="Source directory of the version to compare with.")],
    only: Annotated[str, typer.Option(help="Measure only cases whose name contains this.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=MOST_TURNS, help="Least number of turns of a case.")] = 5,
    path: Annotated[Path, typer.Option("--json", help="File of the results.")] = Path("outputs", "versions.json"),
    smoke: Annotated[bool, typer.Option("--smoke", help="Measure tiny models, as a test.")] = False,
) -> None:
    """Measure the AFT models of the benchmark with two versions, which take turns."""
    results = json.loads(path.read_text()) if path.exists() else {}
    here = Path(__file__).resolve().parents[1] / "src"
    before, now = (Version(each, "SMOKE" if smoke else "FULL") for each in (source, here))
    names = [name for name in now.cases if name in before.cases and only in name]
    print("| case | before | now | now / before |\n|---|---:|---:|---:|")
    for name in names:
        if name not in results:
            results[name] = compare(before, now, name, repeats)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
        row = results[name]
        milliseconds = " | ".join(f"{1000 * row[key]:,.1f} ms" for key in ("before", "now"))
        print(f"| {name} | {milliseconds} | {row['ratio']:.2f} |", flush=True)
    ratios = sorted(results[name]["ratio"] for name in names)
    if ratios:
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        print(f"\nCases: {len(ratios)}; now / before: {span}")


if __name__ == "__main__":
    typer.run(main)
