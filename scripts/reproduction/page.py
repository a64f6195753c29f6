"""Write docs/reproduction.md, its pictures and its records."""

import itertools
import math
import os
import statistics
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from aft_hf.analysis.pictures import CURVES, new_figure, save, styled
from aft_hf.atomic_files import write_atomic
from scripts.benchmark.page import write_records

from .arms import ARMS, PAIRS, RATES, RECALL_MODELS, Widths, recall_arm
from .claims import CLAIMS, OURS, Claim, Comparison
from .judging import EXACT, FAILS, HOLDS, LEAST_SEEDS, NOT_RUN, SEEDS, UNDECIDED, Judgement, Record, Records
from .measures import LONGER


if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = f"""# The paper's claims at small scale

Small models with equal budgets test each claim on Tiny Shakespeare (characters) and CIFAR-10 (pixels and images), far
from convergence: compare the order, not values. Text is in bits per character or dimension (lower is
better), images in accuracy.

{{verdicts}}

**Rule.** Arms are compared seed by seed. The effect is our number minus the other, with the 95 % interval of Student's
t over the shared seeds ({SEEDS} are planned, {LEAST_SEEDS} the least). p, of a t test against 0 or the margin that a
claim allows, is adjusted by Holm over the comparisons of a claim (controls apart, unrun ones included); intervals are
not adjusted. A comparison is decided if p is at most 0.05. A claim *holds* if all comparisons of the paper hold; one
that fails sinks it; one without three seeds leaves it *incomplete*. Controls are ours and decide nothing. Parameters
and memory (peak of a call, without weights) are exact; speeds, measured beside other processes, have a sign test over
nine turns. Intervals, first learning rates and seeds were fixed before the confirmed runs, Holm's adjustment and the
role of controls after them. Intervals leave out the test sets' sampling error (standard errors of at most
{{errors}}).

**Runs.** {{runs}} Each arm gets a cosine schedule and the learning rate of the lowest training loss in short runs with
another seed. For {{edges}} (‡), the best rate is at the grid's edge or unused.
The appendix has earlier runs (a quarter of the steps), which decide nothing.

```bash
# on a GPU, add --device cuda --minutes 8
nice python -m scripts.reproduction all --hours 10 \\
    --text tinyshakespeare.txt --images cifar10
python -m scripts.reproduction report
```

`cifar10` holds `train.parquet` and `validation.parquet`. `report` writes this page and
[its records](reproduction.json).

## Claims

| claim | verdict | controls |
|---|---|---|
"""
COMPARISONS = """| | comparison | paper | ours | parameters, M | seeds | effect (95 %) | p | verdict |
|---|---|---:|---:|---:|---:|---:|---:|---|
"""
APPENDIX = """
## Appendix: earlier runs

| | comparison | paper | ours | effect (95 %) |
|---|---|---:|---:|---:|
"""


def write_page(records: Records, page: Path, pictures: Path) -> None:
    """Write the page, its pictures and, in the same folder, its records."""
    drawn = {pictures / f"claim-{claim.name}.svg": claim for claim in CLAIMS.values() if _sides(claim, records)}
    for path, claim in drawn.items():
        save(draw(claim, records), path)
    for path in set(pictures.glob("claim-*.svg")) - drawn.keys():
        path.unlink()
    if _recalled(records):
        save(draw_recall(records), pictures / "recall.svg")
    if records.of("widths"):
        save(draw_widths(records), pictures / "widths.svg")
    folder = os.path.relpath(pictures, page.parent)
    with write_atomic(page) as file:
        file.write(render(records, folder).encode())
    write_records(page.with_suffix(".json"), records.all())


def render(records: Records, pictures: str) -> str:
    """The text, the table of the claims, that of the comparisons, what is not in the paper, and earlier runs."""
    text = TEXT.format(verdicts=counted(records), errors=_errors(records), runs=_runs(records), edges=_edges(records))
    text = "\n\n".join(
        fill(part, 119, break_on_hyphens=False) if part.startswith("**") else part for part in text.split("\n\n")
    )
    text += "".join(_row(claim, records) for claim in CLAIMS.values())
    text += "\n## Comparisons\n\n" + COMPARISONS
    text += "".join(_comparisons(claim, records) for claim in CLAIMS.values()) + "\n"
    text += "".join(f"{claim.name}: {claim.note}\n" for claim in CLAIMS.values() if claim.note)
    drawn = [claim for claim in CLAIMS.values() if _sides(claim, records)]
    shown = "".join(f"![Claim {claim.name}]({pictures}/claim-{claim.name}.svg)\n" for claim in drawn)
    text += f"\n<details markdown>\n<summary>Losses and scores</summary>\n\n{shown}\n</details>\n" if drawn else ""
    text += _ours(records, pictures)
    earlier = "".join(_earlier(claim, records) for claim in CLAIMS.values())
    return text + (APPENDIX + earlier if earlier else "")


