"""Test claims of the paper by small runs, and write docs/reproduction.md.

python -m scripts.reproduction all --text tinyshakespeare.txt --images cifar10 --hours 10
python -m scripts.reproduction 4 17 --text tinyshakespeare.txt --plan
python -m scripts.reproduction report
"""

import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from aft_hf.benchmarking import keep_freed_memory
from aft_hf.console import reported

from .arms import ARMS
from .claims import CLAIMS, ORDER
from .judging import SEEDS, Records
from .page import write_page
from .running import Run, Runner, read_records


def main(
    what: Annotated[list[str], typer.Argument(help="Numbers of claims, or all, or report, to only write the page.")],
    text: Annotated[str | None, typer.Option(help="Plain text file, or generated.")] = None,
    images: Annotated[str | None, typer.Option(help="Folder with train and validation.parquet, or generated.")] = None,
    image_column: Annotated[str, typer.Option(help="Column of the images.")] = "image",
    label_column: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model, with seeds 0, 1, ...")] = SEEDS,
    hours: Annotated[float, typer.Option(help="Begin no run after this time.")] = float("inf"),
    out: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("outputs/reproduction"),
    page: Annotated[Path, typer.Option(help="Page; its records are beside it.")] = Path("docs/reproduction.md"),
    plan: Annotated[bool, typer.Option("--plan", help="List the runs that are left, and exit.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Train tiny models for a few steps, as a test.")] = False,
) -> None:
    """Run what the claims need, in the order of the claims. A finished run is not repeated, and an interrupted one
    resumes from its last checkpoint."""
    earlier = read_records(page.with_suffix(".json"))
    if what == ["report"]:
        write_page(Records([*earlier, *read_records(out / "records.json")]), page, page.parent / "images" / page.stem)
        return
    keep_freed_memory()
    end = time.monotonic() + 3600 * hours
    runner = Runner(out, text, images, image_column, label_column, smoke, earlier)
    arms = arms_of(what)
    for arm in arms:
        runner.digest(Run(arm))  # raises for wrong options before hours of runs
    if plan:
        for run in runner.left(arms, seeds):
            print(f"{run.name}, seed {run.seed}")
        return
    failed = run_all(runner, arms, seeds, end)
    if failed:
        raise ValueError(f"{len(failed)} runs failed: {', '.join(failed)}")


def run_all(runner: Runner, arms: list[str], seeds: int, end: float) -> list[str]:
    """Run what is left until the time `end`. A failed run is reported, and the others continue.

    Returns:
        The failed runs, each with its error.
    """
    failed = []
    for run in runner.left(arms, seeds):
        if time.monotonic() >= end:
            print("the time is over: the same command continues")
            break
        if run.rate is None and ARMS[run.arm].data != "speed":
            failed.append(f"{run.arm} with seed {run.seed} (no learning rate was chosen)")
            continue
        print(f"{run.name}, seed {run.seed}", flush=True)
        try:
            runner.run(run)
        except (ValueError, OSError, RuntimeError) as error:
            traceback.print_exception(error, file=sys.stderr)
            failed.append(f"{run.name} with seed {run.seed} ({error})")
    return failed


def arms_of(what: list[str]) -> list[str]:
    """The arms of the claims that a user names, each once and after the arm that it starts from.

    Raises:
        ValueError: a claim does not exist.
    """
    for word in what:
        if what != ["all"] and (not word.isdigit() or int(word) not in CLAIMS):
            raise ValueError(f"{word!r} is not a claim: give numbers in 1 .. {max(CLAIMS)}, or all, or report")
    arms: dict[str, None] = {}
    for number in ORDER if what == ["all"] else map(int, what):
        for arm in CLAIMS[number].arms:
            arms |= dict.fromkeys(filter(None, (getattr(ARMS[arm], "start", None), arm)))
    return list(arms)


if __name__ == "__main__":
    with reported("scripts.reproduction"):
        typer.run(main)
