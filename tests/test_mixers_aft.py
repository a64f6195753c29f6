"""The mixers and all their options: each mixer against Eq. 2 in float64 with its own projections and position biases.

`eq_2` below is the complete definition of a mixer. It uses the position biases of `mixer.position_bias`, which
separate tests compare with the paper's definitions. Everything else is tested by `test_backend_contract_aft.py`, with
the reference implementation as the definition: it equals `eq_2`, since the other forms equal both.
"""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import test_backend_contract_aft as contract
import torch
from test_backend_contract_aft import STRUCTURES, TYPICAL, TYPICAL_SEQUENCES, WIDTH, at_most, structures, with_grid
from torch.nn.functional import linear

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple, mixing_aft
from aft_hf.caching_aft import AFTLayerState
from aft_hf.mixers_aft import AFTMixer
from aft_hf.mixing_aft import Mixing, Visibility, reference_mixing
from aft_hf.position_biases_aft import NoBias, PositionBias


build = partial(contract.build, backend=contract.NAMED[0])


# ------------------------------------------------------------------------------------------------------ the formula


def position_bias(mixer, length):
    """Return the mixer's own w, with -inf for later positions if the mixer is causal: (1, h, T, T) in float64."""
    w = mixer.position_bias(length, **with_grid(mixer, length)).double().unsqueeze(0)
    return w + torch.full_like(w[0, 0], -torch.inf).triu(1) if mixer.causal else w


def eq_2(mixer, w, query, key=None, value=None):
    """Return the output of a mixer for position biases w (1 or B, h, T, T'), which are -inf for hidden keys."""
    query, key, value = (query if x is None else x for x in (query, key, value))

    def project(layer, x):
        return linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())

    def by_head(x):  # (B, T, h c) -> (B, h, T, c)
        return x.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)

    logits = by_head(project(mixer.k_proj, key)).unsqueeze(2) + w.unsqueeze(-1)  # (B, h, T, T', k)
    nothing = (logits == -torch.inf).all(3, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), 3).masked_fill(nothing, 0.0)
    output = (weights * by_head(project(mixer.v_proj, value)).unsqueeze(2)).sum(3).transpose(1, 2).flatten(2)
    if mixer.q_proj is not None:
        output = mixer.query_activation(project(mixer.q_proj, query)) * output
    return output if isinstance(mixer.o_proj, torch.nn.Identity) else project(mixer.o_proj, output)


def assert_gradients_near(output, expected, mixer, *inputs):
    """Check each gradient to 1e-5 of its largest entry, or a tenth of the largest of all if larger."""
    named = {f"input {i}": x for i, x in enumerate(inputs)} | dict(mixer.named_parameters())
    weight = torch.linspace(0.2, 1, output.numel()).view_as(output)
    both = [
        torch.autograd.grad((weight * y).sum(), list(named.values()), materialize_grads=True)
        for y in (output, expected)
    ]
    largest = max(x.abs().max().item() for x in both[1])
    for name, found, gradient in zip(named, *both):
        scale = max(gradient.abs().max().item(), 0.1 * largest)
        contract.assert_within(found, gradient.double(), 1e-5 * scale, name)


# ----------------------------------------------------------------------------------------------------------- Eq. 2


@pytest.mark.parametrize(
    ("structure", "options"),
    [(x, "") for x in STRUCTURES] + [("simple causal", name) for name in contract.OPTIONS if name],
)
def test_a_mixer_is_eq_2_with_its_own_position_bias_in_values_and_gradients(structure, options):
    mixer, x = build(structure, **contract.OPTIONS[options]), torch.randn(2, 33, WIDTH, requires_grad=True)
    output, expected = mixer(x, **with_grid(mixer, 33)), eq_2(mixer, position_bias(mixer, 33), x)
    assert output.dtype == torch.float32
    at_most(output, expected)
    assert_gradients_near(output, expected, mixer, x)


