"""The distillation losses of DeiT, compared with its formulas in float64."""

import numpy as np
import pytest
import torch

from aft_hf.training.distillation import distillation_loss


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.fixture
def logits():
    return torch.randn(5, 4, requires_grad=True), (3 * torch.randn(5, 4)).requires_grad_()


@pytest.mark.parametrize(("weight", "temperature"), [(0.1, 3.0), (0.7, 1.0), (1.0, 0.5), (0.0, 3.0)])
def test_soft_distillation_is_the_divergence_from_the_teacher(logits, weight, temperature):
    z, z_t = (x.detach().double().numpy() for x in logits)
    ours, teachers = softmax(z / temperature), softmax(z_t / temperature)
    divergence = (teachers * (np.log(teachers) - np.log(ours))).sum(-1).mean()
    expected = (1 - weight) * 2.0 + weight * temperature**2 * divergence
    loss = distillation_loss(torch.tensor(2.0), *logits, kind="soft", weight=weight, temperature=temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_hard_distillation_takes_the_decision_of_the_teacher_for_a_label(logits):
    z, z_t = (x.detach().double().numpy() for x in logits)
    expected = 0.4 * 2.0 - 0.6 * np.log(softmax(z))[np.arange(5), z_t.argmax(-1)].mean()
    assert distillation_loss(torch.tensor(2.0), *logits, kind="hard", weight=0.6).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_no_gradient_reaches_the_teacher_and_half_precision_is_summed_in_float32(logits, kind):
    loss = distillation_loss(torch.tensor(2.0), *logits, kind=kind)
    loss.backward()
    assert logits[0].grad.abs().sum() > 0 and logits[1].grad is None
    same = logits[1].to(torch.bfloat16)
    assert distillation_loss(torch.tensor(0.0), same, same).item() == pytest.approx(0, abs=1e-6)
    assert distillation_loss(torch.tensor(0.0), same, same).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "medium"}, "one of soft, hard, got 'medium'"),
        ({"weight": 1.5}, r"in \[0, 1\], got 1.5"),
        ({"temperature": 0.0}, "greater than 0, got 0.0"),
        ({"teacher_logits": torch.zeros(5, 1000)}, r"the teacher gives \(5, 1000\) logits and the model \(5, 4\)"),
    ],
)
def test_wrong_options_are_told(logits, options, message):
    with pytest.raises(ValueError, match=message):
        distillation_loss(torch.tensor(2.0), logits[0], **{"teacher_logits": logits[1]} | options)
