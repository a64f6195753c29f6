"""The AFT operation: the reference against loops over Eq. 2, and every fast form against the reference.

A `Form` is a fast form with random parameters (position biases, kernels, slopes), and a function that spells these out
as the dense table w of Eq. 2, -inf where a query must not look. That table is all that `reference_mixing` is given.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch

from aft_hf import mixing_aft
from aft_hf.mixing_aft import (
    chunked_mixing,
    collect_grid_table,
    convolution_mixing,
    dense_mixing,
    grid_table,
    indexed_mixing,
    masked_mixing,
    mixing_weights,
    power_of_two_from,
    prefix_sums,
    reference_mixing,
    single_sums,
    windowed_mixing,
)


HEADS, FEATURES = 2, 3
LENGTHS = (1, 2, 3, 5, 31, 32, 33, 64, 67, 130)
GRIDS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 5: (5, 1), 31: (1, 31), 32: (4, 8), 33: (11, 3), 64: (8, 8), 67: (67, 1)}
GRIDS[130] = (10, 13)


def brute_force(key, value, bias, mask=None):
    """Eq. 2 number by number."""
    batch, heads, keys, features = value.shape
    output = torch.zeros(batch, heads, bias.shape[-2], features, dtype=torch.float64)
    for b, i, t, f in product(range(batch), range(heads), range(bias.shape[-2]), range(features)):
        numerator = denominator = 0.0
        for s in range(keys):
            if mask is None or mask[b, i, t, s]:
                w = bias[b % bias.shape[0], i, t, s].item()
                weight = math.exp(key[b, i, s, f % key.shape[-1]].item() + w)
                numerator += weight * value[b, i, s, f].item()
                denominator += weight
        output[b, i, t, f] = numerator / denominator if denominator > 0 else 0.0
    return output


# ------------------------------------------------------------------------------------------------ forms and tables


class Form(NamedTuple):
    parameters: tuple[torch.Tensor, ...]
    fast: Callable  # (key, value, *parameters) -> (B, h, T, c)
    table: Callable  # (*parameters) -> (1 or B, h, T, T')


def causal_table(length):
    """0 where t' <= t and -inf elsewhere, (T, T)."""
    return torch.full((length, length), -torch.inf).triu(1)


def from_blocks(own, previous, length, elsewhere):
    """The causal table (h, T, T) of blocks within each chunk and to the chunk before it."""
    chunks, size = own.shape[1:3]
    rows = []
    for n in range(chunks):
        row = [own.new_full((own.shape[0], size, size), elsewhere)] * chunks
        row[n] = own[:, n]
        if n > 0:
            row[n - 1] = previous[:, n]
        rows.append(torch.cat(row, -1))
    return (torch.cat(rows, -2)[:, :length, :length] + causal_table(length)).unsqueeze(0)


def dense_form(batch, length):
    bias = torch.randn(HEADS, length, length)
    return Form((bias,), dense_mixing, lambda bias: bias.unsqueeze(0))


def dense_rectangular_form(batch, length):
    bias = torch.randn(HEADS, length + 4, length)
    return Form((bias,), dense_mixing, lambda bias: bias.unsqueeze(0))


def dense_causal_form(batch, length):
    bias = torch.randn(HEADS, length, length)
    return Form((bias,), lambda *x: dense_mixing(*x, causal=True), lambda bias: bias[None] + causal_table(length))


def dense_without_bias_form(batch, length):
    return Form((), dense_mixing, lambda: torch.zeros(1, HEADS, length, length))


def chunked_without_bias_form(batch, length):
    return Form((), chunked_mixing, lambda: causal_table(length).expand(1, HEADS, -1, -1))


