"""The contract of every backend: Eq. 2 for each structure of w, dtype, mask and shape, in values and gradients.

Every form and every structure of w in `STRUCTURES` is tested. Results are compared with
`reference_mixing` in float64, with the inputs rounded to the dtype under test. The allowed errors follow from the
dtype and the number of terms (`tolerance`). The second half tests the other guarantees one by one: causality in
floating point, hidden NaN, differentiation in every mode, memory, packed documents.
"""

import copy
import gc
import math
import warnings
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.mixing_aft import Mixing, Visibility, mix, reference_mixing


WIDTH = 8
LONGEST = 400  # number of positions that learned tables cover
GRIDS = {
    1: (1, 1),
    2: (2, 1),
    6: (2, 3),
    9: (3, 3),
    12: (3, 4),
    31: (1, 31),
    33: (11, 3),
    35: (5, 7),
    65: (5, 13),
    129: (3, 43),
}
HALF = (torch.bfloat16, torch.float16)

full = partial(AFTFull, WIDTH, LONGEST, position_bias_dim=4)
full_table = partial(AFTFull, WIDTH, LONGEST, position_bias_dim=None)
local = partial(AFTLocal, WIDTH, LONGEST, 3, position_bias_dim=4)
local_wide = partial(AFTLocal, WIDTH, LONGEST, 40, position_bias_dim=4)  # wider than a chunk
local_table = partial(AFTLocal, WIDTH, LONGEST, window_size=5, position_bias_dim=None)
sequence = partial(AFTConv, WIDTH, num_heads=2, kernel_size=5, spatial_dims=1)
grid = partial(AFTConv, WIDTH, num_heads=2, kernel_size=3)
CAUSAL, ALONE, NAIVE = {"causal": True}, {"global_connectivity": False}, {"position_bias_reparameterized": False}
SELECTED = {"position_bias_selection": "gumbel", **NAIVE}

# All structures of w. Tests select cases by the words "causal" and "2-D" in names; "negative" shifts biases below 0.
STRUCTURES = {
    "full": full,
    "full, 2 heads": partial(full, num_heads=2),
    "full, table, 4 heads": partial(full_table, num_heads=4),
    "full causal": partial(full, **CAUSAL),
    "full causal, 2 heads": partial(full, num_heads=2, **CAUSAL),
    "full causal, table": partial(full_table, **CAUSAL),
    "local": local,
    "local, window of 1": partial(local_table, window_size=1),
    "local, wide": local_wide,
    "local, table, 2 heads": partial(local_table, num_heads=2),
    "local, window alone": partial(local, **ALONE),
    "local causal": partial(local, **CAUSAL),
    "local causal, 2 heads": partial(local, num_heads=2, **CAUSAL),
    "local causal, wide": partial(local_wide, **CAUSAL),
    "local causal, table": partial(local_table, **CAUSAL),
    "local causal, window alone": partial(local, **CAUSAL, **ALONE),
    "local causal, wide, window alone": partial(local_wide, **CAUSAL, **ALONE),
    "simple": partial(AFTSimple, WIDTH),
    "simple causal": partial(AFTSimple, WIDTH, **CAUSAL),
    "simple causal, 2 heads": partial(AFTSimple, WIDTH, num_heads=2, **CAUSAL),
    "conv": sequence,
    "conv, kernel of 1": partial(sequence, kernel_size=1, **NAIVE),
    "conv, wide": partial(sequence, kernel_size=81),
    "conv, window alone": partial(sequence, **ALONE),
    "conv, selected": partial(sequence, **SELECTED),
    "conv, selected, negative": partial(sequence, **SELECTED),
    "conv causal": partial(sequence, **CAUSAL),
    "conv causal, even kernel": partial(sequence, kernel_size=4, **CAUSAL, **NAIVE),
    "conv causal, wide": partial(sequence, kernel_size=41, **CAUSAL),
    "conv causal, window alone": partial(sequence, **CAUSAL, **ALONE),
    "conv causal, selected": partial(sequence, **CAUSAL, **SELECTED),
    "conv causal, selected, negative": partial(sequence, **CAUSAL, **SELECTED),
    "conv 2-D": grid,
    "conv 2-D, 1 head": partial(grid, num_heads=1),
    "conv 2-D, naive": partial(grid, **NAIVE),
    "conv 2-D, larger than the grid": partial(grid, kernel_size=27),
    "conv 2-D, one key per feature": partial(grid, num_heads=WIDTH),
    "conv 2-D, window alone": partial(grid, **ALONE),
    "conv 2-D, selected": partial(grid, **SELECTED),
    "conv 2-D, selected, negative": partial(grid, **SELECTED),
    "conv 2-D, selected, window alone": partial(grid, **SELECTED, **ALONE),
    "alibi causal": partial(AFTAlibi, WIDTH, num_heads=2),
    "alibi causal, 1 head": partial(AFTAlibi, WIDTH, num_heads=1),
    "alibi causal, 8 heads": partial(AFTAlibi, WIDTH, num_heads=8),
}
ON_GRIDS = [name for name in STRUCTURES if "2-D" in name]
SEQUENCES = [name for name in STRUCTURES if name not in ON_GRIDS]
CAUSAL_ONES = [name for name in STRUCTURES if "causal" in name]
LEARNED = [name for name in STRUCTURES if not name.startswith(("simple", "alibi"))]
# One case of each structure, for tests that do not depend on sizes.
TYPICAL = ["full", "full causal", "local", "local causal", "local causal, window alone", "simple", "simple causal"]
TYPICAL += ["conv", "conv causal", "conv causal, selected", "conv 2-D", "conv 2-D, window alone", "conv 2-D, selected"]
TYPICAL += ["alibi causal"]
TYPICAL_SEQUENCES = [name for name in TYPICAL if name in SEQUENCES]


class Backend(NamedTuple):
    name: str
    device: str


# Every form on every available device, by its name as a `mixing_implementation`: "auto" stands for the operators where
# they are registered. Interpreted Triton kernels are tested in a file of their own.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
NAMED = [Backend(name, device) for name in ("auto", "portable") for device in DEVICES]


@pytest.fixture(params=NAMED, ids=" ".join)
def backend(request) -> Backend:
    return request.param


@pytest.fixture(params=[*NAMED, Backend("reference", "cpu")], ids=" ".join)
def backend_or_reference(request) -> Backend:
    return request.param


structures = partial(pytest.mark.parametrize, "structure")


