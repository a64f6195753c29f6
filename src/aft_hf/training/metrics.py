"""Metrics as functions of the predictions and references of a whole data set, for training and evaluation."""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F


def accuracy(scores: torch.Tensor, labels: torch.Tensor, top_k: Sequence[int] = (1,)) -> dict[str, float]:
    """Return the share of samples whose label, (n,), is among the k highest scores, (n, classes), for each k."""
    ranking = scores.argsort(dim=1, descending=True, stable=True)  # of equal scores the first, as with argmax
    hits = ranking == labels[:, None]
    return {"accuracy" if k == 1 else f"top_{k}_accuracy": hits[:, :k].any(1).double().mean().item() for k in top_k}


def accuracy_and_loss(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return top-1 accuracy, top-5 accuracy if there are more than five classes, and the mean loss in nats."""
    loss = F.cross_entropy(logits.double(), labels).item()
    return accuracy(logits, labels, (1, 5) if logits.shape[1] > 5 else (1,)) | {"loss": loss}


def code_length(nats: torch.Tensor, counts: torch.Tensor, units: Sequence[str]) -> dict[str, float]:
    """Return the code length of the data in bits per unit: per byte, per character, per token or per sub-pixel.

    `nats` are the losses, summed over each row, (n,), and `counts` the numbers of each unit in the rows, (n, units).
    A unit that does not occur, such as a character in bytes that are no text, is left out.
    """
    bits = nats.double().sum().item() / math.log(2)
    return {f"bits_per_{unit}": bits / count for unit, count in zip(units, counts.sum(0).tolist()) if count}
