"""The forms with plain exponentials: equal to Eq. 2 whatever the blocks are, and not used where they would not be."""

import copy

import pytest
import torch

import aft_hf.causal_sums_aft as causal_sums_aft
import aft_hf.dense_sums_aft as dense_sums_aft
from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.causal_sums_aft import CausalSums
from aft_hf.convolution_sums_aft import ConvolutionSums
from aft_hf.dense_sums_aft import DenseSums
from aft_hf.direct_mixing_aft import MODERATE


WIDTH = 12
LONGEST = 200


def on_grid(heads, convolved):
    mixer = AFTConv(WIDTH, heads, 5, reparameterized=False)
    mixer._sums_type = lambda keys, grid_size: ConvolutionSums if convolved else DenseSums
    return mixer


MIXERS = {
    "conv 2-D": lambda: on_grid(3, convolved=False),
    "conv 2-D, a key per feature": lambda: on_grid(WIDTH, convolved=False),
    "conv 2-D convolved": lambda: on_grid(3, convolved=True),
    "conv 2-D convolved, a key per feature": lambda: on_grid(WIDTH, convolved=True),
    "conv 1-D": lambda: AFTConv(WIDTH, 3, 5, spatial_dims=1, reparameterized=False),
    "conv causal": lambda: AFTConv(WIDTH, 3, 10, spatial_dims=1, causal=True, reparameterized=False),
    "full": lambda: AFTFull(WIDTH, LONGEST, num_heads=2, position_bias_dim=4),
    "full causal": lambda: AFTFull(WIDTH, LONGEST, causal=True, position_bias_dim=4),
    "local causal": lambda: AFTLocal(WIDTH, LONGEST, 10, causal=True, position_bias_dim=4),
    "local causal, heads, wide": lambda: AFTLocal(WIDTH, LONGEST, 40, causal=True, num_heads=3, position_bias_dim=4),
    "local causal, table": lambda: AFTLocal(WIDTH, LONGEST, 10, causal=True, position_bias_dim=None),
    "simple causal": lambda: AFTSimple(WIDTH, causal=True),
    "alibi causal": lambda: AFTAlibi(WIDTH, 4),  # of four heads, the slopes are exact in float32
}
CAUSAL = [name for name in MIXERS if "causal" in name and not name.startswith("full")]
LENGTHS = {True: (1, 5, 33, 97, 200), False: (1, 36, 121)}


@pytest.fixture(params=MIXERS)
def name(request):
    return request.param


def build(name, implementation="direct"):
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    mixer.implementation = implementation
    return positions_first(mixer)


def positions_first(mixer):
    """With a layer that is not plain, so that positions do not come to lie last in memory."""
    mixer.o_proj = torch.nn.Sequential(mixer.o_proj)
    return mixer


def results(mixer, x):
    """The output and the gradients of input and parameters, in float64."""
    x = x.clone().requires_grad_()
    output = mixer(x)
    weight = torch.linspace(0.2, 1, output.numel(), dtype=output.dtype).view_as(output)
    inputs = [x, *mixer.parameters()]
    gradients = torch.autograd.grad((weight * output).sum(), inputs, materialize_grads=True)
    return [y.detach().double() for y in (output, *gradients)]


def assert_near(actual, expected, tolerance, share=0.1):
    """Relative to each one's largest entry, or to a share of the largest of all if that is more."""
    largest = max(x.abs().max() for x in expected)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(max(b.abs().max(), share * largest)))