class Waves(PositionBias):
    """A structure of w that states nothing but w."""

    def __init__(self, scale):
        self.scale = scale

    def between(self, queries, keys):
        return self.scale.view(-1, 1, 1) * torch.cos(queries[..., :, None] - keys[..., None, :]).unsqueeze(-3)


class AFTWaves(AFTMixer):
    def biases(self, like, grid_size=None):
        return Waves(torch.tensor([1.0, -2.0], dtype=like.dtype))


@pytest.mark.parametrize("causal", (False, True))
def test_a_position_bias_of_a_user_needs_only_w_also_in_pieces(causal):
    mixer, x = AFTWaves(WIDTH, num_heads=2, causal=causal), torch.randn(2, 70, WIDTH, requires_grad=True)
    output, expected = mixer(x), eq_2(mixer, position_bias(mixer, 70), x)
    at_most(output, expected)
    assert_gradients_near(output, expected, mixer, x)
    if causal:
        state = AFTLayerState(mixer.state_window)
        with torch.no_grad():
            at_most(torch.cat([mixer(part, state=state) for part in x.split([40, 1, 29], 1)], 1), expected)


@structures(TYPICAL)
@pytest.mark.parametrize(("queries", "keys"), ((7, 12), (12, 7)))
@pytest.mark.parametrize("padded", (False, True))
def test_keys_and_values_may_have_another_length_and_padding(structure, queries, keys, padded):
    mixer, query = build(structure), torch.randn(2, queries, WIDTH)
    key, value = torch.randn(2, 2, keys, WIDTH)
    mask = contract.padding_mask("right", 2, keys) if padded else torch.ones(2, keys)
    w = position_bias(mixer, 12)[..., :queries, :keys].masked_fill(mask[:, None, None] == 0, -torch.inf)
    actual = mixer(query, key, value, attention_mask=mask, **with_grid(mixer, 12))
    at_most(actual, eq_2(mixer, w, query, key, value))


@structures(TYPICAL)
@pytest.mark.parametrize("rows", (1, 2), ids=("a mask for all", "a mask per row"))
def test_a_mask_takes_keys_out_of_eq_2(structure, rows):
    mixer, x, mask = build(structure), torch.randn(2, 35, WIDTH, requires_grad=True), torch.rand(rows, 35, 35) < 0.6
    output = mixer(x, attention_mask=mask, **with_grid(mixer, 35))
    expected = eq_2(mixer, position_bias(mixer, 35).masked_fill(~mask.unsqueeze(1), -torch.inf), x)
    at_most(output, expected)
    assert_gradients_near(output, expected, mixer, x)


@structures(TYPICAL)
def test_nan_that_is_hidden_from_a_query_does_not_reach_it(structure):
    mixer, x = build(structure), torch.randn(1, 4, WIDTH)
    x[0, 2], mask = torch.nan, torch.ones(1, 4, 4, dtype=torch.bool)
    mask[:, 3, 2] = mask[:, :2, 2] = False
    for output in (mixer(x, attention_mask=mask), mixer(x, attention_mask=mask, output_attentions=True)[0]):
        assert output.isnan().any(-1).tolist() == [[False, False, True, False]]
    x = torch.randn(1, 35, WIDTH)
    x[0, 0] = torch.nan
    with_attentions = mixer(x, output_attentions=True, **with_grid(mixer, 35))[0].isnan()
    assert with_attentions.equal(mixer(x, **with_grid(mixer, 35)).isnan())


