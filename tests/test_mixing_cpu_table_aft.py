"""Tables of exp(w) on a CPU against Eq. 2 in float64: keys, values and biases of any size, masks, gradients."""

import copy
import math
from functools import partial

import pytest
import torch

import aft_hf.mixing_cpu_sums_aft as sums
from aft_hf import AFTConv, AFTFull
from aft_hf.mixing_aft import Mixing, reference_mixing
from aft_hf.mixing_cpu_bias_aft import (
    LOWEST_CONVOLVED,
    MODERATE,
    BandTables,
    ConvolutionTables,
    DenseTables,
    GridTables,
    choose_tables,
)
from aft_hf.mixing_cpu_product_aft import LARGEST_EXPONENT
from aft_hf.mixing_cpu_table_aft import table_layer, table_mixing
from aft_hf.position_biases_aft import Dense, GridKernel, grid_table


BATCH, LENGTH, WIDTH, GRID = 2, 72, 12, (6, 12)
TABLES = {"dense": DenseTables(), "causal": DenseTables(causal=True), "grid": GridTables(grid_size=GRID)}
# (heads, key features): one key per feature with one or more heads, one key per head, and one head per feature.
SIZES = [(1, WIDTH), (3, WIDTH), (3, 3), (WIDTH, WIDTH)]


def reference(key, value, bias, tables, heads):
    """Eq. 2 in the dtype of the inputs, (B, T, d)."""
    length = value.shape[1]
    if isinstance(tables, GridTables):
        bias = grid_table(bias, tables.grid_size)
    if isinstance(tables, BandTables):
        queries = torch.arange(length).repeat(heads)
        bias = tables.rows(bias, torch.arange(heads).repeat_interleave(length), queries, length)
        bias = bias.unflatten(0, (heads, -1))
    return reference_mixing(Mixing(key, value, heads, Dense(bias), tables.causal))


def mix(key, value, bias, tables, heads):
    differentiable = partial(reference, tables=tables, heads=heads)
    return table_mixing(key, value, bias, tables, num_heads=heads, differentiable=differentiable)


def draw(tables, heads, key_features, dtype=torch.float32, key_size=1.0, bias_size=1.0):
    torch.manual_seed(0)
    shape = (heads, 2 * GRID[0] - 1, 2 * GRID[1] - 1) if isinstance(tables, GridTables) else (heads, LENGTH, LENGTH)
    bias_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    bias = (torch.randn(shape) * bias_size).to(bias_dtype)
    key = (torch.randn(BATCH, LENGTH, key_features) * key_size).to(dtype)
    return key, torch.randn(BATCH, LENGTH, WIDTH).to(dtype), bias


