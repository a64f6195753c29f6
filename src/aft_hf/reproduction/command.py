"""The command of `scripts/reproduce.py`. Slow imports are deferred until it runs."""

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..progress import plain_console
from ..reading import reported


if TYPE_CHECKING:
    from .records import Records
    from .running import Settings


def reproduce_command(
    what: Annotated[list[str], typer.Argument(help="Numbers of claims, or all, or report, to only write the page.")],
    text: Annotated[str | None, typer.Option(help="Plain text file, or generated.")] = None,
    images: Annotated[
        str | None, typer.Option(help="Folder with train.parquet and validation.parquet, or generated.")
    ] = None,
    image_column: Annotated[str, typer.Option(help="Column of the images.")] = "image",
    label_column: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model, with seeds 0, 1, ...")] = 3,
    scale: Annotated[int, typer.Option(min=1, help="Factor of widths, heads, lengths and steps; 4 on a GPU.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Directory of the runs. Default: outputs/reproduction.")] = None,
    page: Annotated[Path | None, typer.Option(help="Page of the report. Default: docs/reproduction.md.")] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON file of a page: skip its runs that have the same settings and data.",
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="List the runs that are left, and exit.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run tiny models for a few steps, as a test.")] = False,
) -> None:
    """Test claims of the paper by short runs, or write the page about the finished runs.

    An interrupted run resumes from its last checkpoint, and a finished run is not repeated.
    """
    from .records import read_records
    from .report import write_report
    from .running import Settings, runs_left

    name = "reproduction" if scale == 1 else f"reproduction-{scale}"
    out = out or Path("outputs", *(["smoke"] if smoke else []), name)
    page = page or (out / "reproduction.md" if smoke else Path("docs", f"{name}.md"))
    if what == ["report"]:
        records = read_records(page.with_suffix(".json"), out / "results")
        write_report(records, page, page.parent / "images" / name)
        print(f"{page}: {len(records.all())} runs")
        return
    arms = arms_of(what)
    settings = Settings(out, text, images, image_column, label_column, scale, smoke)
    runs = [(arm, seed) for seed in range(seeds) for arm in arms]
    pages = [] if earlier is None else [earlier]
    left = runs_left(runs, settings, read_records(*pages))
    print(f"{len(runs)} runs, {len(left)} left to do")
    if plan:
        print("\n".join(f"{arm}, seed {seed}" for arm, seed in left))
        return
    failed = run_all([run for run in runs if run in left or settings.record_path(*run).exists()], settings)
    show_verdicts(what, read_records(*pages, out / "results"))
    if failed:
        raise ValueError(f"{len(failed)} runs failed: {', '.join(failed)}")


def arms_of(what: list[str]) -> list[str]:
    """The arms of the claims that a user names, each after the arm that it starts from.

    Raises:
        ValueError: a claim does not exist.
    """
    from .claims import CLAIMS
    from .running import with_starts

    return with_starts(arm for number in numbers_of(what) for arm in CLAIMS[number].arms)


def numbers_of(what: list[str]) -> list[int]:
    """The numbers of the claims that a user names: numbers or "all".

    Raises:
        ValueError: a claim does not exist.
    """
    from .claims import CLAIMS

    if what == ["all"]:
        return list(CLAIMS)
    for word in what:
        if not word.isdigit() or int(word) not in CLAIMS:
            raise ValueError(f"{word!r} is not a claim: give numbers in 1 .. {max(CLAIMS)}, or all, or report")
    return [int(word) for word in what]


def run_all(runs: list[tuple[str, int]], settings: "Settings") -> list[str]:
    """Run arms one after the other. A failed run is reported, and the others continue.

    Returns:
        The failed runs, each with its error.
    """
    from .running import identify, run_arm

    for arm, seed in runs:
        identify(arm, seed, settings)  # raises for wrong options before hours of runs
    failed = []
    for index, (arm, seed) in enumerate(runs):
        print(f"[{index + 1} of {len(runs)}] {arm}, seed {seed}", flush=True)
        try:
            run_arm(arm, seed, settings)
        except (ValueError, OSError, RuntimeError) as error:
            traceback.print_exception(error, file=sys.stderr)
            failed.append(f"{arm} with seed {seed} ({error})")
    return failed


def show_verdicts(what: list[str], records: "Records") -> None:
    """Print a table of the claims, their comparisons and verdicts."""
    from rich.table import Table

    from .claims import CLAIMS

    table = Table("#", "claim", "comparison", "ours", "verdict")
    for claim in map(CLAIMS.__getitem__, numbers_of(what)):
        table.add_row(str(claim.number), claim.says, "", "", records.verdict(claim), end_section=False)
        for each in claim.comparisons:
            judgement = records.judge(each)
            table.add_row("", "", each.says, f"{judgement.difference:+.3f}", judgement.verdict)
        table.add_section()
    plain_console().print(table)


def main() -> None:
    """Run the command; an error is printed as one line."""
    with reported("reproduce.py"):
        typer.run(reproduce_command)
