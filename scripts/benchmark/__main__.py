"""Measure the benchmark, and write the table and the pictures of docs/benchmark.md.

    python -m scripts.benchmark
    python -m scripts.benchmark --only "*small*bf16" --seconds 90
    python -m scripts.benchmark --seconds 0          # writes the page only

Every case is written as soon as it is measured. The same command measures what is missing for the current code and
machine, so that a run can be interrupted and continued.
"""

import fnmatch
import time
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from aft_hf.console import reported

from .cases import all_cases
from .page import read_records, write_page, write_records


def main(
    json: Annotated[Path, typer.Option(help="File of the records.")] = Path("docs/benchmark.json"),
    page: Annotated[Path | None, typer.Option(help="Page whose table is replaced. Default: JSON as .md.")] = None,
    only: Annotated[str, typer.Option(help="Only the cases whose names match this pattern.")] = "*",
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each case.")] = 7,
    seconds: Annotated[float, typer.Option(help="Begin no further case after this time.")] = float("inf"),
) -> None:
    end = time.monotonic() + seconds
    records = {record["case"]: record for record in read_records(json)}
    chosen = [case for case in all_cases() if fnmatch.fnmatchcase(case.name, only)]
    if not chosen:
        raise ValueError(f"no case matches {only!r}; a name is, for example, {next(all_cases()).name!r}")
    left = [case for case in chosen if not case.key().items() <= records.get(case.name, {}).items()]
    print(f"{len(left)} of {len(chosen)} cases to measure")
    for case in tqdm(left):
        if time.monotonic() >= end:
            break
        records[case.name] = case.measure(turns)
        write_records(json, [records[each.name] for each in all_cases() if each.name in records])
        tqdm.write(f"{case.name}: {records[case.name]['ratio']}")
    write_page(page or json.with_suffix(".md"), list(records.values()))


if __name__ == "__main__":
    with reported("scripts.benchmark"):
        typer.run(main)