@pytest.mark.parametrize("block_size", (2**23, 20_000, 2800))
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)),
    ids=str,
)
def test_it_is_eq_2_in_values_and_gradients_whatever_fits_into_a_block(
    name, dtype, tolerance, block_size, monkeypatch
):
    monkeypatch.setattr(dense_sums_aft, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(causal_sums_aft, "BLOCK_SIZE", block_size)
    monkeypatch.setattr(dense_sums_aft, "FEWEST_COLUMNS", 1)
    # What cancels in the gradient of a key cancels to the precision of its terms.
    share = 1.0 if dtype == torch.bfloat16 else 0.1
    mixer = build(name).to(dtype)
    reference = copy.deepcopy(mixer).double()
    reference.implementation = "reference"
    for length in LENGTHS[name in CAUSAL]:
        x = torch.randn(3, length, WIDTH).to(dtype)
        assert_near(results(mixer, x), results(reference, x.double()), tolerance, share)
        with torch.no_grad():
            assert_near([mixer(x).double()], [mixer(x.clone().requires_grad_()).double()], tolerance)


def spy(monkeypatch):
    """Records which sums are used."""
    used = []
    for sums in (DenseSums, ConvolutionSums, CausalSums):
        forward = sums.forward

        def record(self, *args, forward=forward):
            used.append(type(self))
            return forward(self, *args)

        monkeypatch.setattr(sums, "forward", record)
    return used


def test_auto_takes_it_for_moderate_keys_and_only_for_these(name, monkeypatch):
    used, mixer, x = spy(monkeypatch), build(name, "auto"), torch.randn(2, 36, WIDTH)
    safe = copy.deepcopy(mixer)
    safe.implementation = mixer.implementations[1]
    torch.testing.assert_close(mixer(x), safe(x))
    assert len(used) == 1
    with torch.no_grad():
        mixer.k_proj.bias[-1] = safe.k_proj.bias[-1] = 2 * MODERATE
    torch.testing.assert_close(mixer(x), safe(x))
    assert len(used) == 1


@pytest.mark.parametrize("name", [name for name in MIXERS if "conv" in name])
def test_large_position_biases_are_left_to_the_safe_forms(name, monkeypatch):
    used, mixer = spy(monkeypatch), build(name)
    with torch.no_grad():
        mixer.kernel.flatten()[0] = 2 * MODERATE
    assert mixer(torch.randn(2, 36, WIDTH)).isfinite().all()
    assert not used


def test_nan_is_left_to_the_safe_forms_and_stays_in_its_row(name, monkeypatch):
    used, mixer = spy(monkeypatch), build(name)
    x = torch.randn(2, 36, WIDTH)
    x[0, -1] = torch.nan
    output = mixer(x)
    assert output[0, -1].isnan().any() and output[1].isfinite().all()
    assert not used


def test_padding_is_hidden_and_a_row_of_nothing_else_averages_to_nothing(name):
    mixer, x = build(name), torch.randn(3, 36, WIDTH, requires_grad=True)
    mixer.o_proj = torch.nn.Identity()
    mask = torch.ones(3, 36, dtype=torch.long)
    mask[1, 20:], mask[2] = 0, 0
    output = mixer(x, attention_mask=mask)
    assert output[2].eq(0).all()
    output[:, :20].sum().backward()
    assert x.grad.isfinite().all() and x.grad[1, 20:].eq(0).all() and x.grad[0].ne(0).any()


def test_gradients_of_gradients_are_those_of_the_safe_forms(name):
    def second(mixer):
        torch.manual_seed(1)
        x = torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
        inputs = [x, *mixer.parameters()]
        return torch.autograd.grad(first.square().sum(), inputs, materialize_grads=True)

    mixer = build(name).double()
    safe = copy.deepcopy(mixer)
    safe.implementation = mixer.implementations[1]
    assert_near(second(mixer), second(safe), 1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_later_tokens_of_moderate_size_leave_earlier_outputs_alone(name, monkeypatch):
    used, mixer = spy(monkeypatch), build(name)
    x = torch.randn(1, 100, WIDTH)
    later = torch.cat([x[:, :50], torch.randn(1, 50, WIDTH)], 1)
    torch.testing.assert_close(mixer(later)[:, :50], mixer(x)[:, :50], rtol=0, atol=1e-6)
    assert len(used) == 2


def test_after_a_long_padding_a_fading_weight_is_still_a_weight():
    mixer, x = build("alibi causal", "auto"), torch.randn(1, 4000, WIDTH)
    mask = torch.ones(1, 4000, dtype=torch.long)
    mask[:, 20:] = 0
    reference = copy.deepcopy(mixer)
    reference.implementation = "chunked"
    output = mixer(x, attention_mask=mask)
    torch.testing.assert_close(output, reference(x, attention_mask=mask))
    assert output.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MIXERS if "convolved" in name])
@pytest.mark.parametrize("too_large", (False, True), ids=("with a table", "too large for a table"))
def test_a_convolution_that_would_cancel_is_done_otherwise(name, too_large, monkeypatch):
    used, mixer = spy(monkeypatch), build(name)
    if too_large:
        monkeypatch.setattr("aft_hf.mixers_aft.LARGEST_CONV_TABLE", 0)
    with torch.no_grad():
        mixer.kernel.fill_(-12.0)
    x = torch.randn(2, 36, WIDTH)
    reference = copy.deepcopy(mixer)
    reference.implementation = "reference"
    torch.testing.assert_close(mixer(x), reference(x))
    assert used == ([] if too_large else [DenseSums])


