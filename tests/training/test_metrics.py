"""Metrics, compared with a few lines of numpy."""

import numpy as np
import pytest
import torch

from aft_hf.training.metrics import AccuracyAndLoss, BitsPerToken, TopKAccuracy, token_losses


def accuracies(scores, labels, **options) -> dict[str, float]:
    return TopKAccuracy(keep_in_memory=True).compute(predictions=scores, references=labels, **options)


def test_accuracy_is_the_share_of_labels_among_the_highest_scores():
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(200, 7)).astype(np.float32), random.integers(0, 7, 200)
    expected = {
        name: np.mean([label in np.argsort(row)[-k:] for row, label in zip(scores, labels)])
        for name, k in (("accuracy", 1), ("top_3_accuracy", 3), ("top_9_accuracy", 9))
    }
    assert accuracies(scores, labels, top_k=(1, 3, 9)) == pytest.approx(expected)
    assert expected["top_9_accuracy"] == 1 and accuracies(scores, labels).keys() == {"accuracy"}


def test_of_equal_scores_the_first_class_counts_as_argmax_has_it():
    scores, labels = np.zeros((4, 4)), np.arange(4)
    assert accuracies(scores, labels, top_k=(1, 2)) == {"accuracy": 0.25, "top_2_accuracy": 0.5}
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 3, (200, 1000)), random.integers(0, 1000, 200)  # enough for any sort to mix
    own = scores[np.arange(200), labels][:, None]
    before = (scores > own).sum(1) + ((scores == own) & (np.arange(1000) < labels[:, None])).sum(1)
    assert accuracies(scores, labels, top_k=(100,)) == {"top_100_accuracy": (before < 100).mean()}
    tied = np.array([[1.0, 2.0, 2.0]] * 3)
    assert accuracies(tied, np.arange(3)) == {"accuracy": pytest.approx((tied.argmax(1) == np.arange(3)).mean())}


def test_a_model_that_has_become_nan_is_not_right():
    assert accuracies(np.full((4, 3), np.nan), np.array([1, 2, 1, 2])) == {"accuracy": 0.0}


def test_batches_give_what_everything_at_once_gives():
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(9, 3)), random.integers(0, 3, 9)
    metric = TopKAccuracy(keep_in_memory=True)
    for part in (slice(0, 4), slice(4, 9)):
        metric.add_batch(predictions=scores[part], references=labels[part])
    assert metric.compute() == accuracies(scores, labels)


def test_the_loss_of_a_classifier_is_the_cross_entropy_of_every_row_also_for_large_scores():
    random = np.random.default_rng(0)
    scores, labels = (1000 * random.normal(size=(9, 3))).astype(np.float32), random.integers(0, 3, 9)
    expected = torch.nn.functional.cross_entropy(torch.tensor(scores).double(), torch.tensor(labels)).item()
    metric = AccuracyAndLoss(keep_in_memory=True)
    for part in (slice(0, 8), slice(8, 9)):  # batches of unequal size, where a mean of means would be wrong
        metric.add_batch(predictions=scores[part], references=labels[part])
    result = metric.compute(top_k=(1, 2))
    assert result.pop("loss") == pytest.approx(expected, rel=1e-12) and expected > 100
    assert result == accuracies(scores, labels, top_k=(1, 2))


def test_bits_per_token_are_the_mean_loss_in_bits_of_what_counts():
    losses, tokens = np.array([1.0, 2.0, 50.0, 3.0]), np.array([5, 0, -100, 7])
    result = BitsPerToken(keep_in_memory=True).compute(predictions=losses, references=tokens)
    assert result["bits_per_token"] == pytest.approx(2 / np.log(2))
    assert result["perplexity"] == pytest.approx(np.exp(2))


def test_a_loss_beyond_all_bounds_is_an_infinite_perplexity():
    result = BitsPerToken(keep_in_memory=True).compute(predictions=np.array([1e4]), references=np.array([1]))
    assert result["bits_per_token"] == pytest.approx(1e4 / np.log(2)) and result["perplexity"] == float("inf")


def test_token_losses_of_half_precision_are_summed_in_float32():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 9, 500).bfloat16(), torch.randint(0, 500, (2, 9))
    torch.testing.assert_close(token_losses(logits, labels), token_losses(logits.float(), labels))


@pytest.mark.parametrize("alone", [True, False])
def test_token_losses_are_those_of_the_next_token(alone):
    logits, labels = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(0, 7, (2, 5))
    labels[1, 3] = -100
    losses = token_losses(logits if alone else (logits, None), labels)
    assert losses.shape == (2, 4)
    log_probabilities = logits - logits.exp().sum(-1, keepdim=True).log()
    for row in range(2):
        for t in range(4):
            label = int(labels[row, t + 1])
            expected = 0.0 if label == -100 else -log_probabilities[row, t, label]
            assert losses[row, t].item() == pytest.approx(float(expected), abs=1e-5)
