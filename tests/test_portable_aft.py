"""The algorithms of the portable backend for large problems, tested on small problems."""

import copy
import math

import pytest
import torch

import aft_hf.portable_aft as portable
from aft_hf import AFTConv, AFTLocal, mixing_aft
from aft_hf.mixing_aft import Mixing, Visibility, mix
from aft_hf.position_biases_aft import Dense, GridKernel, LinearDecay, NoBias, Window


NO_BIAS = NoBias(1, torch.empty(0))
WIDTH, GRID = 6, (9, 8)


def results(mixer, x, **options):
    """Return the output and the gradients of the input and of the parameters of w, in float64."""
    x = x.clone().requires_grad_()
    output = mixer(x, **options)
    weight = torch.linspace(0.2, 1, output.numel(), dtype=output.dtype).view_as(output)
    biases = [p for name, p in mixer.named_parameters() if name.startswith(("kernel", "position_bias"))]
    return [y.detach().double() for y in (output, *torch.autograd.grad(output, [x, *biases], weight))]


def assert_equal_to_the_reference(mixer, x, largest_bias=1.0, **options):
    """Compare with the reference, to the rounding of K + w and of sqrt(T) terms, relative to the largest entry."""
    reference = copy.deepcopy(mixer).double()
    reference.mixing_implementation = "reference"
    exact = results(reference, x.double(), **options)
    largest = max(y.abs().max().item() for y in exact)
    allowed = 8 * (x.numel() ** 0.5 + largest_bias) * torch.finfo(x.dtype).eps * largest
    for actual, expected in zip(results(mixer, x, **options), exact):
        torch.testing.assert_close(actual, expected, rtol=0, atol=allowed)


@pytest.fixture
def convolved(monkeypatch):
    """Make the backend use convolutions: no table fits."""
    monkeypatch.setattr(portable, "LARGEST_GRID_TABLE", 0)


def on_grid(size, dtype=torch.float32, heads=2):
    mixer = AFTConv(WIDTH, heads, size, position_bias_reparameterized=False, mixing_implementation="portable").to(
        dtype
    )
    torch.nn.init.normal_(mixer.kernel)
    return mixer


@pytest.mark.parametrize("size", (1, 3, 7, 25), ids=lambda size: f"kernel {size}")
@pytest.mark.parametrize("heads", (1, 2, WIDTH))
@pytest.mark.parametrize("grid_size", (GRID, (1, 4), (5, 1)), ids=str)
def test_a_grid_too_large_for_a_table_is_convolved(size, heads, grid_size, convolved):
    x = torch.randn(2, grid_size[0] * grid_size[1], WIDTH)
    assert_equal_to_the_reference(on_grid(size, heads=heads), x, grid_size=grid_size)
    assert_equal_to_the_reference(on_grid(size, torch.float64, heads), x.double(), grid_size=grid_size)
    per_feature = Mixing(x, x.flip(1), heads, GridKernel(torch.randn(heads, size, size), grid_size))
    torch.testing.assert_close(mix(per_feature, "portable"), mix(per_feature, "reference"))
    row = Mixing(x, x.flip(1), heads, GridKernel(torch.randn(heads, 1, size), (1, x.shape[1])))  # a 1-D kernel
    torch.testing.assert_close(mix(row, "portable"), mix(row, "reference"))


@pytest.mark.parametrize(
    ("grid_size", "center"),
    [*(((4, 4), center) for center in (-100.0, -30.0, 100.0)), ((4, 3), -100.0), ((4, 5), -60.0), ((5, 4), -60.0)],
    ids=str,
)
def test_a_convolution_is_exact_where_all_biases_of_a_kernel_are_far_from_0(grid_size, center, convolved, monkeypatch):
    """A kernel of 7 x 7 reaches every pair of a grid of 4 x 4. A backend that reads it does not convolve it."""
    monkeypatch.setattr(portable, "_ask_now", lambda condition, *tensors: None)
    mixer = on_grid(7)
    torch.nn.init.uniform_(mixer.kernel, center - 1.0, center + 1.0)
    x = torch.randn(2, grid_size[0] * grid_size[1], WIDTH)
    assert_equal_to_the_reference(mixer, x, abs(center), grid_size=grid_size)


@pytest.mark.parametrize("size", (3, 25), ids=("smaller than the grid", "larger than the grid"))
@pytest.mark.parametrize(
    "lowest, highest", [(-1.0, 0.0), (-20.0, 0.0), (-50.0, 50.0), (-150.0, 150.0), (-150.0, -50.0)]
)
def test_a_convolution_is_exact_where_biases_are_very_negative_or_span_more_than_75(lowest, highest, size, convolved):
    """exp(w) - 1, as the paper prints Eq. 6, would round away a small exp(w)."""
    mixer = on_grid(size)
    torch.nn.init.uniform_(mixer.kernel, lowest, highest)
    if (size, highest) == (25, -50.0):  # most queries do not see the largest bias, from the first patch to the last
        with torch.no_grad():
            mixer.kernel[:, 12 + GRID[0] - 1, 12 + GRID[1] - 1] = 50.0
    assert_equal_to_the_reference(mixer, torch.randn(2, 72, WIDTH), max(-lowest, highest - lowest), grid_size=GRID)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("connected", (False, True))
