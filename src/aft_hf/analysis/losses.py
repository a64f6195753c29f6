"""What results.json of a training run says about its score."""

from collections.abc import Mapping
from typing import Any


# What a run is scored by, the first of these that it has.
METRICS = ("bits_per_byte", "bits_per_dim", "accuracy")


def metric_of(results: Mapping[str, Any]) -> str:
    """The metric that a run is about.

    Raises:
        ValueError: it has none of them.
    """
    measured: Mapping[str, Any] = next(iter(results["metrics"].values()), {})
    for name in METRICS:
        if name in measured:
            return name
    raise ValueError(f"results.json has none of the metrics {', '.join(METRICS)}")
