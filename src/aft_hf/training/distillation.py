"""Knowledge distillation as in DeiT (Touvron et al. 2021, "Training data-efficient image transformers &
distillation through attention", arXiv 2012.12877, Eq. 2 and 3)."""

import torch
from torch.nn import functional as F


DISTILLATIONS = ("soft", "hard")


def distillation_loss(
    loss: torch.Tensor,
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    kind: str = "soft",
    weight: float = 0.5,
    temperature: float = 3.0,
) -> torch.Tensor:
    """Return the loss of the task combined with the distillation loss of a teacher.

    soft (Eq. 2): (1 - weight) loss + weight temperature^2 KL(softmax(z_t / temperature) || softmax(z / temperature));
    hard (Eq. 3): (1 - weight) loss + weight CE(z, argmax z_t).

    Args:
        loss: the loss of the task, a mean over the batch.
        logits, teacher_logits: z and z_t, (B, classes); no gradient flows to the teacher.
        kind: "soft" or "hard".
        weight: the weight of the distillation loss, in [0, 1]. DeiT uses 0.1 for soft and 0.5 for hard distillation.
        temperature: the temperature of soft distillation, > 0. DeiT uses 3.

    Raises:
        ValueError: `kind` is unknown, or a number is out of range.
    """
    if kind not in DISTILLATIONS:
        raise ValueError(f"distillation must be one of {', '.join(DISTILLATIONS)}, got {kind!r}")
    if not 0 <= weight <= 1 or temperature <= 0:
        raise ValueError(f"the weight must be in [0, 1] and the temperature positive, got {weight} and {temperature}")
    logits, teacher_logits = logits.float(), teacher_logits.detach().float()
    if kind == "hard":
        return (1 - weight) * loss + weight * F.cross_entropy(logits, teacher_logits.argmax(-1))
    divergence = F.kl_div(
        F.log_softmax(logits / temperature, -1),
        F.log_softmax(teacher_logits / temperature, -1),
        reduction="batchmean",
        log_target=True,
    )
    return (1 - weight) * loss + weight * temperature**2 * divergence
