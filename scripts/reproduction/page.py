"""Write docs/reproduction.md, its pictures and its records."""

import itertools
import math
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from aft_hf.analysis.pictures import CURVES, new_figure, save, styled
from aft_hf.atomic_files import write_atomic
from scripts.benchmark.page import write_records

from .arms import ARMS
from .claims import CLAIMS, Claim, Comparison
from .judging import LEAST_SEEDS, NOT_RUN, SEEDS, Judgement, Records


if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = f"""# The paper's claims at small scale

Each claim is tested by training small models with equal budgets on Tiny Shakespeare (characters) and CIFAR-10 (pixels
and images). They end far from convergence: compare the order of two numbers, not their values. Text is in bits per
character or dimension (lower is better), images in accuracy.

**Rule, fixed before the runs.** Arms are compared seed by seed. The effect is our number minus the other, with the
95 % interval of Student's t over the shared seeds ({SEEDS} are planned, {LEAST_SEEDS} the least). A comparison *holds*
if the whole interval is on the claimed side, *does not hold* if it is on the other side, and is else *not decided*; a
margin that a claim allows is added first. A claim holds if all of its comparisons do, controls included. Controls are
ours, not the paper's; those that cannot reverse a claim are in parentheses. Seeds change neither counts of parameters
nor speeds, which have the interval of repeated turns. Intervals leave out the sampling error of the test sets, which
both arms share (standard error of a score: {{errors}}).

**Runs.** Each arm gets the learning rate, of three, with the lowest training loss in short runs with another seed, and
a cosine schedule that ends. A † marks earlier runs: three seeds, a quarter of the steps at four times the batch (for
pixels twice), one learning rate for all, and data recorded by name alone. Runs of this rule replace them.
{{count}}

```bash
nice python -m scripts.reproduction all --hours 10 \\
    --text tinyshakespeare.txt --images cifar10
python -m scripts.reproduction report
```

`cifar10` is a folder with `train.parquet` and `validation.parquet`. The first command resumes after an interruption
and begins no run after its hours; `--plan` lists what is left. The second writes this page and
[its records](reproduction.json), with learning rates and versions. The models are in `scripts/reproduction/arms.py`.

## Claims

Numbers are those of the deciding comparison; all comparisons are below.

| claim | paper | ours | effect (95 %) | verdict | controls |
|---|---:|---:|---:|---|---|
"""
COMPARISONS = "| comparison | paper | ours | effect (95 %) | verdict |\n|---|---:|---:|---:|---|\n"


def write_page(records: Records, page: Path, pictures: Path) -> None:
    """Write the page, its pictures and, in the same folder, its records."""
    drawn = [claim for claim in CLAIMS.values() if _sides(claim, records)]
    for claim in drawn:
        save(draw(claim, records), pictures / f"claim-{claim.number}.svg")
    folder = os.path.relpath(pictures, page.parent)
    with write_atomic(page) as file:
        file.write(render(records, folder).encode())
    write_records(page.with_suffix(".json"), records.all())


def render(records: Records, pictures: str) -> str:
    """The text, the table of the claims, and for each claim its comparisons and its picture, folded."""
    kinds = {"characters": "bits per character", "pixels": "bits per dimension", "images": "accuracy"}
    errors: dict[str, list[float]] = {}
    for record in records.all():
        if "test_error" in record["metrics"] and record["arm"] in ARMS:
            errors.setdefault(kinds[ARMS[record["arm"]].data], []).append(record["metrics"]["test_error"])
    said = ", ".join(f"at most {max(values):.3f} {kind}" for kind, values in errors.items())
    known = sum(record["identity"] is not None for record in records.all())
    text = TEXT.format(
        errors=said or "about 0.007 for an accuracy (5,000 images)",
        count=f"{known} runs are confirmed, {len(records.all()) - known} are earlier ones.",
    )
    text += "".join(_row(claim, records) for claim in CLAIMS.values()) + "\n## Comparisons\n"
    return text + "".join(_fold(claim, records, pictures) for claim in CLAIMS.values())


def _row(claim: Claim, records: Records) -> str:
    judged = [(each, records.judge(each)) for each in claim.comparisons if each.judged]
    verdict = records.verdict(claim)
    deciding = next(x for x in judged if x[1].verdict == verdict)
    controls = ", ".join(_verdict(found) for each, found in judged if each.control) or "-"
    mark = "" if all(found.confirmed for _, found in judged) else " †"
    says = f"{claim.number}. **{claim.says}** ({claim.where})"
    return f"| {says} | {_cells(*deciding)} | **{verdict}**{mark} | {controls} |\n"


