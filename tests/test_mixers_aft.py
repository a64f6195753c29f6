"""The mixers: each against Eq. 2 in float64 with its own projections and position biases, the promises, the options.

`eq_2` below is the whole of what a mixer means, written once. The position biases that it takes from
`mixer.position_bias` are compared with the paper's definitions by themselves.
"""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.mixers_aft import _ProductsOfNeighbours


WIDTH = 8  # of the mixers of the fixtures
LENGTHS = (1, 3, 33, 130)
GRIDS = {1: (1, 1), 3: (1, 3), 12: (3, 4), 33: (11, 3), 35: (5, 7), 130: (10, 13)}


# ------------------------------------------------------------------------------------------------------ the formula


def is_grid(mixer):
    return getattr(mixer, "spatial_dims", 1) == 2


def grid_of(mixer, length):
    return {"grid_size": GRIDS[length]} if is_grid(mixer) else {}


def position_bias(mixer, length):
    """The mixer's own w, causal or not as the mixer is: (1, h, T, T) in float64."""
    w = mixer.position_bias(length, **grid_of(mixer, length)).double().unsqueeze(0)
    return w + torch.full_like(w[0, 0], -torch.inf).triu(1) if mixer.causal else w


def gated_average(mixer, w, query, key=None, value=None):
    """act(Q) times the average of V with weights exp(K + w), before the output projection: (B, T, d) in float64."""
    key, value = query if key is None else key, query if value is None else value
    query, key, value = query.double(), key.double(), value.double()

    def project(layer, x):  # (B, T, h c) -> (B, h, T, c)
        x = linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double())
        return x.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)

    logits = project(mixer.k_proj, key).unsqueeze(2) + w.unsqueeze(-1)  # (B, h, T, T', k)
    nothing = (logits == -torch.inf).all(3, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), 3).masked_fill(nothing, 0.0)
    average = (weights * project(mixer.v_proj, value).unsqueeze(2)).sum(3)
    if mixer.q_proj is not None:
        average = mixer.query_activation(project(mixer.q_proj, query)) * average
    return average.transpose(1, 2).flatten(2)


def eq_2(mixer, w, query, key=None, value=None):
    """What a mixer gives, from position biases w (1 or B, h, T, T') that are -inf where a query must not look."""
    output = gated_average(mixer, w, query, key, value)
    if isinstance(mixer.o_proj, torch.nn.Identity):
        return output
    return linear(output, mixer.o_proj.weight.double(), mixer.o_proj.bias.double())


def assert_near(actual, expected, tolerance=1e-5):
    """To `tolerance` relative to the largest entry."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=tolerance * scale)


def gradients(output, mixer, *inputs):
    """Of a fixed weighted sum of the outputs, with respect to inputs and parameters, by name."""
    weight = torch.linspace(0.2, 1, output.numel(), dtype=output.dtype).view_as(output)
    named = {f"input {i}": x for i, x in enumerate(inputs)} | dict(mixer.named_parameters())
    found = torch.autograd.grad((weight * output).sum(), list(named.values()), materialize_grads=True)
    return dict(zip(named, found))


def assert_gradients_near(actual, expected, tolerance=1e-5):
    """To `tolerance` relative to each one's largest entry, or to a tenth of the largest of all if that is more."""
    largest = max(x.abs().max().item() for x in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 0.1 * largest)
        torch.testing.assert_close(
            actual[name], gradient, rtol=0, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def without_output_projection(mixer):
    mixer.o_proj = torch.nn.Identity()
    return mixer


# ----------------------------------------------------------------------------------------------------------- Eq. 2


@pytest.mark.parametrize("length", LENGTHS)
def test_a_mixer_is_eq_2_with_its_own_position_bias_in_values_and_gradients(mixer, length):
    x = torch.randn(2, length, WIDTH, requires_grad=True)
    output = mixer(x, **grid_of(mixer, length))
    expected = eq_2(mixer, position_bias(mixer, length), x)
    assert output.dtype == torch.float32
    assert_near(output, expected)
    assert_gradients_near(gradients(output, mixer, x), gradients(expected, mixer, x))


def test_a_mixer_passes_gradcheck_in_float64(typical_mixer):
    """By its inputs: position biases are float32 by definition, too coarse for finite differences of float64."""
    typical_mixer.double()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: typical_mixer(x, **grid_of(typical_mixer, 3)), x)


def test_a_square_is_the_default_grid():
    mixer = AFTConv(WIDTH, num_heads=2, kernel_size=3, reparameterized=False)
    x = torch.randn(1, 16, WIDTH)
    torch.testing.assert_close(mixer(x), mixer(x, grid_size=(4, 4)))
    assert not torch.allclose(mixer(x), mixer(x, grid_size=(2, 8)))


@pytest.mark.parametrize("spatial_dims", (1, 2))
def test_a_new_aft_conv_begins_as_aft_simple(spatial_dims):
    mixer = AFTConv(WIDTH, num_heads=2, kernel_size=3, spatial_dims=spatial_dims)
    assert mixer.position_bias(9).eq(0).all()


