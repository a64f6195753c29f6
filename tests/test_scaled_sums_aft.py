"""Partial sums of Eq. 2 with a log-sum-exp shift: each function against a loop, for keys and biases of any size."""

import math

import pytest
import torch

from aft_hf.portable_aft import (
    ScaledSums,
    block_sums,
    delayed,
    fold,
    join_heads,
    power_of_two_from,
    prefix_sums,
    reversed_triangle_sums,
    single_sums,
    split_heads,
    suffix_sums,
    triangle_sums,
    unfold,
)


HEADS, ROWS, FEATURES = 2, 3, 4
double = {"dtype": torch.float64}
key_widths = pytest.mark.parametrize("key_width", (1, FEATURES), ids=("one key per head", "one key per feature"))


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


def of(sums: ScaledSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numerator and denominator without the shift."""
    scale = sums.maximum.exp()
    return sums.numerator * scale, sums.denominator * scale


@key_widths
@pytest.mark.parametrize("length", (1, 2, 7, 8))
@pytest.mark.parametrize("decay", (0.0, 0.7))
def test_prefix_sums_equal_a_loop(key_width, length, decay):
    key, value = keys_and_values(length, key_width)
    found = of(prefix_sums(single_sums(key, value), decay))
    numerator = denominator = 0.0
    for t in range(length):
        numerator = numerator * math.exp(-decay) + key[:, t].exp() * value[:, t]
        denominator = denominator * math.exp(-decay) + key[:, t].exp()
        torch.testing.assert_close(found[0][:, t], numerator)
        torch.testing.assert_close(found[1][:, t], denominator)


@key_widths
@pytest.mark.parametrize("length", (1, 5, 8))
def test_suffix_sums_equal_prefix_sums_of_what_is_turned_around(key_width, length):
    key, value = keys_and_values(length, key_width)
    found = of(suffix_sums(single_sums(key, value)))
    expected = of(prefix_sums(single_sums(key.flip(1), value.flip(1))))
    torch.testing.assert_close(found, tuple(x.flip(1) for x in expected))


@pytest.mark.parametrize("steps", (0, 1, 3, 9, -1, -3, -9))
def test_delayed_sums_come_later_and_nothing_comes_in(steps):
    sums = single_sums(*keys_and_values(5))
    for x, moved in zip(of(sums), of(delayed(sums, steps))):
        expected = torch.zeros_like(x)
        for t in range(5):
            if 0 <= t - steps < 5:
                expected[:, t] = x[:, t - steps]
        torch.testing.assert_close(moved, expected)


@key_widths
def test_merged_sums_are_those_over_both_sets(key_width):
    key, value = keys_and_values(7, key_width)
    left, right = (block_sums(key[:, part], value[:, part]) for part in (slice(0, 3), slice(3, 7)))
    torch.testing.assert_close(of(left.merge(right)), of(block_sums(key, value)))
    torch.testing.assert_close(right.merge(left).average(), left.merge(right).average())


@key_widths
@pytest.mark.parametrize("length", (1, 2, 8, 16))
def test_triangle_sums_see_what_is_not_later(key_width, length):
    key, value = keys_and_values(length, key_width)
    bias, later = torch.randn(HEADS, length, length, **double), torch.ones(length, length).triu(1).bool()
    expected = average(key, value, bias.masked_fill(later, -math.inf))
    torch.testing.assert_close(triangle_sums(key, value, bias).average(), expected)
    without = average(key, value, torch.zeros_like(bias).masked_fill(later, -math.inf))
    torch.testing.assert_close(triangle_sums(key, value).average(), without)
    expected = average(key, value, bias.masked_fill(later.mT, -math.inf))
    torch.testing.assert_close(reversed_triangle_sums(key, value, bias).average(), expected)


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
    for mix in (lambda *x: block_sums(*x, masked=masked).average(), average):
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
def test_what_a_mask_hides_reaches_no_query(size):
    (key, value), bias = keys_and_values(9), torch.randn(HEADS, 6, 9, **double)
    bias[:, :4, 5] = -math.inf
    expected = block_sums(key, value, bias, masked=True).average()
    for hostile_key, hostile_value in ((size, 0.0), (0.0, size), (size, size)):
        other_key, other_value = key.clone(), value.clone()
        other_key[:, 5] += hostile_key
        other_value[:, 5] += hostile_value
        found = block_sums(other_key, other_value, bias, masked=True).average()
        torch.testing.assert_close(found[:, :4], expected[:, :4])


def test_sums_over_nothing_average_to_0_with_gradients_of_0():
    key, value = keys_and_values(8)
    key.requires_grad_()
    hidden = key.masked_fill(torch.ones_like(key).bool(), -math.inf)
    bias = torch.randn(HEADS, 8, 8, **double)
    forms = (
        block_sums(hidden, value),
        block_sums(hidden, value, bias),
        block_sums(key, value, torch.full_like(bias, -math.inf), masked=True),
        triangle_sums(hidden, value, bias),
        prefix_sums(single_sums(hidden, value)),
    )
    for sums in forms:
        output = sums.average()
        assert output.eq(0).all()
        assert torch.autograd.grad(output.sum(), key, retain_graph=True)[0].eq(0).all()


def test_heads_and_rows_are_split_and_joined():
    x = torch.randn(3, 5, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (3, 2, 5, 4) and heads[1, 1].equal(x[1, :, 4:])
    assert join_heads(heads).equal(x)
    assert unfold(fold(heads), 3).equal(heads)


@pytest.mark.parametrize(("number", "power"), ((0, 1), (1, 1), (2, 2), (3, 4), (32, 32), (33, 64)))
def test_power_of_two_from_is_the_smallest_that_is_not_below(number, power):
    assert power_of_two_from(number) == power
