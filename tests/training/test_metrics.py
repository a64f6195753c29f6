"""Metrics, compared with a few lines of numpy."""

import math

import numpy as np
import pytest
import torch

from aft_hf.training.metrics import accuracy, accuracy_and_loss, code_length


def accuracies(scores: np.ndarray, labels: np.ndarray, *top_k: int) -> dict[str, float]:
    return accuracy(torch.tensor(scores), torch.tensor(labels), top_k or (1,))


def test_accuracy_is_the_share_of_labels_among_the_highest_scores():
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(200, 7)).astype(np.float32), random.integers(0, 7, 200)
    expected = {
        name: np.mean([label in np.argsort(row)[-k:] for row, label in zip(scores, labels)])
        for name, k in (("accuracy", 1), ("top_3_accuracy", 3), ("top_9_accuracy", 9))
    }
    assert accuracies(scores, labels, 1, 3, 9) == pytest.approx(expected)
    assert expected["top_9_accuracy"] == 1 and accuracies(scores, labels).keys() == {"accuracy"}


def test_of_equal_scores_the_first_class_counts_as_argmax_has_it():
    assert accuracies(np.zeros((4, 4)), np.arange(4), 1, 2) == {"accuracy": 0.25, "top_2_accuracy": 0.5}
    assert accuracies(np.full((2, 3), np.nan), np.array([1, 2])) == {"accuracy": 0.0}  # of a model that is NaN
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 3, (200, 1000)), random.integers(0, 1000, 200)  # enough for any sort to mix
    own = scores[np.arange(200), labels][:, None]
    before = (scores > own).sum(1) + ((scores == own) & (np.arange(1000) < labels[:, None])).sum(1)
    assert accuracies(scores, labels, 100) == {"top_100_accuracy": (before < 100).mean()}


@pytest.mark.parametrize("classes", [5, 6])
def test_the_loss_of_a_classifier_is_the_cross_entropy_also_for_large_scores(classes):
    random = np.random.default_rng(0)
    scores, labels = (1000 * random.normal(size=(9, classes))).astype(np.float32), random.integers(0, classes, 9)
    exact = scores.astype(np.float64)
    losses = np.logaddexp.reduce(exact, 1) - exact[np.arange(9), labels]
    result = accuracy_and_loss(torch.tensor(scores), torch.tensor(labels))
    assert result.pop("loss") == pytest.approx(losses.mean(), rel=1e-12) and losses.mean() > 100
    assert result == accuracies(scores, labels, *((1,) if classes == 5 else (1, 5)))


def test_bits_are_summed_before_they_are_divided_by_each_unit():
    # Two rows: 8 bytes and 4 characters in 16 bits, and 2 bytes and 2 characters in 24 bits.
    nats, counts = math.log(2) * torch.tensor([16.0, 24.0]), torch.tensor([[8, 4], [2, 2]])
    expected = {"bits_per_byte": pytest.approx(4.0), "bits_per_character": pytest.approx(40 / 6)}
    assert code_length(nats, counts, ("byte", "character")) == expected


def test_small_losses_count_beside_a_large_sum():
    nats = torch.tensor([2.0**24] + [1.0] * 1000) * math.log(2)  # float32 has 24 bits
    result = code_length(nats, torch.tensor([[1]] + [[0]] * 1000), ("byte",))
    assert result["bits_per_byte"] == pytest.approx(2**24 + 1000, rel=1e-7)