def counted(records: Records) -> str:
    """How many claims have each verdict."""
    verdicts = Counter(records.verdict(claim) for claim in CLAIMS.values())
    words = {
        HOLDS: ("holds", "hold"),
        FAILS: ("does not hold at this size", "do not hold at this size"),
        UNDECIDED: ("is not decided", "are not decided"),
        NOT_RUN: ("is incomplete", "are incomplete"),
    }
    said = [f"{n} {word[n > 1]}" for verdict, word in words.items() if (n := verdicts[verdict])]
    return f"Of {len(CLAIMS)} claims, {' and '.join([', '.join(said[:-1]), said[-1]])}."


def _errors(records: Records) -> str:
    kinds = {"characters": "bits per character", "pixels": "bits per dimension", "images": "accuracy"}
    errors: dict[str, list[float]] = {}
    for record in _confirmed(records):
        if "test_error" in record["metrics"] and ARMS[record["arm"]].data in kinds:
            errors.setdefault(kinds[ARMS[record["arm"]].data], []).append(record["metrics"]["test_error"])
    return (
        ", ".join(f"{math.ceil(1e3 * max(values)) / 1e3:.3f} {kind}" for kind, values in errors.items())
        or "not measured"
    )


def _confirmed(records: Records) -> list[Record]:
    """The confirmed runs that are not searches for a learning rate."""
    return [record for record in records.all() if record["identity"] is not None and "@" not in record["arm"]]


def _runs(records: Records) -> str:
    final, all_of = len(_confirmed(records)), [record["identity"] is not None for record in records.all()]
    arms = Counter(record["arm"] for record in _confirmed(records) if ARMS[record["arm"]].data in RATES)
    seeds = ", ".join(f"{n} ({count} arm{'s' * (count > 1)})" for n, count in sorted(Counter(arms.values()).items()))
    others = f"{sum(all_of) - final} chose a learning rate, and {all_of.count(False)} are earlier ones"
    return f"{final} runs are confirmed, {others}. Seeds: {seeds or 'none'}.{_made_by(records)}"


def _made_by(records: Records) -> str:
    """The machines of the confirmed runs, and their versions."""
    confirmed = _confirmed(records)
    versions = {" ".join(pair) for record in confirmed for pair in record["versions"].items() if "aft" not in pair[0]}
    machines = sorted({record["device"].replace(", 1 threads", ", 1 thread") for record in confirmed})
    return f" Machines: {'; '.join(machines)}; {', '.join(sorted(versions))}." if confirmed else ""


def _edges(records: Records) -> str:
    arms = {record["arm"] for record in _confirmed(records) if ARMS[record["arm"]].data in RATES}
    return f"{sum(not records.rate_is_inside(arm) for arm in arms)} of {len(arms)} arms"


def _row(claim: Claim, records: Records) -> str:
    verdicts = [judgement.verdict for each, judgement in records.judge(claim).items() if each.control]
    controls = ", ".join(
        f"{count} {verdict}" if count > 1 else verdict for verdict, count in Counter(verdicts).items()
    )
    return f"| {claim.name}. {claim.says} ({claim.where}) | **{records.verdict(claim)}** | {controls or '-'} |\n"


