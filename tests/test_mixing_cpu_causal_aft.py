"""The causal sums on a CPU against Eq. 2 in float64, in values and gradients, for keys and biases of any size."""

import math
from functools import partial

import pytest
import torch

import aft_hf.mixing_cpu_causal_aft as mixing_cpu_causal_aft
import aft_hf.mixing_cpu_chunks_aft as mixing_cpu_chunks_aft
import aft_hf.mixing_cpu_lost_aft as mixing_cpu_lost_aft
from aft_hf.mixing_cpu_causal_aft import causal_mixing


FEATURES, CHUNK = 12, 8

# name: (heads, whether there is one key per head, kind of biases, global connectivity)
STRUCTURES = {
    "simple": (1, False, None, True),
    "alibi": (3, False, "slopes", True),
    "local": (1, False, "each", True),
    "local, heads": (2, False, "each", True),
    "local, window only": (2, False, "each", False),
    "conv": (3, True, "shared", True),
    "conv, window only": (3, True, "shared", False),
}

# Functions of the positions (T, 1), whose result is added to random keys.
KEYS = {
    "of size 1": lambda t: 0 * t,
    "times 30": lambda t: torch.randn(len(t), FEATURES, generator=torch.Generator().manual_seed(1)).double() * 30,
    "times 90": lambda t: torch.randn(len(t), FEATURES, generator=torch.Generator().manual_seed(1)).double() * 90,
    "far below": lambda t: 0 * t - 1e4,
    "far above": lambda t: 0 * t + 1e4,
    "rising": lambda t: t / len(t) * 3000,
    "falling": lambda t: t / len(t) * -3000,
    "one huge and late": lambda t: 1e4 * (t == len(t) * 2 // 3),
}


def reference(key, value, tables=None, *, slopes=None, heads, size, window_only):
    """Eq. 2 by a softmax over all pairs, in float64."""
    length = key.shape[1]
    key, value = (x.double().unflatten(-1, (heads, -1)) for x in (key, value))  # (B, T, h, c)
    position = torch.arange(length)
    lag = position[:, None] - position
    w = torch.zeros(heads, length, length, dtype=torch.float64)
    visible = lag >= 0
    if slopes is not None:
        w = -slopes.double()[:, None, None] * lag
    if tables is not None:
        chunk = position // size
        place = position - (chunk[:, None] - 1) * size  # the index of each key within the two chunks of each query
        near = (place >= 0) & visible
        table = tables.double().expand(-1, -(-length // size), -1, -1)
        near_w = table[:, chunk[:, None], (position % size)[:, None], place.clamp(0, 2 * size - 1)]
        w = torch.where(near, near_w, -math.inf if window_only else 0.0)
    logits = key.permute(0, 2, 3, 1).unsqueeze(-2) + w[:, None]  # (B, h, k, T, T')
    logits = logits.masked_fill(~visible, -math.inf)
    nothing = (logits == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    values = value.permute(0, 2, 3, 1).unsqueeze(-2)  # (B, h, c, 1, T')
    values = values.masked_fill(weights == 0, 0.0)  # values with weight 0, including NaN, have no influence
    return (weights * values).sum(-1).permute(0, 3, 1, 2).flatten(2)


def make(structure, length, batch=2, seed=0):
    """Return (key, value, tables) in float64, and the tested function and its reference with all other arguments."""
    heads, per_head, kind, connected = STRUCTURES[structure]
    torch.manual_seed(seed)
    key = torch.randn(batch, length, heads if per_head else FEATURES, dtype=torch.float64)
    value = torch.randn(batch, length, FEATURES, dtype=torch.float64)
    tables, slopes = None, None
    if kind == "slopes":
        slopes = 0.5 ** torch.arange(1.0, heads + 1)
    elif kind is not None:
        chunks = -(-length // CHUNK) if kind == "each" else 1
        tables = torch.randn(heads, chunks, CHUNK, 2 * CHUNK, dtype=torch.float64)
        lag = torch.arange(CHUNK, 2 * CHUNK)[:, None] - torch.arange(2 * CHUNK)
        tables = tables.masked_fill(lag >= 6, 0.0 if connected else -math.inf)
    expected = partial(reference, slopes=slopes, heads=heads, size=CHUNK, window_only=not connected)
    actual = partial(
        causal_mixing,
        slopes=slopes,
        num_heads=heads,
        chunk_size=CHUNK,
        differentiable=expected,
        global_connectivity=connected,
    )
    return [key, value, tables], actual, expected


def results(function, inputs, gradient=1.0):
    """Return the context and the gradients of the inputs, in float64, for an upstream gradient of this size."""
    inputs = [None if x is None else x.clone().requires_grad_() for x in inputs]
    context = function(inputs[0], inputs[1], inputs[2])
    weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight *= gradient
    given = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad(context, given, weight.to(context.dtype))
    return [x.detach().double() for x in (context, *gradients)]


def assert_near(actual, expected, dtype, terms=64, values=1.0):
    """Check results to the error of `terms` roundings of numbers as large as the values, or as the largest result.

    Subtracting the references of chunks adds an error of up to 64 units in the last place to an exponent.
    """
    sizes = (values, values, 1.0, values)  # sizes of the context and of the gradients of key, value and tables
    for a, b, size in zip(actual, expected, sizes[: len(expected)], strict=True):
        bound = terms * torch.finfo(dtype).eps * max(float(b.abs().max()), size)
        torch.testing.assert_close(a, b, rtol=0, atol=bound)


def to(inputs, dtype):
    """Return the inputs rounded to a dtype, and the rounded numbers in float64."""
    rounded = [None if x is None else x.to(dtype) for x in inputs]
    return rounded, [None if x is None else x.double() for x in rounded]


@pytest.fixture(params=STRUCTURES)
def structure(request):
    return request.param


@pytest.fixture(params=["first by a softmax", "first as all"])
def first_queries(request, monkeypatch):
    """How the first queries of the short sequences of a test are computed, if their keys are large."""
    if request.param == "first by a softmax":
        monkeypatch.setattr(mixing_cpu_causal_aft, "SHORTEST_SEQUENCE", 0)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", KEYS)
def test_values_and_gradients_are_exact_for_keys_of_any_size(structure, keys, dtype):
    inputs, actual, expected = make(structure, 53)
    inputs[0] += KEYS[keys](torch.arange(53.0).double()[:, None])[..., : inputs[0].shape[-1]]
    inputs, exact = to(inputs, dtype)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)
    if dtype == torch.float64:
        assert_near(results(actual, inputs), results(expected, exact), dtype, terms=2**12)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 33])
@pytest.mark.parametrize("size", [1.0, 90.0])
def test_any_length_in_any_number_of_blocks(structure, length, size, monkeypatch):
    inputs, actual, expected = make(structure, length, batch=3)
    inputs[0] *= size
    inputs, exact = to(inputs, torch.float32)
    for block_size in (mixing_cpu_chunks_aft.BLOCK_SIZE, 4000, 1):
        monkeypatch.setattr(mixing_cpu_chunks_aft, "BLOCK_SIZE", block_size)
        assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.parametrize("piece", [1, 2**17])
@pytest.mark.parametrize("largest_bias", [-1.0, 20.0], ids=["each by a softmax", "by windows"])
def test_lost_queries_are_exact_in_windows_and_one_by_one(structure, largest_bias, piece, monkeypatch):
    monkeypatch.setattr(mixing_cpu_lost_aft, "PRECISE_BIAS", largest_bias)
    for name in ("PIECE_SIZE", "PIECE_OF_WINDOWS"):
        monkeypatch.setattr(mixing_cpu_lost_aft, name, piece)
    inputs, actual, expected = make(structure, 33, batch=3)
    inputs[0] *= 200.0
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.parametrize("size", [1.0, 90.0])
@pytest.mark.parametrize("side", ["left", "right", "whole row"])
def test_hidden_tokens_do_not_count_and_queries_that_see_nothing_give_0(structure, side, size):
    inputs, actual, expected = make(structure, 37)
    key, value, _ = inputs
    key *= size
    hidden = {"left": slice(0, 19), "right": slice(20, None), "whole row": slice(None)}[side]
    key[0, hidden], value[0, hidden] = -math.inf, 0
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize("bias", [60.0, -60.0, 300.0, -300.0, 5000.0])
@pytest.mark.parametrize("structure", ["local, heads", "local, window only", "conv"])
def test_biases_of_any_span(structure, bias):
    inputs, actual, expected = make(structure, 41)
    rows = inputs[2][..., :3, :]
    rows.copy_(torch.where(rows.isfinite(), rows * bias, rows))
    inputs[2][..., 5, 11] += bias
    for size in (1.0, 30.0):
        inputs[0] *= size
        rounded, exact = to(inputs, torch.float32)
        assert_near(results(actual, rounded), results(expected, exact), torch.float32)


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("later", ["huge keys", "NaN", "infinite values", "infinite keys"])
def test_what_comes_later_has_no_influence(structure, later, size):
    (key, value, tables), actual, _ = make(structure, 45)
    inputs, _ = to((key * size, value, tables), torch.float32)
    before = actual(*inputs)
    for last in (0, 17, 23, 24, 38):
        key, value, tables = (None if x is None else x.clone() for x in inputs)
        if later == "huge keys":
            key[:, last + 1 :] += 1e4
        elif later == "infinite keys":
            key[:, last + 1 :] = math.inf
        else:
            value[:, last + 1 :] = math.nan if later == "NaN" else math.inf
        after = actual(key, value, tables)
        torch.testing.assert_close(after[:, : last + 1], before[:, : last + 1], rtol=1e-5, atol=1e-5)
        if later == "NaN":
            assert after[:, last + 1 :].isnan().all()


def test_a_value_of_nan_is_seen_by_its_feature_and_within_the_window_only():
    (key, value, tables), actual, _ = make("conv, window only", 45)
    inputs, _ = to((key, value, tables), torch.float32)
    inputs[1][:, 20, 3] = math.nan
    context = actual(*inputs)
    seen = torch.zeros_like(context, dtype=torch.bool)
    seen[:, 20:26, 3] = True
    assert torch.equal(context.isnan(), seen)


@pytest.mark.parametrize("offset", [10.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_keys_survive_an_offset_of_values_in_half_precision(structure, offset, dtype):
    (key, value, tables), actual, expected = make(structure, 53)
    inputs, exact = to((key, value + offset, tables), dtype)
    gradients, expected_gradients = results(actual, inputs)[1:], results(expected, exact)[1:]
    # The upstream gradient and the result are rounded to `dtype`; sums in float32 lose digits to the offset.
    tolerance = 2 * torch.finfo(dtype).eps + 64 * offset * torch.finfo(torch.float32).eps
    error = (gradients[0] - expected_gradients[0]).norm() / expected_gradients[0].norm()
    assert error < tolerance


def test_the_context_is_no_view_of_other_memory():
    inputs, actual, _ = make("local", 20)
    context = actual(*(x.float().requires_grad_() for x in inputs))
    assert context.is_contiguous() and not context._is_view()
    context.transpose(0, 1)[3:] += 1


def test_gradients_of_gradients_and_batched_gradients(structure):
    inputs, actual, expected = make(structure, 11)
    inputs[0] *= 90
    inputs = [None if x is None else x.requires_grad_() for x in inputs]
    given = [x for x in inputs if x is not None]
    found = []
    for function in (actual, expected):
        context = function(inputs[0], inputs[1], inputs[2])
        weights = torch.randn(3, *context.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        batched = torch.autograd.grad(context, given, weights, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(context, given, weights[0], create_graph=True)
        second = torch.autograd.grad(sum((x**2).sum() for x in first), given)
        found.append([x.detach() for x in (*batched, *second)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value", [1e12, 1e30])
@pytest.mark.parametrize("key", [60.0, 90.0])
def test_gradients_of_huge_values_are_finite_and_exact(structure, key, value):
    inputs, actual, expected = make(structure, 53)
    inputs[0] *= key
    inputs[1] *= value
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32, values=4 * value)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize(("gradient", "value"), [(1e-6, 1.0), (1e-12, 1.0), (1e6, 1.0), (1.0, 1e-6), (1e-9, 1e-9)])
def test_gradients_of_any_size_are_exact(structure, gradient, value):
    """Gradients of a mean over a million numbers are about 1e-6."""
    inputs, actual, expected = make(structure, 65)
    inputs[0] *= 60.0
    inputs[1] *= value
    inputs, exact = to(inputs, torch.float32)
    for a, b in zip(results(actual, inputs, gradient), results(expected, exact, gradient), strict=True):
        assert float((a - b).norm() / b.norm()) < 64 * torch.finfo(torch.float32).eps


def test_slopes_whose_decay_over_a_chunk_is_no_integer(monkeypatch):
    """One feature has a decay of 4 per chunk, the other one of 0.25, over several segments."""
    monkeypatch.setattr(mixing_cpu_chunks_aft, "BLOCK_SIZE", 1)
    torch.manual_seed(0)
    slopes, key = torch.tensor([0.5, 1 / 32]), torch.randn(8, 53, 2)
    key[:, 0] += 60.0
    expected = partial(reference, slopes=slopes, heads=2, size=8, window_only=False)
    actual = partial(causal_mixing, slopes=slopes, num_heads=2, chunk_size=8, differentiable=expected)
    inputs, exact = to([key, torch.randn(8, 53, 2), None], torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.parametrize("value", [1.0, 1e12])
@pytest.mark.parametrize("step", [10.0, 100.0])
@pytest.mark.parametrize("slope", [1.0, 0.25])
def test_steep_slopes_over_long_chunks(slope, step, value):
    """Relative to the start of a chunk, the last token weighs up to exp(31) times as much as the first one."""
    torch.manual_seed(0)
    key = torch.randn(2, 96, FEATURES) + step * torch.arange(96.0)[:, None]
    key[:, 40:] = -math.inf
    slopes = torch.full((3,), slope)
    expected = partial(reference, slopes=slopes, heads=3, size=32, window_only=False)
    actual = partial(causal_mixing, slopes=slopes, num_heads=3, chunk_size=32, differentiable=expected)
    inputs, exact = to([key, torch.randn(2, 96, FEATURES) * value, None], torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32, values=4 * value)


@pytest.mark.parametrize("structure", ["local", "local, window only", "conv"])
def test_what_is_left_out_does_not_count_by_a_large_bias(structure):
    inputs, actual, expected = make(structure, 64, batch=8)
    inputs[0] *= 90.0
    inputs[2].copy_(torch.where(inputs[2].isfinite(), 20.0 - inputs[2].abs().clamp(max=1.0), inputs[2]))
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.parametrize("structure", ["local, window only", "conv, window only"])
def test_a_huge_key_counts_by_any_bias(structure):
    inputs, actual, expected = make(structure, 16)
    inputs[0][:, 5] = 1e30
    low = (torch.rand(inputs[2].shape) < 0.5) & inputs[2].isfinite()
    inputs[2].masked_fill_(low, -100.0)
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


def test_huge_keys_of_all_tokens(structure):
    """Each query sees a key that is infinitely larger than the others after the exponential."""
    inputs, actual, expected = make(structure, 53)
    inputs[0] *= 1e28
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.parametrize("slope", [None, 1e-5])
@pytest.mark.parametrize("key", [0.3, 40.0])
def test_errors_do_not_grow_with_the_length(key, slope):
    """Equal keys and values are the worst case: the running sum grows by the same number in each chunk."""
    slopes = None if slope is None else torch.tensor([slope])
    mix = partial(causal_mixing, slopes=slopes, num_heads=1, chunk_size=32, differentiable=None)
    inputs, exact = to([torch.full((1, 2**17, 2), key), torch.full((1, 2**17, 2), 0.7), None], torch.float32)
    actual, expected = results(mix, inputs), results(mix, exact)
    torch.testing.assert_close(expected[0], exact[1])
    assert_near(actual, expected, torch.float32)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize("structure", ["local", "local, window only"])
@pytest.mark.parametrize("size", [100.0, 1e4])
def test_large_biases_that_cancel_large_keys_keep_all_digits(structure, size):
    """K + w is of size 1, and the digits of w count in each query, the first ones included."""
    inputs, actual, expected = make(structure, 33)
    key = size * torch.randn(33, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[0] = key[None, :, None].expand_as(inputs[0]).clone()
    before_and_own = torch.cat([torch.zeros(CHUNK), key, torch.zeros(CHUNK)])
    for chunk in range(inputs[2].shape[1]):
        seen = before_and_own[chunk * CHUNK : (chunk + 2) * CHUNK]
        inputs[2][:, chunk, :, : len(seen)] -= seen
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs), results(expected, exact), torch.float32)


@pytest.mark.usefixtures("first_queries")
@pytest.mark.parametrize("value", [1e-12, 1e-13])
def test_small_values_count_next_to_large_keys(structure, value):
    inputs, actual, expected = make(structure, 65)
    inputs[0] *= 90.0
    inputs[1] *= value
    inputs, exact = to(inputs, torch.float32)
    assert_near(results(actual, inputs)[:1], results(expected, exact)[:1], torch.float32, values=value)


@pytest.mark.parametrize("slope", [None, 1e-5])
@pytest.mark.parametrize("value", [1.0, 1e30, 1e60])
def test_running_sums_in_float64_have_room_for_large_values(slope, value):
    key = torch.zeros(1, 96, 2, dtype=torch.float64)
    key[:, 32:] = 599.0
    values = value * (1 + torch.rand(1, 96, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    slopes = None if slope is None else torch.tensor([slope])
    mix = partial(causal_mixing, slopes=slopes, num_heads=1, chunk_size=32, differentiable=None)
    expected = partial(reference, slopes=slopes, heads=1, size=32, window_only=False)
    inputs = [key, values, None]
    assert_near(results(mix, inputs), results(expected, inputs), torch.float64, terms=2**12, values=value)
