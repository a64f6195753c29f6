"""Speed and memory of AFT models beside ViT and GPT-2 with SDPA, measured in turns in one process.

    python scripts/benchmark.py --suite vision --suite causal --out outputs/benchmark.json

Each row: the median over turns of the ratio of seconds (peer to ours), items per second, and peak memory from a
process of its own.
"""

import fnmatch
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from aft_hf.benchmarking.cases import SUITES, Case
from aft_hf.benchmarking.measuring import peak_bytes, ratio, seconds_in_turns
from aft_hf.data.json_files import write_json


console = Console(width=150)


def cases(suites: list[str], only: str | None) -> list[Case]:
    """The cases of the suites whose names match a pattern."""
    everything = [case for suite in suites for case in SUITES[suite]()]
    return [case for case in everything if only is None or fnmatch.fnmatch(case.name, only)]


def memory(case: Case, candidate: str, device: torch.device) -> int:
    """Peak bytes of one call in a new process."""
    command = [sys.executable, __file__, "--suite", case.suite, "--only", case.name, "--peak-of", candidate]
    done = subprocess.run([*command, "--device", device.type], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def measure(case: Case, device: torch.device, repeats: int, with_memory: bool) -> dict:
    """One row."""
    calls = {name: build(device) for name, build in case.builders.items()}
    seconds = seconds_in_turns(calls, device, repeats=repeats)
    row = {"case": case.name, "suite": case.suite, "task": case.task, "dtype": case.dtype}
    row["seconds"] = {name: statistics.median(values) for name, values in seconds.items()}
    row["items_per_second"] = {name: case.items / value for name, value in row["seconds"].items()}
    row["ratio"] = {name: ratio(seconds, "ours", name) for name in calls if name != "ours"}
    row["required"] = case.required
    if with_memory:
        row["peak_bytes"] = {name: memory(case, name, device) for name in calls if name != "floor"}
    return row


def show(rows: list[dict]) -> Table:
    """The rows for people."""
    table = Table(
        "case", "ours / s", "peer / s", "ratio", "required", "floor's ratio", "required", "peak", "peer's peak"
    )
    for row in rows:
        speed, ratios, peaks = row["items_per_second"], row["ratio"], row.get("peak_bytes", {})
        cells = [row["case"], f"{speed['ours']:.1f}", f"{speed['peer']:.1f}"]
        for name in ("peer", "floor"):
            cells.append(f"{ratios[name]:.2f}" if name in ratios else "")
            cells.append(f"{row['required'][name]:.2f}" if name in row["required"] else "")
        cells += [f"{peaks[name] / 2**20:.0f} MiB" if name in peaks else "" for name in ("ours", "peer")]
        table.add_row(*cells)
    return table


def main(
    suite: Annotated[list[str], typer.Option(help=f"One of {', '.join(SUITES)}, or all.")] = ["all"],  # noqa: B006
    only: Annotated[str | None, typer.Option(help="Cases whose names match this pattern.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed turns of each case.")] = 7,
    with_memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory, too.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the results.")] = Path("outputs/benchmark.json"),
    peak_of: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print a table with ratios, and write JSON."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    suites = list(SUITES) if suite == ["all"] else suite
    selected = cases(suites, only)
    if not selected:
        raise ValueError(f"no case matches {only!r}")
    if peak_of is not None:
        print(peak_bytes(selected[0].builders[peak_of](place), place))
        return
    rows = []
    for case in selected:
        rows.append(measure(case, place, repeats, with_memory))
        console.print(show(rows[-1:]))
        record = {
            "machine": {"device": str(place), "processor": platform.processor(), "threads": torch.get_num_threads()},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "rows": rows,
        }
        write_json(out, record)
    console.print(show(rows))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmark.py: {' '.join(str(error).split())}")