def test_an_aft_conv_begins_to_learn_its_kernels_by_scale_and_shift():
    mixer = AFTConv(WIDTH, num_heads=2, kernel_size=3)
    mixer(torch.randn(2, 16, WIDTH)).square().sum().backward()
    assert mixer.kernel.grad.eq(0).all()
    assert mixer.kernel_scale.grad.ne(0).all() and mixer.kernel_shift.grad.ne(0).all()


# ----------------------------------------------------------------------------------------------- the numerical promise


@pytest.mark.parametrize("size", (30, 90, 1000))
def test_inputs_scaled_up_stay_finite_in_value_and_gradient(mixer, size):
    x = (size * torch.randn(2, 35, WIDTH)).requires_grad_()
    output = mixer(x, **grid_of(mixer, 35))
    assert output.isfinite().all()
    for name, gradient in gradients(output, mixer, x).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("size", (1e4, -1e4))
def test_keys_of_1e4_in_one_token_stay_finite_in_value_and_gradient(mixer, size):
    keys_are_inputs(mixer)
    x = torch.randn(2, 35, WIDTH)
    x[:, 17] = size
    x.requires_grad_()
    output = mixer(x, **grid_of(mixer, 35))
    assert output.isfinite().all()
    for name, gradient in gradients(output, mixer, x).items():
        assert gradient.isfinite().all(), name


def keys_are_inputs(mixer):
    """Project keys by the identity (as far as there are keys)."""
    with torch.no_grad():
        mixer.k_proj.weight.copy_(torch.eye(*mixer.k_proj.weight.shape))
        if mixer.k_proj.bias is not None:
            mixer.k_proj.bias.zero_()
    return mixer


def later_tokens_1e4_larger(mixer, length, last):
    """Inputs, and others that have keys 1e4 larger after position `last`."""
    keys_are_inputs(mixer)
    x = torch.randn(2, length, WIDTH)
    y = torch.cat([x[:, : last + 1], 1e4 + torch.randn(2, length - last - 1, WIDTH)], 1)
    assert (mixer.k_proj(y)[:, last + 1 :] > 9e3).all()
    return x.requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize("last", (0, 31, 32, 74, 127))
def test_later_tokens_1e4_larger_leave_earlier_outputs_and_gradients_unchanged(causal_mixer, last):
    x, y = later_tokens_1e4_larger(causal_mixer, 130, last)
    (output, x_gradient), (other, y_gradient) = (
        (out := causal_mixer(inputs)[:, : last + 1], torch.autograd.grad(out.sum(), inputs)[0]) for inputs in (x, y)
    )
    assert_near(other, output)
    assert_near(y_gradient[:, : last + 1], x_gradient[:, : last + 1])
    assert y_gradient[:, last + 1 :].eq(0).all()


@pytest.mark.parametrize("hidden", (0, 5, 20))
def test_a_token_1e4_larger_that_left_the_window_leaves_later_outputs_unchanged(windowed_mixer, hidden):
    keys_are_inputs(windowed_mixer)
    x = torch.randn(2, 130, WIDTH)
    y = x.clone()
    y[:, hidden] = 1e4
    first = hidden + windowed_mixer.window
    assert_near(windowed_mixer(y)[:, first:], windowed_mixer(x)[:, first:])


@pytest.mark.parametrize("mask_dims", (2, 3))
def test_a_query_that_sees_nothing_gives_0_and_finite_gradients(mixer, mask_dims):
    without_output_projection(mixer)
    x = torch.randn(2, 33, WIDTH, requires_grad=True)
    mask = torch.ones(2, 33, dtype=torch.bool) if mask_dims == 2 else torch.rand(2, 33, 33) < 0.5
    mask[1] = False
    output = mixer(x, attention_mask=mask, **grid_of(mixer, 33))
    assert output[1].eq(0).all()
    assert output[0].ne(0).any()
    for name, gradient in gradients(output, mixer, x).items():
        assert gradient.isfinite().all(), name


# What rounding inputs, weights, projections and results costs.
HALF_PRECISION = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
def test_half_precision_is_finite_and_near_the_float32_result(mixer, dtype):
    mixer.to(dtype)
    x = torch.randn(2, 130, WIDTH, dtype=dtype, requires_grad=True)
    output = mixer(x, **grid_of(mixer, 130))
    assert output.dtype == dtype
    for name, gradient in gradients(output, mixer, x).items():
        assert gradient.isfinite().all(), name
    expected = mixer.float()(x.float(), **grid_of(mixer, 130))
    assert_near(output, expected, HALF_PRECISION[dtype])


