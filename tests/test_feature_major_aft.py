"""A mixer with the positions last in memory: equal to Eq. 2, gradients too, and not used where it would not be."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import aft_hf.feature_major_aft as feature_major_aft
import aft_hf.mixer_aft as mixer_aft
from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.banded_sums_aft import BandSums
from aft_hf.dense_sums_aft import DenseSums
from aft_hf.direct_mixing_aft import LARGEST_VALUE, MODERATE


WIDTH = 12
LENGTH = 35  # a grid of 5 x 7


def on_grid(heads, sums=DenseSums, **options):
    mixer = AFTConv(WIDTH, heads, 5, reparameterized=False, **options)
    mixer._sums_type = lambda keys, grid_size: DenseSums if torch.is_grad_enabled() else sums
    return mixer


MIXERS = {
    "conv 2-D": lambda: on_grid(3),
    "conv 2-D, one head": lambda: on_grid(1),
    "conv 2-D, a key per feature": lambda: on_grid(WIDTH),
    "conv 2-D, bands": lambda: on_grid(3, BandSums),
    "conv 2-D, a key per feature, bands": lambda: on_grid(WIDTH, BandSums),
    "conv 2-D, no biases": lambda: on_grid(3, qkv_bias=False),
    "conv 2-D, no query": lambda: on_grid(3, use_query=False),
    "conv 2-D, neither query nor projection": lambda: on_grid(3, use_query=False, use_output_projection=False),
    "conv 1-D": lambda: AFTConv(WIDTH, 3, 5, spatial_dims=1, reparameterized=False),
    "full": lambda: AFTFull(WIDTH, LENGTH, position_bias_dim=4),
    "full, heads, no projection": lambda: AFTFull(WIDTH, LENGTH, num_heads=2, use_output_projection=False),
    "full, a head for each feature": lambda: AFTFull(WIDTH, LENGTH, num_heads=WIDTH),
    "full causal": lambda: AFTFull(WIDTH, LENGTH, causal=True, position_bias_dim=None),
    "full causal, no query": lambda: AFTFull(WIDTH, LENGTH, causal=True, use_query=False, qkv_bias=False),
    "local": lambda: AFTLocal(WIDTH, LENGTH, 4, position_bias_dim=4),
}
OTHERS = {
    "convolved": lambda: AFTConv(WIDTH, 3, 3, implementation="convolution"),
    "simple": lambda: AFTSimple(WIDTH),
    "simple causal": lambda: AFTSimple(WIDTH, causal=True),
    "alibi": lambda: AFTAlibi(WIDTH, 3),
    "local causal": lambda: AFTLocal(WIDTH, LENGTH, 4, causal=True),
    "dense": lambda: AFTFull(WIDTH, LENGTH, implementation="dense"),
    "reference": lambda: on_grid(3, implementation="reference"),
    "window alone": lambda: on_grid(3, global_connectivity=False),
    "selected": lambda: on_grid(3, selection="gumbel"),
    "another gate": lambda: on_grid(3, query_activation="gelu"),
}


def build(make):
    torch.manual_seed(0)
    mixer = make().eval()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


@pytest.fixture(params=MIXERS)
def mixer(request):
    return build(MIXERS[request.param])


def grid_of(mixer):
    return (5, 7) if isinstance(mixer, AFTConv) and mixer.spatial_dims == 2 else None


def safe(mixer, x):
    """Eq. 2 as it stands, in float64."""
    reference = copy.deepcopy(mixer).double()
    reference.implementation = "reference"
    with torch.no_grad():
        return reference(x.double(), grid_size=grid_of(mixer))


def parameters_of(mixer):
    return [parameter for parameter in mixer.parameters() if parameter.requires_grad]


def results(mixer, x):
    """The output and the gradients of input and parameters, in float64."""
    x = x.clone().requires_grad_()
    output = mixer(x, grid_size=grid_of(mixer))
    weight = torch.linspace(0.2, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((weight * output).sum(), [x, *parameters_of(mixer)], materialize_grads=True)
    return [y.detach().double() for y in (output, *gradients)]


def expected_results(mixer, x, implementation="reference"):
    exact = copy.deepcopy(mixer).double()
    exact.implementation = implementation
    return results(exact, x.double())


def assert_near(actual, expected, tolerance):
    """Relative to each one's largest entry, or to a tenth of the largest of all if that is more."""
    largest = max(x.abs().max() for x in expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(max(b.abs().max(), 0.1 * largest)))


