"""The operator `table` against Eq. 2 as printed, in float64: values and gradients, with every compiled variant."""

import math
from typing import NamedTuple

import pytest
import torch

from aft_hf.kernels.library import runnable_variants
from aft_hf.mixing_aft import Mixing, reference_mixing
from aft_hf.position_biases_aft import Dense, grid_table


OPS = torch.ops.aft_hf_v1
pytestmark = pytest.mark.skipif(not runnable_variants(), reason="no compiled kernels for this CPU")


class Problem(NamedTuple):
    """The arguments of `table`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    columns: int = 0
    causal: bool = False


class Shape(NamedTuple):
    batch: int
    length: int
    width: int
    heads: int
    key_per_head: bool = False
    grid: tuple[int, int] | None = None
    causal: bool = False
    gated: bool = True


SHAPES = [
    Shape(1, 1, 3, 1),
    Shape(2, 2, 8, 1, causal=True),
    Shape(3, 3, 40, 2),
    Shape(2, 37, 24, 3, gated=False),
    Shape(2, 37, 37, 37),
    Shape(9, 61, 33, 1),
    Shape(2, 37, 40, 2, True),
    Shape(5, 35, 24, 4, True, (5, 7)),
    Shape(40, 12, 12, 2, True, (3, 4)),
    Shape(5, 12, 120, 2, True),  # rows of the batch in two parts, of 3 and 2
    Shape(2, 35, 24, 24, grid=(5, 7)),
    Shape(2, 31, 6, 2, grid=(31, 1)),
    Shape(2, 31, 6, 3, True, grid=(1, 31), gated=False),
    Shape(2, 37, 40, 1, causal=True),
    Shape(1, 301, 20, 2, causal=True),  # several blocks of queries
    Shape(1, 301, 20, 2, True, causal=True),
]


def problem(shape: Shape, dtype=torch.float32, key_scale=1.0, bias_scale=1.0) -> Problem:
    torch.manual_seed(0)
    batch, length, width, heads = shape[:4]
    query, value = (torch.randn(batch, length, width).to(dtype) for _ in range(2))
    key = (key_scale * torch.randn(batch, length, heads if shape.key_per_head else width)).to(dtype)
    if shape.grid is None:
        bias = torch.randn(heads, length, length)
    else:
        bias = torch.randn(heads, 2 * shape.grid[0] - 1, 2 * shape.grid[1] - 1)
    columns = 0 if shape.grid is None else shape.grid[1]
    return Problem(query if shape.gated else None, key, value, bias_scale * bias, columns, shape.causal)


def eq_2(query, key, value, bias, columns, causal) -> torch.Tensor:
    """Eq. 2 as printed, in float64."""
    query, key, value, bias = (x if x is None else x.double() for x in (query, key, value, bias))
    if columns:
        bias = grid_table(bias, ((bias.shape[1] + 1) // 2, columns))
    return reference_mixing(Mixing(key, value, len(bias), Dense(bias), causal, query=query))


def gradients(function, given: Problem, weight: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x if x is None else x.detach().clone().requires_grad_() for x in given[:4]]
    output = function(*inputs, *given[4:])
    return list(torch.autograd.grad(output, [x for x in inputs if x is not None], weight.to(output.dtype)))


def assert_close(found: torch.Tensor, exact: torch.Tensor, allowed: float, scale: float = 0.0) -> None:
    assert found.shape == exact.shape and found.isfinite().all()
    error = (found.double() - exact).abs().max().item()
    assert error <= allowed * max(exact.abs().max().item(), scale), error


def assert_exact(given: Problem, allowed: float, logits: float = 8.0) -> None:
    """Compare values and gradients. Logits are rounded, which is a relative error of their exponentials."""
    dtype = given.value.dtype
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 0.0
    allowed = allowed * (1.0 + logits / 8.0) + rounding
    exact = eq_2(*given)
    assert_close(OPS.table(*given), exact, allowed)
    weight = torch.randn(exact.shape).to(dtype)
    # A gradient of a key or bias is a sum of gradients of values times differences of values, which may cancel.
    found, expected = gradients(OPS.table, given, weight), gradients(eq_2, given, weight.double())
    largest = max(x.abs().max().item() for x in expected)
    for x, y in zip(found, expected):
        assert_close(x, y.double(), allowed, largest)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_eq_2(shape, dtype, variant):
    assert_exact(problem(shape, dtype), 4e-6)


@pytest.mark.parametrize("scales", ((30.0, 1.0), (90.0, 1.0), (1.0, 100.0), (90.0, 300.0), (1e4, 1.0)), ids=str)
@pytest.mark.parametrize("shape", [x for x in SHAPES if x.length > 30], ids=str)
def test_large_keys_and_biases_are_finite_and_right(shape, scales, variant):
    given = problem(shape, torch.float32, *scales)
    largest = given.key.abs().max().item() + given.bias.abs().max().item()
    assert_exact(given, 4e-6, largest)


@pytest.mark.parametrize("shape", SHAPES[-4:], ids=str)
def test_gradients_are_exact_where_values_share_an_offset(shape, variant):
    given = problem(shape)
    moved = given._replace(value=(given.value * 64).round() / 64 + 512.0)  # exact in float32
    weight = torch.randn(given.value.shape)
    found, exact = gradients(OPS.table, moved, weight), gradients(eq_2, moved, weight)
    for x, y in zip(found[1:], exact[1:]):  # the gradient of the query is that of a large number
        assert_close(x, y.double(), 2e-5)


@pytest.mark.parametrize("later", (1e4, math.nan, math.inf), ids=str)
@pytest.mark.parametrize("shape", [x for x in SHAPES if x.causal and x.length > 100], ids=str)
def test_later_tokens_do_not_change_earlier_outputs_and_gradients(shape, later, variant):
    given = problem(shape)
    for last in (0, 143, 144, 200):
        key, value = given.key.clone(), given.value.clone()
        key[:, last + 1 :], value[:, last + 1 :] = later, later
        changed = given._replace(key=key, value=value)
        assert_close(OPS.table(*changed)[:, : last + 1], OPS.table(*given)[:, : last + 1].double(), 1e-5)
        if math.isfinite(later):
            weight = torch.zeros(given.value.shape)
            weight[:, : last + 1] = 1.0
            for x, y in zip(gradients(OPS.table, changed, weight), gradients(OPS.table, given, weight)):
                assert_close(x, y.double(), 1e-5)


@pytest.mark.parametrize("key_per_head", (False, True))
@pytest.mark.parametrize("hostile", (math.nan, math.inf, 1e30), ids=str)
def test_hidden_tokens_reach_no_query(key_per_head, hostile, variant):
    given = problem(Shape(2, 37, 40, 2, key_per_head))
    key, value, bias = given.key.clone(), given.value.clone(), given.bias.clone()
    key[:, 5] = -math.inf
    value[:, 5] = 0.0
    bias[:, :20, 30] = -math.inf
    expected = OPS.table(given.query, key, value, bias, 0, False)
    value[:, 5] = hostile  # hidden from all queries by its key
    value[:, 30] = hostile  # hidden from 20 queries by its biases
    found = OPS.table(given.query, key, value, bias, 0, False)
    assert_close(found[:, :20], expected[:, :20].double(), 1e-5)


@pytest.mark.parametrize("causal", (False, True))
def test_a_query_that_sees_nothing_gives_0_and_no_gradients(causal, variant):
    given = problem(Shape(2, 37, 40, 2, causal=causal))
    key, bias = given.key.clone(), given.bias.clone()
    key[0] = -math.inf
    bias[0, 7] = -math.inf
    given = given._replace(key=key, bias=bias)
    output = OPS.table(*given)
    assert output[0].eq(0).all() and output[1, 7, :20].eq(0).all() and output[1, 7, 20:].ne(0).all()
    found = gradients(OPS.table, given, torch.ones_like(output))
    assert all(x.isfinite().all() for x in found)
    assert all(x[0].eq(0).all() for x in found[:3]) and found[3][0, 7].eq(0).all()


def test_inputs_need_not_be_contiguous(variant):
    given = problem(Shape(3, 37, 40, 2))
    expected = OPS.table(*given)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given[:3]]
    bias = given.bias.mT.contiguous().mT
    assert OPS.table(*strided, bias, 0, False).equal(expected)
    columns = [x.mT.contiguous().mT for x in given[:3]]
    assert OPS.table(*columns, bias, 0, False).equal(expected)


def test_queries_and_keys_may_differ_in_number(variant):
    given = problem(Shape(2, 37, 40, 2, gated=False))
    assert_close(OPS.table(None, *given[1:3], given.bias[:, :11], 0, False), eq_2(*given)[:, :11], 4e-6)


def test_shapes_that_do_not_match_are_a_clear_error():
    given = problem(Shape(2, 37, 40, 2))
    for wrong in (
        given._replace(query=given.query[..., :1]),
        given._replace(key=given.key[..., :3]),
        given._replace(bias=given.bias[..., :36]),
        given._replace(columns=37),
        given._replace(bias=given.bias[:, :36], query=given.query[:, :36], causal=True),
    ):
        with pytest.raises(ValueError, match="do not match"):
            OPS.table(*wrong)


def test_a_batch_without_rows_gives_no_rows(variant):
    given = problem(Shape(2, 37, 40, 2))
    empty = Problem(*(x[:0].clone().requires_grad_() for x in given[:3]), given.bias.clone().requires_grad_())
    output = OPS.table(*empty)
    assert output.shape == (0, 37, 40)
    assert torch.autograd.grad(output.sum(), empty.bias)[0].eq(0).all()


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_any_number_of_threads_gives_the_same(threads, variant):
    given = problem(Shape(7, 61, 33, 1))
    weight = torch.randn(given.value.shape)
    expected = gradients(OPS.table, given, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x, y in zip(gradients(OPS.table, given, weight), expected):
            assert_close(x, y.double(), 1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", (SHAPES[3], SHAPES[7], SHAPES[13]), ids=str)
def test_the_operator_passes_opcheck(shape):
    given = problem(shape)
    inputs = [x if x is None else x.requires_grad_() for x in given[:4]]
    torch.library.opcheck(OPS.table.default, (*inputs, *given[4:]))


@pytest.mark.parametrize("shape", (SHAPES[2], SHAPES[7], SHAPES[1]), ids=str)
def test_gradients_of_gradients_are_right(shape):
    given = problem(shape)
    inputs = [x.requires_grad_() for x in given[:4]]

    def squares(function):
        found = torch.autograd.grad(function(*inputs, *given[4:]).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.double().square().sum() for x in found), inputs)

    for x, y in zip(squares(OPS.table), squares(eq_2)):
        assert_close(x, y.double(), 1e-4, 1e-3)