@pytest.mark.parametrize(
    ("width", "kernel", "heads", "grid", "rows", "dtype", "expected", "with_gradients"),
    (
        (384, 11, 16, 14, 32, torch.float32, DenseSums, DenseSums),
        (192, 11, 32, 14, 32, torch.bfloat16, DenseSums, DenseSums),
        (192, 11, 32, 14, 32, torch.float32, DenseSums, DenseSums),
        (384, 11, 384, 14, 32, torch.float32, ConvolutionSums, DenseSums),
        (384, 15, 384, 14, 32, torch.bfloat16, DenseSums, DenseSums),
        (768, 25, 32, 24, 4, torch.float32, DenseSums, DenseSums),
        (768, 7, 32, 24, 4, torch.float32, ConvolutionSums, ConvolutionSums),
        (384, 15, 384, 14, 32, torch.float32, ConvolutionSums, DenseSums),
        (768, 25, 32, 24, 4, torch.bfloat16, DenseSums, DenseSums),
        (768, 25, 32, 64, 1, torch.float32, ConvolutionSums, ConvolutionSums),
    ),
)
def test_a_grid_is_multiplied_or_convolved_as_is_faster(
    width, kernel, heads, grid, rows, dtype, expected, with_gradients
):
    with torch.device("meta"):
        mixer = AFTConv(width, heads, kernel)
        keys = torch.empty(rows, heads, grid**2, 1, dtype=dtype)
        assert type(mixer._direct_form(keys, None)[0]) is with_gradients
        with torch.no_grad():
            assert type(mixer._direct_form(keys, None)[0]) is expected


def test_a_grid_too_large_for_a_table_is_convolved(monkeypatch):
    mixer, x, used = positions_first(AFTConv(WIDTH, 3, 5)), torch.randn(1, 36, WIDTH), spy(monkeypatch)
    monkeypatch.setattr("aft_hf.mixers_aft.TABLE_COST", 0)
    dense = mixer(x)
    monkeypatch.setattr("aft_hf.mixers_aft.LARGEST_CONV_TABLE", 3 * 36 * 36 - 1)
    torch.testing.assert_close(mixer(x), dense)
    assert used == [DenseSums, ConvolutionSums]


def test_torch_func_gives_the_gradient_of_each_row_by_itself(name):
    mixer, x = build(name), torch.randn(3, 9, WIDTH)
    parameters = dict(mixer.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(mixer, parameters, row.unsqueeze(0)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, row in enumerate(x):
        mixer.zero_grad()
        mixer(row.unsqueeze(0)).square().sum().backward()
        gradients = [parameter.grad for parameter in parameters.values()]
        assert_near([found[key][i] for key in parameters], gradients, 1e-5)


def test_one_key_per_head_without_position_biases():
    x = torch.randn(2, 40, WIDTH)
    for mixer in (
        AFTSimple(WIDTH, num_heads=2, causal=True, key_per_head=True),
        AFTAlibi(WIDTH, 2, key_per_head=True),
    ):
        reference = copy.deepcopy(mixer)
        reference.implementation = "reference"
        torch.testing.assert_close(mixer(x), reference(x))


def test_a_value_too_large_for_the_sums_stays_in_its_place(monkeypatch):
    used, mixer, x = spy(monkeypatch), AFTSimple(WIDTH, causal=True), torch.randn(1, 40, WIDTH)
    torch.nn.init.eye_(mixer.v_proj.weight)
    later = x.clone()
    later[:, -1] = 1e31
    mixer.k_proj.weight.data.zero_()
    output = mixer(later)
    assert output[:, :-1].isfinite().all() and not used
    torch.testing.assert_close(output[:, :-1], mixer(x)[:, :-1])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)), ids=str)
def test_in_half_precision_the_choice_of_the_form_is_no_more_than_a_rounding(name, dtype, tolerance):
    mixer, x = build(name, "auto").to(dtype), torch.randn(1, 100, WIDTH).to(dtype)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(0.2)
        later = torch.cat([x[:, :70], 1000 * x[:, 70:]], 1)
        torch.testing.assert_close(mixer(later)[:, :70], mixer(x)[:, :70], rtol=tolerance, atol=tolerance)


def test_equal_values_average_to_themselves_in_bfloat16():
    mixer = AFTSimple(WIDTH, causal=True, use_query=False, use_output_projection=False)
    torch.nn.init.zeros_(mixer.v_proj.weight)
    torch.nn.init.constant_(mixer.v_proj.bias, 3.0)
    output = mixer.to(torch.bfloat16)(torch.randn(1, 1000, WIDTH).bfloat16())
    assert output.eq(3.0).all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_backward_pass_may_run_under_autocast(name, dtype):
    mixer = build(name)
    torch.nn.init.constant_(mixer.k_proj.bias, 15.0)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(0.1)
    with torch.autocast("cpu", dtype):
        mixer(torch.randn(2, 36, WIDTH)).float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())


def test_a_traced_mixer_does_not_keep_the_choice():
    mixer, x = AFTSimple(WIDTH, causal=True), torch.randn(2, 16, WIDTH)
    with torch.no_grad():
        traced = torch.jit.trace(mixer, (x,), check_trace=False)
        torch.testing.assert_close(traced(1000 * x), mixer(1000 * x))


def test_forward_mode_differentiation_has_the_safe_forms(name):
    mixer, x = build(name), torch.randn(1, 9, WIDTH)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(mixer(dual)).tangent.isfinite().all()