@pytest.mark.parametrize("backend", contract.NAMED, ids=str)
@structures(TYPICAL)
def test_a_sequence_of_one_token_gives_every_parameter_a_gradient(structure, backend):
    mixer = contract.build(structure, backend=backend)
    mixer(torch.randn(2, 1, WIDTH)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@structures(TYPICAL_SEQUENCES)
@pytest.mark.parametrize("rows", (1, 2))
def test_position_ids_choose_the_position_biases(structure, rows):
    mixer, x = build(structure), torch.randn(2, 12, WIDTH)
    positions = torch.stack([torch.randperm(50)[:12] for _ in range(rows)])
    w = torch.stack([mixer.position_bias(50)[:, row[:, None], row] for row in positions]).double()
    if mixer.causal:
        w = w + torch.full((12, 12), -torch.inf).triu(1)
    at_most(mixer(x, position_ids=positions), eq_2(mixer, w, x))


@structures(TYPICAL_SEQUENCES)
def test_position_ids_that_count_real_tokens_equal_the_padding_mask_alone(structure):
    mixer, x, mask = build(structure), torch.randn(2, 35, WIDTH), contract.padding_mask("holes", 2, 35)
    expected = mixer(x, attention_mask=mask)
    actual = mixer(x, attention_mask=mask.float(), position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    at_most(actual[mask], expected[mask])
    torch.testing.assert_close(mixer(x, attention_mask=mask.long()), expected)  # of any dtype


@torch.no_grad()
@structures(["full", "local"])
def test_left_padding_of_separate_keys_does_not_count_either(structure):
    mixer = build(structure)
    query, memory = torch.randn(1, 3, WIDTH), torch.randn(1, 5, WIDTH)
    padded = torch.cat([torch.randn(1, 2, WIDTH), memory], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(mixer(query, padded, padded, attention_mask=mask), mixer(query, memory, memory))


def test_a_square_is_the_default_grid():
    mixer, x = build("conv 2-D"), torch.randn(1, 16, WIDTH)
    torch.testing.assert_close(mixer(x), mixer(x, grid_size=(4, 4)))
    assert not torch.allclose(mixer(x), mixer(x, grid_size=(2, 8)))


@pytest.mark.parametrize("options", ({}, {"spatial_dims": 1}), ids=str)
def test_a_new_aft_conv_begins_as_aft_simple_and_learns_its_kernels_by_scale_and_shift(options):
    mixer = AFTConv(WIDTH, num_heads=2, kernel_size=3, **options)
    assert mixer.position_bias(9).eq(0).all()
    mixer(torch.randn(2, 16, WIDTH)).square().sum().backward()
    assert mixer.kernel.grad.eq(0).all()
    assert mixer.kernel_scale.grad.ne(0).all() and mixer.kernel_shift.grad.ne(0).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_the_reference_sums_in_float32_and_gives_the_dtype_of_its_values(dtype):
    key, value = torch.randn(2, 2, 50, 4).to(dtype)
    found = reference_mixing(Mixing(key, value, 1, NoBias(1, key)))
    expected = reference_mixing(Mixing(key.float(), value.float(), 1, NoBias(1, key)))
    assert found.dtype == dtype and found.equal(expected.to(dtype))


# ------------------------------------------------------------------------------------------ w, as the paper defines it


def test_position_bias_of_aft_full_is_the_product_of_its_factors_or_its_table_and_that_of_aft_simple_is_0():
    mixer = AFTFull(WIDTH, 6, position_bias_dim=3, num_heads=2)
    w = mixer.position_bias()
    assert w.shape == (2, 6, 6) and w.dtype == torch.float32
    for i, t, s in product(range(2), range(6), range(6)):
        expected = sum(mixer.position_bias_query[i, t, n] * mixer.position_bias_key[i, s, n] for n in range(3))
        assert w[i, t, s].item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(mixer.position_bias(4), w[:, :4, :4])
    mixer = AFTFull(WIDTH, 6, position_bias_dim=None, num_heads=2)
    assert mixer.position_bias().equal(mixer.position_bias_table)
    assert mixer.position_bias(4).equal(mixer.position_bias_table[:, :4, :4])
    assert AFTSimple(WIDTH, num_heads=2).position_bias(5).equal(torch.zeros(2, 5, 5))


@pytest.mark.parametrize(("connected", "outside"), ((True, 0.0), (False, -torch.inf)))
@pytest.mark.parametrize("window", (1, 3, 9))
@pytest.mark.parametrize("causal", (False, True))
def test_position_bias_of_aft_local_is_that_of_aft_full_within_the_window(connected, outside, window, causal):
    """Eq. 4, on both sides of the query: the causal mask is not part of w."""
    options = {"position_bias_dim": 3, "num_heads": 2, "causal": causal}
    mixer = AFTLocal(WIDTH, 7, window, global_connectivity=connected, **options)
    w, learned = mixer.position_bias(), AFTFull.position_bias(mixer)
    for i, t, s in product(range(2), range(7), range(7)):
        assert w[i, t, s] == (learned[i, t, s] if abs(t - s) < window else outside)


@pytest.mark.parametrize("size", (1, 3, 5, 11))
@pytest.mark.parametrize(("connected", "outside"), ((True, 0.0), (False, -torch.inf)))
@pytest.mark.parametrize("grid", ((3, 4), (4, 2), (1, 5)))
def test_position_bias_of_aft_conv_is_the_kernel_at_the_offset_on_the_grid(size, connected, outside, grid):
    """Eq. 6: entry (i, j) of the kernel for the patch i - s // 2 rows below and j - s // 2 columns right."""
    mixer = AFTConv(WIDTH, 2, size, position_bias_reparameterized=False, global_connectivity=connected)
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
    options = {"causal": causal, "position_bias_reparameterized": False, "global_connectivity": connected}
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
    torch.nn.init.ones_(mixer.kernel)  # a constant kernel stays finite
    bias = mixer.kernel_bias()
    assert bias.flatten(1).equal(mixer.kernel_shift[:, None].expand(2, kernel[0].size))
    assert torch.autograd.grad(bias.sum(), mixer.kernel)[0].isfinite().all()


MULTIPLIED = ["full, 2 heads", "full, table, 4 heads", "local", "local causal", "local causal, table"]
MULTIPLIED += ["local, window alone", "conv", "conv causal, even kernel", "conv, selected", "conv 2-D"]


@structures(MULTIPLIED)
def test_the_multiplier_multiplies_w_and_nothing_else(structure):
    mixer, plain = STRUCTURES[structure](position_bias_multiplier=7.0).eval(), STRUCTURES[structure]().eval()
    for parameter in mixer.parameters(recurse=False):
        torch.nn.init.normal_(parameter)
    plain.load_state_dict(mixer.state_dict())
    grid = with_grid(mixer, 6)
    inside = plain.position_bias(6, **grid)
    torch.testing.assert_close(mixer.position_bias(6, **grid), 7.0 * inside)
    x = torch.randn(2, 6, WIDTH)
    at_most(mixer(x, **grid), eq_2(mixer, 7.0 * position_bias(plain, 6), x))


@structures(MULTIPLIED)
def test_a_new_layer_has_the_same_w_for_every_multiplier(structure):
    biases = []
    for multiplier in (1.0, 9.0):
        torch.manual_seed(0)
        mixer = STRUCTURES[structure](position_bias_multiplier=multiplier).eval()
        if isinstance(mixer, AFTConv) and mixer.kernel_scale is not None:
            assert mixer.kernel_scale.eq(0).all() and mixer.kernel_shift.eq(0).all()
            torch.nn.init.constant_(mixer.kernel_scale, 1 / multiplier)  # with the initial gamma = 0, w is 0
            # Standardization hides the size of the kernel, which determines the relative size of Adam's steps.
            assert mixer.kernel.std().item() == pytest.approx(0.1 / multiplier, rel=0.5)
        biases.append(mixer.position_bias(6, **with_grid(mixer, 6)))
    torch.testing.assert_close(*biases)


@pytest.mark.parametrize("heads", (8, 16))
def test_position_bias_of_aft_alibi_falls_by_the_slopes_of_alibi(heads):
    """The slopes are 1/2, 1/4 .. 1/256 for 8 heads; 16 heads add the geometric means of neighbouring slopes."""
    step = 2 ** (-8 / heads)
    w = AFTAlibi(16, heads).double().position_bias(7)
    assert w.shape == (heads, 7, 7)
    for i, t, s in product(range(heads), range(7), range(7)):
        assert w[i, t, s].item() == pytest.approx(-(step ** (i + 1)) * (t - s), rel=1e-12)


# ---------------------------------------------------------------------- selection, entropy and the implicit attention


@pytest.mark.parametrize("implementation", ("auto", "portable", "reference"))
@pytest.mark.parametrize("options", ({}, {"spatial_dims": 1}, {"spatial_dims": 1, "causal": True}), ids=str)
def test_an_entry_of_minus_infinity_is_never_selected(options, implementation):
    mixer = AFTConv(
        WIDTH, 2, 5, position_bias_selection="gumbel", position_bias_reparameterized=False, **options
    ).eval()
    torch.nn.init.normal_(mixer.kernel)
    x = torch.randn(2, 36, WIDTH)
    expected = mixer(x)
    w = mixer.kernel.detach().flatten(1)
    w.scatter_(1, w.argmin(-1, keepdim=True), -math.inf)
    mixer.mixing_implementation = implementation
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), expected)


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"position_bias_reparameterized": False, "position_bias_selection": "gumbel", "position_bias_multiplier": 7.0},
        {"spatial_dims": 1},
    ),
    ids=str,
)
def test_position_bias_entropy_is_the_entropy_of_the_softmax_of_each_kernel(options):
    """Eq. 9."""
    mixer = AFTConv(WIDTH, 2, 5, **options)
    if mixer.kernel_scale is not None:
        assert mixer.position_bias_entropy().item() == pytest.approx(2 * math.log(mixer.kernel[0].numel()), rel=1e-6)
        torch.nn.init.normal_(mixer.kernel_scale)
    found, expected = mixer.position_bias_entropy().item(), 0.0
    mixer.position_bias_selection = None  # the entropy is that of w before a selection
    for kernel in mixer.kernel_bias().detach().numpy():
        p = np.exp(kernel) / np.exp(kernel).sum()
        expected -= (p * np.log(p)).sum()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "kind"),
    [(x, kind) for x in TYPICAL for kind in ("no mask", "padding", "a mask per row")]
    + [(x, "training") for x in contract.SELECTIONS if "window alone" not in x],
)
def test_the_implicit_attention_times_values_is_the_gated_average(structure, kind):
    """Eq. 3. In training, with the selection that made the output. Gradients reach the attention."""
    mixer, x = build(structure, use_output_projection=False).train(kind == "training"), torch.randn(2, 35, WIDTH)
    padding = contract.padding_mask("left", 2, 35)
    mask = {"padding": padding, "a mask per row": torch.rand(2, 35, 35) < 0.6}.get(kind)
    options = {"attention_mask": mask, **with_grid(mixer, 35)}
    output, attention = mixer(x, output_attentions=True, **options)
    assert attention.shape == (2, WIDTH, 35, 35)
    real = mask if kind == "padding" else torch.ones(2, 35, dtype=torch.bool)
    if kind != "training":
        at_most(output[real], mixer(x, **options)[real])
    at_most(torch.einsum("bdts,bsd->btd", attention, mixer.v_proj(x))[real], output[real])
    attention.retain_grad()
    output.sum().backward()
    assert attention.grad.ne(0).any()


