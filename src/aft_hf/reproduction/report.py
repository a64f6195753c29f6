"""Write the page of the reproduction in Markdown from the records of its runs."""

import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from ..analysis.pictures import save
from ..data.atomic_files import write_atomic
from ..data.json_files import write_json
from .arms import ARMS, Training
from .claims import CLAIMS, Claim, Comparison
from .pictures import draw_claim
from .records import Records, without_settings
from .verdict import FACTOR, LEAST_SEEDS, NOT_RUN


BEGINNING = f"""# The paper's claims at small scale

Each claim of the paper is tested by short runs with equal budgets: models of a fraction of the paper's size are
trained for few steps on a fraction of its data, with {LEAST_SEEDS} seeds each. The runs end long before the models
have converged, which favors models that learn faster at first. The paper's numbers come from its own models and data:
compare the order, not the values. `scripts/reproduce.py report` writes this page from the results of the runs in
`reproduction.json`, in the same folder.

A comparison **holds** if the difference of the means exceeds {FACTOR:g} standard errors of that difference in the
direction of the claim, **does not hold** if it exceeds them in the other direction, and is otherwise **not decided at
this size**; fewer than {LEAST_SEEDS} seeds are **too few runs** for a verdict. If a claim allows a margin, the margin
is first added in favor of the claim. A claim holds if all of its comparisons hold. The rule, the margins and the
models were fixed before the runs. Comparisons in parentheses are our own controls and do not count for the verdict;
some of them were added afterwards.
"""

COMMANDS = """
## Commands

`--text` is any plain text file, such as Tiny Shakespeare, and `--images` a folder with `train.parquet` and
`validation.parquet`, such as those of CIFAR-10. After an interruption, the same command resumes and skips finished
runs; `--plan` lists the runs that are left. `--earlier docs/reproduction.json` also skips the runs of this page. On a
GPU, `--scale 4` gives the widths, heads and lengths of the paper.

```bash
python scripts/reproduce.py all --text tinyshakespeare.txt --images cifar10
python scripts/reproduce.py report
```
"""


def write_report(records: Records, page: Path, pictures: Path) -> None:
    """Write the page, its pictures and, in the same folder, its records.

    Args:
        records: the records of the runs.
        page: the Markdown file; the records are written to the same path with the suffix .json.
        pictures: the folder of the pictures `claim-1.svg` and so on.
    """
    for claim in CLAIMS.values():
        if any(records.of(arm) for arm in claim.arms):
            save(draw_claim(claim, records), pictures / f"claim-{claim.number}.svg")
    folder = os.path.relpath(pictures, page.parent)
    with write_atomic(page) as file:
        file.write(render(records, folder).encode())
    write_json(page.with_suffix(".json"), [without_settings(record) for record in records.all()])


def render(records: Records, pictures: str) -> str:
    """Render the page as Markdown.

    Args:
        records: the records of the runs.
        pictures: the folder of the pictures, relative to the page.
    """
    parts = [BEGINNING]
    if any(record["smoke"] for record in records.all()):
        parts.append("\n**These are smoke tests of a few steps: the numbers say nothing.**\n")
    parts += ["\n", *_lines(_summary(records)), COMMANDS, *_lines(_conditions(records))]
    for claim in CLAIMS.values():
        parts += _lines(_section(claim, records, pictures))
    parts += _lines(_runs())
    return "".join(parts)


def _lines(lines: Iterator[str]) -> list[str]:
    return [line + "\n" for line in lines]


def _summary(records: Records) -> Iterator[str]:
    yield "| # | claim | paper | verdict |"
    yield "|---:|---|---|---|"
    for claim in CLAIMS.values():
        yield f"| {claim.number} | {claim.says} | {claim.where} | **{records.verdict(claim)}** |"


