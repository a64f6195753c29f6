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
    measured: Mapping[str, Any] = next(iter(results["metrics"].values()), {})
    for name in METRICS:
        if name in measured:
            return name
    raise ValueError(f"results.json has none of the metrics {', '.join(METRICS)}")
