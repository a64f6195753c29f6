"""Averages over parts of the positions, which are merged: each function against a loop, for keys and biases of any
size.
"""

import math

import pytest
import torch

from aft_hf.portable_aft import (
    EMPTY,
    Averages,
    block_sums,
    delayed,
    fold,
    join_heads,
    power_of_two_from,
    prefix_sums,
    split_heads,
    triangle_sums,
    unfold,
)


HEADS, ROWS, FEATURES = 2, 3, 4
double = {"dtype": torch.float64}
key_widths = pytest.mark.parametrize("key_width", (1, FEATURES), ids=("one key per head", "one key per feature"))
exported = pytest.mark.parametrize("exporting", (False, True), ids=("", "exporting"))


def keys_and_values(length: int, key_width: int = FEATURES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random keys (h, T, B, k) and values (h, T, B, c)."""
    return torch.randn(HEADS, length, ROWS, key_width, **double), torch.randn(HEADS, length, ROWS, FEATURES, **double)


def average(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 with w (h, T, T'), which is -inf for hidden keys; 0 for a query that sees no key."""
    logits = key.unsqueeze(1) + bias[..., None, None]
    logits = logits.masked_fill((bias == -math.inf)[..., None, None], -math.inf)
    nothing = (logits == -math.inf).all(2, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), 2).masked_fill(nothing, 0.0)
    return (weights * value.unsqueeze(1)).sum(2)