def build(structure: str, backend: Backend, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    """Build a mixer with that structure and random position biases, in evaluation mode."""
    torch.manual_seed(0)
    mixer = STRUCTURES[structure](mixing_implementation=backend.name, **options).eval()
    for parameter in learned(mixer).values():
        nn.init.normal_(parameter)
        if "negative" in structure:
            parameter.data.sub_(4.0)
    return mixer.to(backend.device, dtype)


def learned(mixer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of w by name."""
    return {name: x for name, x in mixer.named_parameters() if name.startswith(("position_bias", "kernel"))}


def grid_of(mixer: nn.Module, length: int) -> tuple[int, int] | None:
    return GRIDS[length] if getattr(mixer, "spatial_dims", 1) == 2 else None


def with_grid(mixer: nn.Module, length: int) -> dict:
    size = grid_of(mixer, length)
    return {} if size is None else {"grid_size": size}


def keys_are_inputs(mixer: nn.Module) -> nn.Module:
    """Make the key projection the identity (its first rows, if there are fewer keys than features)."""
    with torch.no_grad():
        mixer.k_proj.weight.copy_(torch.eye(*mixer.k_proj.weight.shape))
        mixer.k_proj.bias.zero_()
    return mixer


# ------------------------------------------------------------------------------------------------------ allowed errors


def tolerance(dtype: torch.dtype, terms: int, largest_logit: float = 8.0) -> float:
    """Return the allowed relative error of sums of `terms` numbers, each of them exp(K + w) times a factor.

    Sums run in float32 at least. K + w is rounded to eps |K + w|, which is a relative error of its exponential; a few
    operations per term, such as the log-sum-exp shift, add to it. Rounding errors are independent, so the errors of n
    terms add up as sqrt(n). A factor of 8 is left for the order of the operations.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    return 8 * (math.sqrt(terms) + largest_logit) * torch.finfo(working).eps


def storage_error(dtype: torch.dtype) -> float:
    """Return the relative error of a result that is stored in half precision, in addition to `tolerance`."""
    return torch.finfo(dtype).eps if dtype in HALF else 0.0


def assert_within(actual: torch.Tensor, exact: torch.Tensor, allowed: float, what: str) -> None:
    actual = actual.detach().double().cpu()
    assert actual.shape == exact.shape, what
    assert actual.isfinite().all(), f"{what} is not finite"
    error = (actual - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def assert_as_exact(actual: dict, rounded: dict, exact: dict, factor: float, dtype: torch.dtype) -> None:
    """Check that errors in norm are at most `factor` times those of `rounded`, the reference in the same dtype."""
    for name, expected in exact.items():
        norm = expected.norm()
        errors = [((x[name].detach().double().cpu() - expected).norm() / norm).item() for x in (actual, rounded)]
        allowed = factor * errors[1] + torch.finfo(dtype).eps
        assert errors[0] <= allowed, f"{name}: error {errors[0]:.3g}, reference {errors[1]:.3g}"


# ------------------------------------------------------------------------------------------------ problems and results


def padding_mask(side: str, batch: int, length: int) -> torch.Tensor:
    """Return a mask (B, T): the last row is not padded, the others are padded by different numbers of tokens."""
    places, mask = torch.arange(length), torch.ones(batch, length, dtype=torch.bool)
    for row in range(max(batch - 1, 1)):
        count = (row + 1) * length // 4
        if side == "holes":
            mask[row] = torch.rand(length) < 0.6
            mask[row, 0], mask[row, 1] = row == 0, True
        else:
            mask[row] = places >= count if side == "left" else places < length - count
    return mask


def pair_mask(batch: int, length: int) -> torch.Tensor:
    mask = torch.rand(batch, length, length) < 0.5
    mask[:, length // 2] = False  # a query that sees no key
    return mask


def document_starts(batch: int, length: int) -> torch.Tensor:
    starts = torch.rand(batch, length) < 0.12
    starts[:, 0] = True
    return starts


# Masks, starts of documents, and positions for B rows of T tokens.
SEEN = {
    "everything": lambda batch, length: {},
    "left padding": lambda batch, length: {"padding_mask": padding_mask("left", batch, length)},
    "right padding": lambda batch, length: {"padding_mask": padding_mask("right", batch, length)},
    "holes": lambda batch, length: {"padding_mask": padding_mask("holes", batch, length)},
    "a pair mask": lambda batch, length: {"pair_mask": pair_mask(1, length)},
    "a pair mask per row": lambda batch, length: {"pair_mask": pair_mask(batch, length)},
    "both masks": lambda batch, length: {
        "padding_mask": padding_mask("right", batch, length),
        "pair_mask": pair_mask(batch, length),
    },
    "fewer queries": lambda batch, length: {"num_queries": length - 5},
    "documents": lambda batch, length: {"starts": document_starts(batch, length)},
    "documents and padding": lambda batch, length: {
        "starts": document_starts(batch, length),
        "padding_mask": padding_mask("right", batch, length),
    },
    "documents and holes": lambda batch, length: {
        "starts": document_starts(batch, length),
        "padding_mask": padding_mask("holes", batch, length),
    },
    "other positions": lambda batch, length: {"positions": torch.randperm(2 * length)[:length].unsqueeze(0)},
}
OF_SEQUENCES = ("documents", "documents and padding", "documents and holes", "other positions")


def one_key(place: int, size: float):
    def keys(*shape: int) -> torch.Tensor:
        key = torch.randn(shape)
        key[:, place] = size
        return key

    return keys


def ramp(first: float, last: float):
    return lambda *shape: torch.randn(shape) + torch.linspace(first, last, shape[1])[:, None]


# Keys (B, T, h k).
KEYS = {
    "moderate": lambda *shape: torch.randn(shape),
    "x 30": lambda *shape: 30 * torch.randn(shape),
    "x 90": lambda *shape: 90 * torch.randn(shape),
    "up to 1e4": lambda *shape: 1e4 * (2 * torch.rand(shape) - 1),
    "all 1e4": lambda *shape: torch.full(shape, 1e4),
    "all -1e4": lambda *shape: torch.full(shape, -1e4),
    "a rising ramp": ramp(0.0, 3000.0),
    "a falling ramp": ramp(3000.0, 0.0),
    "one huge, late": one_key(-3, 1e4),
    "one huge, early": one_key(1, 1e4),
    "one hidden by its size": one_key(4, -1e4),
}


class Case(NamedTuple):
    """A problem in the dtype under test, and its exact results."""

    mixer: nn.Module
    key: torch.Tensor
    value: torch.Tensor
    weight: torch.Tensor  # the gradient of the outputs, 0 for padding
    fields: dict
    exact: dict[str, torch.Tensor]


def results(mixer, key, value, weight, fields, implementation: str) -> dict[str, torch.Tensor]:
    """Return outputs and gradients by name; outputs of padding are set to 0."""
    key, value = (x.detach().clone().requires_grad_() for x in (key, value))
    biases, fields = mixer.biases(value, grid_of(mixer, key.shape[1])), dict(fields)
    seen = Visibility.of(fields.pop("padding_mask", None), fields.pop("starts", None))
    problem = Mixing(key, value, mixer.num_heads, biases, mixer.causal, visibility=seen, **fields)
    output = reference_mixing(problem) if implementation == "reference" else mix(problem, implementation)
    assert output.dtype == value.dtype
    inputs = {"key": key, "value": value, **learned(mixer)}
    gradients = torch.autograd.grad(output, list(inputs.values()), weight, materialize_grads=True)
    gradients = {f"gradient of {name}": x for name, x in zip(inputs, gradients)}
    return {"output": output * weight.ne(0)} | gradients


@cache
def case(structure, dtype, batch, length, seen="everything", keys="moderate", scale=None) -> Case:
    mixer = build(structure, Backend("reference", "cpu"), dtype)
    if scale is not None:
        scale_biases(mixer, length, scale)
    torch.manual_seed(1)
    key = KEYS[keys](batch, length, mixer.k_proj.out_features).to(dtype)
    value = torch.randn(batch, length, WIDTH).to(dtype)
    fields = SEEN[seen](batch, length)
    queries = fields.get("num_queries", length)
    # All weights have one sign, so that gradients of values do not cancel.
    weight = torch.linspace(0.2, 1, batch * queries * WIDTH).view(batch, queries, WIDTH).to(dtype)
    if "padding_mask" in fields:
        weight = weight * fields["padding_mask"][:, :queries, None]
    double = copy.deepcopy(mixer).double()
    exact = results(double, key.double(), value.double(), weight.double(), fields, "reference")
    return Case(mixer, key, value, weight, fields, {name: x.detach() for name, x in exact.items()})


def to_device(x, device: str):
    return x.to(device) if isinstance(x, (torch.Tensor, Visibility)) else x


def assert_exact(given: Case, backend: Backend, largest_key: float | None = None) -> None:
    """Check each result to its `tolerance`, relative to its largest entry, or to the terms that cancel if larger.

    Args:
        given: the case.
        backend: the backend under test.
        largest_key: the absolute value of keys whose rounding is allowed. Default: that of the largest key.
    """
    mixer, dtype = copy.deepcopy(given.mixer).to(backend.device), given.key.dtype
    tensors = (x.to(backend.device) for x in (given.key, given.value, given.weight))
    fields = {name: to_device(x, backend.device) for name, x in given.fields.items()}
    actual = results(mixer, *tensors, fields, backend.name)
    batch, length, width = given.value.shape
    with torch.no_grad():
        bias = copy.deepcopy(given.mixer).double().position_bias(length, **with_grid(mixer, length))
    finite = bias.masked_fill(bias.isinf(), 0.0).abs().max().item()
    largest_key = given.key.abs().max().item() if largest_key is None else largest_key
    allowed = tolerance(dtype, batch * length * width // mixer.num_heads, largest_key + finite)
    # The gradient of a logit is the gradient of V_t' times V_t' - Y_t, summed over the features that share the key, or
    # over the rows and features that share w. This bounds the terms that cancel in it.
    largest_value, value_gradient = given.value.abs().max().item(), given.exact["gradient of value"].abs()
    of_key = 2 * largest_value * value_gradient.max().item() * width / given.key.shape[-1]
    of_bias = 2 * largest_value * value_gradient.sum((0, 2)).max().item()
    for name, exact in given.exact.items():
        summed = {"output": largest_value, "gradient of key": of_key, "gradient of value": 0.0}.get(name)
        if summed is None:  # a gradient of biases may be multiplied by another factor
            summed = of_bias * max(x.abs().max().item() for x in learned(mixer).values())
        largest = exact.abs().max().item() if exact.numel() else 0.0
        assert_within(actual[name], exact, storage_error(dtype) * largest + allowed * max(largest, summed), name)


# ---------------------------------------------------------------------------- all structures, dtypes, masks and shapes


FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LONG = ["local", "local, wide", "local, window alone", "conv, wide", "local causal, wide", "full causal"]
SHAPES = [(FP32, 1, 1), (FP32, 3, 33), (FP32, 2, 129), (FP64, 2, 65), (BF16, 2, 65)]
# What the other shapes and masks reach depends on the type, and not on the number of heads or the width of a window.
SHAPES_OF_TYPICAL = [(FP32, 3, 2), (FP32, 1, 31), (FP64, 1, 2), (FP16, 2, 65)]
SEEN_BY_TYPICAL = ("right padding", "a pair mask", "documents", "documents and padding")


@pytest.mark.parametrize(
    ("structure", "dtype", "batch", "length", "seen"),
    [(x, *shape, "everything") for x in STRUCTURES for shape in SHAPES]
    + [(x, *shape, "everything") for x in TYPICAL for shape in SHAPES_OF_TYPICAL]
    + [(x, FP32, 1, 390, "everything") for x in LONG]
    + [
        (x, FP32, 3, 35, seen)
        for x in STRUCTURES
        for seen in SEEN
        if (x in SEQUENCES or seen not in OF_SEQUENCES) and (x in TYPICAL or seen not in SEEN_BY_TYPICAL)
    ]
    + [
        (x, BF16, 3, 35, seen)
        for x in TYPICAL_SEQUENCES
        for seen in ("left padding", "a pair mask per row", "documents")
    ],
    ids=str,
)
def test_a_backend_equals_the_reference_and_sums_in_float32(structure, dtype, batch, length, seen, backend):
    assert_exact(case(structure, dtype, batch, length, seen), backend)


# ----------------------------------------------------------------------------------------------- large keys and biases


def scale_biases(mixer: nn.Module, length: int, size: float) -> None:
    """Scale the parameters of w so that the largest position bias has about the absolute value `size`."""
    with torch.no_grad():
        bias = mixer.float().position_bias(length, **with_grid(mixer, length))
        factor = size / bias.masked_fill(bias.isinf(), 0.0).abs().max()
        parameters = learned(mixer)
        if "position_bias_query" in parameters:
            factor = factor.abs().sqrt()  # w is a product of two factors
        if "kernel_scale" in parameters:
            parameters.pop("kernel")  # it is standardized, so its scale has no effect
        for parameter in parameters.values():
            parameter.mul_(factor)


ALL = (2, 65, "everything")
SOME = ((3, 35, "a pair mask per row"), (3, 35, "holes"))


@pytest.mark.parametrize(
    ("structure", "dtype", "batch", "length", "seen", "keys", "largest_bias"),
    [(x, FP32, *ALL, keys, None) for x in STRUCTURES for keys in KEYS if x in TYPICAL or keys == "up to 1e4"]
    + [(x, dtype, *ALL, keys, None) for x in TYPICAL for dtype, keys in ((BF16, "x 90"), (FP16, "up to 1e4"))]
    + [(x, FP32, *some, keys, None) for x in TYPICAL for some in SOME for keys in ("one huge, late", "x 90")]
    + [(x, FP32, *ALL, "moderate", size) for x in LEARNED for size in (50.0, 150.0) if x in TYPICAL or size == 150.0]
    + [(x, FP32, *ALL, "x 90", 150.0) for x in TYPICAL if x in LEARNED],
    ids=str,
)
def test_large_keys_and_biases_are_right(structure, dtype, batch, length, seen, keys, largest_bias, backend):
    assert_exact(case(structure, dtype, batch, length, seen, keys, largest_bias), backend)


def test_a_decay_over_a_long_sequence_is_right_where_keys_make_up_for_it(backend):
    mixer, length = STRUCTURES["alibi causal, 8 heads"](mixing_implementation=backend.name).to(backend.device), 2**10
    slopes = 2.0 ** -torch.arange(1, 9)
    # exp(K + w) is about the same for all tokens, while K and w change by up to 512 from the first to the last token.
    key = -slopes * torch.arange(length)[:, None] + torch.randn(1, length, WIDTH)
    value = torch.randn(1, length, WIDTH)
    options = (torch.ones_like(value), {})
    actual = results(mixer, *(x.to(backend.device) for x in (key, value, options[0])), {}, backend.name)
    double = copy.deepcopy(mixer).cpu().double()
    exact = results(double, key.double(), value.double(), options[0].double(), {}, "reference")
    rounding = 2 * 512 * 2.0**-24 * value.abs().max().item()  # of K and of K + w in float32
    assert_within(actual["output"], exact["output"], tolerance(torch.float32, length) * 4 + rounding, "output")


# ----------------------------------------------------------------------------------------------------------- causality


def at_most(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    """Check that all entries are within `relative` times the largest entry."""
    assert_within(actual, expected.detach().double().cpu(), relative * expected.abs().max().item(), "output")


LATER = {"1e4 larger": 1e4, "-1e4": -1e4, "NaN": math.nan, "infinity": math.inf, "-infinity": -math.inf}


@pytest.mark.parametrize(
    ("structure", "later"),
    [(x, later) for x in CAUSAL_ONES for later in LATER if x in TYPICAL or later in ("1e4 larger", "NaN")],
)
def test_later_tokens_do_not_change_earlier_outputs(structure, later, backend):
    mixer = keys_are_inputs(build(structure, backend))
    x = torch.randn(2, 130, WIDTH, device=backend.device)
    with torch.no_grad():
        expected = mixer(x)
        for last in (0, 31, 74, 127):
            changed = x.clone()
            changed[:, last + 1 :] += LATER[later]
            at_most(mixer(changed)[:, : last + 1], expected[:, : last + 1])


@structures(CAUSAL_ONES)
def test_later_tokens_do_not_change_earlier_gradients(structure, backend):
    mixer = keys_are_inputs(build(structure, backend))
    x = torch.randn(2, 130, WIDTH, device=backend.device)
    for last in (0, 32, 74):
        gradients = []
        for larger in (0.0, 1e4):
            y = x.clone()
            y[:, last + 1 :] += larger
            y.requires_grad_()
            gradients.append(torch.autograd.grad(mixer(y)[:, : last + 1].sum(), y)[0])
        at_most(gradients[1][:, : last + 1], gradients[0][:, : last + 1])
        assert gradients[1][:, last + 1 :].eq(0).all()


@structures([name for name in STRUCTURES if "window alone" in name])
@pytest.mark.parametrize("size", (1e4, math.nan))
def test_tokens_beyond_the_window_do_not_change_outputs(structure, size, backend):
    mixer = keys_are_inputs(build(structure, backend))
    x = torch.randn(2, 129, WIDTH, device=backend.device)
    options = with_grid(mixer, 129)
    with torch.no_grad():
        expected = mixer(x, **options)
        for hidden in (0, 5, 20, 60):
            y = x.clone()
            y[:, hidden] = size
            far = mixer.position_bias(129, **options)[:, :, hidden].isinf().all(0).cpu()
            assert far.any()
            at_most(mixer(y, **options)[:, far], expected[:, far])


# ---------------------------------------------------------------------------------------------------- hidden positions


@pytest.mark.parametrize(
    ("structure", "side"),
    [(x, side) for x in STRUCTURES for side in ("left", "right", "holes") if x in TYPICAL or side == "left"]
    + [(x, "right, in packed rows") for x in TYPICAL_SEQUENCES],
)
def test_padding_of_any_size_reaches_no_real_token(structure, side, backend_or_reference):
    mixer = keys_are_inputs(build(structure, backend_or_reference))
    device, options = backend_or_reference.device, with_grid(mixer, 35)
    x, mask = torch.randn(3, 35, WIDTH).to(device), padding_mask(side.split(",")[0], 3, 35).to(device)
    if "packed" in side:
        options["visibility"] = Visibility.of(mask, document_starts(3, 35).to(device))
    else:
        options["attention_mask"] = mask
    with torch.no_grad():
        expected = mixer(x.masked_fill(~mask.unsqueeze(-1), 0.0), **options)[mask]
        for size in (math.nan, math.inf):
            hostile = x.masked_fill(~mask.unsqueeze(-1), size)
            at_most(mixer(hostile, **options)[mask], expected)
    for size in (1e4, math.nan):
        hostile = x.masked_fill(~mask.unsqueeze(-1), size).requires_grad_()
        output = mixer(hostile, **options)
        at_most(output[mask], expected)
        # A layer above, which computes with the padding, may return NaN for it.
        upstream = torch.ones_like(output).masked_fill(~mask.unsqueeze(-1), size * 0.0)
        gradient = torch.autograd.grad(output, hostile, upstream)[0]
        assert gradient[mask].isfinite().all() and (gradient[~mask].eq(0).all() or math.isnan(size))


@pytest.mark.parametrize(
    ("structure", "rows"), [(x, rows) for x in STRUCTURES for rows in (1, 3) if x in TYPICAL or rows == 3]
)
def test_nan_behind_a_pair_mask_reaches_no_query_that_does_not_see_it(structure, rows, backend_or_reference):
    mixer = build(structure, backend_or_reference)
    device, options = backend_or_reference.device, with_grid(mixer, 35)
    x, mask = torch.randn(3, 35, WIDTH).to(device), pair_mask(rows, 35).to(device)
    mask[:, 10:20, 30] = False
    mask[:, 20:, 30] = True
    sees = mask[:, :, 30].expand(3, -1)
    hostile = x.clone()
    hostile[:, 30] = math.nan
    actual, expected = (mixer(x, y, y, attention_mask=mask, **options) for y in (hostile, x))
    at_most(actual[~sees], expected[~sees])
    assert actual[:, 30].isnan().any(-1).all()


@pytest.mark.parametrize(
    ("structure", "masked"),
    [(x, masked) for x in STRUCTURES for masked in ("padding", "pairs") if x in TYPICAL or masked == "padding"],
)
def test_a_query_that_sees_nothing_gives_0_and_finite_gradients(structure, masked, backend_or_reference):
    mixer = build(structure, backend_or_reference)
    mixer.o_proj = nn.Identity()
    device = backend_or_reference.device
    x = torch.randn(2, 33, WIDTH, device=device, requires_grad=True)
    mask = torch.ones(2, 33, dtype=torch.bool) if masked == "padding" else pair_mask(2, 33)
    mask[1] = False
    output = mixer(x, attention_mask=mask.to(device), **with_grid(mixer, 33))
    assert output[1].eq(0).all() and output[0].ne(0).any()
    inputs = [x, *mixer.parameters()]
    assert all(g.isfinite().all() for g in torch.autograd.grad(output.sum(), inputs, materialize_grads=True))


@structures(STRUCTURES)
def test_nan_in_one_row_does_not_reach_another(structure, backend):
    mixer, x = build(structure, backend), torch.randn(3, 35, WIDTH, device=backend.device)
    options = with_grid(mixer, 35)
    expected = mixer(x, **options)
    x[1, 20] = math.nan
    output = mixer(x, **options)
    at_most(output[[0, 2]], expected[[0, 2]])
    assert output[1, 20].isnan().any()


@pytest.mark.parametrize(
    ("structure", "changed", "size"),
    [
        (x, changed, size)
        for x in STRUCTURES
        for changed in ("key", "value")
        for size in (math.nan, math.inf)
        if x in TYPICAL or (changed, size) != ("value", math.inf)
    ],
)
def test_nan_and_infinity_are_not_turned_into_numbers(structure, size, changed, backend):
    """Also not where a whole column of keys is NaN, as after a step of training that failed."""
    mixer = build(structure, backend)
    biases = mixer.biases(torch.empty(2, 35, WIDTH, device=backend.device), grid_of(mixer, 35))
    for tokens in (20, slice(None)):
        given = {"key": torch.randn(2, 35, mixer.k_proj.out_features), "value": torch.randn(2, 35, WIDTH)}
        given[changed][1, tokens, 0] = size
        key, value = (x.to(backend.device) for x in given.values())
        problem = Mixing(key, value, mixer.num_heads, biases, mixer.causal)
        with torch.no_grad():
            actual, expected = mix(problem, backend.name), reference_mixing(problem)
        assert not expected[1].isfinite().all()
        torch.testing.assert_close(actual.isfinite(), expected.isfinite())
        at_most(actual.nan_to_num(0.0, 0.0, 0.0), expected.nan_to_num(0.0, 0.0, 0.0))


@structures([x for x in TYPICAL if not x.startswith(("simple", "alibi"))])
@torch.no_grad()
def test_nan_in_a_position_bias_is_not_turned_into_a_number(structure, backend):
    mixer = build(structure, backend)
    next(iter(learned(mixer).values())).view(-1)[5] = math.nan
    key, value = (torch.randn(2, 35, x, device=backend.device) for x in (mixer.k_proj.out_features, WIDTH))
    problem = Mixing(key, value, mixer.num_heads, mixer.biases(value, grid_of(mixer, 35)), mixer.causal)
    actual, expected = mix(problem, backend.name), reference_mixing(problem)
    assert not expected.isfinite().all()
    torch.testing.assert_close(actual.isfinite(), expected.isfinite())


@structures(STRUCTURES)
def test_an_outlier_of_small_weight_costs_the_gradients_of_others_no_precision(structure, backend):
    mixer = build(structure, backend)
    torch.manual_seed(0)
    key, value = torch.randn(1, 35, mixer.k_proj.out_features), torch.randn(1, 35, WIDTH)
    key[:, 0], value[:, 0], gradients = -30.0, 1e6, []
    double = copy.deepcopy(mixer).cpu().double()
    for module, name, device, dtype in (
        (mixer, backend.name, backend.device, FP32),
        (double, "reference", "cpu", FP64),
    ):
        given = [x.to(device, dtype).requires_grad_() for x in (key, value)]
        biases = module.biases(given[1], grid_of(module, 35))
        output = mix(Mixing(*given, module.num_heads, biases, module.causal), name)[:, 1:]
        gradients.append([x[:, 1:] for x in torch.autograd.grad(output.square().sum(), given)])
    for actual, exact in zip(*gradients):
        at_most(actual, exact, tolerance(FP32, 35, 30.0))


# -------------------------------------------------------------------------------------------------------- whole mixers


def mixer_results(mixer, x: torch.Tensor, autocast: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the input and of all parameters, by name."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        output = mixer(x, **with_grid(mixer, x.shape[1]))
    weight = torch.linspace(0.2, 1, output.numel(), device=x.device).view_as(output).to(output.dtype)
    inputs = {"the input": x, **dict(mixer.named_parameters())}
    gradients = torch.autograd.grad(output, list(inputs.values()), weight, materialize_grads=True)
    return {"output": output.detach()} | {f"gradient of {name}": x for name, x in zip(inputs, gradients)}


def by_reference(
    mixer, x: torch.Tensor, dtype: torch.dtype = torch.float64, autocast: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return `mixer_results` of the reference implementation in another dtype on the CPU, converted to float64."""
    reference = copy.deepcopy(mixer).cpu().to(dtype)
    reference.mixing_implementation = "reference"
    return {name: y.double() for name, y in mixer_results(reference, x.cpu().to(dtype), autocast).items()}


def without_what_cancels(exact: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out gradients that are 0 up to rounding, such as the key's bias: they have no relative precision."""
    largest = max(x.abs().max().item() for x in exact.values())
    return {name: x for name, x in exact.items() if x.numel() and x.abs().max().item() > 1e-9 * largest}


def assert_mixer_exact(mixer, x: torch.Tensor) -> None:
    """Compare a mixer with the reference. Gradients that cancel, such as that of the key's bias, are compared relative
    to the terms that cancel in them.
    """
    actual, exact = mixer_results(mixer, x), by_reference(mixer, x)
    largest = max(g.abs().max().item() for name, g in exact.items() if name != "output")
    allowed = tolerance(x.dtype, x[..., 0].numel() * x.shape[-1])
    for name, expected in exact.items():
        own = expected.abs().max().item()
        assert_within(actual[name], expected, allowed * (own if name == "output" else max(own, largest)), name)


OPTIONS = {
    "": {},
    "no query": {"use_query": False},
    "no output projection": {"use_output_projection": False},
    "neither": {"use_query": False, "use_output_projection": False},
    "relu, no biases": {"query_activation": "relu", "qkv_bias": False},
}


@pytest.mark.parametrize(
    ("structure", "options", "dtype"),
    [(x, name, torch.float32) for x in STRUCTURES for name in OPTIONS if not name or x in TYPICAL]
    + [(x, "", torch.float64) for x in TYPICAL],
    ids=lambda value: str(value) or "as it is",
)
def test_a_whole_mixer_is_eq_2(structure, options, dtype, backend):
    mixer = build(structure, backend, dtype, **OPTIONS[options])
    x = torch.randn(2, 33, WIDTH, dtype=dtype, device=backend.device)
    assert_mixer_exact(mixer, x)
    with torch.no_grad():
        actual = mixer(x, **with_grid(mixer, 33))
    at_most(actual, by_reference(mixer, x)["output"])


OFFSET = [name for name in TYPICAL if "selected" not in name]


@pytest.mark.parametrize(
    ("structure", "dtype", "autocast", "offset"),
    [(x, BF16, False, 0.0) for x in STRUCTURES]
    + [(x, FP16, False, 0.0) for x in TYPICAL]
    + [(x, dtype, True, 0.0) for x in TYPICAL for dtype in HALF]
    + [(x, dtype, autocast, 100.0) for x in OFFSET for dtype in HALF for autocast in (False, True)],
    ids=str,
)
def test_a_whole_mixer_in_half_precision_is_as_exact_as_the_reference(structure, dtype, autocast, offset, backend):
    """Also where all values share an offset, which cancels in the gradients."""
    mixer, x = build(structure, backend), torch.randn(3, 65, WIDTH, device=backend.device)
    with torch.no_grad():
        mixer.v_proj.bias.add_(offset)
    if autocast:
        actual, rounded = mixer_results(mixer, x, dtype), by_reference(mixer, x, torch.float32, dtype)
        assert all(y.dtype == torch.float32 for name, y in actual.items() if name != "output")
        with torch.no_grad(), torch.autocast(backend.device, dtype):
            assert mixer(x, **with_grid(mixer, 65)).dtype == dtype
    else:
        mixer, x = mixer.to(dtype), x.to(dtype)
        actual, rounded = mixer_results(mixer, x), by_reference(mixer, x, dtype)
    assert actual["output"].dtype == dtype
    exact = without_what_cancels(by_reference(mixer, x))
    assert_as_exact(actual, rounded, exact, 1.25 if offset else 2.0, dtype)


@structures(TYPICAL_SEQUENCES)
@pytest.mark.parametrize("side", ("left", "holes"))
def test_a_padded_row_equals_the_row_alone(structure, side, backend_or_reference):
    mixer = build(structure, backend_or_reference)
    device = backend_or_reference.device
    x, mask = torch.randn(3, 35, WIDTH, device=device), padding_mask(side, 3, 35).to(device)
    output = mixer(x, attention_mask=mask)
    for row, real, actual in zip(x, mask, output):
        at_most(actual[real], mixer(row[real].unsqueeze(0))[0], tolerance(x.dtype, 35))


@structures(TYPICAL)
def test_inputs_and_gradients_need_not_be_contiguous(structure, backend):
    mixer = build(structure, backend)
    options = with_grid(mixer, 35)
    x = torch.randn(35, WIDTH, 2, device=backend.device).permute(2, 0, 1).requires_grad_()
    output = mixer(x, **options)
    at_most(output, mixer(x.contiguous(), **options), tolerance(x.dtype, 35))
    strided = torch.randn(WIDTH, 35, 2, device=backend.device).permute(2, 1, 0)
    for gradient in (torch.ones((), device=backend.device).expand(2, 35, WIDTH), strided):
        actual = torch.autograd.grad(output, x, gradient, retain_graph=True)[0]
        expected = torch.autograd.grad(mixer(x, **options), x, gradient.contiguous())[0]
        at_most(actual, expected, tolerance(x.dtype, 35 * WIDTH))


TRAINED = ("q_proj", "k_proj", "v_proj", "position_bias", "kernel")


@structures(["full", "local causal", "conv causal", "conv 2-D"])
@pytest.mark.parametrize("trained", TRAINED)
def test_only_what_is_trained_gets_a_gradient(structure, trained, backend):
    mixer, x = build(structure, backend), torch.randn(2, 35, WIDTH, device=backend.device)
    expected = mixer_results(mixer, x)
    for name, parameter in mixer.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    output = mixer(x, **with_grid(mixer, 35))
    if not output.requires_grad:  # this type has no parameters with that name
        assert not any(name.startswith(trained) for name, _ in mixer.named_parameters())
        return
    output.backward(torch.linspace(0.2, 1, output.numel(), device=x.device).view_as(output))
    for name, parameter in mixer.named_parameters():
        assert (parameter.grad is not None) == name.startswith(trained)
        if parameter.grad is not None:
            wanted = expected[f"gradient of {name}"]
            scale = max(wanted.abs().max().item(), expected["gradient of v_proj.weight"].abs().max().item())
            assert_within(parameter.grad, wanted.double().cpu(), scale * tolerance(x.dtype, 70 * WIDTH), name)


@structures(TYPICAL)
def test_nothing_is_kept_where_no_gradient_is_needed(structure, backend):
    mixer, kept = build(structure, backend).requires_grad_(False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x), lambda x: x):
        assert not mixer(torch.randn(2, 35, WIDTH, device=backend.device), **with_grid(mixer, 35)).requires_grad
    assert not kept


@structures(TYPICAL)
@pytest.mark.parametrize("training", (False, True))
def test_memory_is_free_without_garbage_collection(structure, training, backend):
    mixer, x = build(structure, backend), torch.randn(2, 129, WIDTH, device=backend.device)
    gc.disable()
    gc.freeze()  # objects from before the test are not collected or examined
    try:
        with torch.set_grad_enabled(training):
            output = mixer(x, **with_grid(mixer, 129))
        if training:
            output.sum().backward()
        del output
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [type(kept) for kept in gc.garbage if isinstance(kept, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@structures(["full", "simple causal", "local causal", "conv 2-D"])
@pytest.mark.parametrize("training", (False, True))
def test_hooks_of_the_gate_are_called(structure, training, backend):
    mixer, x, seen = build(structure, backend), torch.randn(2, 35, WIDTH, device=backend.device), []
    with torch.set_grad_enabled(training):
        plain = mixer(x, **with_grid(mixer, 35))
        mixer.query_activation.register_forward_hook(lambda *args: seen.append(args))
        at_most(mixer(x, **with_grid(mixer, 35)), plain, tolerance(x.dtype, 35 * WIDTH))
    assert len(seen) == 1


def test_one_gate_may_serve_all_features(backend):
    mixer, x = build("full", backend), torch.randn(2, 35, WIDTH, device=backend.device)
    mixer.q_proj = nn.Linear(WIDTH, 1).to(backend.device)
    with torch.no_grad():
        actual = mixer(x)
        mixer.query_activation.register_forward_hook(lambda *args: None)  # the gate is then applied after Eq. 2
        at_most(actual, mixer(x), tolerance(x.dtype, 35 * WIDTH))


# ---------------------------------------------------------------------------------------- outputs are ordinary tensors


@structures(TYPICAL)
def test_the_output_may_be_changed_in_place(structure, backend):
    mixer = build(structure, backend, **OPTIONS["neither"])
    for batch in (1, 2):
        x = torch.randn(batch, 9, WIDTH, device=backend.device, requires_grad=True)
        inputs, actual = [x, *mixer.parameters()], []
        for output in (mixer(x).mul_(2).add_(x), mixer(x) * 2 + x):
            actual.append((output, *torch.autograd.grad(output.square().sum(), inputs, materialize_grads=True)))
        torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-5)


@structures(["full", "full causal", "local causal", "conv 2-D"])
@pytest.mark.parametrize("options", ("", "neither"))
def test_a_gradient_that_others_share_is_not_changed(structure, options, backend):
    mixer = build(structure, backend, **OPTIONS[options])
    for shape in ((1, 1), (1, 9), (3, 1)):
        x = torch.randn(*shape, WIDTH, device=backend.device, requires_grad=True)
        given = torch.randn(shape[0], WIDTH, shape[1], device=backend.device).mT
        before, output = given.clone(), mixer(x)
        first, second = (torch.autograd.grad(output, x, given, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(given, before) and torch.equal(first, second)


@structures(TYPICAL)
def test_changing_an_input_before_the_backward_pass_is_an_error(structure, backend):
    mixer = build(structure, backend)
    x = torch.randn(2, 35, WIDTH, device=backend.device)
    for changed in (x, mixer.o_proj.weight):
        output = mixer(x, **with_grid(mixer, 35))
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@structures(TYPICAL)
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_an_activation_checkpoint_gives_the_same(structure, use_reentrant, backend):
    mixer = build(structure, backend).train()
    x = torch.randn(2, 35, WIDTH, device=backend.device, requires_grad=True)
    run = partial(mixer, **with_grid(mixer, 35))
    actual = []
    for call in (run, partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        output = call(x)
        output.square().sum().backward()
        actual.append((output.detach(), x.grad.clone()))
        x.grad = None
    torch.testing.assert_close(*actual)


# ----------------------------------------------------------------------------------------- differentiation and tracing


def doubles(structure, backend, length=5, batch=1):
    """Return a mixer and its reference in float64, and an input for both that requires gradients."""
    mixer = build(structure, backend, torch.float64)
    reference = copy.deepcopy(mixer)
    reference.mixing_implementation = "reference"
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64, device=backend.device, requires_grad=True)
    options = with_grid(mixer, length)
    return partial(mixer, **options), partial(reference, **options), x


@structures(TYPICAL)
def test_batched_gradients_are_the_gradients_one_by_one(structure, backend):
    mixer, x = build(structure, backend), torch.randn(2, 35, WIDTH, device=backend.device, requires_grad=True)
    output, inputs = mixer(x, **with_grid(mixer, 35)), [x, *mixer.parameters()]
    given = torch.randn(3, *output.shape, device=backend.device)
    options = {"retain_graph": True, "materialize_grads": True}
    batched = torch.autograd.grad(output, inputs, given, is_grads_batched=True, **options)
    for i in range(3):
        expected = list(torch.autograd.grad(output, inputs, given[i], **options))
        torch.testing.assert_close([x[i] for x in batched], expected, rtol=1e-4, atol=1e-4)


@structures(TYPICAL)
@pytest.mark.parametrize("masked", ("nothing", "padding", "pairs"))
def test_gradients_of_gradients_are_right(structure, masked, backend):
    mixer, _, x = doubles(structure, backend, 9, batch=2)
    if masked != "nothing":
        mask = padding_mask("right", 2, 9) if masked == "padding" else pair_mask(2, 9)
        mixer = partial(mixer, attention_mask=mask.to(backend.device))
    assert torch.autograd.gradcheck(mixer, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(mixer, x, fast_mode=True)


@structures(TYPICAL)
def test_gradients_of_gradients_of_parameters_are_those_of_the_reference(structure, backend):
    def second(mixer, parameters):
        (first,) = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *parameters], materialize_grads=True)

    mixer, reference, x = doubles(structure, backend, 9)
    torch.testing.assert_close(*(second(m, list(m.func.parameters())) for m in (mixer, reference)))


@structures(TYPICAL)
def test_gradients_of_gradients_are_finite_for_keys_far_apart(structure, backend):
    results = []
    for name in (backend.name, "reference"):
        mixer = build(structure, Backend(name, backend.device), torch.float64)
        x = torch.randn(4, 35, WIDTH, dtype=torch.float64, device=backend.device)
        if name != "reference":
            mixer, x = mixer.float(), x.float()
        with torch.no_grad():
            mixer.k_proj.weight.mul_(40)  # keys differ by 150
        (first,) = torch.autograd.grad(mixer(x.requires_grad_(), **with_grid(mixer, 35)).sum(), x, create_graph=True)
        first.square().mean().backward()
        results.append(mixer.k_proj.weight.grad.double())
    actual, expected = results
    assert (actual - expected).norm() < 1e-2 * expected.norm()


@structures(TYPICAL)
def test_forward_mode_is_that_of_the_reference(structure, backend):
    mixer, reference, x = doubles(structure, backend, 9)
    x = x.detach()
    tangent = torch.randn_like(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of decompositions that PyTorch compiles at the first call
        torch.testing.assert_close(*(torch.func.jvp(m, (x,), (tangent,)) for m in (mixer, reference)))


@structures(["full causal, table", "local", "local causal", "conv causal", "conv 2-D", "conv, selected"])
def test_forward_mode_by_parameters_is_that_of_the_reference(structure, backend):
    mixer, reference, x = doubles(structure, backend, 9)
    x = x.detach()
    for name in (*learned(mixer.func), "v_proj.bias"):
        value = mixer.func.get_parameter(name).detach()
        tangent = torch.randn_like(value)
        actual = []
        for m in (mixer, reference):

            def run(value, m=m, name=name):
                return torch.func.functional_call(m.func, {name: value}, (x,), m.keywords)

            actual.append(torch.func.jvp(run, (value,), (tangent,))[1])
        torch.testing.assert_close(*actual)


@pytest.mark.parametrize(
    ("structure", "mapped"),
    [
        (x, mapped)
        for x in STRUCTURES
        for mapped in ("inputs", "padding", "pairs")
        if x in TYPICAL or mapped == "inputs"
    ],
)
def test_vmap_is_a_loop(structure, mapped, backend):
    mixer, device = build(structure, backend), backend.device
    x = torch.randn(3, 2, 35, WIDTH, device=device)
    options = with_grid(mixer, 35)
    if mapped == "inputs":
        actual, expected = torch.func.vmap(partial(mixer, **options))(x), [mixer(y, **options) for y in x]
    else:
        masks = [padding_mask("left", 2, 35) if mapped == "padding" else pair_mask(2, 35) for _ in range(3)]
        masks = torch.stack(masks).to(device)
        run = partial(mixer, x[0], **options)
        actual = torch.func.vmap(lambda mask: run(attention_mask=mask))(masks)
        expected = [run(attention_mask=mask) for mask in masks]
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-4, atol=1e-5)


@structures(TYPICAL)
def test_vmap_of_gradients_gives_those_of_each_row(structure, backend):
    mixer, x = build(structure, backend), torch.randn(3, 9, WIDTH, device=backend.device)
    parameters, options = dict(mixer.named_parameters()), with_grid(mixer, 9)

    def loss(parameters, row):
        return torch.func.functional_call(mixer, parameters, row.unsqueeze(0), options).square().sum()

    actual = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, row in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, row), list(parameters.values()), materialize_grads=True)
        torch.testing.assert_close([actual[name][i] for name in parameters], list(expected), rtol=1e-4, atol=1e-4)


@structures(["full", "full causal", "local", "local causal"])
def test_vmap_of_wide_biases_is_exact_on_a_cpu(structure):
    mixer, x = build(structure, Backend("portable", "cpu")), torch.randn(3, 35, WIDTH)
    with torch.no_grad():
        mixer.k_proj.weight.mul_(30)
        for parameter in learned(mixer).values():
            parameter.mul_(8)  # w is a product of two
    rows = torch.func.vmap(lambda row: mixer(row.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(rows, mixer(x), rtol=1e-4, atol=1e-5)


@structures(["full", "full causal", "local", "local causal"])
def test_vmap_over_parameters_of_float64_is_exact_for_biases_that_differ_by_hundreds(structure):
    mixers = [build(structure, Backend("portable", "cpu"), torch.float64) for _ in range(2)]
    x = 100 * torch.randn(2, 35, WIDTH, dtype=torch.float64)
    for mixer in mixers:
        for parameter in learned(mixer).values():
            parameter.data.mul_(3)
        bias = mixer.position_bias(35)
        assert 80 < bias.amax() - bias.amin() < 500
    parameters, buffers = torch.func.stack_module_state(mixers)
    run = torch.func.vmap(lambda p, b: torch.func.functional_call(mixers[0], (p, b), (x,)))
    torch.testing.assert_close(run(parameters, buffers), torch.stack([mixer(x) for mixer in mixers]))


@structures(TYPICAL)
def test_the_default_device_does_not_matter(structure, backend):
    mixer, x = build(structure, backend), torch.randn(2, 35, WIDTH, device=backend.device)
    expected, weight = mixer_results(mixer, x), torch.linspace(0.2, 1, x.numel(), device=x.device).view_as(x)
    torch.set_default_device("meta")
    try:
        x.requires_grad_()
        output = mixer(x, **with_grid(mixer, 35))
        output.backward(weight)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(output, expected["output"])
    torch.testing.assert_close(x.grad, expected["gradient of the input"])


@structures(TYPICAL)
def test_a_dynamically_quantized_mixer_works(structure, backend):
    if backend.device != "cpu":
        pytest.skip("quantize_dynamic is for CPUs")
    mixer, x = build(structure, backend), torch.randn(2, 35, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        quantized = torch.ao.quantization.quantize_dynamic(mixer, {nn.Linear}, dtype=torch.qint8)
    options = with_grid(mixer, 35)
    torch.testing.assert_close(quantized.position_bias(35, **options), mixer.position_bias(35, **options))
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients):
            # Three layers with inputs and weights in steps of 1/127 of their range, and WIDTH terms each.
            at_most(quantized(x, **options), mixer(x, **options), 6 * WIDTH / 127)


def test_tracing_is_a_clear_error():
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        torch.jit.trace(build("local causal", NAMED[0]), torch.randn(2, 35, WIDTH), check_trace=False)


# --------------------------------------------------------------------------------------------------- float64, autocast


@structures(TYPICAL)
@pytest.mark.parametrize("options", ("", "neither"))
def test_float64_stays_float64_under_autocast(structure, options, backend):
    mixer = build(structure, backend, torch.float64, **OPTIONS[options])
    x = torch.randn(2, 33, WIDTH, dtype=torch.float64, device=backend.device)
    expected = mixer(x, **with_grid(mixer, 33))
    for dtype in HALF:
        for with_gradients in (False, True):
            with torch.set_grad_enabled(with_gradients), torch.autocast(backend.device, dtype):
                actual = mixer(x, **with_grid(mixer, 33))
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@structures(TYPICAL)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_backward_pass_may_run_under_autocast(structure, dtype, backend):
    mixer = build(structure, backend)
    x = torch.randn(2, 33, WIDTH, device=backend.device, requires_grad=True)
    with torch.autocast(backend.device, dtype):
        loss = mixer(x, **with_grid(mixer, 33)).float().square().mean()
        gradients = torch.autograd.grad(loss, [x, *mixer.parameters()], materialize_grads=True)
    assert all(gradient.isfinite().all() and gradient.dtype == torch.float32 for gradient in gradients)


@structures(STRUCTURES)
def test_the_position_bias_of_a_float64_mixer_is_float64(structure):
    for dtype, expected in ((torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)):
        mixer = build(structure, Backend("auto", "cpu"), dtype)
        assert mixer.position_bias(9, **with_grid(mixer, 9)).dtype == expected


# -------------------------------------------------------------------------------------------------------------- Eq. 10


SELECTIONS = [name for name in STRUCTURES if "selected" in name]


@structures(SELECTIONS)
def test_a_selection_at_inference_is_w_at_its_largest_entry_and_0_elsewhere(structure):
    mixer = build(structure, NAMED[0])
    kernel = mixer.kernel.detach()
    flat = kernel.flatten(1)
    expected = torch.zeros_like(flat).scatter(1, flat.argmax(-1, keepdim=True), flat.amax(-1, keepdim=True))
    torch.testing.assert_close(mixer.kernel_bias().detach(), expected.view_as(kernel))


@structures(SELECTIONS)
def test_a_selection_in_training_is_w_times_a_sample_of_the_gumbel_softmax(structure, backend):
    mixer = build(structure, backend, gumbel_temperature=0.3, position_bias_multiplier=1.5).train()
    w = 1.5 * mixer.kernel
    torch.manual_seed(3)
    sample = nn.functional.gumbel_softmax(w.flatten(1), tau=0.3).view_as(w)
    torch.manual_seed(3)
    torch.testing.assert_close(mixer.kernel_bias(), w * sample)
    x, noise = torch.randn(2, 35, WIDTH, device=backend.device), torch.get_rng_state()
    actual = mixer_results(mixer, x)
    torch.set_rng_state(noise)
    reference = copy.deepcopy(mixer).cpu()
    reference.mixing_implementation = "reference"
    expected = mixer_results(reference, x.cpu())
    largest = max(y.abs().max().item() for y in expected.values())
    assert expected["gradient of kernel"].ne(0).any()
    for name, y in expected.items():
        assert_within(actual[name], y.double(), tolerance(x.dtype, 35 * 2 * WIDTH) * largest, name)


# -------------------------------------------------------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns while the mode is active."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return output


def memory(mixer, x: torch.Tensor, **options) -> tuple[int, int]:
    """Return the number of elements of the largest tensor in a forward and backward pass, and of all tensors that are
    kept between the two passes.
    """
    kept = {}

    def keep(y):
        storage = y.untyped_storage()  # referenced, so that its address is not used again
        kept[storage.data_ptr()] = storage, storage.nbytes() // y.element_size()
        return y

    x = x.detach().clone().requires_grad_()
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
            loss = mixer(x, **options).sum()
        loss.backward()
    return largest.numbers, sum(count for _, count in kept.values())


LINEAR = {
    "simple": partial(AFTSimple, 16),
    "simple causal": partial(AFTSimple, 16, causal=True),
    "local": partial(AFTLocal, 16, 2048, 5, position_bias_dim=4),
    "local, window alone": partial(AFTLocal, 16, 2048, 5, position_bias_dim=4, **ALONE),
    "local causal": partial(AFTLocal, 16, 2048, 32, position_bias_dim=4, causal=True),
    "local causal, window alone": partial(AFTLocal, 16, 2048, 8, position_bias_dim=4, causal=True, **ALONE),
    "conv": partial(AFTConv, 16, 2, 11, spatial_dims=1),
    "conv causal": partial(AFTConv, 16, 2, 11, spatial_dims=1, causal=True),
    "conv causal, window alone": partial(AFTConv, 16, 2, 11, spatial_dims=1, causal=True, **ALONE),
    "conv causal, selected": partial(
        AFTConv, 16, 2, 11, spatial_dims=1, causal=True, position_bias_selection="gumbel"
    ),
    "alibi": partial(AFTAlibi, 16, 2),
}


def masks_of(kind: str, length: int) -> dict:
    if kind == "padding":
        return {"attention_mask": torch.arange(length).expand(2, length) >= 7}
    if kind == "documents":
        torch.manual_seed(4)
        starts = torch.rand(2, length) < 8 / length
        starts[:, 0] = True
        return {"visibility": Visibility.of(None, starts)}
    return {}


@structures(LINEAR)
@pytest.mark.parametrize("seen", ("everything", "padding", "documents"))
def test_linear_types_make_no_table_of_all_pairs(structure, seen, backend):
    mixer = LINEAR[structure](mixing_implementation=backend.name).to(backend.device).eval()
    options = {name: to_device(x, backend.device) for name, x in masks_of(seen, 2048).items()}
    largest, kept = memory(mixer, torch.randn(2, 2048, 16, device=backend.device), **options)
    # Activations have 65,536 elements; a table of all pairs has 4,194,304.
    assert largest < 2048 * 2048 // 4
    assert kept < 2048 * 2048


FULL = {
    "full": partial(AFTFull, max_positions=256, position_bias_dim=4),
    "full, 2 heads": partial(AFTFull, max_positions=256, position_bias_dim=4, num_heads=2),
    "full causal": partial(AFTFull, max_positions=256, position_bias_dim=4, causal=True),
    "local": partial(AFTLocal, max_positions=256, window_size=32, position_bias_dim=4),
    "conv": partial(AFTConv, num_heads=2, kernel_size=11, spatial_dims=1),
    "conv 2-D": partial(AFTConv, num_heads=2, kernel_size=11),
}


# Lost queries are summed again in groups that need at most this many numbers.
WORKSPACE = 2**24


def all_pairs(structure: str, backend: Backend, width: int, masked: bool, hostile: bool) -> tuple[int, int, int]:
    """Return the `memory` of a mixer, and the number of elements of a table of all pairs."""
    batch, length = 2, 256
    mixer = keys_are_inputs(FULL[structure](width, mixing_implementation=backend.name)).to(backend.device)
    mask = torch.rand(batch, length, length, device=backend.device) < 0.5
    mask[:, :, 7] = False
    key = torch.zeros(batch, length, width, device=backend.device)
    key[:, 7] = 1e4 * hostile
    x = torch.randn(batch, length, width, device=backend.device)
    largest, kept = memory(mixer, x, key=key, value=key, **({"attention_mask": mask} if masked else {}))
    return largest, kept, mixer.num_heads * length * length * (batch if masked else 1)


@structures(FULL)
@pytest.mark.parametrize("seen", ("everything", "a pair mask per row", "a key 1e4 larger"))
def test_no_tensor_of_t_x_t_x_d_is_made_or_kept(structure, seen, backend):
    masked, hostile = seen == "a pair mask per row", seen == "a key 1e4 larger"
    largest, kept, table = all_pairs(structure, backend, 64, masked, hostile)
    assert largest <= max(table, 6 * 2 * 256 * 64)
    assert kept <= 2 * 256 * 256 * 64 // 4


def test_no_tensor_of_t_x_t_x_d_is_made_or_kept_for_keys_dwarfed_by_hidden_ones(backend):
    width = 160
    assert 2 * 256 * 256 * width > WORKSPACE
    largest, kept, _ = all_pairs("full", backend, width, masked=True, hostile=True)
    assert largest <= WORKSPACE
    assert kept <= 2 * 256 * 256 * width // 4


# ---------------------------------------------------------------------------------------------------- packed documents


LENGTHS = ((17, 1, 5, 2, 40), (65,))


def packed_positions() -> torch.Tensor:
    """Return positions (2, 65) that start again at 0 with each document."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])


@structures(SEQUENCES)
def test_packed_documents_equal_the_documents_one_by_one(structure, backend_or_reference):
    """Gradients are tested with the other masks, against the reference."""
    mixer, device = build(structure, backend_or_reference), backend_or_reference.device
    x = torch.randn(2, 65, WIDTH, device=device)
    packed = mixer(x, visibility=Visibility.of(None, packed_positions().to(device) == 0))
    alone = [torch.cat([mixer(y[None])[0] for y in row.split(lengths)]) for row, lengths in zip(x, LENGTHS)]
    at_most(packed, torch.stack(alone), tolerance(x.dtype, 2 * 65 * WIDTH))


@pytest.mark.parametrize(
    ("structure", "size"),
    [(x, size) for x in SEQUENCES for size in (math.nan, 1e4) if x in TYPICAL or math.isnan(size)],
)
def test_a_document_does_not_reach_another(structure, size, backend_or_reference):
    mixer, device = keys_are_inputs(build(structure, backend_or_reference)), backend_or_reference.device
    x = torch.randn(2, 65, WIDTH, device=device)
    documents = Visibility.of(None, packed_positions().to(device) == 0)
    with torch.no_grad():
        expected = mixer(x, visibility=documents)
        x[0, 19] = size  # in the third document, which has the positions 18 .. 22 of the row
        actual = mixer(x, visibility=documents)
    for places in (slice(0, 18), slice(23, 65)):
        at_most(actual[0, places], expected[0, places])
    at_most(actual[1], expected[1])


@structures(TYPICAL_SEQUENCES)
def test_documents_of_a_traced_program_are_those_of_an_eager_one(structure, backend):
    """If the host cannot read the number of documents, as under vmap, a table of all pairs is used."""
    mixer, device = build(structure, backend), backend.device
    x, documents = torch.randn(3, 2, 65, WIDTH, device=device), Visibility.of(None, packed_positions() == 0)
    documents = to_device(documents, device)
    actual = torch.func.vmap(lambda y: mixer(y, visibility=documents))(x)
    torch.testing.assert_close(actual, torch.stack([mixer(y, visibility=documents) for y in x]), rtol=1e-4, atol=1e-5)


@structures(TYPICAL)
def test_a_batch_without_rows_is_a_batch_without_rows(structure, backend):
    mixer = build(structure, backend)
    output = mixer(torch.randn(0, 9, WIDTH, device=backend.device))
    assert output.shape == (0, 9, WIDTH)
    output.sum().backward()
    assert all(not x.grad.any() for x in mixer.parameters() if x.grad is not None)