def tolerance(dtype, span):
    """Return the allowed relative error.

    Exponents are rounded relative to their size, which is a relative error of the terms; then T terms are added, and
    the result is rounded.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return 2 * torch.finfo(dtype).eps + (4 * span + LENGTH) * torch.finfo(work).eps


def compare(key, value, bias, tables, heads, bound, gradient_size=1.0):
    """Compare averages and gradients with the reference; gradient errors are relative to the size of their terms."""
    inputs = [x.detach().clone().requires_grad_() for x in (key, value, bias)]
    exact = [x.detach().double().requires_grad_() for x in (key, value, bias)]
    context, expected = mix(*inputs, tables, heads), reference(*exact, tables, heads)
    gradient = (torch.randn(expected.shape) * gradient_size).to(value.dtype)
    context.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(context.double(), expected, rtol=bound, atol=bound * float(value.abs().max()))
    terms = LENGTH * BATCH * float(gradient.abs().max()) * max(1.0, 2 * float(value.abs().max()))
    for given, wanted in zip(inputs, exact):
        torch.testing.assert_close(given.grad.double(), wanted.grad, rtol=2 * bound, atol=bound * terms)
    with torch.no_grad():  # in half precision, the factors of products are rounded
        half = 4 * torch.finfo(value.dtype).eps if value.dtype == torch.bfloat16 else bound
        torch.testing.assert_close(
            mix(key, value, bias, tables, heads).double(), expected, rtol=half, atol=half * float(value.abs().max())
        )


@pytest.mark.parametrize("key_size", [1, 30, 90, 1e4])
@pytest.mark.parametrize("bias_size", [0.5, 100])
@pytest.mark.parametrize("heads, key_features", SIZES)
@pytest.mark.parametrize("name", TABLES)
def test_it_is_eq_2_for_keys_and_biases_of_any_size(name, heads, key_features, bias_size, key_size):
    inputs = draw(TABLES[name], heads, key_features, key_size=key_size, bias_size=bias_size)
    compare(*inputs, TABLES[name], heads, tolerance(torch.float32, 5 * (key_size + bias_size)))


@pytest.mark.parametrize("growth", [0, 100])
@pytest.mark.parametrize("name", TABLES)
def test_biases_count_next_to_keys_with_a_large_offset(name, growth):
    """float32 has only integers at 1e7, so K + w would lose w."""
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES[name], heads, key_features)
        # With a growth, only one or two weights of a query are not negligible.
        key = 1e7 + torch.randint(4, key.shape) + growth * (torch.arange(LENGTH) // 2)[:, None]
        compare(key, value, bias, TABLES[name], heads, tolerance(torch.float32, 20))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_size", [1, 90])
@pytest.mark.parametrize("name", TABLES)
def test_other_types_of_numbers(name, key_size, dtype):
    for heads, key_features in SIZES[1:3]:
        inputs = draw(TABLES[name], heads, key_features, dtype, key_size)
        compare(*inputs, TABLES[name], heads, tolerance(dtype, 5 * key_size))


@pytest.mark.parametrize("first", [1, 16, 2 * LENGTH])
def test_lost_queries_are_found_in_pieces_of_any_size(first, monkeypatch):
    monkeypatch.setattr(sums, "FIRST", first)
    monkeypatch.setattr(sums, "LOST_BLOCK", 2**12)
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES["causal"], heads, key_features, key_size=90)
        compare(key, value, bias, TABLES["causal"], heads, tolerance(torch.float32, 500))
        growing = key / 90 + 100 * torch.arange(LENGTH)[:, None]
        compare(growing, value, bias, TABLES["causal"], heads, tolerance(torch.float32, 100 * LENGTH))


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("part", [0, 1 / 32, 1e3])
def test_rows_with_lost_queries_are_summed_again(rounds, part, monkeypatch):
    """With one piece for all queries, with many pieces, and with queries that are left for a softmax."""
    monkeypatch.setattr(sums, "ROUNDS", rounds)
    monkeypatch.setattr(sums, "SUMMED_AGAIN", part)
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES["causal"], heads, key_features, key_size=90)
        compare(key, value, bias, TABLES["causal"], heads, tolerance(torch.float32, 500))
        growing = key / 90 + 100 * torch.arange(LENGTH)[:, None]
        compare(growing, value, bias, TABLES["causal"], heads, tolerance(torch.float32, 100 * LENGTH))
        hidden = key.clone()
        hidden[0, :20], hidden[1, 5:9] = -math.inf, -math.inf
        inputs = [x.requires_grad_() for x in (hidden, value, bias)]
        context = mix(*inputs, TABLES["causal"], heads)
        assert (context[0, :20] == 0).all()
        shown = [x.detach().double() for x in (hidden, value, bias)]
        expected = reference(*shown, TABLES["causal"], heads)
        bound = tolerance(torch.float32, 500)
        atol = bound * float(value.detach().abs().max())
        torch.testing.assert_close(context[0, 20:].double(), expected[0, 20:], rtol=bound, atol=atol)
        torch.testing.assert_close(context[1].double(), expected[1], rtol=bound, atol=atol)
        context.sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("key_size", [30, 90])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_huge_values_are_finite_and_exact(name, key_size):
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES[name], heads, key_features, key_size=key_size)
        for size in (1e11, 9e11 / float(value.abs().max())):
            compare(key, value * size, bias, TABLES[name], heads, tolerance(torch.float32, 5 * key_size), 1e3)


@pytest.mark.parametrize("keys", ["random", "growing"])
def test_sums_of_several_parts_are_rounded_once(keys):
    """If all values are equal, the gradients of keys and biases are 0."""
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES["causal"], heads, key_features, torch.bfloat16, 90)
        if keys == "growing":
            key = (key / 90 + torch.arange(LENGTH)[:, None]).bfloat16()
        inputs = [x.requires_grad_() for x in (key, torch.full_like(value, 3.0), bias)]
        context = mix(*inputs, TABLES["causal"], heads)
        gradient = torch.randn(context.shape).bfloat16()
        context.backward(gradient)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        reference(*exact, TABLES["causal"], heads).backward(gradient.double())
        terms = LENGTH * BATCH * 3.0 * float(gradient.abs().max())
        atol, rounding = 8 * terms * torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
        for given, wanted in zip(inputs, exact):
            torch.testing.assert_close(given.grad.double(), wanted.grad, rtol=rounding, atol=atol)


@pytest.mark.parametrize("name", TABLES)
def test_keys_below_all_others(name):
    """A row of very low finite keys is not taken for a row of hidden keys."""
    key, value, bias = draw(TABLES[name], 3, 3)
    key[0] = -3e38
    with torch.no_grad():
        context = mix(key, value, bias, TABLES[name], 3)
    assert context.isfinite().all()
    assert (context[0].abs() <= value[0].abs().amax(0) * 1.001).all() and context[0].any()
    expected = reference(key, value, bias, TABLES[name], 3)
    torch.testing.assert_close(context[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("later", [1e4, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("of", ["key", "value"])
def test_later_tokens_leave_earlier_ones_alone(of, later):
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES["causal"], heads, key_features)
        changed = {"key": key.clone(), "value": value.clone()}
        changed[of][:, 40:] = later
        inputs = [x.requires_grad_() for x in (changed["key"], changed["value"], bias)]
        context = mix(*inputs, TABLES["causal"], heads)[:, :40]
        expected = reference(*(x.detach().double() for x in (key, value, bias)), TABLES["causal"], heads)[:, :40]
        bound = tolerance(torch.float32, LARGEST_EXPONENT)
        torch.testing.assert_close(context.double(), expected, rtol=bound, atol=bound * float(value.abs().max()))
        context.sum().backward()
        assert inputs[0].grad[:, :40].isfinite().all() and inputs[1].grad[:, :40].isfinite().all()


@pytest.mark.parametrize("key_size", [1, 90])
@pytest.mark.parametrize("name", TABLES)
def test_what_is_hidden_counts_nothing_and_who_sees_nothing_gets_nothing(name, key_size):
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES[name], heads, key_features, key_size=key_size)
        key[0, :20], key[1] = -math.inf, -math.inf
        value[0, :20], value[1] = 0.0, 0.0
        inputs = [x.requires_grad_() for x in (key, value, bias)]
        context = mix(*inputs, TABLES[name], heads)
        expected = reference(key.double(), value.double(), bias.double(), TABLES[name], heads)
        bound = tolerance(torch.float32, 5 * key_size)
        torch.testing.assert_close(context.double(), expected, rtol=bound, atol=4 * bound)
        assert not context[1].any()
        context.sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs)
        assert not inputs[0].grad[1].any() and not inputs[1].grad[1].any() and not inputs[0].grad[0, :20].any()


@pytest.mark.parametrize("size", [3, 7, 25])
@pytest.mark.parametrize("bias_size", [1, 100])
@pytest.mark.parametrize("key_size", [1, 90])
def test_bands_are_eq_2(size, bias_size, key_size):
    tables = BandTables(GRID, size)
    for dtype, half in ((torch.float32, 0.0), (torch.bfloat16, 4 * torch.finfo(torch.bfloat16).eps)):
        key, value, _ = draw(TABLES["dense"], 3, 3, dtype, key_size)
        kernels = torch.randn(3, size, size) * bias_size
        expected = reference(key.double(), value.double(), kernels.double(), tables, 3)
        bound = half + tolerance(torch.float32, 5 * (key_size + bias_size))
        torch.testing.assert_close(mix(key, value, kernels, tables, 3).double(), expected, rtol=bound, atol=4 * bound)


# Kernels within the range of a convolution, and those at its ends.
KERNELS = {
    "random": lambda size: torch.randn(3, size, size).clamp(min=LOWEST_CONVOLVED),
    "lowest": lambda size: torch.full((3, size, size), LOWEST_CONVOLVED),
    "highest": lambda size: torch.full((3, size, size), MODERATE),
    "both ends": lambda size: torch.where(torch.rand(3, size, size) < 0.5, LOWEST_CONVOLVED, MODERATE),
}


@pytest.mark.parametrize("key_size", [1, 30, 90, 1e4])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("size", [1, 7, 13, 15, 25])
def test_convolutions_are_eq_2_for_keys_of_any_size(size, kernels, key_size):
    tables = ConvolutionTables(GRID, size)
    for heads in (3, WIDTH):
        key, value, _ = draw(TABLES["dense"], heads, heads, key_size=key_size)
        of_heads = KERNELS[kernels](size).repeat(heads // 3, 1, 1)
        expected = reference(key.double(), value.double(), of_heads.double(), tables, heads)
        # A weight of exp(w) is a difference of terms of up to 1, which are exp(2) times as large as the weight.
        bound = math.exp(-LOWEST_CONVOLVED) * tolerance(torch.float32, 5 * key_size + MODERATE)
        torch.testing.assert_close(
            mix(key, value, of_heads, tables, heads).double(), expected, rtol=bound, atol=4 * bound
        )


def test_convolutions_of_hidden_and_undefined_positions():
    tables, kernels = ConvolutionTables(GRID, 7), KERNELS["random"](7)
    key, value, _ = draw(TABLES["dense"], 3, 3, key_size=30)
    key[0, :20], key[1] = -math.inf, -math.inf
    shown = mix(key, value, kernels, tables, 3)
    expected = reference(key[:1].double(), value[:1].double(), kernels.double(), tables, 3)
    bound = math.exp(-LOWEST_CONVOLVED) * tolerance(torch.float32, 5 * 30)
    torch.testing.assert_close(shown[:1].double(), expected, rtol=bound, atol=4 * bound)
    assert not shown[1].any()
    value[0, 30, 0] = math.nan  # every query sees it, in this head
    value[0, 30, 4] = 1e20
    mixed = mix(key, value, kernels, tables, 3)
    expected = reference(key[:1].double(), value[:1].double(), kernels.double(), tables, 3)
    assert mixed[0, :, 0].isnan().all()
    torch.testing.assert_close(mixed[0, :, 4].double(), expected[0, :, 4], rtol=bound, atol=1e20 * bound)
    torch.testing.assert_close(mixed[:1, :, 5:].double(), expected[..., 5:], rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("offset", [10, 100])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_in_half_precision_do_not_lose_to_an_offset_of_the_values(name, offset):
    key, value, bias = draw(TABLES[name], 3, WIDTH, torch.bfloat16, bias_size=0.3)
    value = (value + offset).requires_grad_()
    inputs = [key.requires_grad_(), value, bias.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradient = torch.randn(value.shape).to(torch.bfloat16)
    mix(*inputs, TABLES[name], 3).backward(gradient)
    reference(*exact, TABLES[name], 3).backward(gradient.double())
    for given, wanted in zip(inputs, exact):  # half an eps, since the gradient itself is rounded to bfloat16
        error = (given.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error <= torch.finfo(torch.bfloat16).eps / 2 + offset * LENGTH * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_gradients_and_batches_of_gradients(name):
    tables = {"grid": GridTables(grid_size=(2, 2))}.get(name, TABLES[name])
    bias = torch.randn(2, 3, 3) if name == "grid" else torch.randn(2, 4, 4)
    inputs = [torch.randn(1, 4, 4).double().requires_grad_() for _ in range(2)] + [bias.double().requires_grad_()]
    function = partial(mix, tables=tables, heads=2)
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def layer(mixer, x):
    """`table_layer` for an AFTFull or an AFTConv."""
    heads = mixer.num_heads
    if isinstance(mixer, AFTFull):
        tables, bias = DenseTables(mixer.causal), mixer.position_bias(x.shape[1])
    else:
        features = len(x) * (mixer.hidden_size // heads + 1)
        tables = choose_tables(GRID, mixer.window, heads, features, with_gradients=True)
        bias = GridKernel(mixer.kernel_bias(), GRID).by_offset()
    differentiable = partial(reference, tables=tables, heads=heads)
    return table_layer(x, mixer._projections(), bias, tables, num_heads=heads, differentiable=differentiable)


MIXERS = {
    "full": lambda **options: AFTFull(WIDTH, LENGTH, **options),
    "causal": lambda **options: AFTFull(WIDTH, LENGTH, num_heads=3, causal=True, **options),
    "conv": lambda **options: AFTConv(WIDTH, 3, 5, **options),
}
OPTIONS = [
    {},
    {"use_query": False},
    {"use_output_projection": False},
    {"use_query": False, "use_output_projection": False, "qkv_bias": False},
]


@pytest.mark.parametrize("scale", [1, 90])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_is_eq_2_with_its_projections(name, options, scale):
    torch.manual_seed(0)
    mixer = MIXERS[name](**options)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(scale)
    exact = copy.deepcopy(mixer).double()
    exact.implementation = "reference"
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    output, expected = layer(mixer, x), exact(wide, grid_size=GRID if name == "conv" else None)
    gradient = torch.randn(output.shape)
    given = gradient.clone()
    output.backward(given)
    expected.backward(gradient.double())
    assert torch.equal(given, gradient)
    # Keys up to 5 x scale are sums of d products. Their absolute rounding error is a relative error of the weights.
    bound = 5 * scale * WIDTH * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        output.double(), expected, rtol=bound, atol=bound * float(expected.detach().abs().max())
    )
    terms = BATCH * LENGTH * WIDTH * scale  # size of the terms of a gradient
    for mine, wanted in [(x, wide), *zip(mixer.parameters(), exact.parameters())]:
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=bound, atol=bound * terms)
    with torch.no_grad():
        torch.testing.assert_close(
            layer(mixer, x), output, rtol=bound, atol=bound * float(expected.detach().abs().max())
        )


@pytest.mark.parametrize("options", OPTIONS)
def test_the_output_may_be_changed(options):
    mixer = MIXERS["full"](**options)
    output = layer(mixer, torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True))
    output += 1
    output.sum().backward()


def test_a_grid_has_a_table_of_all_pairs_or_bands_or_a_convolution_or_none():
    assert isinstance(choose_tables((14, 14), 11, 16, 800, with_gradients=True), GridTables)
    for convolution, chosen in ((False, BandTables), (True, ConvolutionTables)):
        tables = choose_tables((64, 64), 25, 32, 25, with_gradients=False, convolution=convolution)
        assert type(tables) is chosen
    assert choose_tables((64, 64), 25, 32, 25, with_gradients=True) is None


def test_a_convolution_needs_moderate_kernels_and_float32(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    kernels = torch.randn(3, 5, 5).clamp(-2, 2)
    assert ConvolutionTables.can_convolve(kernels, torch.float32)
    assert not ConvolutionTables.can_convolve(kernels, torch.bfloat16)
    assert not ConvolutionTables.can_convolve(kernels, torch.float64)
    for entry in (-2.1, 20.1, math.nan):
        kernels[1, 2, 2] = entry
        assert not ConvolutionTables.can_convolve(kernels, torch.float32)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert not ConvolutionTables.can_convolve(torch.zeros(3, 5, 5), torch.float32)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33])
def test_a_causal_table_of_any_length(length):
    for heads, key_features in SIZES:
        key, value, bias = draw(TABLES["causal"], heads, key_features, key_size=90)
        inputs = key[:, :length], value[:, :length], bias[:, :length, :length]
        compare(*inputs, TABLES["causal"], heads, tolerance(torch.float32, 500))


@pytest.mark.parametrize("name", TABLES)
def test_exponentials_of_large_keys_are_rounded_alike_in_both_passes(name):
    """Both passes are then exact for nearly the same keys. Otherwise the rounding of each exponent remains."""
    inputs = draw(TABLES[name], 3, WIDTH, key_size=150.0)
    exact = [x.double() for x in inputs]
    upstream = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    gradients = []
    for function, given in ((mix, inputs), (reference, exact)):
        value = given[1].clone().requires_grad_()
        context = function(given[0].requires_grad_(), value, given[2], TABLES[name], 3)
        gradients.append(torch.autograd.grad(context, value, upstream.to(context.dtype))[0].double())
    error = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
    assert float(error) < 16 * torch.finfo(torch.float32).eps