@pytest.mark.parametrize("length", (7, 8, 9, 40))
def test_chunks_of_any_length_equal_the_reference(causal, connected, length, monkeypatch):
    monkeypatch.setattr(portable, "CHUNK_SIZE", 4)
    monkeypatch.setattr(mixing_aft, "FEW_CHUNKS", 1)
    options = {"causal": causal, "global_connectivity": connected, "position_bias_dim": 3, "use_query": False}
    mixer = AFTLocal(WIDTH, 40, 3, mixing_implementation="portable", position_bias_init_std=1.0, **options)
    assert_equal_to_the_reference(mixer, torch.randn(2, length, WIDTH))


def test_large_gradients_of_a_query_that_sees_no_key_are_dropped():
    key, value, w = (torch.randn(size, requires_grad=True) for size in ((2, 40, 4), (2, 40, 4), (1, 40, 40)))
    mask = torch.ones(2, 40, 40, dtype=torch.bool)
    mask[0, 3] = False
    context = mix(Mixing(key, value, 1, Dense(w), pair_mask=mask), "portable")
    assert all(x.isfinite().all() for x in torch.autograd.grad(1e3 * context.sum(), (key, value, w)))


@pytest.mark.parametrize("difference", [-1e-7, 0.0, 1e-7, 1.0])
def test_a_merge_has_the_gradient_of_both_sides_where_their_logarithms_differ_by_rounding(difference):
    sums = torch.tensor([1.0, 1.0 + difference], requires_grad=True)
    (merged,) = torch.autograd.grad(
        portable.Averages(torch.zeros(1), sums[:1]).merge(portable.Averages(torch.zeros(1), sums[1:])).logsumexp, sums
    )
    torch.testing.assert_close(merged, sums.detach().softmax(0))


@pytest.mark.parametrize("biases", (NO_BIAS, LinearDecay(torch.ones(1))), ids=("simple", "alibi"))
def test_two_documents_of_one_token_do_not_see_each_other(biases):
    value, starts = torch.tensor([[[5.0], [7.0]]]), torch.tensor([[True, True]])
    for hostile in (1e4, math.nan):
        key = torch.tensor([[[hostile], [0.0]]])
        actual = mix(Mixing(key, value, 1, biases, True, visibility=Visibility.of(None, starts)), "portable")
        assert actual[0, 1] == 7.0
    key = torch.tensor([[[-math.inf], [-math.inf]]])
    seen = Visibility.of(None, starts)
    assert mix(Mixing(key, value, 1, biases, True, visibility=seen), "portable").eq(0).all()


@pytest.mark.parametrize("length", (1, 3))
@pytest.mark.parametrize(
    "biases, causal",
    ((NO_BIAS, False), (NO_BIAS, True), (LinearDecay(torch.ones(1)), True), (Dense(torch.zeros(1, 3, 3)), True)),
)
def test_the_first_token_is_nan_if_its_key_is_nan_and_0_if_it_is_hidden(biases, causal, length):
    value = torch.full((1, length, 1), 3.0)
    for special, expected in ((math.nan, math.nan), (-math.inf, 0.0 if causal or length == 1 else 3.0)):
        key = torch.zeros(1, length, 1)
        key[:, 0] = special
        actual = mix(Mixing(key, value, 1, biases, causal), "portable")[0, 0, 0]
        torch.testing.assert_close(actual, torch.tensor(expected), equal_nan=True)


def test_gradients_are_finite_where_a_query_sees_only_what_is_almost_lost():
    """The denominator of the first query is just above the smallest number before it is computed by its logits."""
    key = torch.tensor([0.0, -47.0, -math.inf]).view(1, 3, 1, 1).requires_grad_()
    value = torch.full((1, 3, 1, 1), 10.0, requires_grad=True)
    bias = torch.tensor([[[-math.inf, -40.0, 0.0], [0.0, 0.0, 0.0]]], requires_grad=True)
    average = portable.block_sums(key, value, bias, masked=True).average
    gradients = torch.autograd.grad(average.sum(), [key, value, bias])
    assert average[0, 0] == 10.0 and all(x.isfinite().all() for x in gradients)


def test_few_lost_queries_are_computed_again_alone(monkeypatch):
    """A few queries of almost every chunk lose terms where keys and biases are wide."""
    torch.manual_seed(0)
    key, value = 30 * torch.randn(2, 1024, 16), torch.randn(2, 1024, 16)
    u, v = 1.3 * torch.randn(2, 1, 1024, 32)
    dtypes, block_sums = [], portable.block_sums

    def counted(key, *arguments, **options):
        dtypes.append(key.dtype)
        return block_sums(key, *arguments, **options)

    monkeypatch.setattr(portable, "block_sums", counted)
    output = mix(Mixing(key, value, 1, Window(u, v, size=32)), "portable")
    assert torch.float64 not in dtypes
    exact_biases = Window(u.double(), v.double(), size=32)
    exact = mix(Mixing(key.double(), value.double(), 1, exact_biases), "reference")
    torch.testing.assert_close(output.double(), exact, atol=1e-4, rtol=0)
