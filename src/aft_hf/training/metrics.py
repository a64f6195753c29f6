"""Metrics as classes of `evaluate`, which need no network because they are not loaded by name."""

from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from torch.nn import functional as F

from ..data.bytes import IGNORED


class TopKAccuracy(evaluate.Metric):
    """Top-k accuracy: the share of samples whose label is among the k highest scores, for each k in `top_k`.

    Among equal scores, that of the first class counts as the highest, as with argmax.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Top-k accuracy of a classifier.",
            citation="",
            inputs_description=(
                "predictions: scores (n, classes); references: labels (n,); top_k: the values of k, (1,) by default."
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
    """Top-k accuracy, and `loss`: the mean cross entropy in nats, with the scores as logits."""

    def _compute(self, predictions: Any, references: Any, top_k: tuple[int, ...] = (1,)) -> dict[str, float]:
        logits, labels = np.asarray(predictions, dtype=np.float64), np.asarray(references)
        logits = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(logits).sum(1)) - np.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return super()._compute(predictions, references, top_k) | {"loss": float(losses.mean())}


class BitsPerToken(evaluate.Metric):
    """Mean code length in bits per token (with a byte tokenizer, per byte), and perplexity, 2 to the power of that."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean code length of tokens.",
            citation="",
            inputs_description=("predictions: losses in nats (n,); references: tokens (n,), -100 to ignore a loss."),
            features=datasets.Features(
                {"predictions": datasets.Value("float32"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        losses, tokens = np.asarray(predictions, dtype=np.float64), np.asarray(references)
        bits = float(losses[tokens != IGNORED].mean() / np.log(2))
        with np.errstate(over="ignore"):  # infinite for a diverged model
            return {"bits_per_token": bits, "perplexity": float(np.exp2(bits))}


def token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token but the first in nats, (B, T - 1): small enough to keep, unlike the logits.

    Args:
        logits: logits (B, T, vocabulary), or a tuple that begins with them.
        labels: labels (B, T), not shifted; the loss is 0 where they are -100.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits, targets = logits[:, :-1].float().transpose(1, 2), labels[:, 1:]
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
