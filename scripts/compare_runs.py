"""Compare runs of `scripts/train.py`: a table in Markdown, and a figure of their losses.

    python scripts/compare_runs.py outputs/bytes-aft-local outputs/bytes-gpt2 --picture outputs/runs.png

All values come from the `results.json` in the directory of each run, including the paper's score if the recipe of the
run repeats a row of the paper.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from aft_hf.analysis import draw_losses, metric_of, save
from aft_hf.reading import explained, read_json, reported


def name_of(results: dict[str, Any]) -> str:
    """The name of the model of a run: the type of AFT, or another architecture."""
    model = results["recipe"]["model"]
    architecture = model.get("architecture", "pretrained")
    return f"AFT-{model['aft_type']}" if architecture == "aft" else architecture.upper().replace("GPT2", "GPT-2")


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table with a row for each run."""
    splits = " | ".join(runs[0]["metrics"])
    lines = [f"| run | parameters | steps | samples per step | metric | {splits} | paper | row of the paper |"]
    lines.append("|---|---:|---:|---:|---|" + "---:|" * (len(runs[0]["metrics"]) + 1) + "---|")
    for results in runs:
        metric = metric_of(results)
        scores = " | ".join(f"{scores[metric]:.3f}" for scores in results["metrics"].values())
        size = f"{results['parameters'] / 1e6:.2f} M | {results['steps']} | {results['recipe']['global_batch_size']}"
        paper = results["recipe"].get("paper")
        quoted = f"{paper['score']:.3f} | {'; '.join(paper['rows'])}" if paper else "- | ours"
        lines.append(f"| {name_of(results)} | {size} | {metric.replace('_', ' ')} | {scores} | {quoted} |")
    return "\n".join(lines)


def main(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of runs of one task.")],
    picture: Annotated[Path | None, typer.Option(help="File for the figure of the losses.")] = None,
) -> None:
    """Print a table of finished runs, and plot their losses."""
    results = [read_json(run / "results.json", dict[str, Any]) for run in runs]
    with explained("results.json: not written by the training loop"):
        print(table(results))
        if picture is not None:
            save(draw_losses([(name_of(each), each) for each in results]), picture)


if __name__ == "__main__":
    with reported("compare_runs.py"):
        typer.run(main)
