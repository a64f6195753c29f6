"""Code length: the number of bits in which a model encodes the data."""

from typing import Any

import datasets
import evaluate
import numpy as np


class CodeLength(evaluate.Metric):
    """Code length of the data in bits per unit: per byte, per character or per dimension (sub-pixel).

    Losses and units are summed before the division, so a row may hold any number of units. No network is needed.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Code length in bits per unit.",
            citation="",
            inputs_description=(
                "predictions: losses in nats, summed over a row (n,); references: number of each unit in the row "
                '(n, units); units: names of the units, ("byte",) by default.'
            ),
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Sequence(datasets.Value("int64"))}
            ),
        )

    def _compute(self, predictions: Any, references: Any, units: tuple[str, ...] = ("byte",)) -> dict[str, float]:
        bits = np.asarray(predictions, dtype=np.float64).sum() / np.log(2)
        counts = np.asarray(references).sum(0)
        return {f"bits_per_{unit}": float(bits / count) for unit, count in zip(units, counts)}