@key_widths
@exported
@pytest.mark.parametrize("length", (1, 2, 7, 8, 70))
@pytest.mark.parametrize("decay", (0.0, 0.7))
def test_prefix_sums_equal_a_loop(key_width, exporting, length, decay, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    key, value = keys_and_values(length, key_width)
    found = prefix_sums(Averages(value, key), torch.full((HEADS, 1, 1, 1), decay))
    numerator = denominator = 0.0
    for t in range(length):
        numerator = numerator * math.exp(-decay) + key[:, t].exp() * value[:, t]
        denominator = denominator * math.exp(-decay) + key[:, t].exp()
        torch.testing.assert_close(found.average[:, t], numerator / denominator)
        torch.testing.assert_close(found.logsumexp[:, t], denominator.log())


@pytest.mark.parametrize("steps", (0, 1, 3, -1, -3))
def test_delayed_sums_come_later_and_nothing_comes_in(steps):
    key, value = keys_and_values(5)
    moved = delayed(Averages(value, key), steps, -steps)
    for t in range(5):
        inside = 0 <= t - steps < 5
        assert moved.average[:, t].equal(value[:, t - steps] if inside else torch.zeros_like(value[:, 0]))
        assert moved.logsumexp[:, t].equal(key[:, t - steps] if inside else torch.full_like(key[:, 0], EMPTY))


@key_widths
def test_merged_sums_are_those_over_both_sets(key_width):
    key, value = keys_and_values(7, key_width)
    left, right = (block_sums(key[:, part], value[:, part]) for part in (slice(0, 3), slice(3, 7)))
    torch.testing.assert_close(left.merge(right), block_sums(key, value))
    torch.testing.assert_close(right.merge(left), left.merge(right))


@key_widths
@exported
@pytest.mark.parametrize("length", (1, 2, 7, 16, 130))
def test_triangle_sums_see_what_is_not_later(key_width, exporting, length, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    key, value = keys_and_values(length, key_width)
    bias, later = torch.randn(HEADS, length, length, **double), torch.ones(length, length).triu(1).bool()
    expected = average(key, value, bias.masked_fill(later, -math.inf))
    torch.testing.assert_close(triangle_sums(key, value, bias).average, expected)


# Numbers that are added to keys (T',) and biases (T, T').
HOSTILE = {
    "moderate": lambda: (torch.zeros(9), torch.zeros(6, 9)),
    "large keys": lambda: (90 * torch.randn(9), torch.zeros(6, 9)),
    "a ramp": lambda: (torch.linspace(0, 3000, 9), torch.zeros(6, 9)),
    "large biases": lambda: (torch.zeros(9), 150 * torch.randn(6, 9)),
    "large biases of queries": lambda: (torch.zeros(9), 200 * torch.randn(6, 1).expand(6, 9)),
    "biases that make up for keys": lambda: (torch.linspace(0, 900, 9), -torch.linspace(0, 900, 9).expand(6, 9)),
}


@key_widths
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_block_sums_are_eq_2_in_value_and_gradient_for_keys_and_biases_of_any_size(key_width, hostile, masked, dtype):
    (key, value), bias = keys_and_values(9, key_width), torch.randn(HEADS, 6, 9, **double)
    of_keys, of_biases = HOSTILE[hostile]()
    key, bias = key + of_keys.double()[:, None, None], bias + of_biases.double()
    key, value, bias = (x.to(dtype) for x in (key, value, bias))
    hidden = torch.rand(HEADS, 6, 9) < 0.4 if masked else torch.zeros(HEADS, 6, 9, dtype=torch.bool)
    hidden[:, 2] = masked  # a query that sees no key
    results = []
    for mix in (lambda *x: block_sums(*x, masked=masked).average, average):
        inputs = [x.clone().requires_grad_() for x in (key, value, bias)]
        if mix is average:
            inputs = [x.detach().double().requires_grad_() for x in inputs]
        output = mix(*inputs[:2], inputs[2].masked_fill(hidden, -math.inf))
        weight = torch.linspace(0.2, 1, output.numel(), dtype=output.dtype).view_as(output)
        results.append([output, *torch.autograd.grad(output, inputs, weight)])
    # K + w is rounded to eps |K + w|, which is a relative error of its exponential.
    error = 8 * (9 + key.abs().max() + bias.abs().max()) * torch.finfo(dtype).eps
    for found, exact in zip(*results):
        allowed = float(error * max(exact.detach().abs().max(), 1.0))
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=allowed)


@pytest.mark.parametrize("size", (1e4, math.nan, math.inf))
@key_widths
def test_what_a_mask_hides_reaches_no_query(size, key_width):
    (key, value), bias = keys_and_values(9, key_width), torch.randn(HEADS, 6, 9, **double)
    bias[:, :4, 5] = -math.inf
    expected = block_sums(key, value, bias, masked=True).average
    for hostile_key, hostile_value in ((size, 0.0), (0.0, size), (size, size)):
        other_key, other_value = key.clone(), value.clone()
        other_key[:, 5] += hostile_key
        other_value[:, 5] += hostile_value
        found = block_sums(other_key, other_value, bias, masked=True).average
        torch.testing.assert_close(found[:, :4], expected[:, :4])


def test_sums_over_nothing_average_to_0_with_gradients_of_0():
    key, value = keys_and_values(8)
    key.requires_grad_()
    hidden = key.masked_fill(torch.ones_like(key).bool(), -math.inf)
    value, bias = torch.zeros_like(value), torch.randn(HEADS, 8, 8, **double)
    forms = (
        block_sums(hidden, value),
        block_sums(hidden, value, bias),
        block_sums(key, value, torch.full_like(bias, -math.inf), masked=True),
        triangle_sums(hidden, value, bias),
        prefix_sums(Averages(value, hidden.clamp_min(EMPTY))),
    )
    for sums in forms:
        assert sums.average.eq(0).all()
        gradient = torch.autograd.grad(sums.average.sum(), key, retain_graph=True, materialize_grads=True)[0]
        assert gradient.eq(0).all()


def test_heads_and_rows_are_split_and_joined():
    x = torch.randn(3, 5, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (3, 2, 5, 4) and heads[1, 1].equal(x[1, :, 4:])
    assert join_heads(heads).equal(x)
    assert unfold(fold(heads), 3).equal(heads)


@pytest.mark.parametrize(("number", "power"), ((0, 1), (1, 1), (2, 2), (3, 4), (32, 32), (33, 64)))
def test_power_of_two_from_is_the_smallest_that_is_not_below(number, power):
    assert power_of_two_from(number) == power