def _comparisons(claim: Claim, records: Records) -> str:
    """A row for each comparison with confirmed runs."""
    rows = []
    for each, judgement in records.judge(claim).items():
        if judgement.seeds:
            sides = [side[0] for side in (each.ours, each.other) if isinstance(side, tuple)]
            exact = each.metric in EXACT
            paper, ours = _pairs(each, judgement)
            if not exact:
                numbers = zip(ours.split("/"), sides, strict=True)
                ours = "/".join(x if records.rate_is_inside(arm) else f"{x}‡" for x, arm in numbers)
            name = f"control: {each.says}" if each.control else each.says
            cells = [claim.name if claim.where else "", name, paper, ours, _parameters(sides, records)]
            cells += ["-" if exact else str(judgement.seeds), _effect(each, judgement)]
            cells += ["-" if exact or math.isnan(judgement.low) else f"{judgement.p:.2g}", judgement.verdict]
            rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _earlier(claim: Claim, records: Records) -> str:
    """A row for each comparison that has earlier runs only."""
    effects = {each: records.effect(each, confirmed=False) for each in claim.comparisons}
    left = [each for each, confirmed in records.judge(claim).items() if confirmed.verdict == NOT_RUN]
    rows = [
        [claim.name, f"control: {each.says}" if each.control else each.says, *_pairs(each, effects[each])]
        + [_effect(each, effects[each])]
        for each in left
        if effects[each].seeds
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _parameters(arms: list[str], records: Records) -> str:
    counts = [next(iter(records.of(arm).values()))["metrics"].get("parameters") for arm in arms]
    return "/".join(f"{count / 1e6:.2f}" for count in dict.fromkeys(counts) if count) or "-"


def _pairs(comparison: Comparison, judgement: Judgement) -> list[str]:
    paper = comparison.paper or (math.nan, math.nan)
    return [_pair(comparison, *paper), _pair(comparison, judgement.ours, judgement.other)]


def _pair(comparison: Comparison, ours: float, other: float) -> str:
    """Both numbers; a constant, like the speed 1 of the peer, is left out."""
    both = [number(ours), number(other)] if isinstance(comparison.other, tuple) else [number(ours)]
    return "-" if math.isnan(ours) else "/".join(both)


def _effect(comparison: Comparison, judgement: Judgement) -> str:
    effect = number(judgement.difference, "+")
    spread = (
        ""
        if math.isnan(judgement.low) or judgement.low == judgement.high
        else f"<br>[{judgement.low:+.3f}, {judgement.high:+.3f}]"
    )
    margin = f"<br>margin {comparison.margin:g}" if comparison.margin else ""
    return effect + spread + margin


def number(value: float, sign: str = "") -> str:
    """Format a number: three decimals, none from 1,000, and in millions from 10^6."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:{sign}.1f} M"
    return f"{value:{sign}.0f}" if abs(value) >= 1000 else f"{value:{sign}.3f}"


def _ours(records: Records, pictures: str) -> str:
    """The experiments that are not in the paper."""
    text = "\n## Beyond the paper\n"
    if _recalled(records):
        text += f"\n{RECALL.format(seeds=_spread(len(x) for x in _recalled(records).values()))}\n\n{_recall(records)}"
        text += f"\n![Associative recall by the number of pairs]({pictures}/recall.svg)\n"
    if records.of("widths"):
        text += f"\n{WIDTHS}\n\n![Time by width]({pictures}/widths.svg)\n"
    if lengths := _lengths(records):
        text += f"\n{LENGTHS}\n\n{lengths}"
    later = _comparisons(OURS["later"], records)
    return text + f"\n{LATER}\n\n{COMPARISONS}{later}" if later else text


RECALL = """**Associative recall** (MQAR, arXiv 2312.04927): n pairs of key and value, then each key asks for its
value. Right answers of 2 layers of width 64 after 400 steps; seeds: {seeds}; learning rates chosen at 4 pairs."""
WIDTHS = """**Time by width** (Table 1): forward, 1,024 tokens on a CPU. AFT grows with d, linear attention with d²
(one head) or d (heads of 64), their projections with d²."""
LENGTHS = """**Longer texts than in training** (arXiv 2108.12409): bits per character of four layers after 600 steps at
T = 64."""
LATER = "**Later layers** on characters:"


def _spread(values) -> str:
    values = sorted(set(values))
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _recalled(records: Records) -> dict[tuple[str, int], list[float]]:
    """The scores of the seeds on associative recall, by model and pairs."""
    scores_of = {
        (model, pairs): [x["metrics"]["test"] for x in records.of(recall_arm(model, pairs)).values()]
        for pairs, model in itertools.product(PAIRS, RECALL_MODELS)
    }
    return {key: scores for key, scores in scores_of.items() if scores}


def _recall(records: Records) -> str:
    scores = _recalled(records)
    rows = [f"| pairs | {' | '.join(map(str, PAIRS))} |\n|---|{'---:|' * len(PAIRS)}\n"]
    for model in RECALL_MODELS:
        cells = [
            f"{statistics.fmean(values):.2f}" if (values := scores.get((model, pairs))) else "-" for pairs in PAIRS
        ]
        rows.append(f"| {model} | {' | '.join(cells)} |\n")
    return "".join(rows)


def _lengths(records: Records) -> str:
    rows = []
    for arm in OURS["lengths"].shown:
        if runs := records.of(arm).values():
            means = [statistics.fmean(x["metrics"][f"test_at_{factor}x"] for x in runs) for factor in LONGER]
            model = arm.removeprefix("lengths-").replace("aft", "AFT").replace("attention", "attention (ALiBi)")
            cells = [model, *(f"{mean:.3f}" for mean in means), str(len(runs))]
            rows.append(f"| {' | '.join(cells)} |\n")
    head = f"| | {' | '.join(f'T = {64 * factor}' for factor in LONGER)} | seeds |\n|---|{'---:|' * 5}\n"
    return head + "".join(rows) if rows else ""


@styled()
def draw_recall(records: Records) -> "Figure":
    """The share of right answers by the number of pairs: means, and a dot for each seed."""
    figure, axes = new_figure(1, 1, (5.6, 3.0))
    axis = axes[0][0]
    scores = _recalled(records)
    for model, (dash, colour) in zip(RECALL_MODELS, itertools.product(("-", "--"), CURVES)):
        points = {pairs: scores[model, pairs] for pairs in PAIRS if (model, pairs) in scores}
        axis.plot(list(points), [statistics.fmean(x) for x in points.values()], dash, color=colour, label=model)
        for pairs, values in points.items():
            axis.plot([pairs] * len(values), values, ".", color=colour)
    axis.plot(PAIRS, [1 / pairs for pairs in PAIRS], ":", color=CURVES[-1], label="1 / pairs")
    axis.set(xscale="log", xlabel="pairs", ylabel="share of right answers", ylim=(0, 1.03))
    axis.set_xticks(PAIRS, map(str, PAIRS))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    return figure


@styled()
def draw_widths(records: Records) -> "Figure":
    """Seconds of the operations of a layer by its width."""
    figure, axes = new_figure(1, 1, (4.5, 3.0))
    axis = axes[0][0]
    arm, metrics = ARMS["widths"], records.of("widths")[0]["metrics"]
    assert isinstance(arm, Widths)
    for (name, seconds), colour in zip(metrics.items(), CURVES):
        axis.plot(arm.widths[: len(seconds)], seconds, ".-", color=colour, label=name)
    axis.set(xscale="log", yscale="log", xlabel="width d", ylabel="seconds")
    axis.set_xticks(arm.widths, map(str, arm.widths))
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6)
    return figure


def _sides(claim: Claim, records: Records) -> dict[tuple[str, str], list[dict]]:
    """The arms and metrics of a claim that a picture shows, and their confirmed runs. Counts need no picture."""
    shown = [each for each in claim.comparisons if each.metric not in EXACT and records.effect(each).seeds]
    sides = dict.fromkeys(x for each in shown for x in (each.ours, each.other) if isinstance(x, tuple))
    return {side: [dict(x) for x in records.of(side[0]).values()] for side in sides}


@styled()
def draw(claim: Claim, records: Records) -> "Figure":
    """For each kind of data: training losses of the arms, averaged over seeds, and the score of each seed, or
    the speed of each turn.
    """
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
            values = sides[arm, metric][0]["metrics"].get("speed_turns", values)
            scores.plot(values, [position] * len(values), ".", color=CURVES[0])
        names = [arm if metric == "test" else f"{arm}: {metric}" for arm, metric in reversed(own)]
        scores.set_yticks(range(len(own)), names)
        scores.set_xlabel("speed of each turn" if kind == "speed" else "score of each seed")
        scores.set_ylim(-0.6, len(own) - 0.4)
        scores.locator_params(axis="x", nbins=6)  # labels of small differences are long
        scores.grid(alpha=0.3, axis="x")
    return figure
