"""Runs of `scripts/train.py` side by side: a table in Markdown, and a picture of their losses.

    python scripts/compare_runs.py outputs/bytes-aft-local outputs/bytes-gpt2 --picture outputs/runs.png

Everything is taken from the `results.json` that a run leaves in its directory.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aft_hf.reading import explained, read_json


# What a run is scored by, the first of these that it has.
METRICS = ("bits_per_byte", "bits_per_dim", "accuracy")


def name_of(results: dict[str, Any]) -> str:
    """What a run trained: the type of AFT, or another architecture."""
    model = results["recipe"]["model"]
    architecture = model.get("architecture", "pretrained")
    return f"AFT-{model['aft_type']}" if architecture == "aft" else architecture.upper().replace("GPT2", "GPT-2")


def metric_of(results: dict[str, Any]) -> str:
    """The metric that a run is about."""
    return next(name for name in METRICS if name in next(iter(results["metrics"].values())))


def table(runs: list[dict[str, Any]]) -> str:
    """A row for each run."""
    lines = ["| run | parameters | steps | samples a step | metric | " + " | ".join(runs[0]["metrics"]) + " |"]
    lines.append("|---|---:|---:|---:|---|" + "---:|" * len(runs[0]["metrics"]))
    for results in runs:
        metric = metric_of(results)
        scores = " | ".join(f"{scores[metric]:.3f}" for scores in results["metrics"].values())
        size = f"{results['parameters'] / 1e6:.2f} M | {results['steps']} | {results['recipe']['global_batch_size']}"
        lines.append(f"| {name_of(results)} | {size} | {metric.replace('_', ' ')} | {scores} |")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Training losses and what was measured on the validation data, over the steps."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, scores = figure.subplots(1, 2)
    metrics = {metric_of(results) for results in runs}
    for results in runs:
        curve, metric = results["losses"], metric_of(results)
        losses.plot([row["step"] for row in curve], [row["loss"] for row in curve], label=name_of(results))
        points = [(row["step"], row[metric]) for row in results["evaluations"]]
        scores.plot(*zip(*points), marker=".", label=name_of(results))
    losses.set(xlabel="step", ylabel="training loss (nats)")
    scores.set(xlabel="step", ylabel="validation " + ", ".join(metrics).replace("_", " "))
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of runs of one task.")],
    picture: Annotated[Path | None, typer.Option(help="Where to draw the losses.")] = None,
) -> None:
    """Print a table of finished runs, and draw them."""
    results = [read_json(run / "results.json", dict[str, Any]) for run in runs]
    with explained("results.json: not of a run of the training loop"):
        print(table(results))
        if picture is not None:
            draw(results, picture)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (OSError, ValueError) as error:
        sys.exit(f"compare_runs.py: {error}")
