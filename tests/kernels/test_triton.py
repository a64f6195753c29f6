"""The operators by Triton kernels: the contract of all forms, and properties of the kernels alone.

Without a GPU the kernels are interpreted on the CPU, which takes about a second per problem. So the problems are
small, and each covers a branch of the kernels.
"""

import copy
import logging
import math
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
import test_backend_contract_aft as contract
import torch
from test_backend_contract_aft import structures
from tiny_models import language_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple, mixing_aft
from aft_hf.caching_aft import AFTLayerState
from aft_hf.kernels import operators as schema
from aft_hf.kernels.operators import portable
from aft_hf.mixing_aft import Mixing, Visibility


pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from aft_hf.kernels.triton import causal_launch, kept, operators, product_launch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy warns of inf - inf
    pytest.mark.filterwarnings("ignore:.*other operators may also be overridden:UserWarning"),
]
TRITON = contract.Backend("auto", DEVICE)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The operators of this device are those by Triton, in place of the C++ kernels on a CPU."""
    library = operators.register(DEVICE.upper())
    monkeypatch.setattr(mixing_aft, "_provided", {})
    yield
    library._destroy()
    schema.KEEPING.discard("cpu")
    assert not operators.FAILED


@pytest.fixture
def launched(monkeypatch):
    """Assert that the kernels computed the problem, so that the portable form fails the test."""
    calls = []
    for module, name in ((causal_launch, "walk"), (causal_launch, "sweep"), (product_launch, "_forward")):
        compute = getattr(module, name)

        def counted(*arguments, compute=compute, **options):
            calls.append(arguments)
            return compute(*arguments, **options)

        monkeypatch.setattr(module, name, counted)
    yield calls
    assert calls


# ----------------------------------------------------------------------------------------------- the contract of Eq. 2


# Structure, dtype, batch size, length, and what queries see.
SEEN = "documents and padding"
QUICK = (
    [("alibi causal", FP32, 1, 35, "everything"), ("local causal", FP32, 1, 65, "everything")]
    + [("simple causal", FP32, 2, 12, SEEN), ("local causal, window alone", FP32, 1, 40, SEEN)]
    + [("conv causal", BF16, 1, 35, "everything"), ("full causal", FP32, 1, 35, "everything")]
    + [("conv 2-D", FP32, 1, 35, "everything"), ("local causal", FP16, 1, 40, "documents")]
)
LONG = (
    [("alibi causal", FP32, 1, 35, SEEN), ("local causal", FP32, 1, 70, SEEN), ("conv causal", FP32, 1, 40, SEEN)]
    + [
        ("full causal", FP32, 1, 12, SEEN),
        ("local causal", BF16, 1, 40, "documents"),
        ("local causal", BF16, 2, 70, "documents"),
        ("local causal, window alone", BF16, 1, 70, "documents"),
        ("conv causal", BF16, 1, 40, "documents"),
    ]
    + [("alibi causal", FP32, 2, 12, "left padding"), ("local causal, wide, window alone", FP32, 1, 129, "everything")]
    + [(x, FP32, 1, 1, "everything") for x in ("local causal", "full causal", "full")]
    + [(x, FP32, 1, 40, "everything") for x in ("simple causal, 2 heads", "local causal, 2 heads")]
    + [(x, FP32, 1, 40, "everything") for x in ("conv causal, even kernel", "conv causal, selected")]
    + [(x, FP32, 1, 35, "everything") for x in ("local", "local, window alone", "conv", "full, table, 4 heads")]
    + [(x, FP32, 1, 35, "everything") for x in ("conv 2-D, one key per feature", "conv 2-D, window alone")]
    + [(x, BF16, 1, 35, "everything") for x in ("alibi causal", "full causal, table", "full, 2 heads")]
    + [(x, FP16, 1, 40, SEEN) for x in ("simple causal", "alibi causal", "conv causal", "local causal, window alone")]
    + [(x, FP16, 2, 35, "everything") for x in ("full causal", "full", "conv", "conv 2-D")]
)
CASES = [*QUICK, *(slow(*case) for case in LONG)]


@pytest.mark.parametrize(("structure", "dtype", "batch", "length", "seen"), CASES, ids=str)
def test_kernels_equal_the_reference(structure, dtype, batch, length, seen, launched):
    contract.assert_exact(contract.case(structure, dtype, batch, length, seen), TRITON)


@pytest.mark.parametrize(
    ("structure", "keys", "largest_bias"),
    [
        ("local causal", "x 90", 150.0),
        ("full causal", "moderate", 150.0),
        slow("alibi causal", "a rising ramp", None),
        slow("local causal", "one huge, late", None),
        slow("conv 2-D", "x 30", None),
        slow("full", "x 90", None),
    ],
)
def test_large_keys_and_biases_are_finite_and_right(structure, keys, largest_bias, launched):
    contract.assert_exact(contract.case(structure, FP32, 1, 35, keys=keys, scale=largest_bias), TRITON)


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "keys"), (("local causal", "x 90"), ("simple causal", "moderate")))
def test_keys_with_a_large_common_offset_cost_no_precision(structure, keys, launched):
    """A common offset does not change the averages. Rounding the sums of keys and biases would cost 3 digits."""
    given = contract.case(structure, FP32, 1, 40, keys=keys)
    key, size = given.key + 1e4, given.key.abs().max().item()
    double = copy.deepcopy(given.mixer).double()
    doubles = (x.double() for x in (key, given.value, given.weight))
    exact = {name: x.detach() for name, x in contract.results(double, *doubles, {}, "reference").items()}
    contract.assert_exact(given._replace(key=key, exact=exact), TRITON, largest_key=size)


@pytest.mark.slow
@structures(["alibi causal", "local causal", "full causal"])
def test_later_tokens_do_not_change_earlier_outputs(structure, launched):
    mixer = contract.keys_are_inputs(contract.build(structure, TRITON))
    x = torch.randn(1, 70, contract.WIDTH, device=DEVICE)
    with torch.no_grad():
        expected = mixer(x)
        for last, later in ((31, "1e4 larger"), (40, "NaN")):
            changed = x.clone()
            changed[:, last + 1 :] += contract.LATER[later]
            contract.at_most(mixer(changed)[:, : last + 1], expected[:, : last + 1])


# -------------------------------------------------------------------------------------------------- mixers and models

WIDTHS = {
    "37 features": partial(AFTLocal, 37, 80, 7, position_bias_dim=4, causal=True),
    "2 heads of 35 features": partial(AFTAlibi, 70, 2),
    "a key for each of 3 heads of 23 features": partial(AFTConv, 69, 3, 5, spatial_dims=1, causal=True),
    "1 feature": partial(AFTFull, 1, 80, causal=True),
    "130 features": partial(AFTSimple, 130, causal=True),
    "a key for 100 features": partial(AFTConv, 100, 1, 5, spatial_dims=1, causal=True),
    "an image, a key for each of 2 heads of 35 features": partial(AFTConv, 70, 2, 3),
    "an image, 37 features": partial(AFTFull, 37, 80),
}


def _query(arguments):
    """The query among the arguments of a launch."""
    return arguments[0].inputs[0] if isinstance(arguments[0], product_launch._Problem) else arguments[0]


@pytest.mark.parametrize("name", [x if x == "37 features" else slow(x) for x in WIDTHS])
def test_a_whole_mixer_of_any_width_is_eq_2(name, launched):
    mixer = WIDTHS[name](mixing_implementation="auto").to(DEVICE)
    length = 35 if "image" in name else 40
    contract.assert_mixer_exact(mixer, torch.randn(1, length, mixer.hidden_size, device=DEVICE))
    assert all(_query(arguments) is not None for arguments in launched)


@pytest.mark.parametrize("options", ("no query", slow("relu, no biases")))
def test_the_gate_is_fused_where_it_is_a_sigmoid(options, launched):
    mixer = contract.build("local causal", TRITON, **contract.OPTIONS[options])
    contract.assert_mixer_exact(mixer, torch.randn(2, 33, contract.WIDTH, device=DEVICE))
    fused = mixer.q_proj is not None and type(mixer.query_activation) is nn.Sigmoid
    assert all((_query(arguments) is not None) == fused for arguments in launched)


@pytest.mark.slow
def test_a_model_trains_with_padding_autocast_and_gradient_checkpointing(launched):
    model = language_model(["local", "simple"], hidden_size=16, num_heads=1).to(DEVICE)
    ids = torch.randint(0, 256, (2, 9), device=DEVICE)
    mask = contract.padding_mask("left", 2, 9).to(DEVICE)
    actual = []
    for implementation in ("auto", "reference"):
        for layer in model.aft.layers:
            layer.mixer.mixing_implementation = implementation
        model.train().gradient_checkpointing_enable()
        model.zero_grad()
        with torch.autocast(DEVICE, BF16):
            loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        actual.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    difference = (actual[0] - actual[1]).norm() / actual[1].norm()
    assert difference < 4 * torch.finfo(BF16).eps


# ------------------------------------------------------------------------------- ordinary tensors, operators, tracing


OF_THE_CONTRACT = [
    ("nan_in_one_row_does_not_reach_another", "local causal"),
    ("nan_and_infinity_are_not_turned_into_numbers", "simple causal", torch.inf, "key"),
    ("nan_and_infinity_are_not_turned_into_numbers", "full causal", torch.nan, "key"),
    slow(("nan_and_infinity_are_not_turned_into_numbers", "conv 2-D", torch.inf, "key")),
    slow(("nan_and_infinity_are_not_turned_into_numbers", "alibi causal", torch.inf, "key")),
    ("nan_in_a_position_bias_is_not_turned_into_a_number", "local causal, window alone"),
    ("nan_in_a_position_bias_is_not_turned_into_a_number", "conv 2-D"),
    slow(("nan_in_a_position_bias_is_not_turned_into_a_number", "full causal")),
    ("later_tokens_do_not_change_earlier_outputs", "local causal", "1e4 larger"),
    ("an_outlier_of_small_weight_costs_the_gradients_of_others_no_precision", "local causal"),
    slow(("an_outlier_of_small_weight_costs_the_gradients_of_others_no_precision", "simple causal")),
    ("an_outlier_of_small_weight_costs_the_gradients_of_others_no_precision", "conv"),
    ("padding_of_any_size_reaches_no_real_token", "local causal", "left"),
    slow(("padding_of_any_size_reaches_no_real_token", "simple causal", "left")),
    slow(("padding_of_any_size_reaches_no_real_token", "conv causal", "right")),
    ("the_output_may_be_changed_in_place", "local causal"),
    slow(("inputs_and_gradients_need_not_be_contiguous", "local causal")),
    ("changing_an_input_before_the_backward_pass_is_an_error", "local causal"),
    ("nothing_is_kept_where_no_gradient_is_needed", "local causal"),
    ("only_what_is_trained_gets_a_gradient", "local causal", "position_bias"),
    slow(("batched_gradients_are_the_gradients_one_by_one", "local causal")),
    slow(("a_document_does_not_reach_another", "conv causal", torch.nan)),
    slow(("batched_gradients_are_the_gradients_one_by_one", "full")),
    slow(("a_whole_mixer_in_half_precision_is_as_exact_as_the_reference", "local causal", BF16, False, 100.0)),
    slow(("a_whole_mixer_in_half_precision_is_as_exact_as_the_reference", "conv causal", FP16, False, 100.0)),
]


@pytest.mark.parametrize("case", OF_THE_CONTRACT, ids=str)
def test_the_kernels_pass_a_test_of_the_contract(case, launched):
    name, *arguments = case
    getattr(contract, f"test_{name}")(*arguments, TRITON)


@pytest.mark.parametrize(
    ("structure", "changed", "size"),
    (
        ("local causal", "key", math.inf),
        ("conv 2-D", "key", math.nan),
        slow("local causal", "value", math.nan),
        slow("local causal, window alone", "key", math.nan),
        slow("conv causal", "key", math.inf),
        slow("full causal", "key", math.nan),
        slow("full", "key", math.inf),
        slow("simple causal", "key", math.nan),
        slow("alibi causal", "key", math.inf),
    ),
)
def test_gradients_that_are_not_defined_are_not_turned_into_numbers(structure, changed, size, launched):
    mixer, results = contract.build(structure, TRITON), []
    given = {"key": torch.randn(2, 35, mixer.k_proj.out_features), "value": torch.randn(2, 35, contract.WIDTH)}
    given[changed][1, 20, 0] = size
    double = copy.deepcopy(mixer).cpu().double()
    for module, backend, dtype in ((mixer, TRITON, FP32), (double, contract.Backend("reference", "cpu"), FP64)):
        key, value = (x.to(backend.device, dtype).requires_grad_() for x in given.values())
        biases = module.biases(value, contract.grid_of(module, 35))
        output = mixing_aft.mix(Mixing(key, value, module.num_heads, biases, module.causal), backend.name)
        weight = torch.linspace(0.2, 1, output.numel(), device=backend.device, dtype=dtype).view_as(output)
        wanted = [key, value, *contract.learned(module).values()]
        results.append([x.isfinite().cpu() for x in torch.autograd.grad(output, wanted, weight)])
    assert not results[1][0].all()
    torch.testing.assert_close(*results)


@structures(["local causal"])
def test_a_compiled_mixer_is_one_graph_with_the_same_results(structure, launched):
    mixer, x = contract.build(structure, TRITON), torch.randn(1, 40, contract.WIDTH, device=DEVICE)
    eager = contract.mixer_results(mixer, x)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    actual = contract.mixer_results(compiled, x)
    for name, expected in eager.items():
        torch.testing.assert_close(
            actual[name.replace("of ", "of _orig_mod.") if name not in actual else name], expected
        )


@structures(["simple"])
def test_what_kernels_do_not_compute_goes_to_the_portable_form(structure, monkeypatch):
    for module, name in ((causal_launch, "walk"), (causal_launch, "sweep"), (product_launch, "_forward")):
        monkeypatch.setattr(module, name, None)
    contract.assert_exact(contract.case(structure, FP32, 2, 35), TRITON)
    contract.assert_exact(contract.case("local causal", torch.float64, 1, 35), TRITON)
    contract.assert_exact(contract.case("local causal", FP32, 3, 35, "a pair mask"), TRITON)


@structures([slow("conv causal"), slow("alibi causal")])
def test_biases_of_rows_that_differ_and_padding_anywhere_are_those_of_the_schema(structure):
    """The kernels take one table for all rows, and positions from 0 on; the schema asks for neither."""
    mixer, length, batch = contract.build(structure, TRITON), 45, 2
    biases, heads = mixer.biases(torch.randn(1)), mixer.num_heads
    bias = biases.by_lag(length)
    first = torch.zeros(batch, length, dtype=torch.int64)
    first[0, 20:], first[1, 7:12], first[1, 12:] = 20, length, 12
    width = heads if isinstance(mixer, AFTConv) else contract.WIDTH
    given = [torch.randn(batch, length, n, device=DEVICE) for n in (contract.WIDTH, width, contract.WIDTH)]
    rows = torch.arange(batch, device=DEVICE)[:, None, None, None]
    given.append(None if bias is None else (bias.to(DEVICE) + rows).detach())
    slopes = None if biases.slopes is None else biases.slopes.to(DEVICE)
    others, actual = (slopes, first.to(DEVICE), biases.global_connectivity), []
    for operator in (torch.ops.aft_hf_v4.causal, partial(portable, "causal")):
        inputs = [x if x is None else x.clone().requires_grad_() for x in given]
        output = operator(*inputs, *others)
        leaves = [x for x in inputs if x is not None]
        actual.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert actual[0][0][1, 7:12].eq(0).all()
    torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------- operators that keep, and failures


def of_operator(name, batch=2):
    """Return arguments of an operator, for 6 tokens."""
    torch.manual_seed(0)
    shapes = {"causal": (1, 6, 2, 3), "grid": (2, 3, 3), "table": (2, 6, 6)}
    others = {"causal": (None, None, True), "grid": (2, 3, True), "table": (False,)}
    inputs = [torch.randn(shape, device=DEVICE) for shape in (*[(batch, 6, 4)] * 3, shapes[name])]
    return [*inputs, *others[name]]


@pytest.mark.parametrize("batch", (2, 0))
@pytest.mark.parametrize("name", ("causal", "grid", "table"))
def test_kept_results_and_gradients_are_as_the_fakes_say(name, batch):
    arguments = of_operator(name, batch)
    forward = getattr(torch.ops.aft_hf_v4, f"{name}_keeping").default
    backward = getattr(torch.ops.aft_hf_v4, f"{name}_backward_keeping").default
    actual = forward(*arguments)
    for bias_needed in (True, False):
        given = actual[0], *arguments, *actual[1:], bias_needed
        for operator, inputs in ((forward, arguments), (backward, given)):
            with FakeTensorMode() as mode:
                fake = operator(*(mode.from_tensor(x) if torch.is_tensor(x) else x for x in inputs))
            for x, y in zip(operator(*inputs), fake, strict=True):
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    if batch == 0:
        assert backward(*given[:-1], True)[3].eq(0).all()


@pytest.mark.parametrize("failing", ("forward", "backward"))
@pytest.mark.parametrize("name", ("causal", "grid", "table"))
def test_the_portable_form_computes_what_does_not_compile(name, failing, monkeypatch, caplog):
    monkeypatch.setattr(operators, "FAILED", set())
    monkeypatch.setattr(logging.getLogger("aft_hf"), "propagate", True)
    function = name if failing == "forward" else f"{name}_backward"
    monkeypatch.setattr(operators.launches(name), function, Mock(side_effect=OutOfResources(2, 1, "shared memory")))
    results, arguments = [], of_operator(name)
    for operator in (getattr(torch.ops.aft_hf_v4, name), partial(portable, name)):
        leaves = [x.clone().requires_grad_() for x in arguments[:4]]
        output = operator(*leaves, *arguments[4:])
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    if failing == "backward":  # a compiled program expects contiguous gradients
        transposed = torch.randn_like(arguments[2].mT).mT
        kept = getattr(torch.ops.aft_hf_v4, f"{name}_keeping")(*arguments)[1:]
        given = transposed, *arguments, *kept, True
        assert all(x.is_contiguous() for x in getattr(torch.ops.aft_hf_v4, f"{name}_backward_keeping")(*given))
    with torch.no_grad():
        torch.testing.assert_close(getattr(torch.ops.aft_hf_v4, name)(*arguments), results[1][0], rtol=1e-4, atol=1e-5)
    assert (name, FP32, arguments[0].device) in operators.FAILED
    operators.FAILED.clear()
    assert sum("do not work on" in x.message for x in caplog.records) == 1


def test_a_wrong_call_does_not_turn_a_kernel_off():
    query, key, value, bias, *others = of_operator("causal")
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        torch.ops.aft_hf_v4.causal(query, key, value, bias[0], *others)
    assert not operators.FAILED


@pytest.mark.parametrize(
    ("message", "raised"),
    (("out of memory", torch.OutOfMemoryError), ("operation not permitted when stream is capturing", RuntimeError)),
)
def test_errors_that_are_not_of_the_kernel_are_raised_and_do_not_turn_it_off(message, raised, monkeypatch):
    failing = Mock(side_effect=RuntimeError(f"Triton Error [CUDA]: {message}"))
    monkeypatch.setattr(operators.launches("causal"), "causal", failing)
    with pytest.raises(raised, match=message):
        torch.ops.aft_hf_v4.causal(*of_operator("causal"))


@pytest.mark.parametrize("name", ("causal", "grid", "table"))
def test_kernels_run_on_the_device_of_their_tensors(name, monkeypatch):
    """Triton launches on the current device, which in a model on several GPUs is another one."""
    current, outside, launch = [], [], type(causal_launch.walk_kernel).__getitem__

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    def recorded(kernel, programs):
        outside.extend([] if current else [kernel])
        return launch(kernel, programs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(type(causal_launch.walk_kernel), "__getitem__", recorded)
    inputs = [x.requires_grad_() if torch.is_tensor(x) else x for x in of_operator(name)]
    getattr(torch.ops.aft_hf_v4, name)(*inputs).sum().backward()
    assert not outside


def test_programs_of_large_batches_fit_the_axes_of_a_gpu(monkeypatch):
    """A GPU allows 2^31 - 1 programs on the first axis, and 65,535 on others."""
    actual = []

    def recorded(kernel, programs):
        actual.append(programs)
        return lambda *arguments, **options: None

    monkeypatch.setattr(type(causal_launch.walk_kernel), "__getitem__", recorded)
    shapes = {"table": (1, 9, 9), "grid": (384, 3, 3)}  # keys per feature; a head per feature
    for name, others in (("table", (False,)), ("grid", (3, 3, True))):
        with torch.device("meta"):
            value, bias = torch.empty(70_000, 9, 384), torch.empty(shapes[name])
        output, *kept = getattr(product_launch, name)(value, value, value, bias, *others, True)
        backward = getattr(product_launch, f"{name}_backward")
        backward(output, value, value, value, bias, *others, *kept, True)
    with torch.device("meta"):
        factors, starts = torch.empty(1, 9, 4), torch.empty(70_000, dtype=torch.int64)
    causal_launch.band(factors, factors, 0, 1, 3, starts)
    assert max(max(programs[1:], default=1) for programs in actual) <= 65_535


# -------------------------------------------------------------------------------------------------- memory they touch

GUARD, GUARDED = 512, 96  # guard elements on each side of a buffer, and their value, which any dtype holds


class Guarded:
    """Stands in for `torch` in the launches: new tensors lie between guards, and `empty` fills them with NaN."""

    def __init__(self):
        self.buffers = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype, device, fill=torch.nan):
        size = shape[0] if not isinstance(shape[0], int) else shape
        count = torch.Size(size).numel()
        buffer = torch.full((count + 2 * GUARD,), GUARDED, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + count].fill_(fill if dtype.is_floating_point else 0).view(size)

    def zeros(self, *shape, dtype, device):
        return self.empty(*shape, dtype=dtype, device=device, fill=0.0)

    def like(self, tensor):
        """Copy a tensor to a buffer between guards."""
        return self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, fill=0).copy_(tensor)

    def assert_untouched(self):
        assert self.buffers
        for buffer in self.buffers:
            assert buffer[:GUARD].eq(GUARDED).all() and buffer[-GUARD:].eq(GUARDED).all()


def between_nan(x: torch.Tensor) -> torch.Tensor:
    """Copy x into the middle of a buffer of NaN (-1 for integers)."""
    fill = torch.nan if x.is_floating_point() else -1
    buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    copy = buffer[GUARD : GUARD + x.numel()].view(x.shape)
    copy.copy_(x)
    return copy


@structures(["local causal", *map(slow, ("local causal, window alone", "conv causal"))])
def test_kernels_read_and_write_nothing_beyond_their_tensors(structure, monkeypatch):
    monkeypatch.setattr(causal_launch, "PROGRAMS", 1000)  # several segments
    dtype = BF16 if structure == "local causal" else FP32
    given, guarded = contract.case(structure, dtype, 1, 70, "documents"), Guarded()
    mixer, key, value = given.mixer.to(DEVICE), given.key.to(DEVICE), given.value.to(DEVICE)
    fields = {name: contract.to_device(x, DEVICE) for name, x in given.fields.items()}
    biases, first = mixer.biases(value), Visibility.of(None, fields["starts"]).first
    bias = biases.by_lag(70)
    problem = [value + 1, key, value, bias, biases.slopes, first]
    problem = [x if x is None else x.detach() for x in problem]
    given.mixer.cpu()

    def both_passes(gradient, *problem):
        output, *kept = causal_launch.causal(*problem, biases.global_connectivity, True)
        others = biases.global_connectivity, *kept, bias is not None
        gradients = causal_launch.causal_backward(gradient, *problem, *others)
        return [output, *(x for x in gradients if x is not None)]

    gradient = torch.linspace(0.2, 1, value.numel(), device=DEVICE, dtype=dtype).view_as(value)
    expected = both_passes(gradient, *problem)
    for module in (causal_launch, kept):
        monkeypatch.setattr(module, "torch", guarded)
    actual = both_passes(*(x if x is None else between_nan(x) for x in (gradient, *problem)))
    guarded.assert_untouched()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@structures(["local causal", slow("conv causal"), slow("alibi causal")])
def test_kernels_of_generation_read_and_write_nothing_beyond_their_tensors(structure, monkeypatch):
    mixer, guarded = contract.build(structure, TRITON), Guarded()
    x, states = torch.randn(2, 36, contract.WIDTH, device=DEVICE), []
    for state in (AFTLayerState(mixer.state_window, 50), AFTLayerState(mixer.state_window, 50)):
        with torch.no_grad():
            mixer(x[:, :1], state=state)
            if states:
                monkeypatch.setattr(causal_launch, "torch", guarded)
                for name, tensor in state._tensors().items():
                    setattr(state, name, guarded.like(tensor))
            outputs = [mixer(piece, state=state) for piece in x[:, 1:].split([34, 1], 1)]
        states.append([*outputs, *state._tensors().values()])
    guarded.assert_untouched()
    torch.testing.assert_close(*states)
