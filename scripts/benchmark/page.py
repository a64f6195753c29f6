"""The table and the pictures of docs/benchmark.md, from the records of the measurements."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from aft_hf.analysis.pictures import CURVES, INK, new_figure, save, styled
from aft_hf.atomic_files import write_atomic

from .cases import DECODED, DECODING, GROWTH, TABLE, Case
from .models import Images, Text


if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
BEGIN, END = "<!-- table: written by python -m scripts.benchmark -->", "<!-- end of the table -->"
COLUMNS = [(task, bf16) for task in ("inference", "training") for bf16 in (False, True)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, which is a JSON array with a record in each line."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as a JSON array, one record per line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomic(path) as file:
        file.write(f"[\n{lines}\n]\n".encode())


def write_page(page: Path, records: list[dict[str, Any]]) -> None:
    """Replace the table of a page, if the page exists, and draw its pictures."""
    if page.exists():
        before, _, rest = page.read_text().partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{rest.partition(END)[2]}"
        with write_atomic(page) as file:
            file.write(text.encode())
    for kind, name in ((Text, "text"), (Images, "images")):
        save(draw_growth(records, kind), page.parent / "images" / f"benchmark_{name}.svg")


def table(records: list[dict[str, Any]]) -> str:
    """The table in Markdown: times the speed of the peer and, in parentheses, the share of the limit; memory."""
    by_case = {record["case"]: record for record in records}
    lines = [
        "| model | peer | x speed: inference fp32 | bf16 | training fp32 | bf16 | x memory: inference | training |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for model, _ in TABLE:
        of = {(task, bf16): by_case.get(Case("table", model, task, bf16, 1).name) for task, bf16 in COLUMNS}
        memory = [_memory(of[task, False]) for task in ("inference", "training")]
        if any(of.values()):
            lines.append(_line(model.name, model.peer_name, *(_speed(of[each]) for each in COLUMNS), *memory))
    of_decoding = [by_case.get(Case("table", DECODING, "decoding", bf16, 1).name) for bf16 in (False, True)]
    name = f"{DECODING.name.partition(',')[0]}, {DECODED} tokens after {DECODING.length:,}"
    if any(of_decoding):
        lines.append(_line(name, DECODING.peer_name, *map(_speed, of_decoding), *["-"] * 4))
    notes = [_conditions(part, records) for part in ("table", "growth")]
    return "\n".join(lines) + "\n\n" + "\n".join(filter(None, notes))


def _conditions(part: str, records: list[dict[str, Any]]) -> str:
    """The machine, the versions and the turns of the measurements of a part."""
    own = [record for record in records if record["case"].startswith(part)]
    machines = sorted({record["machine"] for record in own})
    versions = sorted({" ".join(pair) for record in own for pair in record["versions"].items()})
    turns = sorted({record["turns"] for record in own})
    name = "Table" if part == "table" else "Pictures"
    text = f"{name}: {'; '.join(machines)}; {', '.join(versions)}; medians of {', '.join(map(str, turns))} turns."
    return "\n".join(wrap(text, 119)) if own else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _speed(record: Record | None) -> str:
    if record is None:
        return "-"
    ratio = record["ratio"]
    peer = min(ratio[each] for each in ("peer", "eager") if each in ratio)
    return f"{peer:.2f}" + (f" ({ratio['limit']:.2f})" if "limit" in ratio else "")


def _memory(record: Record | None) -> str:
    return "-" if record is None else f"{_bytes(record, 'ours') / _bytes(record, 'peer'):.2f}"


def _bytes(record: Record, name: str) -> int:
    """Peak memory with the weights."""
    return record["bytes"][name] + record["weights"][name]


@styled()
def draw_growth(records: list[dict[str, Any]], kind: type[Images] | type[Text]) -> "Figure":
    """Time and memory against the length of texts (a training step) or the size of images (inference)."""
    by_case = {record["case"]: record for record in records}
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for model in (model for model in GROWTH if isinstance(model, kind)):
        task, size = ("training", model.length) if isinstance(model, Text) else ("inference", model.pixels)
        if record := by_case.get(Case("growth", model, task, False, 1).name):
            for name, candidate in ((model.name.partition(",")[0], "ours"), (model.peer_name, "peer")):
                point = size, record["seconds"][candidate], _bytes(record, candidate) / 2**20
                if all(size != other[0] for other in lines.setdefault(name, [])):
                    lines[name].append(point)
    figure, axes = new_figure(2, 1, (3.4, 4.6))  # for a phone of 360 pixels
    for column, (axis, title) in enumerate(zip(axes[:, 0], ("seconds", "peak memory, MiB")), 1):
        axis.set(xscale="log", yscale="log", title=title, xlabel="tokens" if kind is Text else "pixels of a side")
        colours = iter(CURVES)
        for place, (name, points) in enumerate(lines.items()):
            sizes, values = zip(*((point[0], point[column]) for point in sorted(points)))
            width = 5 if place == 0 else 1.5  # the lines of two types of AFT may lie on each other
            colour = INK if name in ("ViT", "GPT-2") else next(colours)
            axis.plot(sizes, values, ".-", color=colour, linewidth=width, markersize=width + 4, label=name)
            axis.set_xticks(sizes, [f"{x // 1024}k" if kind is Text else str(x) for x in sizes])
        low, high = axis.get_ylim()
        ticks = [x * 10.0**power for power in range(-4, 6) for x in (1, 2, 5)]
        axis.set_yticks([x for x in ticks if low <= x <= high], [f"{x:g}" for x in ticks if low <= x <= high])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    if lines:
        axes[0][0].legend()
    return figure
