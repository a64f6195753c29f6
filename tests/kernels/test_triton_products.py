"""The Triton kernels of `grid` and `table` against Eq. 2 in float64, in values and gradients.

Without a GPU the kernels are interpreted on the CPU, so the problems are small, and each covers a branch.
"""

import math

import pytest
import torch


pytest.importorskip("triton")

from test_triton import Guarded, between_nan

from aft_hf.kernels.triton import product_launch
from aft_hf.kernels.triton.kept import kept_like
from aft_hf.position_biases_aft import GridKernel


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy warns of inf - inf


class Operator(torch.autograd.Function):
    """An operator of `product_launch` with its backward pass."""

    @staticmethod
    def forward(ctx, name, query, key, value, w, *others):
        output, *kept = getattr(product_launch, name)(query, key, value, w, *others, True)
        ctx.name, ctx.others, ctx.kept = name, others, kept
        ctx.save_for_backward(query, key, value, w)
        expected = kept_like(name, key, value, w)
        assert [(x.shape, x.dtype) for x in kept] == [(x.shape, x.dtype) for x in expected]
        alone = getattr(product_launch, name)(query, key, value, w, *others, False)
        assert torch.equal(alone[0], output) or output.isnan().any()
        assert not any(x.numel() for x in alone[1:])
        return output

    @staticmethod
    def backward(ctx, gradient):
        backward = getattr(product_launch, f"{ctx.name}_backward")
        actual = backward(gradient, *ctx.saved_tensors, *ctx.others, *ctx.kept, ctx.needs_input_grad[4])
        shapes = zip(actual, ctx.saved_tensors)
        return None, *(None if x is None else y.view_as(x) for y, x in shapes), *(None for _ in ctx.others)


def exact(name, query, key, value, w, *others):
    """Eq. 2 element by element."""
    length, features = value.shape[1], value.shape[2] // len(w)
    bias = GridKernel(w, others[:2], others[2]).dense(length) if name == "grid" else w
    if others == (True,):  # causal
        bias = bias.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    logits = bias.repeat_interleave(features, 0).permute(1, 2, 0).unsqueeze(0)  # (1, T, T', d)
    key = key if key.shape == value.shape else key.repeat_interleave(features, 2)
    logits = logits + key.unsqueeze(1)
    nothing = (logits == -math.inf).all(2, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), 2).masked_fill(nothing, 0.0)
    hidden = weights.eq(0) & (logits == -math.inf)
    terms = torch.where(hidden, 0.0, weights * value.unsqueeze(1))
    return terms.sum(2) * (1.0 if query is None else torch.sigmoid(query))


def inputs(dtype, batch, length, width, heads, w_shape, *, per_head, keys=1.0, biases=1.0):
    torch.manual_seed(0)
    query, value, gradient = (torch.randn(batch, length, width).to(dtype) for _ in range(3))
    key = (keys * torch.randn(batch, length, heads if per_head else width)).to(dtype)
    return gradient, [query, key, value, biases * torch.randn(heads, *w_shape)]


def assert_equal_to_eq_2(name, gradient, given, *others, gated=True, largest_logit=8.0):
    """Check values and gradients. Rounding a logit is a relative error of its exponential."""
    dtype = given[2].dtype
    results = []
    for compute, of_dtype in ((Operator.apply, lambda x: x.to(DEVICE)), (exact, lambda x: x.double())):
        leaves = [of_dtype(x.detach()).requires_grad_() for x in given]
        call = [None, *leaves[1:]] if not gated else leaves
        output = compute(name, *call, *others)
        of_output = of_dtype(gradient).to(output.dtype)
        results.append([output, *torch.autograd.grad(output, [x for x in call if x is not None], of_output)])
    allowed = 8 * (math.sqrt(given[2].numel()) + largest_logit) * torch.finfo(FP32).eps
    allowed += 1.5 * torch.finfo(dtype).eps if dtype != FP32 else 0.0
    # Gradients of logits are sums of values times weights, which cancel
    largest = given[2].double().abs().max().item()
    for actual, expected in zip(*results):
        size = max(expected.abs().max().item(), largest)
        assert actual.isfinite().all()
        assert (actual.detach().double().cpu() - expected).abs().max().item() <= allowed * size
    return results


def some_slow(names, *quick):
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in names]