def _conditions(records: Records) -> Iterator[str]:
    """The devices, the PyTorch version and the hours of the runs."""
    if not records.all():
        return
    machines = sorted({record["device"] for record in records.all()})
    releases = sorted({record["versions"].get("torch", "unknown") for record in records.all()})
    hours = sum(record["metrics"].get("seconds", 0.0) for record in records.all()) / 3600
    yield ""
    yield (
        f"{len(records.all())} runs at scale {records.all()[0]['scale']} on {'; '.join(machines)}, with PyTorch "
        f"{', '.join(releases)}: {hours:.1f} hours of training."
    )


def _section(claim: Claim, records: Records, pictures: str) -> Iterator[str]:
    yield ""
    yield f"## {claim.number}. {claim.says}"
    yield ""
    yield f"{claim.where}. Verdict: **{records.verdict(claim)}**. {claim.note}".rstrip()
    yield ""
    yield "| result | unit | paper | ours | std | runs |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in claim.rows:
        values = list(records.values(row.arm, row.metric).values())
        ours = number(statistics.fmean(values)) if values else "-"
        spread = number(statistics.stdev(values)) if len(values) > 1 else "-"
        paper = "-" if row.paper is None else number(row.paper)
        yield f"| {row.name} | {row.unit} | {paper} | {ours} | {spread} | {len(values)} |"
    yield ""
    yield "| comparison | paper | ours | standard error | margin | verdict |"
    yield "|---|---:|---:|---:|---:|---|"
    for comparison in claim.comparisons:
        yield _comparison(claim, comparison, records)
    yield ""
    if any(records.of(arm) for arm in claim.arms):
        yield f"![Losses and results of claim {claim.number}]({pictures}/claim-{claim.number}.svg)"
        yield ""
    yield f"`python scripts/reproduce.py {claim.number}`, runs: {', '.join(claim.arms)}."


def _runs() -> Iterator[str]:
    """The table of the training runs: arm, recipe and overrides."""
    yield ""
    yield "## Runs"
    yield ""
    yield (
        "Each run is `aft-hf train` with a recipe of `src/aft_hf/reproduction/recipes`, a seed and these overrides; "
        "`--scale` multiplies steps, widths, heads, ranks of position biases and text lengths. Speed is measured on "
        "models of the paper's sizes."
    )
    yield ""
    yield "| run | recipe | overrides |"
    yield "|---|---|---|"
    for name, arm in ARMS.items():
        if isinstance(arm, Training):
            overrides = [f"`{override}`" for override in arm.overrides]
            if arm.start is not None:
                overrides.append(f"starts from the run `{arm.start}`{', converted' if arm.convert else ''}")
            yield f"| `{name}` | `{arm.recipe}` | {', '.join(overrides) or '-'} |"


def _comparison(claim: Claim, comparison: Comparison, records: Records) -> str:
    judgement, paper = records.judge(comparison), papers_difference(claim, comparison)
    cells = [
        comparison.says if comparison.judged else f"({comparison.says})",
        "-" if paper is None else f"{number(paper, signed=True)}",
        "-" if judgement.verdict == NOT_RUN else number(judgement.difference, signed=True),
        "-" if math.isnan(judgement.error) else number(judgement.error),
        number(comparison.margin) if comparison.margin else "-",
        judgement.verdict,
    ]
    return f"| {' | '.join(cells)} |"


def papers_difference(claim: Claim, comparison: Comparison) -> float | None:
    """The difference of the paper's numbers, or None if the paper does not give both."""
    numbers = {(row.arm, row.metric): row.paper for row in claim.rows}
    ours = numbers.get(comparison.ours)
    other = comparison.other if isinstance(comparison.other, float) else numbers.get(comparison.other)
    return None if ours is None or other is None else ours - other


def number(value: float, *, signed: bool = False) -> str:
    """Format a number: three decimals, none from 1,000, and in millions from 10^6."""
    sign = "+" if signed else ""
    if abs(value) >= 1e6:
        return f"{value / 1e6:{sign}.2f} M"
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3f}"
