"""The operators against Eq. 2 as printed, in float64: values, gradients and states, with every compiled variant.

The reference makes a (B, T, T', d) tensor of all logits, so shapes are small.
"""

import ctypes
import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import test_backend_contract_aft as contract
import torch

from aft_hf.kernels import operators
from aft_hf.kernels.build import library_path
from aft_hf.kernels.library import load_from, runnable_variants


OPS = torch.ops.aft_hf_v4
pytestmark = pytest.mark.skipif(not runnable_variants(), reason="no compiled kernels for this CPU")
BF16, FP32 = torch.bfloat16, torch.float32


class Causal(NamedTuple):
    """The arguments of `causal`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    first: torch.Tensor | None = None
    global_connectivity: bool = True

    def table(self) -> torch.Tensor:
        """w of all pairs, (B, T, T', h), and -inf for hidden pairs."""
        batch, length, _ = self.value.shape
        t = torch.arange(length)
        lags = t[:, None] - t
        start = torch.zeros(batch, length, dtype=torch.long) if self.first is None else self.first
        seen = (lags >= 0) & (t >= start[:, :, None]) & (start <= t)[:, None]
        heads = operators.num_heads(self.bias, self.slopes)
        w = torch.zeros(batch, length, length, heads, dtype=self.key.dtype)
        if self.slopes is not None:
            w = w - self.slopes * lags[..., None]
        if self.bias is not None:
            size, position = self.bias.shape[-1], (t - start).clamp(0, self.bias.shape[1] - 1)
            rows = self.bias.expand(batch, -1, -1, -1)[torch.arange(batch)[:, None], position]
            queries, keys = ((lags >= 0) & (lags < size)).nonzero(as_tuple=True)
            of_pairs = rows[:, queries, :, size - 1 - queries + keys].transpose(0, 1)
            w = w.index_put((torch.arange(batch)[:, None], queries, keys), of_pairs)
            seen = seen & (lags < size) if not self.global_connectivity else seen
        return w.masked_fill(~seen[..., None], -math.inf)


class Grid(NamedTuple):
    """The arguments of `grid`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    rows: int
    columns: int
    global_connectivity: bool = True

    def table(self) -> torch.Tensor:
        """w of all pairs, (1, T, T', h)."""
        (heads, *size), tables = self.bias.shape, []
        for i, j in ((i, j) for i in range(self.rows) for j in range(self.columns)):
            w = self.bias.new_full((heads, self.rows, self.columns), 0.0 if self.global_connectivity else -math.inf)
            taps = [(i + a - size[0] // 2, j + b - size[1] // 2, a, b) for a in range(size[0]) for b in range(size[1])]
            taps = [x for x in taps if 0 <= x[0] < self.rows and 0 <= x[1] < self.columns]
            row, column, a, b = torch.tensor(taps).unbind(1)
            w = w.index_put((torch.arange(heads)[:, None], row, column), self.bias[:, a, b])
            tables.append(w.flatten(1).T)
        return torch.stack(tables)[None]


class Table(NamedTuple):
    """The arguments of `table`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    causal: bool = False

    def table(self) -> torch.Tensor:
        """w of all pairs, (1, T, T', h), and -inf for later keys."""
        w = self.bias
        if self.causal:
            w = w.masked_fill(torch.ones(w.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        return w.movedim(0, -1)[None]


Problem = Causal | Grid | Table
OPERATORS = {Causal: OPS.causal, Grid: OPS.grid, Table: OPS.table}


def operator(problem: Problem) -> torch.Tensor:
    return OPERATORS[type(problem)](*problem)


def eq_2(problem: Problem) -> torch.Tensor:
    """Eq. 2 as printed, over all pairs."""
    query, key, value = problem[:3]
    w, width = problem.table(), value.shape[2]
    key, w = key.repeat_interleave(width // key.shape[2], 2)[:, None], w.repeat_interleave(width // w.shape[3], 3)
    hidden = (key == -math.inf) | (w == -math.inf)  # whatever else is NaN
    logits = torch.where(hidden, -math.inf, key + w).masked_fill(hidden.all(2, keepdim=True), 0.0)
    weights = torch.where(hidden, 0.0, torch.softmax(logits, 2))
    average = (weights * torch.where(hidden, 0.0, value[:, None])).sum(2)
    return average if query is None else torch.sigmoid(query) * average


def causal(kind, batch, length, width, heads=1, window=5, *, global_connectivity=True, query=True) -> Causal:
    """Make a causal problem of a kind: "rows" (a row of w per position), "kernel", "slopes", "none"."""
    key_width = heads if kind == "kernel" else width
    tensors = [torch.randn(batch, length, n) for n in (width, key_width, width)]
    bias = slopes = None
    if kind in ("rows", "kernel"):
        bias = torch.randn(1, length if kind == "rows" else 1, heads, window)
    elif kind == "slopes":
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return Causal(tensors[0] if query else None, *tensors[1:], bias, slopes, global_connectivity=global_connectivity)


def grid(batch, rows, columns, width, heads, size, *, key_per_head=True, global_connectivity=True) -> Grid:
    key_width = heads if key_per_head else width
    tensors = (torch.randn(batch, rows * columns, n) for n in (width, key_width, width))
    return Grid(*tensors, torch.randn(heads, *size), rows, columns, global_connectivity)


def table(batch, length, width, heads, *, key_per_head=False, causal=False, query=True) -> Table:
    tensors = [torch.randn(batch, length, n) for n in (width, heads if key_per_head else width, width)]
    return Table(tensors[0] if query else None, *tensors[1:], torch.randn(heads, length, length), causal)


def with_gradients(function, problem: Problem, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and the gradients of query, key, value and bias, by name."""
    inputs = {
        name: x.detach().clone().requires_grad_() for name, x in zip(problem._fields, problem[:4]) if x is not None
    }
    output = function(problem._replace(**inputs))
    actual = torch.autograd.grad(output, list(inputs.values()), weight.to(output.dtype), materialize_grads=True)
    return {"output": output.detach()} | dict(zip(inputs, actual))


def to(problem: Problem, dtype: torch.dtype, count: int = 3) -> Problem:
    """Convert the first `count` arguments, which are query, key, value, w, ..., to a dtype."""
    changed = (x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in problem[:count])
    return type(problem)(*changed, *problem[count:])


def exact_results(
    problem: Problem, dtype: torch.dtype = FP32
) -> tuple[Problem, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the problem in a dtype, the gradient of its outputs, and its exact results."""
    problem = to(problem, dtype)
    weight = torch.linspace(0.2, 1, problem.value.numel()).view(problem.value.shape).to(dtype)
    return problem, weight, with_gradients(eq_2, to(problem, torch.float64, 5), weight.double())


def assert_exact(problem: Problem, weight: torch.Tensor, exact: dict[str, torch.Tensor]) -> None:
    """Check output and gradients. Logits are rounded, which is a relative error of their exponentials."""
    actual, is_bf16 = with_gradients(operator, problem, weight), problem.value.dtype == BF16
    finite = [x[x.isfinite()].abs() for x in (problem.key, problem.bias) if x is not None]
    logits = sum(x.max().item() for x in finite if x.numel())
    allowed = (8 * math.sqrt(max(problem.value.shape[1], 64)) + LOGIT_ROUNDINGS * logits) * torch.finfo(FP32).eps
    if is_bf16:  # factors of the matrix products of a table are rounded, too
        allowed += torch.finfo(BF16).eps * (1.0 if isinstance(problem, Table) else 0.6)
    largest = max((x.abs().max().item() for x in exact.values() if x.numel()), default=0.0)
    for name, y in exact.items():
        assert actual[name].isfinite().all(), name
        error, size = ((x.abs().max().item() if x.numel() else 0.0) for x in (actual[name].double() - y, y))
        # The gradient of a key or w is a sum of gradients of values times differences of values, which may cancel.
        scale = size if name in ("output", "value") else largest
        assert error <= allowed * scale + 1e-30, f"{name}: error {error:.3g} of {scale:.3g}"


LOGIT_ROUNDINGS = 4.0  # of K, of w, of K + w and of their common exponent
KINDS = ("rows", "kernel", "slopes", "none")
# (B, T, d, h, s): heads of several vectors, of one, of a part of one; primes; windows longer than the sequence.
CAUSAL_SHAPES = [(1, 1, 8, 1, 1), (2, 2, 8, 2, 3), (1, 3, 37, 1, 5), (2, 31, 16, 16, 4), (1, 67, 24, 3, 7)]
CAUSAL_SHAPES += [(2, 64, 64, 2, 9), (1, 65, 48, 2, 80), (1, 131, 16, 1, 33), (0, 5, 8, 2, 3), (2, 0, 8, 2, 3)]
# (B, rows, columns, d, h, kernel size)
GRID_SHAPES = [(2, 1, 1, 8, 8, (1, 1)), (1, 3, 4, 24, 24, (3, 3)), (2, 7, 9, 20, 10, (5, 5)), (0, 3, 3, 8, 8, (3, 3))]
GRID_SHAPES += [(1, 14, 14, 16, 16, (11, 11)), (2, 5, 8, 37, 37, (3, 15)), (1, 1, 31, 16, 4, (1, 7))]
GRID_SHAPES += [(1, 4, 6, 48, 2, (27, 27)), (3, 5, 16, 60, 20, (3, 5)), (1, 40, 1, 12, 6, (9, 1))]
PROBLEMS = {f"{kind} {shape}": partial(causal, kind, *shape) for kind in KINDS for shape in CAUSAL_SHAPES}
PROBLEMS |= {
    f"{kind} {shape} alone": partial(causal, kind, *shape, global_connectivity=False)
    for kind in ("rows", "kernel")
    for shape in CAUSAL_SHAPES
}
PROBLEMS |= {f"{kind} without query": partial(causal, kind, 2, 70, 16, 2, query=False) for kind in KINDS}
PROBLEMS |= {
    f"grid {shape}{' a key per feature' * (not shared)}{' alone' * alone}": partial(
        grid, *shape, key_per_head=shared, global_connectivity=not alone
    )
    for shape in GRID_SHAPES
    for shared in (True, False)
    for alone in (True, False)
}
TABLES = {
    "table (1, 1, 3, 1)": partial(table, 1, 1, 3, 1),
    "table (2, 2, 8, 1) causal": partial(table, 2, 2, 8, 1, causal=True),
    "table (3, 3, 40, 2)": partial(table, 3, 3, 40, 2),
    "table without query": partial(table, 2, 37, 24, 3, query=False),
    "table, a head per feature": partial(table, 2, 37, 37, 37),
    "table (9, 61, 33, 1)": partial(table, 9, 61, 33, 1),
    "table, a key per head": partial(table, 2, 37, 40, 2, key_per_head=True),
    "table of several parts of a head": partial(table, 2, 31, 150, 2),
    "table (2, 37, 40, 1) causal": partial(table, 2, 37, 40, 1, causal=True),
    "table of several blocks": partial(table, 1, 200, 20, 2, causal=True),
    "table of several blocks, a key per head": partial(table, 1, 200, 20, 2, key_per_head=True, causal=True),
    "table, empty batch": partial(table, 0, 37, 40, 2),
}
PROBLEMS |= TABLES
# One problem for each branch of the kernels: one head, and heads of a part of a vector.
TYPICAL = {
    f"{kind}, {heads} heads": partial(causal, kind, 2, 130, 16, heads, 9) for kind in KINDS for heads in (1, 16)
}
TYPICAL |= {f"{name} alone": partial(TYPICAL[name], global_connectivity=False) for name in TYPICAL if name[0] in "rk"}
TYPICAL |= {
    f"grid{' alone' * alone}{' a key per feature' * (not shared)}": partial(
        grid, 2, 5, 7, 20, 10, (3, 5), key_per_head=shared, global_connectivity=not alone
    )
    for alone in (False, True)
    for shared in (False, True)
}
TYPICAL |= {name: build for name, build in TABLES.items() if "several" in name or "a head per" in name}
TYPICAL |= {name: TABLES[name] for name in ("table (9, 61, 33, 1)", "table, a key per head")}
TYPICAL["table (2, 37, 40, 1) causal"] = TABLES["table (2, 37, 40, 1) causal"]
each = partial(pytest.mark.parametrize, "name")


@each(PROBLEMS)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_values_and_gradients_are_those_of_eq_2(name, dtype, variant):
    assert_exact(*exact_results(PROBLEMS[name](), dtype))


# ------------------------------------------------------------------------------------------------------ hostile values


def one_key(place: Any, size: float):
    def change(problem: Problem) -> Problem:
        problem.key[:, place] = size
        return problem

    return change


def scaled(keys: float, biases: float):
    """Multiply the keys, and spread w over a range of `biases`."""
    return lambda p: p._replace(
        key=keys * p.key, bias=None if p.bias is None else biases * torch.randn_like(p.bias).clamp(-2, 2) / 2
    )


HOSTILE = {name: lambda p, keys=keys: p._replace(key=keys(*p.key.shape)) for name, keys in contract.KEYS.items()}
HOSTILE |= {
    "biases of 300": scaled(1.0, 300.0),
    "biases of 300 and keys x 90": scaled(90.0, 300.0),
    "biases of 300 against keys of 200": lambda p: one_key(20, 200.0)(scaled(1.0, 300.0)(p)),
    "keys that grow": lambda p: p._replace(key=p.key + torch.linspace(0, 900, p.key.shape[1])[:, None]),
    "hidden keys": one_key(slice(3, 20), -math.inf),
    "hidden first keys": one_key(slice(0, 9), -math.inf),
    "values with an offset": lambda p: p._replace(value=p.value + 100),
}


@each(TYPICAL)
def test_hostile_values_are_exact(name, variant):
    for values, change in HOSTILE.items():
        try:
            assert_exact(*exact_results(change(TYPICAL[name]())))
        except AssertionError as error:
            raise AssertionError(values) from error


@pytest.mark.parametrize("size", (1e-25, 1e12))
@each([name for name in TYPICAL if "heads" in name])
def test_gradients_of_causal_operators_grow_with_those_of_the_output(name, size, variant):
    problem, weight = TYPICAL[name](), torch.randn(2, 130, 16)
    actual, of_one = (with_gradients(operator, problem, x) for x in (size * weight, weight))
    for key, gradient in of_one.items():
        expected = gradient if key == "output" else size * gradient
        torch.testing.assert_close(actual[key], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@each([name for name in TYPICAL if "table" in name or "grid" in name])
@pytest.mark.parametrize("hidden", (0.0, 0.8))
def test_gradients_are_exact_where_values_share_an_offset(name, hidden, variant):
    problem = TYPICAL[name]()
    keys = problem.key.masked_fill(torch.rand(*problem.key.shape[:2], 1) < hidden, -math.inf)
    problem = problem._replace(key=keys)
    problem = problem._replace(value=(problem.value * 64).round() / 64 + 512.0)  # exact in float32
    weight = torch.randn(problem.value.shape)
    actual = with_gradients(operator, problem, weight)
    exact = with_gradients(eq_2, to(problem, torch.float64, 5), weight.double())
    for key in ("key", "value", "bias"):
        error = (actual[key].double() - exact[key]).abs().max()
        assert error <= 2e-5 * exact[key].abs().max(), key


def test_rounding_errors_of_long_sums_do_not_add_up(variant):
    """Plain sums of equal values over 65,536 tokens are off by 7e-4 of the average."""
    length = 2**16
    key, value = (torch.full((1, length, 4), x) for x in (0.1, 1.1))
    kernel = torch.zeros(1, 3, 3)
    of_causal = Causal(None, key, value)
    for problem in (
        of_causal,
        of_causal._replace(bias=torch.zeros(1, 1, 1, 8)),
        of_causal._replace(slopes=torch.tensor([2.0**-30])),
        Grid(None, key, value, kernel, 1, length),
        Grid(None, key, value, kernel, length, 1),
    ):
        actual = with_gradients(operator, problem, torch.ones_like(value))
        of_value = torch.ones(length, dtype=torch.float64)
        if isinstance(problem, Causal):  # of 1 / (t + 1) over the queries t from a token on
            of_value = (1 / torch.arange(1, length + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
        exact = of_value[None, :, None].expand(1, -1, 4)
        # In chunks of 128 tokens, 128 roundings in each of both sums, and as many as there are chunks.
        allowed = 2 * (128 + length / 128) * torch.finfo(FP32).eps / 2
        torch.testing.assert_close(actual["output"], value, rtol=allowed, atol=0)
        torch.testing.assert_close(actual["value"].double(), exact, rtol=2 * allowed, atol=0)


def test_taps_that_lie_off_the_grid_for_every_query_have_no_effect(variant):
    for global_connectivity in (False, True):
        problem = grid(2, 2, 3, 8, 2, (5, 7), global_connectivity=global_connectivity)
        weight = torch.randn(problem.value.shape)
        expected = with_gradients(operator, problem, weight)
        for size in (1e4, math.nan):
            problem.bias[:, (0, -1)] = problem.bias[:, :, (0, -1)] = size
            torch.testing.assert_close(with_gradients(operator, problem, weight), expected)


@pytest.mark.parametrize("slope", (0.9, 1.5, 3.0, 10.0))
def test_far_keys_count_for_any_slope(slope, variant):
    problem = causal("slopes", 2, 200, 16, 2)._replace(slopes=torch.full((2,), slope))
    assert_exact(*exact_results(one_key(3, 300 * slope)(problem)))


def documents(batch: int, length: int, share: float, padding: bool) -> torch.Tensor:
    """Make `first` with documents of random lengths; some of them become padding."""
    torch.manual_seed(3)
    first = torch.zeros(batch, length, dtype=torch.long)
    for row in first:
        begin, hidden = 0, False
        for t in range(length):
            if t == 0 or torch.rand(()) < share:
                begin, hidden = t, padding and bool(torch.rand(()) < 0.3)
            row[t] = t + 1 if hidden else begin
    return first


@each([name for name in TYPICAL if name[0] in "rksn"])
@pytest.mark.parametrize("share", (0.5, 0.03))
@pytest.mark.parametrize("padding", (False, True))
def test_documents_and_padding_are_exact_and_what_is_hidden_stays_there(name, share, padding, variant):
    problem = TYPICAL[name]()._replace(first=documents(2, 130, share, padding))
    assert_exact(*exact_results(problem))
    if padding:
        weight = torch.ones_like(problem.value)
        hidden = (problem.first > torch.arange(130)).unsqueeze(-1)
        hostile = problem._replace(
            **{n: getattr(problem, n).masked_fill(hidden, math.nan) for n in ("query", "key", "value")}
        )
        expected, actual = (with_gradients(operator, x, weight) for x in (problem, hostile))
        torch.testing.assert_close(actual, expected)


@each(TYPICAL)
def test_hidden_keys_hide_values_that_are_not_finite(name, variant):
    problem = TYPICAL[name]()
    hidden = torch.rand(*problem.value.shape[:2], 1) < 0.3
    problem = problem._replace(key=problem.key.masked_fill(hidden, -math.inf))
    for size in (math.nan, math.inf, 1e30):
        values = (problem.value.masked_fill(hidden, x) for x in (0.0, size))
        expected, actual = (operator(problem._replace(value=value)) for value in values)
        torch.testing.assert_close(actual, expected)


def test_biases_of_minus_infinity_hide_tokens_from_some_queries(variant):
    for key_per_head in (False, True):
        problem = table(2, 37, 40, 2, key_per_head=key_per_head)
        problem.bias[:, :20, 30] = problem.bias[:, 7] = -math.inf
        actual = with_gradients(operator, problem, torch.ones_like(problem.value))
        assert all(x.isfinite().all() for x in actual.values()) and actual["output"][:, 7].eq(0).all()
        problem.value[:, 30] = math.nan
        torch.testing.assert_close(operator(problem)[:, :20], actual["output"][:, :20])


@each(TYPICAL)
@pytest.mark.parametrize("argument", ("query", "key", "value", "bias"))
def test_nan_and_infinity_reach_what_they_reach_in_eq_2_and_nothing_else(name, argument, variant):
    problem = TYPICAL[name]()
    changed = getattr(problem, argument)
    if changed is None:
        pytest.skip("the problem has no such argument")
    if argument == "bias":
        changed.flatten()[torch.tensor([3, -5])] = torch.tensor([math.nan, math.inf])
    else:
        problem.key[:, 7], problem.value[:, 7] = -math.inf, math.nan
        changed[:, 20, 0], changed[:, -3, -1] = math.nan, -math.inf if argument == "value" else math.inf
    weight = torch.linspace(0.2, 1, problem.value.numel()).view(problem.value.shape)
    actual = with_gradients(operator, problem, weight)
    exact = with_gradients(eq_2, to(problem, torch.float64, 5), weight.double())
    for result, y in exact.items():
        number = y.isfinite()
        assert torch.equal(actual[result].isfinite(), number), result
        torch.testing.assert_close(actual[result][number], y[number].float(), rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------- layouts, threads, errors


@each(TYPICAL)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_inputs_may_be_parts_of_one_tensor_and_gradients_have_any_strides(name, dtype, variant):
    problem = to(TYPICAL[name](), dtype)
    together = torch.cat(problem[:3], -1).transpose(0, 1).contiguous().transpose(0, 1)
    parts = together.split([x.shape[-1] for x in problem[:3]], -1)
    columns = [x.mT.contiguous().mT for x in problem[:3]]
    gradient = torch.randn(problem.value.shape[::-1]).to(dtype).permute(2, 1, 0)
    expected = with_gradients(operator, problem, gradient.contiguous())
    for query, key, value in (parts, columns):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        output = operator(type(problem)(*inputs, *problem[3:]))
        actual = [output.detach(), *torch.autograd.grad(output, inputs, gradient, retain_graph=True)]
        torch.testing.assert_close(actual, [expected[n] for n in ("output", "query", "key", "value")], rtol=0, atol=0)
        one = torch.ones((), dtype=dtype).expand(problem.value.shape)
        assert all(x.isfinite().all() for x in torch.autograd.grad(output, inputs, one))


@each([*(f"{kind}, 1 heads" for kind in KINDS), "grid", "table (9, 61, 33, 1)", "table of several blocks"])
def test_the_number_of_threads_does_not_matter(name, variant):
    problem, before = TYPICAL[name](), torch.get_num_threads()
    weight, results = torch.randn_like(problem.value), []
    try:
        for count in (1, 2, 3, 64):
            torch.set_num_threads(count)
            results.append(with_gradients(operator, problem, weight))
            again = with_gradients(operator, problem, weight)
            torch.testing.assert_close(again, results[-1], rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)
    for actual in results[1:]:
        torch.testing.assert_close(actual, results[0], rtol=1e-5, atol=1e-5)


def test_arguments_that_do_not_match_are_errors(variant):
    of_causal, of_table = causal("rows", 2, 20, 16, 2, 4), table(2, 37, 40, 2)
    wrong = [
        of_causal._replace(query=torch.randn(2, 20, 8)),
        of_causal._replace(key=torch.randn(2, 20, 4)),
        of_causal._replace(bias=torch.randn(1, 20, 3, 4)),
        of_causal._replace(bias=torch.randn(3, 20, 2, 4)),
        of_causal._replace(bias=torch.randn(1, 0, 2, 4)),
        of_causal._replace(bias=torch.randn(1, 20, 2, 4).bfloat16()),
        of_causal._replace(slopes=torch.ones(2)),
        of_causal._replace(first=torch.zeros(2, 19, dtype=torch.long)),
        of_causal._replace(first=torch.zeros(2, 20)),
        grid(2, 3, 4, 8, 4, (3, 3))._replace(rows=4),
        grid(2, 3, 4, 8, 4, (3, 2)),
        grid(2, 3, 4, 8, 4, (3, 3))._replace(rows=-3, columns=-4),
        of_table._replace(key=of_table.key[..., :3]),
        of_table._replace(bias=of_table.bias[..., :36]),
        of_table._replace(bias=of_table.bias[:, :36], query=of_table.query[:, :36]),
    ]
    for problem in wrong:
        with pytest.raises(ValueError, match="do not match"):
            operator(problem)
    state = empty_state(of_causal, 2)
    with pytest.raises(ValueError, match="do not match"):
        OPS.causal_state(*of_causal._replace(bias=torch.randn(1, 20, 4, 4)), *state)  # of more heads than the state
    for i in range(5):
        for change in (lambda x: x[..., :1, :0], lambda x: x.half(), lambda x: x.mT.contiguous().mT):
            changed = [change(x) if i == j else x for j, x in enumerate(state)]
            if not all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(changed, state)):
                with pytest.raises(ValueError, match="do not match"):
                    OPS.causal_state(*of_causal, *changed)


def test_what_no_kernel_takes_is_computed_by_the_portable_form(variant):
    problem = causal("rows", 2, 20, 16, 2, 4)
    for changed in (
        problem._replace(query=problem.query[..., :1]),
        problem._replace(key=problem.key.bfloat16()),
        to(problem, torch.float16, 3),
    ):
        exact = eq_2(to(changed, torch.float64, 5))
        torch.testing.assert_close(operator(changed).double(), exact, rtol=1e-3, atol=1e-3)


def test_a_thread_that_fails_is_an_error(variant):
    parallel_for = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2)(lambda *_: 1)
    two = ctypes.c_uint32(2)
    get_num_threads = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(
        lambda count: ctypes.memmove(count, ctypes.addressof(two), 4) and 0
    )
    functions = (ctypes.cast(function, ctypes.c_void_p) for function in (parallel_for, get_num_threads))
    operators.KERNELS.aft_use_threads_of_torch(*functions)
    try:
        for problem in (causal("rows", 4, 256, 64), grid(4, 16, 16, 64, 64, (3, 3)), table(4, 256, 64, 1)):
            with pytest.raises(RuntimeError, match="failed"):
                operator(problem)
    finally:
        load_from(library_path(variant))  # with the threads of PyTorch


# -------------------------------------------------------------------------------------------------------------- states


def empty_state(problem: Causal, heads: int) -> list[torch.Tensor]:
    batch, _, width = problem.value.shape
    kept = 0 if problem.bias is None else problem.bias.shape[-1] - 1
    key_width = problem.key.shape[2] // heads
    keys = torch.full((batch, heads, kept, key_width), -math.inf)
    values = torch.zeros(batch, heads, kept, width // heads)
    numerator = torch.zeros(batch, heads, 1, width // heads, dtype=torch.float64)
    denominator = torch.zeros(batch, heads, 1, key_width, dtype=torch.float64)
    return [keys, values, numerator, denominator, torch.full(denominator.shape, -1e30)]


def piece(problem: Causal, begin: int, end: int, *, per_row: bool = False) -> Causal:
    """Return the tokens begin .. end - 1, with their biases."""
    bias = problem.bias
    if bias is not None:
        bias = bias[:, begin:end] if bias.shape[1] > 1 else bias
        bias = bias.expand(len(problem.value), -1, -1, -1).contiguous() if per_row else bias
    return problem._replace(bias=bias, **{n: getattr(problem, n)[:, begin:end] for n in ("query", "key", "value")})


PIECES = ((150,), (1,) * 20, (70, 1, 1, 3, 75), (1, 149), (2, 3, 4, 5, 6, 7, 8))
OF_STATES = [(kind, seen) for kind in KINDS for seen in (True, False) if kind in ("rows", "kernel") or seen]


@pytest.mark.parametrize(("kind", "global_connectivity"), OF_STATES)
@pytest.mark.parametrize("heads", (1, 3, 24))
def test_a_prompt_may_be_given_in_pieces(kind, global_connectivity, heads, variant):
    for pieces in PIECES:
        for scale, dtype in ((1.0, FP32), (90.0, FP32), (1.0, BF16)):
            problem = causal(kind, 2, sum(pieces), 24, heads, 6, global_connectivity=global_connectivity)
            problem = to(problem._replace(key=scale * problem.key), dtype)
            expected, state, start = operator(problem), empty_state(problem, heads), 0
            for count in pieces:
                part = piece(problem, start, start + count, per_row=start % 2 == 1)
                actual = OPS.causal_state(*part, *state)
                rounding = 2e-4 if dtype == FP32 else torch.finfo(dtype).eps
                torch.testing.assert_close(actual, expected[:, start : start + count], rtol=rounding, atol=2e-5)
                start += count


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_repeated_tokens_do_not_drift(kind, variant):
    problem = causal(kind, 2, 7, 16, 2, 4, query=False)
    problem.key[0], problem.value[0] = problem.key[0, :1], problem.value[0, :1]  # the same token at each step
    repeats = 7_143
    problem = problem._replace(bias=None if problem.bias is None else problem.bias[:, :1].contiguous())
    repeated = {name: getattr(problem, name).repeat(1, repeats, 1) for name in ("key", "value")}
    # A last token that counts as much as all before it shows errors of their denominator, too.
    repeated["key"] = torch.cat([repeated["key"], repeated["key"][:, -1:] + math.log(7 * repeats)], 1)
    repeated["value"] = torch.cat([repeated["value"], repeated["value"][:, -1:] + 3], 1)
    expected = operator(problem._replace(**repeated))[:, -2:]
    state, one = empty_state(problem, 2), OPS.causal_state.default
    steps = [*zip(repeated["key"].split(1, 1), repeated["value"].split(1, 1))]
    actual = [one(None, *step, problem.bias, problem.slopes, None, True, *state) for step in steps][-2:]
    torch.testing.assert_close(torch.cat(actual, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_after_the_tokens_of_a_row_is_not_added_to_its_state(kind, variant):
    problem, counts = causal(kind, 3, 80, 24, 3, 6), torch.tensor([80, 0, 33])
    first = torch.where(torch.arange(80) < counts[:, None], 0, torch.arange(80) + 1)
    state, given = empty_state(problem, 3), [x.clone() for x in problem[:3]]
    for x in given:
        x[torch.arange(80) >= counts[:, None]] = math.nan
    actual = OPS.causal_state(*given, *problem[3:5], first, True, *state)
    for row, count in enumerate(counts):
        part = piece(Causal(*(x[row : row + 1] for x in problem[:3]), *problem[3:]), 0, count)
        alone = empty_state(part, 3)
        expected = OPS.causal_state(*part, *alone) if count else torch.zeros(1, 0, 24)
        torch.testing.assert_close(actual[row, :count], expected[0])
        torch.testing.assert_close([x[row] for x in state], [x[0] for x in alone])
        assert actual[row, count:].eq(0).all()


# ----------------------------------------------------------------------------------------- operators are ordinary ones

SMALL = {kind: partial(causal, kind, 2, 9, 4, 2, 3) for kind in KINDS}
SMALL |= {"rows, hidden": partial(causal, "rows", 2, 9, 4, 2, 3, global_connectivity=False)}
SMALL |= {"grid": partial(grid, 2, 3, 4, 8, 4, (3, 5)), "table": partial(table, 2, 7, 4, 2)}
SMALL |= {"table, a key per head": partial(table, 2, 6, 4, 2, key_per_head=True)}
SMALL |= {"causal table": partial(table, 2, 7, 4, 1, causal=True), "one feature": partial(table, 2, 6, 3, 3)}


def small(name: str, dtype: torch.dtype = FP32) -> tuple[Problem, list[torch.Tensor], Any]:
    """Return a problem, its inputs that require gradients, and the operator as a function of them."""
    problem = to(SMALL[name](), dtype, 5)
    if isinstance(problem, Causal):
        problem = problem._replace(first=documents(2, 9, 0.2, False))
    names = [n for n, x in zip(problem._fields, problem[:4]) if x is not None]
    inputs = [getattr(problem, n).requires_grad_() for n in names]
    return problem, inputs, lambda *given: operator(problem._replace(**dict(zip(names, given))))


@pytest.mark.parametrize(
    ("name", "dtype"),
    (
        *(("rows", FP32), ("rows", torch.float64), ("slopes", FP32), ("grid", FP32), ("table", FP32)),
        *(("causal table", FP32), ("causal table", torch.float64), ("one feature", FP32)),
    ),
    ids=str,
)
def test_operators_pass_the_checks_of_pytorch(name, dtype):
    problem, *_ = small(name, dtype)
    detached = [x.detach() if torch.is_tensor(x) else x for x in problem]
    for given in (problem, [None, *detached[1:]]):
        torch.library.opcheck(OPERATORS[type(problem)].default, tuple(given))
    if dtype == FP32 and name != "slopes":
        backward = getattr(OPS, f"{type(problem).__name__.lower()}_backward")
        torch.library.opcheck(backward.default, (torch.randn_like(detached[2]), *detached, True))
        if isinstance(problem, Causal):
            detached[5] = None
            torch.library.opcheck(OPS.causal_state.default, (*detached, *empty_state(problem, 2)))


@each(SMALL)
def test_gradients_of_gradients_and_batched_gradients_are_right(name, variant):
    problem, inputs, run = small(name, torch.float64)
    torch.testing.assert_close(operator(to(problem, FP32, 5)), run(*inputs).float())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    _, inputs, run = small(name)
    output = run(*inputs)
    given = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, inputs, given, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad(output, inputs, given[i], retain_graph=True)
        torch.testing.assert_close([x[i] for x in batched], list(expected), rtol=1e-4, atol=1e-5)


def test_a_compiled_program_has_one_node(variant):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    problem = causal("rows", 2, 20, 16, 2, 4)
    compiled = torch.compile(lambda *p: OPS.causal(*p), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*problem), operator(problem))
    assert graphs == [[OPS.causal]] or graphs == [[OPS.causal.default]]