@pytest.fixture
def averages(monkeypatch):
    """The calls that found everything moderate."""
    calls, are_moderate = [], feature_major_aft._are_moderate

    def record(*args):
        found = are_moderate(*args)
        calls.extend([args] if found else [])
        return found

    monkeypatch.setattr(feature_major_aft, "_are_moderate", record)
    return calls


@pytest.fixture
def outputs(monkeypatch):
    """What it gave."""
    found = []

    def record(*args):
        found.append(feature_major_aft.feature_major_mixing(*args))
        return found[-1]

    monkeypatch.setattr(mixer_aft, "feature_major_mixing", record)
    return found


@pytest.mark.parametrize("block_size", (2**22, 3000, 1))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)), ids=str
)
@pytest.mark.parametrize("rows", (1, 3))
def test_it_is_eq_2_whatever_fits_into_a_block(mixer, dtype, tolerance, block_size, rows, outputs, monkeypatch):
    monkeypatch.setattr(feature_major_aft, "BLOCK_SIZE", block_size)
    mixer, x = mixer.to(dtype), torch.randn(rows, LENGTH, WIDTH).to(dtype)
    with torch.no_grad():
        output = mixer(x, grid_size=grid_of(mixer))
    assert output is outputs[0]
    assert output.is_contiguous() and output.dtype == dtype
    expected = safe(mixer, x)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("length", (1, 2, 35))
def test_sequences_may_be_shorter_than_the_table(length, outputs):
    mixer, x = build(MIXERS["full causal"]), torch.randn(2, length, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), safe(mixer, x).float())
        with pytest.raises(ValueError, match="longer"):
            mixer(torch.randn(2, LENGTH + 1, WIDTH))
    assert len(outputs) == 1


@pytest.mark.parametrize("width", (1, 37, 64))
@pytest.mark.parametrize("block_size", (2**22, 10000))
def test_any_width_is_cut_into_groups(width, block_size, outputs, monkeypatch):
    monkeypatch.setattr(feature_major_aft, "BLOCK_SIZE", block_size)
    mixer, x = build(lambda: AFTFull(width, LENGTH)), torch.randn(2, LENGTH, width)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), safe(mixer, x).float(), rtol=1e-4, atol=1e-5)
    assert outputs[0] is not None


def test_what_never_fits_is_cut_as_small_as_is_sensible():
    assert feature_major_aft._count_groups(2, 384, 384, 2**30) == 2 * 12
    assert feature_major_aft._count_groups(2, 384, 384, 2) == 2
    assert feature_major_aft._count_groups(2, 384, 2, 2**30) == 2
    assert feature_major_aft._count_groups(1, 383, 383, 2**30) == 1


def test_biases_are_made_once(monkeypatch):
    made, chunk_bias = [], AFTLocal._chunk_bias
    monkeypatch.setattr(AFTLocal, "_chunk_bias", lambda *args: (made.append(args), chunk_bias(*args))[1])
    with torch.no_grad():
        build(OTHERS["local causal"])(torch.randn(2, LENGTH, WIDTH))
    assert len(made) == 1


@pytest.mark.parametrize("name", ("k_proj", "v_proj", "q_proj"))
def test_a_bias_that_cancels_is_added_before_anything_is_rounded(name, outputs):
    mixer, x = build(MIXERS["full"]), torch.randn(2, LENGTH, WIDTH)
    x[..., 0] = 1.0
    with torch.no_grad():
        getattr(mixer, name).weight[:, 0] = 300.0
        getattr(mixer, name).bias.fill_(-300.0)
        mixer, x = mixer.bfloat16(), x.bfloat16()
        expected = safe(mixer, x)
        torch.testing.assert_close(mixer(x).double(), expected, rtol=0, atol=3e-2 * expected.abs().max().item())
    assert outputs[0] is not None


