"""Metrics as `evaluate` classes that need no network: they are made from the class, not loaded by name."""

from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from torch.nn import functional as F

from ..data.bytes import IGNORED


class TopKAccuracy(evaluate.Metric):
    """The share of examples whose label is among the k highest scores; `compute` gives one number for each k.

    Of equal scores that of the first class counts as the highest, as with argmax.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Top-k accuracy of a classifier.",
            citation="",
            inputs_description=(
                "predictions: scores (n, classes); references: labels (n,); top_k: the ks, (1,) by default."
            ),
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("float32")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any, top_k: tuple[int, ...] = (1,)) -> dict[str, float]:
        ranking = np.argsort(-np.asarray(predictions), axis=1, kind="stable")  # the best class first
        hits = ranking == np.asarray(references)[:, None]
        return {"accuracy" if k == 1 else f"top_{k}_accuracy": float(hits[:, :k].any(1).mean()) for k in top_k}


class AccuracyAndLoss(TopKAccuracy):
    """Top-k accuracy, and `loss`, the mean cross-entropy in nats with the scores as logits."""

    def _compute(self, predictions: Any, references: Any, top_k: tuple[int, ...] = (1,)) -> dict[str, float]:
        logits, labels = np.asarray(predictions, dtype=np.float64), np.asarray(references)
        logits = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - np.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return super()._compute(predictions, references, top_k) | {"loss": float(losses.mean())}


class BitsPerToken(evaluate.Metric):
    """The mean code length of tokens in bits, per byte for a byte tokenizer, and the perplexity, 2 to its power."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean code length of tokens.",
            citation="",
            inputs_description=(
                "predictions: losses in nats (n,); references: the tokens (n,), where -100 does not count."
            ),
            features=datasets.Features(
                {"predictions": datasets.Value("float32"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        losses, tokens = np.asarray(predictions, dtype=np.float64), np.asarray(references)
        bits = float(losses[tokens != IGNORED].mean() / np.log(2))
        with np.errstate(over="ignore"):  # infinite, where a training has failed
            return {"bits_per_token": bits, "perplexity": float(np.exp2(bits))}


def token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token but the first in nats, (B, T - 1), 0 where it does not count: all that is kept of logits.

    Args:
        logits: (B, T, vocabulary), alone or first in a tuple.
        labels: (B, T), not shifted; -100 does not count.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits, targets = logits[:, :-1].float().transpose(1, 2), labels[:, 1:]
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