# ------------------------------------------------------------------------------------------------------ wrong inputs


@pytest.mark.parametrize(("queries", "keys"), [(33, 35), (35, 33), (1, 34), (34, 1), (0, 5), (5, 0)])
@structures(TYPICAL_SEQUENCES)
def test_about_as_many_queries_as_keys_take_no_table_of_pairs(structure, queries, keys, monkeypatch):
    mixer, reference = build(structure), build(structure, dtype=torch.float64)
    reference.mixing_implementation = "reference"
    inputs = [torch.randn(2, n, WIDTH, requires_grad=True) for n in (queries, keys)]
    if mixer.causal or (mixer.biases(inputs[0]).reach is not None and min(queries, keys) >= 32):
        monkeypatch.setattr(mixing_aft, "_pairwise", None)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    output, expected = (m(x, y, y) for m, (x, y) in ((mixer, inputs), (reference, doubles)))
    torch.testing.assert_close(output, expected.float(), rtol=1e-4, atol=1e-5)
    found, exact = (
        torch.autograd.grad(y.square().sum(), x, materialize_grads=True)
        for y, x in ((output, inputs), (expected, doubles))
    )
    torch.testing.assert_close(found, tuple(x.float() for x in exact), rtol=1e-3, atol=1e-4)


def test_a_window_beyond_the_learned_positions_costs_no_more_than_these():
    wide, whole = (AFTLocal(8, 16, window, causal=True) for window in (4096, 16))
    wide.load_state_dict(whole.state_dict())
    x = torch.randn(1, 16, 8)
    assert wide.window == 16 and torch.equal(wide(x), whole(x))


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_the_gate_are_called(register):
    mixer, called = AFTSimple(8), []
    getattr(mixer.query_activation, f"register_{register}")(lambda *given: called.append(len(given)))
    mixer(torch.randn(1, 4, 8)).sum().backward()
    assert len(called) == 1