def test_inputs_need_not_be_contiguous(mixer, outputs):
    x = torch.randn(LENGTH, WIDTH, 2).permute(2, 0, 1)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x, grid_size=grid_of(mixer)), safe(mixer, x).float(), rtol=1e-4, atol=1e-5)
    assert outputs[0] is not None


@pytest.mark.parametrize("name", ("k_proj", "v_proj", "k_proj.bias"))
@pytest.mark.parametrize("size", (1.01, 1e20, float("inf"), float("nan")))
def test_what_is_too_large_is_left_to_the_safe_forms(mixer, name, size, outputs, averages):
    name, _, bias = name.partition(".")
    layer, limit = getattr(mixer, name), MODERATE if name == "k_proj" else LARGEST_VALUE
    if bias and layer.bias is None:
        pytest.skip("a mixer without biases")
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        if bias:
            layer.bias[-1] = size * limit
        else:
            layer.weight[-1] = 0.0
            layer.weight[-1, 0] = size * limit
            x[1, 3, 0] = 1.0
        output = mixer(x, grid_size=grid_of(mixer))
        slow = copy.deepcopy(mixer)
        slow.implementation = slow.implementations[1]
        torch.testing.assert_close(output, slow(x, grid_size=grid_of(mixer)), equal_nan=True)
    assert output is outputs[0] and not averages


def test_queries_may_be_of_any_size(averages):
    mixer, x = build(MIXERS["full"]), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        mixer.q_proj.weight *= 1e6
        torch.testing.assert_close(mixer(x), safe(mixer, x).float())
        mixer.q_proj.bias[0] = torch.nan
        assert mixer(x).isnan().all()
    assert len(averages) == 2


def test_biases_too_large_are_left_to_the_safe_forms(outputs, averages):
    mixer, x = build(MIXERS["conv 2-D"]), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        mixer.kernel[0, 2, 2] = 1.01 * MODERATE
        torch.testing.assert_close(mixer(x, grid_size=(5, 7)), safe(mixer, x).float(), rtol=1e-4, atol=1e-5)
    assert len(outputs) == 1 and not averages


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_are_as_they_were(name, outputs):
    mixer, x = build(OTHERS[name]), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        output = mixer(x, grid_size=grid_of(mixer))
    assert not outputs
    torch.testing.assert_close(output, safe(mixer, x).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    (
        {"key": torch.randn(2, LENGTH, WIDTH)},
        {"value": torch.randn(2, LENGTH, WIDTH)},
        {"attention_mask": torch.ones(2, LENGTH)},
        {"position_ids": torch.arange(LENGTH)[None]},
        {"output_attentions": True},
    ),
    ids=lambda arguments: next(iter(arguments)),
)
def test_only_for_one_input_without_masks(arguments, outputs):
    mixer = build(MIXERS["full"])
    with torch.no_grad():
        mixer(torch.randn(2, LENGTH, WIDTH), **arguments)
    assert not outputs


def test_not_with_float16_mixed_types_or_transformations(mixer, outputs):
    x, grid_size = torch.randn(2, LENGTH, WIDTH), grid_of(mixer)
    with torch.autocast("cpu", dtype=torch.float16):
        mixer(x, grid_size=grid_size)
    torch.func.grad(lambda x: mixer(x, grid_size=grid_size).sum())(x)
    mixed = copy.deepcopy(mixer)
    mixed.v_proj.double()
    with pytest.raises(RuntimeError, match="dtype"):
        mixed(x, grid_size=grid_size)
    with torch.no_grad():
        torch.func.vmap(lambda x: mixer(x[None], grid_size=grid_size)[0])(x)
        torch.func.jvp(lambda x: mixer(x, grid_size=grid_size), (x,), (x,))
    assert not outputs


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_a_checkpoint_in_training_gives_the_same(use_reentrant, outputs):
    mixer, x = build(lambda: on_grid(3, selection="gumbel")).train(), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        arguments = partial(mixer, grid_size=(5, 7)), x
        output = checkpoint(*arguments, use_reentrant=use_reentrant) if checkpointed else arguments[0](x)
        output.sum().backward()
        results.append((output.detach(), x.grad.clone()))
        x.grad = None
    assert len(outputs) == 2 + use_reentrant  # the other kind stops before all is made again
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", ("position_bias_table", "v_proj.bias"))
def test_not_with_tangents_of_parameters(name, outputs):
    mixer, x = build(MIXERS["full causal"]).requires_grad_(False), torch.randn(2, LENGTH, WIDTH)
    value = mixer.get_parameter(name)
    tangent = torch.randn_like(value)

    def run(value):
        return torch.func.functional_call(mixer, {name: value}, (x,))

    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(value, tangent))).tangent
    double = copy.deepcopy(mixer).double()
    step = 1e-6 * tangent.double()
    ends = [
        torch.func.functional_call(double, {name: value.double() + sign * step}, (x.double(),)) for sign in (1, -1)
    ]
    torch.testing.assert_close(found.double(), (ends[0] - ends[1]) / 2e-6, rtol=1e-3, atol=1e-4)


