"""The command `aft-hf benchmark`. Slow imports are deferred until it runs, as other commands do not need them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from rich.console import Console


def benchmark_command(
    suite: Annotated[
        list[str], typer.Option(help="vision, causal, decode, mixer, growth or all; may be repeated.")
    ] = ["all"],  # noqa: B006
    only: Annotated[str | None, typer.Option(help="Only the cases whose names match this pattern.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed turns of each case.")] = 7,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")] = None,
    json: Annotated[
        Path, typer.Option(help="File of the results. Rows of the same machine, versions and turns are kept.")
    ] = Path("outputs/benchmark.json"),
    picture: Annotated[
        Path | None, typer.Option(help="PNG of the growth of time and memory. Default: path of the JSON as .png.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also measure the rows that the JSON has.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to check that every case runs.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure, or only show and draw the rows of the JSON.")] = True,
) -> None:
    """Compare speed and memory of AFT with ViT, GPT-2 and other models, which take turns in one process.

    Each row has the items per second of both models, the median over turns of the
    ratio of their times, and their peak memory, measured in a new process. Models
    with the same peer take turns together. Rows are written as soon as they are
    measured, and the same command resumes after an interruption.
    """
    import torch

    from ..progress import plain_console
    from ..reading import explained
    from .cases import FULL, SMOKE
    from .measuring import keep_freed_memory
    from .rows import measure_cases, read_rows
    from .suites import select_cases
    from .tables import HEADINGS, SLOPE_HEADINGS, comparisons, growth_slopes, rich_table, write_markdown

    console = plain_console(width=None if sys.stdout.isatty() else 190)
    if measure:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type == "cpu" and sys.platform != "linux" and memory:
            raise ValueError("peak memory on a CPU can be measured on Linux only: give --no-memory")
        if place.type == "cpu":
            keep_freed_memory()
        sizes = SMOKE if smoke else FULL
        rows = measure_cases(
            select_cases(suite, only, sizes),
            json,
            device=place,
            repeats=repeats,
            with_memory=memory,
            sizes=sizes,
            fresh=fresh,
            show=lambda row: console.print(f"{row['case']}: {_in_short(row)}"),
        )
        everything = read_rows(json)
    else:
        rows = everything = read_rows(json)
    with explained(f"{json}: its rows cannot be shown; give another --json"):
        if compared := [line for row in rows for line in comparisons(row)]:
            console.print(rich_table(HEADINGS, compared))
        if found := list(growth_slopes(rows)):
            console.print(rich_table(SLOPE_HEADINGS, found))
        if markdown is not None:
            write_markdown(markdown, everything)
        _draw(picture or json.with_suffix(".png"), everything, console)
    if failed := [row["case"] for row in rows if "failed" in row]:
        raise ValueError(f"{len(failed)} of {len(rows)} cases failed: {', '.join(failed)}")


def _in_short(row: dict[str, Any]) -> str:
    """One line about a new row, which is printed while other rows are still measured."""
    if "seconds" not in row:
        return row.get("skipped") or f"failed: {row['failed']}"
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in row["seconds"].items())


def _draw(path: Path, rows: list[dict[str, Any]], console: "Console") -> None:
    try:
        from .picture import plot_growth
    except ImportError:
        console.print("matplotlib is not installed: no picture")
        return
    if plot_growth(path, rows):
        console.print(f"picture: {path}", soft_wrap=True)
