"""Tables of the results of the benchmark, for the terminal and in Markdown."""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from ..data.atomic_files import write_atomic
from .growth import Row, slopes


HEADINGS = (
    "case",
    "ours",
    "peer",
    "peer's speed",
    "speedup",
    "required",
    "memory",
    "memory ratio",
    "required",
)
SLOPE_HEADINGS = ("model", "quantity", "slope", "first decade", "last decade")
MET, MISSED = "✓", "✗"


def comparisons(row: Row) -> Iterator[tuple[str, ...]]:
    """The lines of a row in the table, one for each candidate that ours is compared with."""
    if "seconds" not in row:
        reason = row.get("skipped") or f"failed: {row['failed']}"
        yield (row["case"], reason, *[""] * (len(HEADINGS) - 2))
        return
    for name, faster in row.get("ratio", {}).items():
        speed = row["items_per_second"]
        required, required_memory = row["required"].get(name), row["required_memory"].get(name)
        memory = row.get("state_bytes" if row["task"] == "decode" else "peak_bytes", {})
        fast = f"{faster:.2f}" + _mark(required, required is not None and faster >= required)
        both = times = ""
        if name in memory:
            share = memory["ours"] / max(memory[name], 1)
            times = f"{share:.2f}" + _mark(required_memory, required_memory is not None and share <= required_memory)
            both = " / ".join(f"{memory[key] / 2**20:,.4g}" for key in ("ours", name)) + " MiB"
        yield (
            row["case"],
            _speed(speed["ours"], row["unit"]),
            {"peer": row["peer"], "floor": "no mixing"}.get(name, name),
            _speed(speed[name], row["unit"]),
            fast,
            "" if required is None else f"{required:.2f}",
            both,
            times,
            "" if required_memory is None else f"{required_memory:.2f}",
        )


def _speed(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}/s" if value >= 100 else f"{value:.2f} {unit}/s"


def _mark(required: float | None, met: bool) -> str:
    return "" if required is None else f" {MET if met else MISSED}"


def growth_slopes(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """The lines of the table of slopes."""
    for found in slopes(rows):
        against = "length" if found["unit"] == "tokens" else "side of the image"
        what = f"{found['task']}, {'time' if found['quantity'] == 'seconds' else 'memory'} against {against}"
        parts = [f"{found[part]:.2f}" if part in found else "" for part in ("all", "first_decade", "last_decade")]
        yield found["model"], what, *parts


def rich_table(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    """Make a table for the terminal."""
    table = Table(*headings)
    for line in lines:
        table.add_row(*line)
    return table


def write_markdown(path: Path, rows: list[Row]) -> None:
    """Write the tables of each machine: required comparisons, other comparisons, slopes, and cases not measured."""
    parts = []
    for device, sizes in dict.fromkeys((row["machine"]["device"], row["sizes"]) for row in rows):
        own = [row for row in rows if (row["machine"]["device"], row["sizes"]) == (device, sizes)]
        measured = [row for row in own if "ratio" in row]
        asked = [line for row in measured for line in comparisons(row) if line[5] or line[8]]
        others = [line for row in measured for line in comparisons(row) if not line[5] and not line[8]]
        versions = dict.fromkeys(f"{name} {v}" for row in own for name, v in row["versions"].items())
        parts += [f"## {device}" + (" (smoke sizes: the numbers say nothing)" if sizes == "smoke" else "")]
        parts += [f"Medians of {' or '.join(map(str, sorted({row['repeats'] for row in own})))} turns; "]
        parts[-1] += f"{'; '.join(versions)}. {MET} meets the requirement, {MISSED} does not."
        for title, headings, lines in (
            ("Required", HEADINGS, asked),
            ("Other comparisons", HEADINGS, others),
            ("Growth", SLOPE_HEADINGS, list(growth_slopes(own))),
        ):
            if lines:
                parts += [f"### {title}", _markdown_table(headings, lines)]
        missing = [f"- {row['case']}: {next(comparisons(row))[1]}" for row in own if "seconds" not in row]
        if missing:
            parts += ["### Not measured", "\n".join(missing)]
    with write_atomic(path) as file:
        file.write(("\n\n".join(parts) + "\n").encode())


def _markdown_table(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    alignment = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(headings))) + "|"
    return "\n".join(["| " + " | ".join(headings) + " |", alignment, *("| " + " | ".join(x) + " |" for x in lines)])