def test_layers_of_other_sizes_and_layouts_are_called(outputs):
    x = torch.randn(2, LENGTH, WIDTH)
    wider = build(MIXERS["full"])
    wider.o_proj = nn.Linear(WIDTH, 2 * WIDTH)
    narrow = build(MIXERS["full"])
    narrow.q_proj = nn.Linear(WIDTH, 1)
    sparse = build(MIXERS["full"])
    sparse.k_proj.weight = nn.Parameter(sparse.k_proj.weight.detach().to_sparse_csr(), requires_grad=False)
    shared = build(MIXERS["full"])
    shared.v_proj.bias = nn.Parameter(torch.ones(1))
    for mixer in (wider, narrow, sparse, shared):
        with torch.no_grad():
            found = mixer(x)
            mixer.v_proj.register_forward_hook(lambda *args: None)
            torch.testing.assert_close(found, mixer(x), rtol=1e-4, atol=1e-5)
    assert len(outputs) == 1  # of more features: that is none of its business


def test_not_in_a_trace(outputs):
    mixer, x = build(MIXERS["conv 2-D"]).requires_grad_(False), torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: mixer(x, grid_size=(5, 7)), x, check_trace=False)
        assert not outputs
        torch.testing.assert_close(traced(2 * x), mixer(2 * x, grid_size=(5, 7)), rtol=1e-4, atol=1e-5)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(layer):
    new = Doubled(layer.in_features, layer.out_features)
    new.load_state_dict(layer.state_dict())
    return new


@pytest.mark.parametrize("name", ("q_proj", "k_proj", "v_proj", "o_proj"))
def test_projections_that_are_more_than_their_weights_are_called(name, outputs):
    mixer, x, seen = build(MIXERS["full"]), torch.randn(2, LENGTH, WIDTH), []
    hook = getattr(mixer, name).register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        mixer(x)
        hook.remove()
        assert len(seen) == 1 and not outputs
        plain = mixer(x)
        assert len(outputs) == 1
        setattr(mixer, name, doubled(getattr(mixer, name)))
        assert not torch.allclose(mixer(x), plain)
    assert len(outputs) == 1


def test_a_hook_of_the_gate_is_called(outputs):
    mixer, seen = build(MIXERS["full"]), []
    mixer.query_activation.register_forward_hook(lambda *args: seen.append(args))
    with torch.no_grad():
        mixer(torch.randn(2, LENGTH, WIDTH))
    assert len(seen) == 1 and not outputs


def test_tables_are_made_for_the_heads_at_hand_and_once_for_each(monkeypatch):
    made, table = [], DenseSums.table

    def record(self, exp_bias):
        made.append(len(exp_bias))
        return table(self, exp_bias)

    monkeypatch.setattr(DenseSums, "table", record)
    monkeypatch.setattr(feature_major_aft, "BLOCK_SIZE", 1)
    with torch.no_grad():
        build(MIXERS["conv 2-D"])(torch.randn(2, LENGTH, WIDTH), grid_size=(5, 7))
        assert made == [1, 1, 1]
        build(MIXERS["full"])(torch.randn(2, LENGTH, WIDTH))
    assert made == [1, 1, 1, 1]