GRIDS = {
    "a key per head": (FP32, 3, (5, 7), 24, 2, (3, 3), True, True),
    "a key per head, bfloat16": (BF16, 3, (5, 7), 24, 2, (3, 3), True, True),
    "a key per head, float16": (FP16, 3, (5, 7), 24, 2, (3, 3), True, True),
    "heads of one feature": (FP32, 3, (3, 5), 3, 3, (3, 3), True, True),
    "heads of one feature, bfloat16": (BF16, 3, (3, 5), 3, 3, (3, 3), True, True),
    "a key per feature": (FP32, 2, (4, 3), 6, 2, (3, 5), False, True),
    "outside hidden": (FP32, 2, (4, 5), 8, 2, (3, 3), True, False),
    "a kernel larger than the grid": (FP32, 2, (3, 2), 8, 2, (7, 9), True, True),
    "one position": (FP32, 2, (1, 1), 8, 2, (3, 3), True, True),
    "positions outside in sums": (FP32, 2, (21, 12), 4, 1, (3, 5), True, True),
    "positions outside in sums, bfloat16": (BF16, 2, (21, 12), 4, 1, (3, 5), True, True),
    "a sequence": (FP32, 1, (1, 230), 4, 1, (1, 5), True, True),
    "a sequence, outside hidden": (FP32, 1, (1, 230), 4, 1, (1, 5), True, False),
    "a long grid, outside hidden": (BF16, 2, (21, 12), 4, 1, (3, 5), True, False),
    "a head in several parts": (FP32, 1, (2, 3), 64, 1, (3, 3), True, True),
    "more than one tile of columns": (FP32, 9, (2, 3), 15, 1, (3, 3), True, True),
}


@pytest.mark.parametrize("name", some_slow(GRIDS, "a key per head", "a sequence, outside hidden", "one position"))
def test_grids_equal_eq_2(name):
    dtype, batch, size, width, heads, kernel, per_head, connected = GRIDS[name]
    gated = name != "outside hidden"
    gradient, given = inputs(dtype, batch, size[0] * size[1], width, heads, kernel, per_head=per_head)
    assert_equal_to_eq_2("grid", gradient, given, *size, connected, gated=gated)


TABLES = {
    "a key per feature": (FP32, 2, 37, 6, 1, False, False),
    "a key per feature, bfloat16": (BF16, 2, 37, 6, 1, False, False),
    "a key per head": (FP32, 2, 70, 8, 2, True, False),
    "causal": (FP32, 2, 70, 4, 2, False, True),
    "causal, bfloat16": (BF16, 2, 70, 4, 2, False, True),
    "causal, float16": (FP16, 2, 70, 4, 2, False, True),
    "causal, a key per head": (FP32, 1, 130, 6, 1, True, True),
    "heads of one feature": (FP32, 3, 20, 3, 3, True, False),
    "one token": (FP32, 1, 1, 4, 1, False, True),
}


@pytest.mark.parametrize("name", some_slow(TABLES, "a key per feature", "causal"))
def test_tables_equal_eq_2(name):
    dtype, batch, length, width, heads, per_head, causal = TABLES[name]
    gradient, given = inputs(dtype, batch, length, width, heads, (length, length), per_head=per_head)
    assert_equal_to_eq_2("table", gradient, given, causal)


@pytest.mark.slow
def test_the_gradient_of_w_in_one_part_equals_eq_2(monkeypatch):
    monkeypatch.setattr(product_launch, "ENOUGH_PROGRAMS", 1)  # as for problems with many programs
    test_grids_equal_eq_2("a key per head")
    test_grids_equal_eq_2("heads of one feature")
    test_tables_equal_eq_2("a key per feature")


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "biases"), ((90.0, 1.0), (1.0, 50.0)))
@pytest.mark.parametrize("problem", ("grid, outside hidden", "causal table"))
def test_large_keys_and_biases_are_finite_and_right(problem, keys, biases):
    name = problem.split()[-1] if "table" in problem else "grid"
    others = ("causal" in problem,) if name == "table" else (3, 4, "hidden" in problem)
    shape = (12, 12) if name == "table" else (3, 3)
    gradient, given = inputs(FP32, 2, 12, 4, 2, shape, per_head=name == "grid", keys=keys, biases=biases)
    assert_equal_to_eq_2(name, gradient, given, *others, largest_logit=4 * (keys + biases))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "others", "slope"), (("grid", (3, 4, False), 3000.0), ("table", (True,), -3000.0)))
def test_keys_that_rise_or_fall_by_thousands_are_right(name, others, slope):
    gradient, given = inputs(FP32, 1, 12, 4, 2, (12, 12) if name == "table" else (3, 3), per_head=True)
    given[1] += torch.linspace(0, slope, 12)[:, None]
    assert_equal_to_eq_2(name, gradient, given, *others, largest_logit=3000.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("grid", "table"))
