"""The score of a training run, from its results.json."""

from collections.abc import Mapping
from typing import Any


# Metrics by which a run is scored, in order of preference.
METRICS = ("bits_per_byte", "bits_per_dim", "accuracy")


def metric_of(results: Mapping[str, Any]) -> str:
    """Return the name of the metric by which a run is scored.

    Raises:
        ValueError: the results contain none of `METRICS`.
    """
    measured = _final_metrics(results)
    for name in METRICS:
        if name in measured:
            return name
    raise ValueError(f"results.json has none of the metrics {', '.join(METRICS)}")


def scores_of(results: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return (step, score) of each evaluation during a run; without evaluations, the final score at the last step."""
    name = metric_of(results)
    if results["evaluations"]:
        return [(row["step"], row[name]) for row in results["evaluations"]]
    return [(row["step"], _final_metrics(results)[name]) for row in results["losses"][-1:]]


def _final_metrics(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of the trained model on the first data set that was evaluated."""
    return next(iter(results["metrics"].values()), {})