@pytest.mark.parametrize("block_size", (2**22, 3000, 1))
@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.float64, 1e-12), (torch.float32, 1e-5)), ids=str)
@pytest.mark.parametrize("rows", (1, 3))
def test_gradients_are_those_of_eq_2(mixer, dtype, tolerance, block_size, rows, outputs, averages, monkeypatch):
    monkeypatch.setattr(feature_major_aft, "BLOCK_SIZE", block_size)
    mixer, x = mixer.to(dtype), torch.randn(rows, LENGTH, WIDTH).to(dtype)
    found = results(mixer, x)
    assert outputs[0].is_contiguous() and len(averages) == 1
    assert_near(found, expected_results(mixer, x), tolerance)


@pytest.mark.parametrize("autocast", (True, False))
def test_gradients_of_bfloat16_come_from_sums_in_float32(mixer, autocast, outputs):
    x = torch.randn(3, LENGTH, WIDTH)
    mixer.k_proj.weight.data *= 0.1  # or else the rounding of keys is what is seen
    rounded = copy.deepcopy(mixer).bfloat16()
    expected = expected_results(rounded, x.bfloat16())
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    if not autocast:
        mixer, x = rounded, x.bfloat16()
    other = copy.deepcopy(mixer)
    other.v_proj.register_forward_hook(lambda *args: None)  # which is seen, so that positions come first
    errors = []
    for tried in (mixer, other):
        with context:
            found = results(tried, x)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, expected) if b.norm() > 1e-3])
    assert len(outputs) == 1 and outputs[0].dtype == torch.bfloat16
    assert max(errors[0]) < 2e-2 or max(errors[0]) < 1.5 * max(errors[1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_autocast_is_as_the_modules_are_one_by_one(mixer, dtype, outputs):
    x, grid_size = torch.randn(2, LENGTH, WIDTH).to(dtype), grid_of(mixer)
    other = copy.deepcopy(mixer)
    other.v_proj.register_forward_hook(lambda *args: None)
    for context in (torch.no_grad, torch.enable_grad):
        with context(), torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = (m(x, grid_size=grid_size) for m in (mixer, other))
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if found.requires_grad:
                found.float().square().sum().backward()
    assert len(outputs) == 2
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mixer.parameters())


@pytest.mark.parametrize("length", (1, 2, 35))
def test_gradients_of_what_is_shorter_than_the_table(length):
    mixer, x = build(MIXERS["full causal"]), torch.randn(2, length, WIDTH)
    assert_near(results(mixer, x), expected_results(mixer, x), 1e-5)


def test_gradients_need_not_be_contiguous(mixer):
    x, grid_size = torch.randn(2, LENGTH, WIDTH, requires_grad=True), grid_of(mixer)
    weight = torch.randn(WIDTH, LENGTH, 2).permute(2, 1, 0)
    for gradient in (torch.ones(()).expand(2, LENGTH, WIDTH), weight):
        found = torch.autograd.grad(mixer(x, grid_size=grid_size), x, gradient)
        expected = torch.autograd.grad(mixer(x, grid_size=grid_size), x, gradient.contiguous())
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "trained", ("q_proj", "k_proj", "v_proj", "o_proj", "position_bias", "o_proj.bias", "nothing")
)
def test_only_what_is_trained_gets_a_gradient(trained, outputs):
    mixer, x = build(MIXERS["full"]), torch.randn(2, LENGTH, WIDTH)
    expected = dict(zip((name for name, _ in mixer.named_parameters()), expected_results(mixer, x)[2:]))
    for name, parameter in mixer.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    output = mixer(x)
    assert outputs and output.requires_grad == (trained != "nothing")
    if trained != "nothing":
        weight = torch.linspace(0.2, 1, output.numel()).view_as(output)
        (weight * output).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert (parameter.grad is not None) == name.startswith(trained)
        if parameter.grad is not None:
            atol = 1e-5 * expected["v_proj.weight"].abs().max().item()
            torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", ("k_proj", "v_proj", "bias"))