@pytest.mark.parametrize("dtype", HALF_PRECISION, ids=str)
def test_autocast_is_finite_and_near_the_float32_result(mixer, dtype):
    x = torch.randn(2, 130, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        output = mixer(x, **grid_of(mixer, 130))
    for name, gradient in gradients(output.float(), mixer, x).items():
        assert gradient.isfinite().all(), name
    assert_near(output.float(), mixer(x, **grid_of(mixer, 130)), HALF_PRECISION[dtype])


def test_half_precision_stays_finite_where_inputs_are_scaled_by_90(mixer):
    mixer.to(torch.float16)
    x = (90 * torch.randn(2, 35, WIDTH)).half().requires_grad_()
    output = mixer(x, **grid_of(mixer, 35))
    assert output.isfinite().all()
    assert torch.autograd.grad(output.float().mean(), x)[0].isfinite().all()


# ---------------------------------------------------------------------------------------------------------- masks


def padding_mask(side, length=35):
    """(2, T): the first row is padded, the second one not."""
    mask = torch.ones(2, length, dtype=torch.bool)
    if side == "left":
        mask[0, :7] = False
    elif side == "right":
        mask[0, -7:] = False
    else:
        mask[0] = torch.rand(length) < 0.6
        mask[0, 0], mask[0, 1] = False, True
    return mask


@pytest.mark.parametrize("side", ("left", "right", "holes"))
def test_a_padded_row_equals_the_row_alone(sequence_mixer, side):
    mask = padding_mask(side)
    x = torch.randn(2, 35, WIDTH)
    output = sequence_mixer(x, attention_mask=mask)
    for row, real, actual in zip(x, mask, output):
        assert_near(actual[real], sequence_mixer(row[real].unsqueeze(0))[0])


@pytest.mark.parametrize("side", ("left", "right", "holes"))
def test_padding_with_keys_1e4_larger_changes_nothing(sequence_mixer, side):
    keys_are_inputs(sequence_mixer)
    mask = padding_mask(side)
    x = torch.randn(2, 35, WIDTH)
    expected = sequence_mixer(x, attention_mask=mask)[mask]
    x[~mask] += 1e4
    assert_near(sequence_mixer(x, attention_mask=mask)[mask], expected)


@pytest.mark.parametrize("dtype", (torch.int64, torch.float32), ids=str)
def test_a_padding_mask_may_have_any_dtype(typical_sequence_mixer, dtype):
    x, mask = torch.randn(2, 35, WIDTH), padding_mask("left")
    expected = typical_sequence_mixer(x, attention_mask=mask)
    torch.testing.assert_close(typical_sequence_mixer(x, attention_mask=mask.to(dtype)), expected)


@pytest.mark.parametrize("rows", (1, 2), ids=("a mask for all", "a mask per row"))
def test_a_mask_takes_keys_out_of_eq_2(typical_mixer, rows):
    x = torch.randn(2, 35, WIDTH, requires_grad=True)
    mask = torch.rand(rows, 35, 35) < 0.6
    output = typical_mixer(x, attention_mask=mask, **grid_of(typical_mixer, 35))
    w = position_bias(typical_mixer, 35).masked_fill(~mask.unsqueeze(1), -torch.inf)
    expected = eq_2(typical_mixer, w, x)
    assert_near(output, expected)
    assert_gradients_near(gradients(output, typical_mixer, x), gradients(expected, typical_mixer, x))


@pytest.mark.parametrize("rows", (1, 2), ids=("a mask for all", "a mask per row"))
def test_hidden_keys_1e4_larger_change_nothing(typical_mixer, rows):
    keys_are_inputs(typical_mixer)
    x, key = torch.randn(2, 2, 35, WIDTH)
    key[:, 20] = 1e4
    mask = torch.rand(rows, 35, 35) < 0.6
    mask[:, :-1, 20] = False  # the last query may see it
    x.requires_grad_()
    output = typical_mixer(x, key, x, attention_mask=mask, **grid_of(typical_mixer, 35))[:, :-1]
    w = position_bias(typical_mixer, 35).masked_fill(~mask.unsqueeze(1), -torch.inf)
    expected = eq_2(typical_mixer, w, x, key, x)[:, :-1]
    assert_near(output, expected)
    assert_gradients_near(gradients(output, typical_mixer, x), gradients(expected, typical_mixer, x))


@pytest.mark.parametrize("hostile", (False, True), ids=("like keys", "padding 1e4 larger"))
def test_padding_on_a_grid_takes_keys_out_of_eq_2(grid_mixer, hostile):
    keys_are_inputs(grid_mixer)
    mask = padding_mask("holes")
    x = torch.randn(2, 35, WIDTH)
    key = x + 1e4 * ~mask.unsqueeze(-1) if hostile else x
    w = position_bias(grid_mixer, 35).masked_fill(~mask[:, None, None], -torch.inf)
    actual = grid_mixer(x, key, x, attention_mask=mask, grid_size=GRIDS[35])
    assert_near(actual, eq_2(grid_mixer, w, x, key, x))


# ---------------------------------------------------------------------------- keys of another length, and positions


@pytest.mark.parametrize(("queries", "keys"), ((7, 12), (12, 7)))
def test_keys_and_values_may_have_another_length(mixer, queries, keys):
    query, key, value = torch.randn(2, queries, WIDTH), torch.randn(2, keys, WIDTH), torch.randn(2, keys, WIDTH)
    w = position_bias(mixer, 12)[..., :queries, :keys]
    actual = mixer(query, key, value, **grid_of(mixer, 12))
    assert_near(actual, eq_2(mixer, w, query, key, value))


@pytest.mark.parametrize(("queries", "keys"), ((9, 9), (7, 12), (12, 7)))
@pytest.mark.parametrize("selected", range(5))
@pytest.mark.parametrize("causal", (False, True))
def test_every_place_of_a_kernel_can_be_selected_for_keys_of_any_length(queries, keys, selected, causal):
    mixer = AFTConv(WIDTH, 1, 5, spatial_dims=1, causal=causal, selection="gumbel", reparameterized=False).eval()
    with torch.no_grad():
        mixer.kernel[0, selected] = 10.0
    query, key = torch.randn(2, queries, WIDTH), torch.randn(2, keys, WIDTH)
    w = position_bias(mixer, 12)[..., :queries, :keys]
    assert_near(mixer(query, key, key), eq_2(mixer, w, query, key, key))


def test_keys_of_another_length_may_be_padded(typical_mixer):
    query, key, value = torch.randn(2, 7, WIDTH), torch.randn(2, 12, WIDTH), torch.randn(2, 12, WIDTH)
    mask = padding_mask("right", 12)
    w = position_bias(typical_mixer, 12)[..., :7, :].masked_fill(~mask[:, None, None], -torch.inf)
    actual = typical_mixer(query, key, value, attention_mask=mask, **grid_of(typical_mixer, 12))
    assert_near(actual, eq_2(typical_mixer, w, query, key, value))


@pytest.mark.parametrize("rows", (1, 2))
def test_position_ids_choose_the_position_biases(typical_sequence_mixer, rows):
    mixer = typical_sequence_mixer
    x = torch.randn(2, 12, WIDTH, requires_grad=True)
    positions = torch.stack([torch.randperm(50)[:12] for _ in range(rows)])
    output = mixer(x, position_ids=positions)
    w = torch.stack([mixer.position_bias(50)[:, row[:, None], row] for row in positions]).double()
    if mixer.causal:
        w = w + torch.full((12, 12), -torch.inf).triu(1)
    expected = eq_2(mixer, w, x)
    assert_near(output, expected)
    assert_gradients_near(gradients(output, mixer, x), gradients(expected, mixer, x))


def test_position_ids_that_count_real_tokens_equal_the_padding_mask_alone(typical_sequence_mixer):
    x, mask = torch.randn(2, 35, WIDTH), padding_mask("holes")
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    actual = typical_sequence_mixer(x, attention_mask=mask, position_ids=positions)
    assert_near(actual[mask], typical_sequence_mixer(x, attention_mask=mask)[mask])


# ------------------------------------------------------------------------------------------ w, as the paper defines it


def test_position_bias_of_aft_full_is_the_product_of_its_factors():
    mixer = AFTFull(WIDTH, 6, position_bias_dim=3, num_heads=2)
    w = mixer.position_bias()
    assert w.shape == (2, 6, 6) and w.dtype == torch.float32
    for i, t, s in product(range(2), range(6), range(6)):
        expected = sum(mixer.position_bias_query[i, t, n] * mixer.position_bias_key[i, s, n] for n in range(3))
        assert w[i, t, s].item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(mixer.position_bias(4), w[:, :4, :4])


def test_position_bias_of_an_unfactorized_aft_full_is_its_table():
    mixer = AFTFull(WIDTH, 6, position_bias_dim=None, num_heads=2)
    assert mixer.position_bias().equal(mixer.position_bias_table)
    assert mixer.position_bias(4).equal(mixer.position_bias_table[:, :4, :4])


@pytest.mark.parametrize(("connected", "outside"), ((True, 0.0), (False, -torch.inf)))
@pytest.mark.parametrize("window", (1, 3, 9))
@pytest.mark.parametrize("causal", (False, True))
def test_position_bias_of_aft_local_is_that_of_aft_full_within_the_window(connected, outside, window, causal):
    """Eq. 4, on both sides: what is causal comes from the mask."""
    options = {"position_bias_dim": 3, "num_heads": 2, "causal": causal}
    mixer = AFTLocal(WIDTH, 7, window, global_connectivity=connected, **options)
    w, learned = mixer.position_bias(), AFTFull.position_bias(mixer)
    for i, t, s in product(range(2), range(7), range(7)):
        assert w[i, t, s] == (learned[i, t, s] if abs(t - s) < window else outside)


def test_position_bias_of_aft_simple_is_0():
    assert AFTSimple(WIDTH, num_heads=2).position_bias(5).equal(torch.zeros(2, 5, 5))


@pytest.mark.parametrize("size", (1, 3, 5, 11))
@pytest.mark.parametrize(("connected", "outside"), ((True, 0.0), (False, -torch.inf)))
@pytest.mark.parametrize("grid", ((3, 4), (4, 2), (1, 5)))
def test_position_bias_of_aft_conv_is_the_kernel_at_the_offset_on_the_grid(size, connected, outside, grid):
    """Eq. 6: entry (i, j) of the kernel for the patch i - s // 2 rows below and j - s // 2 columns right."""
    mixer = AFTConv(WIDTH, 2, size, reparameterized=False, global_connectivity=connected)
    w = mixer.position_bias(grid_size=grid).view(2, *grid, *grid)
    for row, column, other_row, other_column in product(
        range(grid[0]), range(grid[1]), range(grid[0]), range(grid[1])
    ):
        i, j = other_row - row + size // 2, other_column - column + size // 2
        inside = 0 <= i < size and 0 <= j < size
        expected = mixer.kernel[:, i, j] if inside else torch.full((2,), outside)
        assert w[:, row, column, other_row, other_column].equal(expected)


@pytest.mark.parametrize(("causal", "size"), ((False, 1), (False, 5), (False, 15), (True, 1), (True, 4), (True, 9)))
@pytest.mark.parametrize(("connected", "outside"), ((True, 0.0), (False, -torch.inf)))
def test_position_bias_of_aft_conv_is_the_kernel_at_the_lag_in_a_sequence(causal, size, connected, outside):
    """Eq. 6 in one dimension: around the query, or lags 0 .. s - 1 if causal."""
    options = {"causal": causal, "reparameterized": False, "global_connectivity": connected}
    mixer = AFTConv(WIDTH, 2, size, spatial_dims=1, **options)
    w = mixer.position_bias(6)
    for t, s in product(range(6), range(6)):
        i = t - s if causal else s - t + size // 2
        assert w[:, t, s].equal(mixer.kernel[:, i] if 0 <= i < size else torch.full((2,), outside))


@pytest.mark.parametrize("spatial_dims", (1, 2))
def test_kernels_are_standardized_scaled_and_shifted_per_head(spatial_dims):
    """Eq. 8."""
    mixer = AFTConv(WIDTH, 2, 5, spatial_dims=spatial_dims)
    torch.nn.init.normal_(mixer.kernel, mean=3.0)
    torch.nn.init.normal_(mixer.kernel_scale)
    torch.nn.init.normal_(mixer.kernel_shift)
    kernel, gamma, beta = (x.detach().numpy() for x in (mixer.kernel, mixer.kernel_scale, mixer.kernel_shift))
    for i in range(2):
        expected = gamma[i] * (kernel[i] - kernel[i].mean()) / kernel[i].std() + beta[i]
        np.testing.assert_allclose(mixer.kernel_bias()[i].detach().numpy(), expected, atol=1e-5)


def test_a_constant_kernel_stays_finite_when_it_is_standardized():
    mixer = AFTConv(WIDTH, 2, 3)
    torch.nn.init.ones_(mixer.kernel)
    torch.nn.init.ones_(mixer.kernel_scale)
    bias = mixer.kernel_bias()
    assert bias.eq(0).all()
    assert torch.autograd.grad(bias.sum(), mixer.kernel)[0].isfinite().all()


@pytest.mark.parametrize("heads", (8, 16))
def test_position_bias_of_aft_alibi_falls_by_the_slopes_of_alibi(heads):
    """1/2, 1/4 .. 1/256 for 8 heads, and the geometric mean of neighbours between them for 16."""
    step = 2 ** (-8 / heads)
    mixer = AFTAlibi(16, heads)
    w = mixer.position_bias(7)
    assert w.shape == (heads, 7, 7)
    for i, t, s in product(range(heads), range(7), range(7)):
        assert w[i, t, s].item() == pytest.approx(-(step ** (i + 1)) * (t - s), rel=1e-5)


# ---------------------------------------------------------------------- selection, entropy and the implicit attention


@pytest.mark.parametrize("options", ({}, {"spatial_dims": 1}, {"spatial_dims": 1, "causal": True}), ids=str)
@pytest.mark.parametrize("reparameterized", (True, False))
def test_a_trained_selection_runs_by_indexing_and_equals_its_one_hot_table(options, reparameterized, monkeypatch):
    indexed, dense = (
        AFTConv(
            WIDTH, 2, 5, selection="gumbel", reparameterized=reparameterized, implementation=implementation, **options
        ).eval()
        for implementation in ("auto", "reference")
    )
    if reparameterized:
        torch.nn.init.normal_(indexed.kernel_scale)
    dense.load_state_dict(indexed.state_dict())
    monkeypatch.setattr(indexed, "position_bias", None)  # no table is built
    x = torch.randn(2, 36, WIDTH)
    assert_near(indexed(x), dense(x))
    bias = indexed.kernel_bias().flatten(1)
    assert bias.sum(-1).eq(1).all() and bias.amax(-1).eq(1).all()
    assert bias.argmax(-1).equal(indexed._reparameterized_kernel().flatten(1).argmax(-1))


@pytest.mark.parametrize("spatial_dims", (1, 2))
def test_a_selection_in_training_is_a_sample_of_the_gumbel_softmax_over_each_kernel(spatial_dims):
    mixer = AFTConv(WIDTH, 2, 5, spatial_dims=spatial_dims, selection="gumbel", reparameterized=False)
    first, second = mixer.kernel_bias(), mixer.kernel_bias()
    assert not torch.allclose(first, second)
    for sample in (first, second):
        assert sample.shape == mixer.kernel.shape and (sample >= 0).all()
        torch.testing.assert_close(sample.flatten(1).sum(-1), torch.ones(2))


def test_a_colder_gumbel_softmax_selects_more_sharply():
    def sharpness(temperature):
        mixer = AFTConv(WIDTH, 2, 5, selection="gumbel", reparameterized=False, gumbel_temperature=temperature)
        return torch.stack([mixer.kernel_bias().flatten(1).amax(-1) for _ in range(50)]).mean()

    assert sharpness(0.1) > sharpness(0.5) + 0.1 > sharpness(5.0) + 0.2


@pytest.mark.parametrize("options", ({}, {"spatial_dims": 1}, {"spatial_dims": 1, "causal": True}), ids=str)
def test_training_with_a_selection_is_eq_2_with_the_sampled_table(options):
    mixer = AFTConv(WIDTH, 2, 3, selection="gumbel", reparameterized=False, **options)
    x = torch.randn(2, 35, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    output = mixer(x, **grid_of(mixer, 35))
    torch.manual_seed(1)
    expected = eq_2(mixer, position_bias(mixer, 35), x)
    assert_near(output, expected)
    actual_gradients = gradients(output, mixer, x)
    assert actual_gradients["kernel"].ne(0).any()
    assert_gradients_near(actual_gradients, gradients(expected, mixer, x))


@pytest.mark.parametrize("options", ({}, {"reparameterized": False}, {"spatial_dims": 1}), ids=str)
def test_position_bias_entropy_is_the_entropy_of_the_softmax_of_each_kernel(options):
    """Eq. 9."""
    mixer = AFTConv(WIDTH, 2, 5, **options)
    if mixer.kernel_scale is not None:
        torch.nn.init.normal_(mixer.kernel_scale)
    expected = 0.0
    for kernel in mixer.kernel_bias().detach().numpy():
        p = np.exp(kernel) / np.exp(kernel).sum()
        expected -= (p * np.log(p)).sum()
    assert mixer.position_bias_entropy().item() == pytest.approx(expected, rel=1e-5)


def test_position_bias_entropy_of_a_new_layer_is_that_of_equal_chances():
    assert AFTConv(WIDTH, 2, 5).position_bias_entropy().item() == pytest.approx(2 * math.log(25), rel=1e-6)


@pytest.mark.parametrize("kind", ("no mask", "padding", "a mask per row"))
def test_the_implicit_attention_times_values_is_the_gated_average(typical_mixer, kind):
    """Eq. 3."""
    mixer = without_output_projection(typical_mixer)
    x = torch.randn(2, 35, WIDTH)
    mask = {"no mask": None, "padding": padding_mask("left"), "a mask per row": torch.rand(2, 35, 35) < 0.6}[kind]
    options = {"attention_mask": mask, **grid_of(mixer, 35)}
    output, attention = mixer(x, output_attentions=True, **options)
    assert attention.shape == (2, WIDTH, 35, 35)
    real = mask if kind == "padding" else torch.ones(2, 35, dtype=torch.bool)
    assert_near(output[real], mixer(x, **options)[real])
    assert_near(torch.einsum("bdts,bsd->btd", attention, mixer.v_proj(x))[real], output[real])


def test_gradients_reach_the_implicit_attention(typical_mixer):
    output, attention = typical_mixer(torch.randn(2, 35, WIDTH), output_attentions=True, **grid_of(typical_mixer, 35))
    attention.retain_grad()
    output.sum().backward()
    assert attention.grad.ne(0).any()


@pytest.mark.parametrize("spatial_dims", (1, 2))
def test_the_implicit_attention_in_training_is_that_of_the_selection_which_made_the_output(spatial_dims):
    mixer = AFTConv(
        WIDTH, 2, 3, spatial_dims=spatial_dims, selection="gumbel", reparameterized=False, use_output_projection=False
    )
    x = torch.randn(2, 16, WIDTH)
    output, attention = mixer(x, output_attentions=True)
    assert_near(torch.einsum("bdts,bsd->btd", attention, mixer.v_proj(x)), output)


# ------------------------------------------------------------------------------------------------ the memory promise


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor, in numbers, that any operation gives while the mode is on."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return output


def memory(mixer, length, batch=2, **options):
    """The largest tensor of a forward and backward pass, and all that is kept between the two, in numbers."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    x = torch.randn(batch, length, mixer.hidden_size, requires_grad=True)
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = mixer(x, **options).sum()
        loss.backward()
    return largest.numbers, sum(kept.values())


LINEAR = {
    "simple": partial(AFTSimple, 16, causal=True),
    "local": partial(AFTLocal, 16, 1024, 32, position_bias_dim=4, causal=True),
    "local window alone": partial(AFTLocal, 16, 1024, 8, position_bias_dim=4, causal=True, global_connectivity=False),
    "conv": partial(AFTConv, 16, 2, 11, spatial_dims=1, causal=True),
    "conv window alone": partial(AFTConv, 16, 2, 11, spatial_dims=1, causal=True, global_connectivity=False),
    "conv gumbel": partial(AFTConv, 16, 2, 11, spatial_dims=1, causal=True, selection="gumbel"),
    "alibi": partial(AFTAlibi, 16, 2),
    "simple, not causal": partial(AFTSimple, 16),
}


@pytest.mark.parametrize("build", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
@pytest.mark.parametrize("training", (False, True), ids=("evaluation", "training"))
def test_twice_the_length_takes_about_twice_the_memory(build, padded, training):
    mixer = build().train(training)
    masks = ({"attention_mask": torch.arange(n).expand(2, n) >= 7} if padded else {} for n in (512, 1024))
    (largest, kept), (twice_largest, twice_kept) = (memory(mixer, n, **m) for n, m in zip((512, 1024), masks))
    assert twice_largest <= 2.1 * largest
    assert twice_kept <= 2.2 * kept
    assert twice_largest < 1024 * 1024  # and no table


FULL = {
    "full": partial(AFTFull, 64, 256, position_bias_dim=4),
    "full 2 heads": partial(AFTFull, 64, 256, position_bias_dim=4, num_heads=2),
    "full causal": partial(AFTFull, 64, 256, position_bias_dim=4, causal=True),
    "local": partial(AFTLocal, 64, 256, 32, position_bias_dim=4),
    "conv": partial(AFTConv, 64, 2, 11, spatial_dims=1),
    "conv 2-D": partial(AFTConv, 64, 2, 11),
    "conv 2-D convolution": partial(AFTConv, 64, 2, 11, implementation="convolution"),
}


@pytest.mark.parametrize("build", FULL.values(), ids=FULL)
@pytest.mark.parametrize("masked", (False, True), ids=("", "a mask per row"))
@pytest.mark.parametrize("hostile", (False, True), ids=("", "a key 1e4 larger"))
def test_no_tensor_is_larger_than_the_table_or_a_few_activations_and_none_adds_up_to_t_x_t_x_d(build, masked, hostile):
    batch, length, width = 2, 256, 64
    mixer = keys_are_inputs(build())
    mask = torch.rand(batch, length, length) < 0.5
    mask[:, :, 7] = False
    x = torch.zeros(batch, length, width)
    x[:, 7] = 1e4 * hostile
    largest, kept = memory(mixer, length, batch, key=x, value=x, **({"attention_mask": mask} if masked else {}))
    table = mixer.num_heads * length * length * (batch if masked else 1)
    assert largest <= max(table, 4 * batch * length * width)
    assert kept <= batch * length * length * width // 4


# ------------------------------------------------------------------------------------------------------ wrong inputs


WRONG = {
    "heads": (lambda: AFTSimple(8, num_heads=3), "num_heads=3 .* hidden_size=8"),
    "implementation": (
        lambda: AFTSimple(8, implementation="flash"),
        "'flash' .* AFTSimple .*'auto', 'reference', 'dense'",
    ),
    "implementation of another type": (
        lambda: AFTFull(8, 4, implementation="convolution"),
        "'convolution' .* AFTFull",
    ),
    "implementation of causal models": (
        lambda: AFTLocal(8, 4, 2, implementation="chunked"),
        "'chunked' .*causal=False",
    ),
    "alibi both ways": (lambda: AFTAlibi(8, 2, causal=False), "causal=False"),
    "even kernel": (lambda: AFTConv(8, 2, 4), "kernel_size .* got 4"),
    "no kernel": (lambda: AFTConv(8, 2, 0, spatial_dims=1, causal=True), "kernel_size .* got 0"),
    "causal grid": (lambda: AFTConv(8, 2, 3, causal=True), "spatial_dims .* got 2 .causal=True"),
    "three dimensions": (lambda: AFTConv(8, 2, 3, spatial_dims=3), "spatial_dims .* got 3"),
    "selection": (lambda: AFTConv(8, 2, 3, selection="gumble"), "gumble"),
    "longer than the table": (lambda: AFTFull(8, 16)(torch.zeros(1, 20, 8)), "20 .* 16"),
    "longer than the windowed table": (lambda: AFTLocal(8, 16, 4, causal=True)(torch.zeros(1, 20, 8)), "20 .* 16"),
    "bias longer than the table": (lambda: AFTFull(8, 16).position_bias(20), "20 .* 16"),
    "position beyond the table": (
        lambda: AFTFull(8, 16)(torch.zeros(1, 2, 8), position_ids=torch.tensor([[3, 19]])),
        "20 .* 16",
    ),
    "keys longer than the table": (
        lambda: AFTFull(8, 16)(torch.zeros(1, 2, 8), torch.zeros(1, 20, 8), torch.zeros(1, 20, 8)),
        "20 .* 16",
    ),
    "width": (lambda: AFTSimple(8)(torch.zeros(1, 5, 6)), r"query .* 8\), got \(1, 5, 6\)"),
    "dimensions": (lambda: AFTSimple(8)(torch.zeros(5, 8)), r"query .* got \(5, 8\)"),
    "width of the key": (lambda: AFTSimple(8)(torch.zeros(1, 5, 8), torch.zeros(1, 5, 6)), r"key .* got \(1, 5, 6\)"),
    "key and value": (
        lambda: AFTSimple(8)(torch.zeros(1, 5, 8), torch.zeros(1, 6, 8), torch.zeros(1, 7, 8)),
        r"\(1, 6, 8\) .* \(1, 7, 8\)",
    ),
    "batch sizes": (
        lambda: AFTSimple(8)(torch.zeros(1, 5, 8), torch.zeros(2, 5, 8), torch.zeros(2, 5, 8)),
        r"\(1, 5, 8\).* \(2, 5, 8\)",
    ),
    "padding mask": (
        lambda: AFTSimple(8)(torch.zeros(2, 5, 8), attention_mask=torch.ones(2, 6)),
        r"\(2, 5\) or \(2 or 1, 5, 5\), got \(2, 6\)",
    ),
    "mask": (
        lambda: AFTSimple(8)(torch.zeros(2, 5, 8), attention_mask=torch.ones(3, 5, 5, dtype=torch.bool)),
        r"got \(3, 5, 5\)",
    ),
    "mask per head": (
        lambda: AFTSimple(8)(torch.zeros(2, 5, 8), attention_mask=torch.ones(2, 1, 5, 5, dtype=torch.bool)),
        r"got \(2, 1, 5, 5\)",
    ),
    "position ids": (
        lambda: AFTFull(8, 16)(torch.zeros(1, 5, 8), position_ids=torch.zeros(1, 4, dtype=torch.long)),
        r"position_ids \(1, 4\) .* 5",
    ),
    "position ids on a grid": (
        lambda: AFTConv(8, 2, 3)(torch.zeros(1, 9, 8), position_ids=torch.arange(9).unsqueeze(0)),
        "position_ids",
    ),
    "grid": (lambda: AFTConv(8, 2, 3)(torch.zeros(1, 35, 8), grid_size=(3, 4)), "35 positions .* 3 x 4"),
    "not a square": (lambda: AFTConv(8, 2, 3)(torch.zeros(1, 35, 8)), "35 positions .* 6 x 6"),
    "no length": (lambda: AFTSimple(8).position_bias(), "AFTSimple .* seq_len"),
    "no grid": (lambda: AFTConv(8, 2, 3).position_bias(), "AFTConv .* grid_size"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_input_is_a_value_error_that_names_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("build", LINEAR.values(), ids=LINEAR)
def test_a_mixer_with_a_wrong_mask_says_which_shapes_fit(build):
    with pytest.raises(ValueError, match=r"\(2, 12\) or \(2 or 1, 12, 12\), got \(2, 11\)"):
        build()(torch.zeros(2, 12, 16), attention_mask=torch.ones(2, 11))


def test_a_mask_to_be_added_to_logits_is_refused_rather_than_inverted():
    mixer = AFTFull(WIDTH, 20)
    with pytest.raises(ValueError, match="boolean"):
        mixer(torch.randn(1, 4, WIDTH), attention_mask=torch.zeros(1, 4, 4))


@torch.no_grad()
@pytest.mark.parametrize("build", [partial(AFTFull, WIDTH, 20), partial(AFTLocal, WIDTH, 20, 3)])
def test_left_padding_of_separate_keys_does_not_count_either(build):
    mixer = build()
    query, memory = torch.randn(1, 3, WIDTH), torch.randn(1, 5, WIDTH)
    padded = torch.cat([torch.randn(1, 2, WIDTH), memory], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(mixer(query, padded, padded, attention_mask=mask), mixer(query, memory, memory))


@pytest.mark.parametrize("window", (10, 40))
@pytest.mark.parametrize("length", (20, 64, 150))
def test_local_biases_between_chunks_are_those_between_their_positions(window, length, monkeypatch):
    def biases_and_gradients(chunk_bias):
        bias = chunk_bias(length, size, torch.device("cpu"))
        # Of each query, its own chunk's keys up to itself, and the chunk before it, which the first one has not.
        seen = [(t // size, t % size, slice(size if t < size else 0, size + t % size + 1)) for t in range(length)]
        flat = torch.cat([bias[:, chunk, place, keys] for chunk, place, keys in seen], 1)
        weight = torch.linspace(-1, 1, flat.numel(), dtype=flat.dtype).view_as(flat)
        factors = mixer.position_bias_query, mixer.position_bias_key
        return [flat, *torch.autograd.grad((weight * flat).sum(), factors)]

    torch.manual_seed(0)
    mixer = AFTLocal(12, 160, window, causal=True, num_heads=3, position_bias_dim=4).double()
    size = mixer._chunk_size(length)
    expected = biases_and_gradients(super(AFTLocal, mixer)._chunk_bias)
    torch.testing.assert_close(biases_and_gradients(mixer._chunk_bias), expected)
    monkeypatch.setattr("aft_hf.mixers_aft.runs_as_written", lambda *_: False)
    torch.testing.assert_close(biases_and_gradients(mixer._chunk_bias), expected)


def test_gradients_of_neighbouring_chunks_are_not_rounded_where_autocast_is_on():
    queries, keys = (torch.randn(2, 3, 4, 2, requires_grad=True) for _ in range(2))
    products = _ProductsOfNeighbours.apply(queries, keys)
    expected = torch.autograd.grad(products.square().sum(), (queries, keys), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(products.square().sum(), (queries, keys)), expected)


def test_products_of_neighbouring_chunks_can_be_differentiated_twice():
    queries, keys = (torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(_ProductsOfNeighbours.apply, (queries, keys))
    assert torch.autograd.gradgradcheck(_ProductsOfNeighbours.apply, (queries, keys))