def _fold(claim: Claim, records: Records, pictures: str) -> str:
    rows = []
    for each in claim.comparisons:
        name = f"control: {each.says}" if each.control else each.says
        found = records.judge(each)
        rows.append(f"| {name if each.judged else f'({name})'} | {_cells(each, found)} | {_verdict(found)} |\n")
    picture = f"\n![Claim {claim.number}]({pictures}/claim-{claim.number}.svg)\n" if _sides(claim, records) else ""
    note = f"{claim.note}\n\n" if claim.note else ""
    start = f"\n<details markdown>\n<summary>{claim.number}. {claim.says}</summary>\n\n"
    return f"{start}{note}{COMPARISONS}{''.join(rows)}{picture}\n</details>\n"


def _verdict(found: Judgement) -> str:
    return found.verdict + ("" if found.confirmed else " †")


def _cells(comparison: Comparison, found: Judgement) -> str:
    paper = _pair(comparison, *(comparison.paper or (math.nan, math.nan)))
    return f"{paper} | {_pair(comparison, found.ours, found.other)} | {_effect(comparison, found)}"


def _pair(comparison: Comparison, ours: float, other: float) -> str:
    """Both numbers; a constant, like the speed 1 of the peer, is left out."""
    both = [number(ours), number(other)] if isinstance(comparison.other, tuple) else [number(ours)]
    return "-" if math.isnan(ours) else "/".join(both)


def _effect(comparison: Comparison, found: Judgement) -> str:
    if found.verdict == NOT_RUN:
        return "-"
    effect = number(found.difference, "+")
    spread = "" if math.isnan(found.low) or found.low == found.high else f"<br>[{found.low:+.3f}, {found.high:+.3f}]"
    margin = f"<br>margin {comparison.margin:g}" if comparison.margin else ""
    return effect + spread + margin


def number(value: float, sign: str = "") -> str:
    """Format a number: three decimals, none from 1,000, and in millions from 10^6."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:{sign}.1f} M"
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3f}"


def _sides(claim: Claim, records: Records) -> dict[tuple[str, str], list[dict]]:
    """The arms and metrics of a claim that a picture shows, but no counts of parameters, and their runs: those whose
    identity is known, or only earlier ones if an arm of the same data has no others, since both kinds do not compare.
    """
    sides = [x for c in claim.comparisons if "parameters" not in c.metric for x in (c.ours, c.other)]
    arms = {side: side[0] for side in dict.fromkeys(sides) if isinstance(side, tuple)}
    earlier = {ARMS[arm].data for arm in arms.values() if records.of(arm, confirmed=False) and not records.of(arm)}
    known = {arm: ARMS[arm].data not in earlier for arm in arms.values()}
    runs = {side: [dict(x) for x in records.of(arm, confirmed=known[arm]).values()] for side, arm in arms.items()}
    return {side: found for side, found in runs.items() if found}


@styled()
def draw(claim: Claim, records: Records) -> "Figure":
    """For each kind of data: training losses of the arms, averaged over seeds, and the score of each seed."""
    sides = _sides(claim, records)
    kinds = list(dict.fromkeys(ARMS[arm].data for arm, _ in sides))
    height = sum(max(1.8, 0.6 + 0.22 * sum(ARMS[arm].data == kind for arm, _ in sides)) for kind in kinds)
    figure, axes = new_figure(len(kinds), 2, (8.0, height + 0.4))
    for (losses, scores), kind in zip(axes, kinds):
        own = [(arm, metric) for arm, metric in sides if ARMS[arm].data == kind]
        styles = zip({side[0]: sides[side] for side in own}.items(), itertools.product(("-", "--", ":"), CURVES))
        for (arm, runs), (dash, colour) in styles:
            curves = [dict(map(tuple, x["losses"])) for x in runs]
            steps = sorted(set.intersection(*map(set, curves)))
            means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
            losses.plot(steps, means, dash, color=colour, linewidth=1, label=arm)
        if kind == "speed":
            losses.set_axis_off()
        else:
            losses.set(xlabel="step", ylabel="training loss (nats)")
            losses.legend(fontsize=6)
        for position, (arm, metric) in enumerate(reversed(own)):
            values = [x["metrics"][metric] for x in sides[arm, metric]]
            scores.plot(values, [position] * len(values), ".", color=CURVES[0])
        names = [arm if metric == "test" else f"{arm}: {metric}" for arm, metric in reversed(own)]
        scores.set_yticks(range(len(own)), names)
        scores.set(xlabel="score of each seed", ylim=(-0.6, len(own) - 0.4))
        scores.grid(alpha=0.3, axis="x")
    return figure