def chunked_form(batch, length, size=8):
    chunks = -(-length // size)
    own, previous = torch.randn(2, HEADS, chunks, size, size)
    return Form(
        (own, previous),
        lambda *x: chunked_mixing(*x, chunk_size=size),
        lambda own, previous: from_blocks(own, previous, length, 0.0),
    )


def chunked_shared_form(batch, length, size=8):
    """The same biases for all chunks, as for relative positions."""
    chunks = -(-length // size)
    own, previous = torch.randn(2, HEADS, 1, size, size)
    return Form(
        (own, previous),
        lambda *x: chunked_mixing(*x, chunk_size=size),
        lambda *blocks: from_blocks(*(x.expand(-1, chunks, -1, -1) for x in blocks), length, 0.0),
    )


def chunked_decay_form(batch, length, size=8):
    lags = torch.arange(length)[:, None] - torch.arange(length)
    slopes = torch.rand(HEADS)

    def fast(key, value, slopes):
        own = -slopes[:, None, None, None] * (torch.arange(size)[:, None] - torch.arange(size))
        return chunked_mixing(key, value, own, chunk_size=size, slopes=slopes)

    return Form((slopes,), fast, lambda slopes: (-slopes[:, None, None] * lags + causal_table(length)).unsqueeze(0))


def windowed_form(batch, length, size=8, window=6):
    chunks = -(-length // size)
    lags = size + torch.arange(size)[:, None] - torch.arange(2 * size)
    hidden = (lags < 0) | (lags >= window)
    bias = torch.randn(HEADS, chunks, size, 2 * size)

    def table(bias):
        previous, own = bias.masked_fill(hidden, -torch.inf).split(size, -1)
        return from_blocks(own, previous, length, -torch.inf)

    def fast(key, value, bias):
        # What lies ahead is the form's own to hide, so leave it in.
        return windowed_mixing(key, value, bias.masked_fill(lags >= window, -torch.inf), chunk_size=size)

    return Form((bias,), fast, table)


def convolution_form(batch, length, size=5):
    grid = GRIDS[length]
    kernel = torch.randn(HEADS, size, size)

    def table(kernel):
        places = list(product(range(grid[0]), range(grid[1])))
        rows = []
        for row, column in places:
            offsets = [(r - row + size // 2, c - column + size // 2) for r, c in places]
            zero = kernel.new_zeros(HEADS)
            rows.append(
                torch.stack([kernel[:, i, j] if 0 <= i < size and 0 <= j < size else zero for i, j in offsets], -1)
            )
        return torch.stack(rows, -2).unsqueeze(0)

    return Form((kernel,), lambda *x: convolution_mixing(*x, grid), table)


def convolution_beyond_the_grid_form(batch, length):
    return convolution_form(batch, length, size=2 * max(GRIDS[length]) + 3 if length < 64 else 27)


def indexed_form(batch, length, causal=False, bias=1.3):
    index = torch.randint(0, length, (HEADS, length))
    index = torch.minimum(index, torch.arange(length)) if causal else index
    inside = torch.rand(HEADS, length) < 0.8
    table = bias * torch.nn.functional.one_hot(index, length) * inside.unsqueeze(-1)
    table = table + causal_table(length) if causal else table

    def fast(key, value):
        return indexed_mixing(key, value, index, inside, bias, causal=causal)

    return Form((), fast, lambda: table.unsqueeze(0))


def indexed_causal_form(batch, length):
    return indexed_form(batch, length, causal=True)


def masked_form(batch, length, rows=None):
    hidden = torch.rand(batch if rows is None else rows, HEADS, length + 1, length) < 0.4
    bias = torch.randn(hidden.shape)
    return Form(
        (bias,),
        lambda key, value, bias: masked_mixing(key, value, bias.masked_fill(hidden, -torch.inf)),
        lambda bias: bias.masked_fill(hidden, -torch.inf),
    )


def masked_shared_form(batch, length):
    return masked_form(batch, length, rows=1)


FORMS = {
    name.removesuffix("_form").replace("_", " "): form for name, form in globals().items() if name.endswith("_form")
}
each_form = pytest.mark.parametrize("make_form", FORMS.values(), ids=FORMS)
key_widths = pytest.mark.parametrize("key_width", (1, FEATURES), ids=("one key per head", "one key per feature"))
# AFT-conv on a grid has one key per head.
each_form_and_key_width = pytest.mark.parametrize(
    ("make_form", "key_width"),
    [
        pytest.param(form, width, id=f"{name}, {width} of {FEATURES} keys")
        for name, form in FORMS.items()
        for width in (1, FEATURES)
        if width == 1 or not name.startswith("convolution")
    ],
)


def keys_and_values(batch, length, key_width):
    return torch.randn(batch, HEADS, length, key_width), torch.randn(batch, HEADS, length, FEATURES)


def leaves(tensors, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def assert_close(actual, expected, tolerance):
    """To `tolerance` relative to the largest entry, or to 0.3 where gradients cancel to less."""
    scale = expected.abs().max().clamp_min(0.3).item()
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=tolerance * scale)


def compare(form, key, value, hidden=None, tolerance=1e-5):
    """Values and gradients of the fast form in float32 with those of the reference in float64."""
    results = []
    for dtype, mix in (
        (torch.float32, form.fast),
        (torch.float64, lambda key, value, *parameters: reference_mixing(key, value, form.table(*parameters))),
    ):
        key_leaf, value_leaf, *parameters = leaves((key, value, *form.parameters), dtype)
        masked_key = key_leaf if hidden is None else key_leaf.masked_fill(hidden, -torch.inf)
        output = mix(masked_key, value_leaf, *parameters)
        weight = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
        gradients = torch.autograd.grad(
            (weight * output).sum(), [key_leaf, value_leaf, *parameters], materialize_grads=True
        )
        results.append((output, *gradients))
    for actual, expected in zip(*results):
        assert_close(actual, expected, tolerance)


# ------------------------------------------------------------------------------------------------------- reference


@key_widths
@pytest.mark.parametrize("tables", (1, 2), ids=("one table", "a table per row"))
def test_the_reference_is_eq_2(key_width, tables):
    key, value = torch.randn(2, 2, 5, key_width).double(), torch.randn(2, 2, 5, FEATURES).double()
    bias = torch.randn(tables, 2, 4, 5).double().masked_fill(torch.rand(tables, 2, 4, 5) < 0.3, -torch.inf)
    mask = torch.rand(2, 2, 4, 5) < 0.7
    mask[0, 0, 1] = False
    torch.testing.assert_close(reference_mixing(key, value, bias), brute_force(key, value, bias))
    torch.testing.assert_close(reference_mixing(key, value, bias, mask), brute_force(key, value, bias, mask))


def test_the_reference_without_a_bias_is_eq_2_with_w_0():
    key, value = torch.randn(2, 2, 4, 3).double(), torch.randn(2, 2, 4, 3).double()
    expected = brute_force(key, value, torch.zeros(1, 2, 4, 4))
    torch.testing.assert_close(reference_mixing(key, value), expected)


def test_one_row_of_a_mask_serves_every_query_of_the_reference():
    key, value, bias = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3), torch.randn(1, 2, 4, 4)
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]]).bool()[:, None, None]
    expected = reference_mixing(key, value, bias, mask.expand(2, 2, 4, 4))
    torch.testing.assert_close(reference_mixing(key, value, bias, mask), expected)


@key_widths
def test_mixing_weights_are_what_the_reference_averages_with(key_width):
    key, value, bias = torch.randn(2, 2, 5, key_width), torch.randn(2, 2, 5, FEATURES), torch.randn(1, 2, 4, 5)
    mask = torch.rand(2, 1, 4, 5) < 0.7
    mask[1, 0, 2] = False
    weights = mixing_weights(key, bias, mask)
    assert weights.shape == (2, 2, key_width, 4, 5)
    sees_something = mask.any(-1)[:, :, None].expand(2, 2, key_width, 4)
    torch.testing.assert_close(weights.sum(-1), sees_something.float())
    averages = torch.einsum("bhfts,bhsf->bhtf", weights.expand(-1, -1, FEATURES, -1, -1), value)
    torch.testing.assert_close(averages, reference_mixing(key, value, bias, mask))


# ------------------------------------------------------------------------------------------------------ fast forms


@each_form_and_key_width
@pytest.mark.parametrize("length", LENGTHS)
def test_a_fast_form_equals_the_reference_in_values_and_gradients(make_form, key_width, length):
    batch = 1 + length % 3
    key, value = keys_and_values(batch, length, key_width)
    compare(make_form(batch, length), key, value)


@each_form
@pytest.mark.parametrize("length", (1, 5, 33, 67))
def test_a_fast_form_equals_the_reference_where_keys_are_masked(make_form, length):
    key, value = keys_and_values(2, length, 1)
    hidden = torch.rand(key.shape) < 0.4
    hidden[0, 0, : length // 2 + 1] = True  # causal queries that see nothing
    compare(make_form(2, length), key, value, hidden)


@each_form
def test_a_fast_form_gives_0_and_finite_gradients_where_every_key_is_masked(make_form):
    key, value = keys_and_values(2, 33, 1)
    form = make_form(2, 33)
    key, value, *parameters = leaves((key, value, *form.parameters), torch.float32)
    output = form.fast(key.masked_fill(torch.ones_like(key).bool(), -torch.inf), value, *parameters)
    assert output.eq(0).all()
    for gradient in torch.autograd.grad(output.sum(), [key, value, *parameters]):
        assert gradient.eq(0).all()


@each_form_and_key_width
def test_a_fast_form_passes_gradcheck_in_float64(make_form, key_width):
    length, batch = 5, 2
    key, value = keys_and_values(batch, length, key_width)
    options = {"size": 2} if make_form in (chunked_form, chunked_shared_form, chunked_decay_form) else {}
    options = {"size": 2, "window": 3} if make_form is windowed_form else options
    form = make_form(batch, length, **options)
    assert torch.autograd.gradcheck(form.fast, leaves((key, value, *form.parameters), torch.float64))


@pytest.mark.parametrize("grid", ((2, 3), (3, 2), (1, 4)))
@pytest.mark.parametrize("size", (1, 3, 7))
def test_convolution_passes_gradcheck_on_rectangles_and_with_kernels_larger_than_the_grid(grid, size):
    tensors = torch.randn(2, 2, math.prod(grid), 1), torch.randn(2, 2, math.prod(grid), 2), torch.randn(2, size, size)
    assert torch.autograd.gradcheck(lambda *x: convolution_mixing(*x, grid), leaves(tensors, torch.float64))


@each_form_and_key_width
def test_keys_of_1e4_stay_finite_and_near_the_reference(make_form, key_width):
    key, value = keys_and_values(2, 67, key_width)
    form = make_form(2, 67)
    # float32 holds K + w at 1e4 to 1e-3.
    compare(form, key.sign() * 1e4 * torch.rand(key.shape), value, tolerance=1e-2)


@each_form
def test_values_are_averaged_where_all_keys_are_1e4(make_form):
    key, value = keys_and_values(2, 33, 1)
    for size in (1e4, -1e4):
        compare(make_form(2, 33), torch.full_like(key, size), value, tolerance=1e-2)


@each_form
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_is_summed_in_float32(make_form, dtype):
    key, value = (x.to(dtype) for x in keys_and_values(2, 67, 1))
    form = make_form(2, 67)
    output = form.fast(key, value, *form.parameters)
    assert output.dtype == dtype
    expected = form.fast(key.float(), value.float(), *form.parameters)
    torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("make_form", (dense_form, dense_rectangular_form, dense_causal_form, masked_form))
def test_queries_whose_position_biases_are_hundreds_apart_do_not_disturb_each_other(make_form):
    key, value = keys_and_values(2, 67, FEATURES)
    form = make_form(2, 67)
    (bias,) = form.parameters
    compare(form._replace(parameters=(bias + 200 * torch.randn(*bias.shape[:-1], 1),)), key, value, tolerance=1e-4)


# --------------------------------------------------------------------------------------------------- special cases


def dwarfing_keys(length=6, key_width=2, dtype=torch.float32):
    """Keys of which the last is 200 larger, and a table that hides it from all but the last query."""
    key = torch.randn(2, HEADS, length, key_width).to(dtype)
    key[:, :, -1] += 200
    bias = torch.randn(2, HEADS, length, length).to(dtype)
    bias[:, :, :-1, -1] = -torch.inf
    return key, torch.randn(2, HEADS, length, 2).to(dtype), bias


@pytest.mark.parametrize("tables", (1, 2), ids=("one table", "a table per row"))
def test_masked_mixing_equals_the_reference_where_hidden_keys_dwarf_visible_ones(tables):
    key, value, bias = dwarfing_keys()
    hidden = (bias == -torch.inf)[:tables]
    form = Form(
        (bias[:tables].masked_fill(hidden, 0.0),),
        lambda key, value, bias: masked_mixing(key, value, bias.masked_fill(hidden, -torch.inf)),
        lambda bias: bias.masked_fill(hidden, -torch.inf),
    )
    compare(form, key, value)


def test_masked_mixing_goes_query_by_query_only_where_hidden_keys_dwarf_visible_ones(monkeypatch):
    calls = []
    query_weights = mixing_aft._query_weights
    monkeypatch.setattr(mixing_aft, "_query_weights", lambda *x: calls.append(1) or query_weights(*x))
    key, value, bias = dwarfing_keys()
    masked_mixing(key.clamp_max(20.0), value, bias)
    assert len(calls) == 0
    masked_mixing(key, value, bias)
    assert len(calls) == key.shape[2]


def test_masked_mixing_passes_gradcheck_query_by_query():
    key, value, bias = dwarfing_keys(length=4, dtype=torch.float64)
    hidden = bias == -torch.inf

    def mix(key, value, bias):
        return masked_mixing(key, value, bias.masked_fill(hidden, -torch.inf))

    assert torch.autograd.gradcheck(mix, leaves((key, value, bias.masked_fill(hidden, 0.0)), torch.float64))


@pytest.mark.parametrize("size", (3, 13), ids=("smaller than the grid", "as large as the grid"))
@pytest.mark.parametrize("lowest", (-1.0, -20.0))
def test_convolution_is_accurate_where_kernel_biases_are_very_negative(size, lowest):
    """exp(w) - 1, as the paper prints Eq. 6, would lose exp(w) to the 1 beside it."""
    form = convolution_form(1, 64, size=size)
    form = form._replace(parameters=(torch.rand(HEADS, size, size) * lowest,))
    key, value = torch.randn(1, HEADS, 64, 1), torch.randn(1, HEADS, 64, FEATURES)
    near_the_corner = torch.zeros(64, dtype=torch.bool).view(8, 8)
    near_the_corner[:2, :2] = True
    compare(form, key, value)
    # With all keys but four masked, the queries near these see nothing outside their window.
    hidden = ~near_the_corner.view(1, 1, 64, 1)
    output = form.fast(key.masked_fill(hidden, -torch.inf), value, *form.parameters)
    table = form.table(form.parameters[0].double())
    expected = reference_mixing(key.double().masked_fill(hidden, -torch.inf), value.double(), table)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_convolution_stays_finite_where_kernel_biases_all_but_hide_the_window():
    form = convolution_form(1, 64)
    form = form._replace(parameters=(form.parameters[0] - 120,))
    compare(form, *keys_and_values(1, 64, 1))


@pytest.mark.parametrize("length", (1, 2, 7, 8))
@pytest.mark.parametrize("decay", (0.0, 0.7))
def test_prefix_sums_equal_a_loop(length, decay):
    key, value = torch.randn(HEADS, length, 2, 1).double(), torch.randn(HEADS, length, 2, FEATURES).double()
    sums = prefix_sums(single_sums(key, value), decay)
    numerator = denominator = 0.0
    for t in range(length):
        numerator = numerator * math.exp(-decay) + key[:, t].exp() * value[:, t]
        denominator = denominator * math.exp(-decay) + key[:, t].exp()
        scale = sums.maximum[:, t].exp()
        torch.testing.assert_close(sums.numerator[:, t] * scale, numerator)
        torch.testing.assert_close(sums.denominator[:, t] * scale, denominator)


@pytest.mark.parametrize(("number", "power"), ((0, 1), (1, 1), (2, 2), (3, 4), (32, 32), (33, 64)))
def test_power_of_two_from_is_the_smallest_that_is_not_below(number, power):
    assert power_of_two_from(number) == power


@pytest.mark.parametrize("grid_size", ((1, 1), (1, 4), (5, 1), (3, 4)), ids=str)
def test_what_a_grid_table_is_made_of_collects_what_comes_back(grid_size):
    rows, columns = grid_size
    positions = rows * columns
    by_offset = torch.randn(2, 2 * rows - 1, 2 * columns - 1, dtype=torch.float64, requires_grad=True)
    of_table = torch.randn(2, positions, positions, dtype=torch.float64)
    (expected,) = torch.autograd.grad(grid_table(by_offset, grid_size), by_offset, of_table)
    torch.testing.assert_close(collect_grid_table(of_table, grid_size), expected)