def test_a_large_common_offset_of_keys_and_values_costs_no_precision(name):
    others = (False,) if name == "table" else (3, 4, True)
    gradient, given = inputs(FP32, 2, 12, 4, 2, (12, 12) if name == "table" else (3, 3), per_head=True)
    given[1] = (given[1] + 1e4).float()
    given[2] = given[2].to(BF16).float() + 512.0
    actual, expected = assert_equal_to_eq_2(name, gradient, given, *others)
    for x, y in zip(actual[2:], expected[2:]):  # the gradients of keys, values and w do not depend on offsets
        assert (x.double().cpu() - y).norm() < 1e-4 * y.norm()


@pytest.mark.slow
@pytest.mark.parametrize("size", (math.nan,))
@pytest.mark.parametrize("case", ("key of -inf", "outside hidden", "entry of -inf", "later token"))
def test_hidden_tokens_reach_nothing(case, size):
    """Neither the outputs and gradients of tokens that do not see them, nor other rows of the batch."""
    name = "grid" if case in ("key of -inf", "outside hidden") else "table"
    gradient, given = inputs(FP32, 2, 12, 4, 2, (3, 3) if name == "grid" else (12, 12), per_head=True)
    others = (3, 4, case != "outside hidden") if name == "grid" else (case == "later token",)
    sees = torch.zeros(2, 12, dtype=torch.bool)
    if case == "key of -inf":
        given[1][1, 11] = -math.inf
    elif case == "outside hidden":
        sees[1, [6, 7, 10, 11]] = True  # its neighbours
    elif case == "entry of -inf":
        given[3][:, :8, 11] = -math.inf
        sees[1, 8:] = True
    else:
        sees[1, 11] = True
    gradient[sees] = 0.0
    expected = Operator.apply(name, *(x.to(DEVICE) for x in given), *others).cpu()
    hostile = [x.clone() for x in given]
    hostile[2][1, 11] = size
    leaves = [x.to(DEVICE).requires_grad_() for x in hostile]
    output = Operator.apply(name, *leaves, *others)
    torch.testing.assert_close(output.detach().cpu()[~sees], expected[~sees], rtol=1e-5, atol=1e-5)
    if math.isnan(size):
        assert output.isnan().any(-1).cpu().equal(sees)
    first = torch.autograd.grad(output, leaves, gradient.to(DEVICE))
    if not sees.any():
        assert all(x.isfinite().all() for x in first)


@pytest.mark.slow
def test_a_query_that_sees_nothing_gives_0_and_finite_gradients():
    for rows, columns, kernel in ((3, 4, (3, 3)), (1, 210, (1, 3))):
        size = rows * columns
        gradient, given = inputs(FP32, 2, size, 4, 2, kernel, per_head=True)
        given[1][0] = -math.inf
        given[1][1, : size - 4] = -math.inf
        for connected in (True, False):
            actual, _ = assert_equal_to_eq_2("grid", gradient, given, rows, columns, connected)
            assert actual[0][0].eq(0).all() and actual[0][1, :4].eq(0).all() != connected
    given[1][1, ::2] = 0.0  # queries between keys, which see nothing but themselves
    assert_equal_to_eq_2("grid", gradient, [*given[:3], given[3][..., 1:2]], 1, 210, False)


@pytest.mark.parametrize("case", ("grid", pytest.param("heads of one feature", marks=pytest.mark.slow), "table"))
def test_the_kernels_read_and_write_nothing_beyond_their_tensors(case, monkeypatch):
    name, heads = ("table", 2) if case == "table" else ("grid", 4 if case == "heads of one feature" else 2)
    shape, others = ((35, 35), (False,)) if name == "table" else ((3, 3), (5, 7, True))
    gradient, given = inputs(FP32, 2, 35, 4, heads, shape, per_head=True)
    gradient, *given = (x.to(DEVICE) for x in (gradient, *given))

    def both_passes(gradient, *given):
        output, *kept = getattr(product_launch, name)(*given, *others, True)
        backward = getattr(product_launch, f"{name}_backward")
        return [output, *backward(gradient, *given, *others, *kept, True)]

    expected, guarded = both_passes(gradient, *given), Guarded()
    monkeypatch.setattr(product_launch, "torch", guarded)
    actual = both_passes(*(between_nan(x) for x in (gradient, *given)))
    guarded.assert_untouched()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