def call(mixer, *shapes, **options):
    return mixer(*map(torch.zeros, shapes), **options)


WRONG = [
    (lambda: AFTSimple(8, num_heads=3), "num_heads=3 .* hidden_size=8"),
    (lambda: AFTSimple(8, mixing_implementation="flash"), "='flash' .*'auto', 'reference', 'portable'"),
    (lambda: AFTAlibi(8, 2, causal=False), "causal=False"),
    (lambda: AFTConv(8, 2, 4), "kernel_size .* got 4"),
    (lambda: AFTConv(8, 2, 0, spatial_dims=1, causal=True), "kernel_size .* got 0"),
    (lambda: AFTConv(8, 2, 3, causal=True), "spatial_dims .* got 2 .causal=True"),
    (lambda: AFTConv(8, 2, 3, position_bias_selection="gumble"), "gumble"),
    (lambda: call(AFTFull(8, 16), (1, 20, 8)), "20 .* 16"),
    (lambda: call(AFTFull(8, 16), (1, 2, 8), position_ids=torch.tensor([[3, 19]])), "20 .* 16"),
    (lambda: call(AFTSimple(8), (1, 5, 6)), r"query .* 8\), got \(1, 5, 6\)"),
    (lambda: call(AFTSimple(8), (5, 8)), r"query .* got \(5, 8\)"),
    (lambda: call(AFTSimple(8), (1, 5, 8), (1, 6, 8), (1, 7, 8)), r"\(1, 6, 8\) .* \(1, 7, 8\)"),
    (lambda: call(AFTSimple(8), (1, 5, 8), (2, 5, 8), (2, 5, 8)), r"\(1, 5, 8\).* \(2, 5, 8\)"),
    (
        lambda: call(AFTSimple(8), (2, 5, 8), attention_mask=torch.ones(2, 6)),
        r"\(2, 5\) or \(2 or 1, 5, 5\), got \(2, 6\)",
    ),
    (lambda: call(AFTSimple(8), (2, 5, 8), attention_mask=torch.ones(3, 5, 5).bool()), r"got \(3, 5, 5\)"),
    (lambda: call(AFTSimple(8), (2, 5, 8), attention_mask=torch.ones(2, 1, 5, 5).bool()), r"got \(2, 1, 5, 5\)"),
    (lambda: call(AFTFull(8, 16), (1, 4, 8), attention_mask=torch.zeros(1, 4, 4)), "boolean.* got torch.float32"),
    (lambda: call(AFTFull(8, 16), (1, 4, 8), attention_mask=torch.ones(1, 4, 4).long()), "got torch.int64"),
    (
        lambda: call(AFTFull(8, 16), (1, 5, 8), position_ids=torch.zeros(1, 4).long()),
        r"position_ids must be .* 5 keys, got \(1, 4\)",
    ),
    (lambda: call(AFTFull(8, 16), (1, 4, 8), position_ids=torch.zeros(1, 4)), r"must be int64.* of torch.float32"),
    (lambda: call(AFTConv(8, 2, 3), (1, 9, 8), position_ids=torch.arange(9).unsqueeze(0)), "position_ids"),
    (lambda: call(AFTConv(8, 2, 3), (1, 12, 8), grid_size=(-3, -4)), "12 positions .* -3 x -4"),
    (lambda: call(AFTConv(8, 2, 3), (1, 35, 8), grid_size=(3, 4)), "35 positions .* 3 x 4"),
    (lambda: call(AFTConv(8, 2, 3), (1, 35, 8)), "35 positions .* 6 x 6"),
    (lambda: AFTSimple(8).position_bias(), "AFTSimple .* seq_len"),
    (lambda: AFTConv(8, 2, 3).position_bias(), "AFTConv .* grid_size"),
    (lambda: AFTFull(8, 16, position_bias_multiplier=0.0), "position_bias_multiplier"),
    (lambda: AFTConv(8, 2, 3, position_bias_multiplier=-1.0), "position_bias_multiplier"),
    (lambda: AFTFull(8, 16, position_bias_multiplier=math.inf), "position_bias_multiplier"),
    (lambda: AFTConv(8, 2, 3, position_bias_multiplier=math.nan), "position_bias_multiplier"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_input_is_a_value_error_that_names_it(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


# --------------------------------------------------------------------------------------------- padding and extremes


@structures(contract.CAUSAL_ONES)
@torch.no_grad()
def test_padding_between_real_tokens_sees_nothing_of_the_future(structure):
    mixer, x = build(structure), torch.randn(2, 12, WIDTH)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = mask[1, 5] = False
    y = mixer(x, attention_mask=mask)
    x[:, -1] += 1.0
    torch.testing.assert_close(y[:, :-1], mixer(x, attention_mask=mask)[:, :-1])


@structures([name for name in TYPICAL_SEQUENCES if name in contract.CAUSAL_ONES])
@torch.no_grad()
def test_padding_in_packed_documents_takes_no_position(structure):
    mixer, x = build(structure).double(), torch.randn(2, 12, WIDTH).double()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = mask[1, 7] = False
    starts = torch.tensor([1] + [0] * 5 + [1] + [0] * 5).bool().expand(2, -1)
    y = mixer(x, visibility=Visibility.of(mask, starts))
    for row in range(2):
        alone = [mixer(x[row : row + 1, part][:, mask[row, part]]) for part in (slice(0, 6), slice(6, 12))]
        torch.testing.assert_close(y[row][mask[row]], torch.cat(alone, 1)[0])


@pytest.mark.parametrize("size", [1e6, 1e25])
@structures(["simple causal", "local causal", "conv causal", "alibi causal", "full causal"])
def test_large_values_beside_large_keys_stay_finite(structure, size):
    mixer, x = build(structure), torch.randn(2, 64, WIDTH, requires_grad=True)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(30 / mixer.k_proj(x).std())
        mixer.v_proj.weight.mul_(size)
    y = mixer(x)
    (gradient,) = torch.autograd.grad((y / size).sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all()


def test_a_key_per_head_goes_with_every_type():
    for mixer in (AFTAlibi(8, 4, key_per_head=True), AFTSimple(8, num_heads=2, causal=True, key_per_head=True)):
        x = torch.randn(2, 33, 8)
        at_most(mixer(x), eq_2(mixer, position_bias(mixer, 33), x))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_documents_may_be_none_at_all(shape):
    seen = Visibility.of(None, torch.ones(shape, dtype=torch.bool))
    assert build("local causal")(torch.randn(*shape, WIDTH), visibility=seen).shape == (*shape, WIDTH)