def test_gradients_of_what_is_too_large_are_those_of_the_safe_forms(mixer, name, outputs, averages):
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        if name == "bias":
            largest = max(mixer.position_bias(LENGTH, grid_of(mixer)).abs().max(), 1.0)
            for key, parameter in mixer.named_parameters():
                if "proj" not in key:  # two factors or one table
                    parameter *= (4 * MODERATE / largest) ** (0.5 if key.endswith(("_query", "_key")) else 1.0)
        else:
            getattr(mixer, name).weight[-1] *= 1e3 * (1.0 if name == "k_proj" else LARGEST_VALUE)
    found = results(mixer, x)
    assert not averages and outputs
    assert all(y.isfinite().all() for y in found)
    assert_near(found, expected_results(mixer, x), 1e-3)


def test_gradients_of_gradients_are_those_of_the_safe_forms(mixer, averages):
    def second(mixer):
        torch.manual_seed(1)
        x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        output = mixer(x, grid_size=grid_of(mixer)).square().sum()
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        inputs = [x, *mixer.parameters()]
        return torch.autograd.grad(first.square().sum(), inputs, materialize_grads=True)

    mixer = mixer.double()
    slow = copy.deepcopy(mixer)
    slow.implementation = "dense"
    assert_near(second(mixer), second(slow), 1e-6)
    assert len(averages) == 1


def test_training_keeps_the_average_and_its_denominators_beside_the_projections():
    mixer, kept = build(MIXERS["conv 2-D"]), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(64, LENGTH, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mixer(x, grid_size=(5, 7))
    features = sum(kept.values()) / (4 * 64 * LENGTH)
    # x, query, value and average of all features, key and denominators of 3 heads, and what does not grow with rows.
    assert 4 * WIDTH + 2 * 3 <= features < 4 * WIDTH + 2 * 3 + 2
    output.sum().backward()


@pytest.mark.parametrize("changed", ("input", "o_proj.weight"))
def test_what_was_changed_before_the_backward_pass_is_noticed(changed):
    mixer, x = build(MIXERS["conv 2-D"]), torch.randn(2, LENGTH, WIDTH)
    output = mixer(x, grid_size=(5, 7))
    with torch.no_grad():
        (x if changed == "input" else mixer.o_proj.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


ALONE = ((1, 1), (1, 5), (3, 1))


@pytest.mark.parametrize("use_query", (True, False))
@pytest.mark.parametrize("shape", ALONE, ids=str)
def test_a_gradient_that_others_share_stays_as_it_is(use_query, shape):
    mixer = build(lambda: AFTFull(WIDTH, LENGTH, use_query=use_query, use_output_projection=False))
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    given = torch.randn(shape[0], WIDTH, shape[1]).mT
    before = given.clone()
    output = mixer(x)
    first, second = (torch.autograd.grad(output, x, given, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(given, before) and torch.equal(first, second)


@pytest.mark.parametrize("use_query", (True, False))
@pytest.mark.parametrize("shape", ALONE, ids=str)
def test_the_output_may_be_changed(use_query, shape):
    mixer = build(lambda: AFTFull(WIDTH, LENGTH, use_query=use_query, use_output_projection=False))
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad((2 * mixer(x)).square().sum(), x)
    (found,) = torch.autograd.grad(mixer(x).mul_(2).square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_what_needs_no_gradient_keeps_nothing(monkeypatch):
    kept = []
    mixer = build(MIXERS["conv 2-D"]).requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x), lambda x: x):
        assert not mixer(torch.randn(2, LENGTH, WIDTH), grid_size=(5, 7)).requires_grad
    assert not kept


def test_the_default_device_does_not_matter(mixer):
    x = torch.randn(2, LENGTH, WIDTH)
    expected = results(mixer, x)
    weight = torch.linspace(0.2, 1, x.numel()).view_as(x)
    with torch.no_grad():
        output = mixer(x, grid_size=grid_of(mixer))
    torch.set_default_device("meta")
    try:
        with torch.no_grad():
            assert torch.equal(mixer(x, grid_size=grid_of(mixer)), output)
        x.requires_grad_()
        (weight * mixer(x, grid_size=grid_of(mixer))).sum().backward()
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(x.grad.double(), expected[1])
