"""Products with bands of a grid: equal to Eq. 2 on any grid, with any kernel, and chosen where they are faster."""

import copy

import pytest
import torch

from aft_hf import AFTConv
from aft_hf.banded_sums_aft import QUERY_ROWS, BandSums
from aft_hf.convolution_sums_aft import ConvolutionSums
from aft_hf.dense_sums_aft import DenseSums
from aft_hf.direct_mixing_aft import MODERATE
from aft_hf.mixing_aft import reference_mixing


WIDTH = 6
HEADS = 2


def build(kernel_size, grid_size, dtype=torch.float64):
    torch.manual_seed(0)
    mixer = AFTConv(WIDTH, HEADS, kernel_size, reparameterized=False).to(dtype).eval()
    torch.nn.init.normal_(mixer.kernel, std=1.0)
    rows, columns = grid_size
    key, value = (mixer._split_heads(torch.randn(3, rows * columns, n, dtype=dtype)) for n in (HEADS, WIDTH))
    return mixer, key, value


def banded(mixer, key, value, grid_size):
    with torch.no_grad():
        return BandSums(grid_size, mixer.window).forward(key, value, mixer.kernel)


def exact(mixer, key, value, grid_size):
    with torch.no_grad():
        bias = copy.deepcopy(mixer).double().position_bias(grid_size=grid_size)
        return reference_mixing(key.double(), value.double(), bias)


@pytest.mark.parametrize("grid_size", ((1, 1), (1, 5), (3, 1), (4, 4), (5, 7), (13, 3), (16, 2)), ids=str)
@pytest.mark.parametrize("kernel_size", (1, 3, 5, 11))
def test_it_is_eq_2_on_any_grid(grid_size, kernel_size):
    case = build(kernel_size, grid_size)
    torch.testing.assert_close(banded(*case, grid_size), exact(*case, grid_size), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)), ids=str)
def test_other_types_of_numbers(dtype, tolerance):
    grid_size = 21, 6
    case = build(5, grid_size, dtype)
    found = banded(*case, grid_size)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact(*case, grid_size), rtol=tolerance, atol=tolerance)


def test_float16_does_not_overflow():
    grid_size = 9, 8
    mixer, key, value = build(5, grid_size, torch.float16)
    key = key + 12
    found = banded(mixer, key, value, grid_size)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), exact(mixer, key, value, grid_size), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", (-MODERATE, MODERATE))
def test_nothing_cancels(size):
    grid_size = 9, 4
    mixer, key, value = build(7, grid_size, torch.float32)
    with torch.no_grad():
        mixer.kernel.fill_(size)
    found = banded(mixer, key, value.abs(), grid_size)
    torch.testing.assert_close(found.double(), exact(mixer, key, value.abs(), grid_size), rtol=1e-5, atol=0)


def test_what_is_hidden_counts_nothing():
    grid_size = 9, 4
    mixer, key, value = build(3, grid_size)
    key = key.masked_fill(torch.arange(36).view(36, 1) > 20, -torch.inf)
    torch.testing.assert_close(banded(mixer, key, value, grid_size), exact(mixer, key, value, grid_size))


def test_a_row_of_which_nothing_is_visible_averages_to_nothing():
    mixer, x = build(3, (20, 20))[0], torch.randn(2, 400, WIDTH, dtype=torch.float64)
    mixer._sums_type = lambda keys, grid_size: BandSums
    mask = torch.ones(2, 400)
    mask[1] = 0
    with torch.no_grad():
        output = mixer(x, attention_mask=mask, grid_size=(20, 20))
    assert torch.equal(output[1], mixer.o_proj.bias.expand(400, -1))
    assert not torch.allclose(output[0], mixer.o_proj.bias.expand(400, -1))


@pytest.mark.parametrize("kernel_size", (5, 25))
def test_the_table_does_not_grow_with_the_rows_of_the_grid(kernel_size):
    kernels = torch.rand(HEADS, kernel_size, kernel_size)
    for rows in (32, 64):
        table = BandSums((rows, 8), kernel_size).table(kernels)
        assert table.shape == (HEADS, 8 * QUERY_ROWS, 8 * (QUERY_ROWS + kernel_size - 1))


@pytest.mark.parametrize(
    ("size", "dtype", "chosen"),
    (
        # (width, heads, kernel, side of the grid, images), as measured
        ((768, 32, 25, 64, 1), torch.bfloat16, BandSums),
        ((768, 32, 25, 64, 1), torch.float32, ConvolutionSums),
        ((384, 16, 11, 32, 4), torch.bfloat16, BandSums),
        ((192, 32, 11, 64, 1), torch.bfloat16, ConvolutionSums),
        ((384, 6, 11, 28, 8), torch.bfloat16, DenseSums),
        ((384, 16, 3, 14, 32), torch.bfloat16, DenseSums),
        ((384, 384, 5, 28, 8), torch.bfloat16, ConvolutionSums),
    ),
    ids=str,
)
def test_bands_are_chosen_where_they_are_faster(size, dtype, chosen):
    width, heads, kernel_size, side, batch = size
    mixer, keys = AFTConv(width, heads, kernel_size), torch.empty((), dtype=dtype).expand(batch, heads, side**2, 1)
    with torch.no_grad():
        assert mixer._sums_type(keys, (side, side)) is chosen
    assert mixer._sums_type(keys, (side, side)) is not BandSums
