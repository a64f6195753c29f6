"""The operators against Eq. 2 as printed, in float64: values, gradients and states, with every compiled variant.

The reference makes a (B, T, T', d) tensor of all logits, so shapes are small.
"""

import ctypes
import math
from typing import NamedTuple

import pytest
import torch

from aft_hf.kernels import operators
from aft_hf.kernels.build import library_path
from aft_hf.kernels.library import load_from, runnable_variants


OPS = torch.ops.aft_hf_v1
pytestmark = pytest.mark.skipif(not runnable_variants(), reason="no compiled kernels for this CPU")


class Problem(NamedTuple):
    """The arguments of `causal`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    first: torch.Tensor | None = None
    hides_outside: bool = False

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the problem with all floating-point tensors in a dtype."""
        return Problem(*(x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in self))


def eq_2(query, key, value, bias, slopes, first, hides_outside) -> torch.Tensor:
    """Eq. 2 as printed, over all pairs."""
    batch, length, width = value.shape
    heads = operators.num_heads(bias, slopes)
    key = key.repeat_interleave(width // key.shape[2], 2)
    lags = torch.arange(length)[:, None] - torch.arange(length)
    start = torch.zeros(batch, length, dtype=torch.long) if first is None else first
    t = torch.arange(length)
    seen = (lags >= 0) & (t[None, None] >= start[:, :, None]) & (start <= t)[:, None]
    w = torch.zeros(batch, length, length, heads, dtype=key.dtype)
    if slopes is not None:
        w = w - slopes * lags[..., None]
    if bias is not None:
        size = bias.shape[-1]
        rows = bias.expand(batch, -1, -1, -1)[torch.arange(batch)[:, None], (t - start).clamp(0, bias.shape[1] - 1)]
        queries, keys = ((lags >= 0) & (lags < size)).nonzero(as_tuple=True)
        of_pairs = rows[:, queries, :, size - 1 - queries + keys].transpose(0, 1)
        w = w.index_put((torch.arange(batch)[:, None], queries, keys), of_pairs)
        if hides_outside:
            seen = seen & (lags < size)
    logits = key[:, None] + w.repeat_interleave(width // heads, 3)
    logits = logits.masked_fill(~seen[..., None], -math.inf)
    nothing = (logits == -math.inf).all(2, keepdim=True)
    weights = torch.softmax(logits.masked_fill(nothing, 0.0), 2).masked_fill(nothing, 0.0)
    values = torch.where(weights == 0, 0.0, value[:, None])  # hidden values may be NaN
    average = (weights * values).sum(2)
    return average if query is None else torch.sigmoid(query) * average


def make(kind, batch, length, width, heads=1, window=5, *, scale=1.0, seed=0, query=True) -> Problem:
    """Make a problem of a kind: "table", "kernel", "slopes", "none"."""
    torch.manual_seed(seed)
    keys = heads if kind == "kernel" else width
    tensors = [torch.randn(batch, length, width) if query else None, scale * torch.randn(batch, length, keys)]
    tensors.append(torch.randn(batch, length, width))
    bias = slopes = None
    if kind == "table":
        bias = torch.randn(1, length, heads, window)
    elif kind == "kernel":
        bias = torch.randn(1, 1, heads, window)
    elif kind == "slopes":
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return Problem(*tensors, bias, slopes)


def with_gradients(function, problem: NamedTuple, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key, value and bias."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in problem[:4]]
    output = function(*inputs, *problem[4:])
    wanted = [x for x in inputs if x is not None]
    return [output.detach(), *torch.autograd.grad(output, wanted, weight.to(output.dtype), materialize_grads=True)]


def assert_exact(problem: Problem, dtype=torch.float32, factor=1.0) -> None:
    rounded = problem.to(dtype)
    rounded = rounded._replace(bias=problem.bias, slopes=problem.slopes)
    weight = torch.linspace(0.2, 1, problem.value.numel()).view(problem.value.shape).to(dtype)
    found = with_gradients(OPS.causal, rounded, weight)
    exact = with_gradients(eq_2, rounded.to(torch.float64), weight.double())
    allowed = factor * 2e-5 if dtype == torch.float32 else 5e-3
    names = ["output", *(n for n, x in zip(("query", "key", "value", "bias"), problem) if x is not None)]
    largest = max(x.abs().max().item() for x in exact) if problem.value.numel() else 0.0
    for name, x, y in zip(names, found, exact):
        assert x.isfinite().all(), name
        error = (x.double() - y).abs().max().item() if y.numel() else 0.0
        scale = y.abs().max().item() if y.numel() and name in ("output", "value") else largest
        assert error <= allowed * scale + 1e-30, f"{name}: error {error:.3g} of {scale:.3g}"


KINDS = ("table", "kernel", "slopes", "none")
# (B, T, d, h, s): heads of several vectors, of one, of a part of one; primes; windows longer than the sequence.
SHAPES = [
    (1, 1, 8, 1, 1),
    (2, 2, 8, 2, 3),
    (1, 3, 37, 1, 5),
    (2, 31, 16, 16, 4),
    (1, 67, 24, 3, 7),
    (2, 64, 64, 2, 9),
    (1, 65, 48, 2, 80),
    (1, 131, 16, 1, 33),
    (0, 5, 8, 2, 3),
    (2, 0, 8, 2, 3),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_values_and_gradients_are_those_of_eq_2(kind, shape, dtype, variant):
    assert_exact(make(kind, *shape), dtype)


@pytest.mark.parametrize("kind", ("table", "kernel"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_outside_the_window_may_be_hidden(kind, shape, variant):
    assert_exact(make(kind, *shape)._replace(hides_outside=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_is_optional(kind, variant):
    assert_exact(make(kind, 2, 70, 16, 2, query=False))


# ------------------------------------------------------------------------------------------------------ hostile values


def one_key(place: int, size: float):
    def change(problem: Problem) -> Problem:
        problem.key[:, place] = size
        return problem

    return change


def ramp(first: float, last: float):
    return lambda p: p._replace(key=p.key + torch.linspace(first, last, p.key.shape[1])[:, None])


def biases(size: float):
    return lambda p: p if p.bias is None else p._replace(bias=size * torch.randn_like(p.bias).clamp(-2, 2) / 2)


def large_biases_against_keys(problem: Problem) -> Problem:
    return one_key(20, 200.0)(biases(300.0)(problem))


HOSTILE = {
    "keys x 30": lambda p: p._replace(key=30 * p.key),
    "keys x 90": lambda p: p._replace(key=90 * p.key),
    "keys up to 1e4": lambda p: p._replace(key=1e4 * (2 * torch.rand_like(p.key) - 1)),
    "all keys 1e4": lambda p: p._replace(key=torch.full_like(p.key, 1e4)),
    "all keys -1e4": lambda p: p._replace(key=torch.full_like(p.key, -1e4)),
    "a rising ramp": ramp(0.0, 3000.0),
    "a falling ramp": ramp(3000.0, 0.0),
    "one huge key, early": one_key(1, 1e4),
    "one huge key, late": one_key(-3, 1e4),
    "one tiny key": one_key(4, -1e4),
    "biases of 300": biases(300.0),
    "biases of 300 against keys of 200": large_biases_against_keys,
    "hidden keys": one_key(slice(3, 20), -math.inf),
    "hidden first keys": one_key(slice(0, 9), -math.inf),
    "values with an offset": lambda p: p._replace(value=p.value + 100),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", HOSTILE)
@pytest.mark.parametrize("hides_outside", (False, True))
def test_hostile_values_are_exact(kind, values, hides_outside, variant):
    if hides_outside and kind in ("slopes", "none"):
        return
    # Logits of 1e4 are rounded to 1e-3.
    factor = 50.0 if "1e4" in values or "ramp" in values or "huge" in values else 8.0
    for heads in (1, 16):
        problem = HOSTILE[values](make(kind, 2, 150, 16, heads, 9))
        assert_exact(problem._replace(hides_outside=hides_outside), factor=factor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (math.nan, math.inf, 1e4), ids=str)
def test_later_tokens_reach_no_earlier_output_or_gradient(kind, size, variant):
    for hides_outside in (False, True) if kind in ("table", "kernel") else (False,):
        problem = make(kind, 1, 150, 16, 1)._replace(hides_outside=hides_outside)
        weight = (torch.arange(150) < 101).float().view(1, -1, 1).expand(1, 150, 16)
        expected = with_gradients(OPS.causal, problem, weight)
        for name in ("key", "value", "query"):
            changed = getattr(problem, name).clone()
            changed[:, 101:] = size
            found = with_gradients(OPS.causal, problem._replace(**{name: changed}), weight)
            for x, y in zip(found[:4], expected[:4]) if math.isfinite(size) else [(found[0], expected[0])]:
                torch.testing.assert_close(x[:, :101], y[:, :101], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slope", (0.9, 1.5, 3.0, 10.0))
def test_far_keys_count_for_any_slope(slope, variant):
    problem = make("slopes", 2, 200, 16, 2)._replace(slopes=torch.full((2,), slope))
    assert_exact(one_key(3, 300 * slope)(problem), factor=10.0)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", (0.5, 0.1, 0.01))
@pytest.mark.parametrize("padding", (False, True))
@pytest.mark.parametrize("hides_outside", (False, True))
def test_documents_and_padding_are_exact(kind, share, padding, hides_outside, variant):
    first = documents(3, 150, share, padding)
    hides_outside = hides_outside and kind in ("table", "kernel")
    problem = make(kind, 3, 150, 16, 2, 6)._replace(first=first, hides_outside=hides_outside)
    assert_exact(problem)
    if padding:  # what is hidden stays there
        weight = torch.ones_like(problem.value)
        expected = with_gradients(OPS.causal, problem, weight)
        hidden = (first > torch.arange(150)).unsqueeze(-1)
        hostile = [x.masked_fill(hidden, math.nan) for x in problem[:3]]
        found = with_gradients(OPS.causal, Problem(*hostile, *problem[3:]), weight)
        torch.testing.assert_close(found, expected)


def test_hidden_keys_hide_values_that_are_not_finite(variant):
    for kind in KINDS:
        problem = make(kind, 2, 90, 16, 2, 6)
        hidden = torch.rand(2, 90, 1) < 0.3
        key, value = problem.key.masked_fill(hidden, -math.inf), problem.value.masked_fill(hidden, 0.0)
        expected = with_gradients(OPS.causal, problem._replace(key=key, value=value), torch.ones_like(value))
        value = value.masked_fill(hidden, math.nan)
        found = with_gradients(OPS.causal, problem._replace(key=key, value=value), torch.ones_like(value))
        torch.testing.assert_close(found, expected)


def test_a_query_that_sees_nothing_gives_0(variant):
    for kind in KINDS:
        problem = make(kind, 2, 70, 16, 2)
        problem.key[0] = -math.inf
        output, *gradients = with_gradients(OPS.causal, problem, torch.ones_like(problem.value))
        assert output[0].eq(0).all() and output[1].ne(0).any()
        assert all(x.isfinite().all() for x in gradients)


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_inputs_may_be_parts_of_one_tensor_and_gradients_have_any_strides(dtype, variant):
    together = torch.randn(70, 3, 3 * 24).to(dtype)  # (T, B, 3 d)
    query, key, value = together.transpose(0, 1).chunk(3, -1)
    bias = torch.randn(1, 70, 2, 6)
    gradient = torch.randn(24, 70, 3).to(dtype).permute(2, 1, 0)
    problem = Problem(query, key, value, bias)
    contiguous = Problem(*(x.contiguous() for x in problem[:3]), bias)
    inputs = [x.requires_grad_() for x in problem[:4]]
    output = OPS.causal(*problem)
    found = torch.autograd.grad(output, inputs, gradient)
    expected = with_gradients(OPS.causal, contiguous, gradient.contiguous())
    torch.testing.assert_close([output.detach(), *found], expected, rtol=0, atol=0)
    expanded = torch.autograd.grad(OPS.causal(*problem), inputs, torch.ones((), dtype=dtype).expand(3, 70, 24))
    assert all(x.isfinite().all() for x in expanded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_matter(kind, variant):
    problem, before = make(kind, 3, 200, 96, 2, 9), torch.get_num_threads()
    weight, results = torch.ones_like(problem.value), []
    try:
        for count in (1, 2, 3, 64):
            torch.set_num_threads(count)
            results.append(with_gradients(OPS.causal, problem, weight))
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- states


def empty_state(problem: Problem, heads: int) -> list[torch.Tensor]:
    batch, _, width = problem.value.shape
    kept = 0 if problem.bias is None else problem.bias.shape[-1] - 1
    key_width = problem.key.shape[2] // heads
    keys = torch.full((batch, heads, kept, key_width), -math.inf)
    values, sums = torch.zeros(batch, heads, kept, width // heads), torch.zeros(batch, heads, 1, width // heads)
    shared = torch.zeros(batch, heads, 1, key_width)
    return [keys, values, sums, shared, torch.full_like(shared, -1e30)]


def piece(problem: Problem, begin: int, end: int, *, per_row: bool = False) -> Problem:
    """Return the tokens begin .. end - 1, with their biases."""
    query, key, value, bias = problem[:4]
    if bias is not None:
        bias = bias[:, begin:end] if bias.shape[1] > 1 else bias
        bias = bias.expand(len(value), -1, -1, -1).contiguous() if per_row else bias
    return problem._replace(query=query[:, begin:end], key=key[:, begin:end], value=value[:, begin:end], bias=bias)


PIECES = ((150,), (1,) * 20, (70, 1, 1, 3, 75), (1, 149), (2, 3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("scale", (1.0, 90.0))
@pytest.mark.parametrize("heads", (1, 3, 24))
@pytest.mark.parametrize("hides_outside", (False, True))
def test_a_prompt_may_be_given_in_pieces(kind, pieces, scale, heads, hides_outside, variant):
    if hides_outside and kind in ("slopes", "none"):
        return
    problem = make(kind, 2, sum(pieces), 24, heads, 6, scale=scale)._replace(hides_outside=hides_outside)
    expected, state, start = OPS.causal(*problem), empty_state(problem, heads), 0
    for count in pieces:
        part = piece(problem, start, start + count, per_row=start % 2 == 1)
        found = OPS.causal_state(*part, *state)
        torch.testing.assert_close(found, expected[:, start : start + count], rtol=2e-4, atol=2e-5)
        start += count


def test_padding_after_the_tokens_of_a_row_is_not_added_to_its_state(variant):
    for kind in KINDS:
        problem = make(kind, 3, 80, 24, 3, 6)
        counts = torch.tensor([80, 0, 33])
        first = torch.where(torch.arange(80) < counts[:, None], 0, torch.arange(80) + 1)
        state, given = empty_state(problem, 3), [x.clone() for x in problem[:3]]
        for x in given:
            x[torch.arange(80) >= counts[:, None]] = math.nan
        found = OPS.causal_state(*given, *problem[3:5], first, False, *state)
        for row, count in enumerate(counts):
            part = piece(Problem(*(x[row : row + 1] for x in problem[:3]), *problem[3:]), 0, count)
            alone = empty_state(part, 3)
            expected = OPS.causal_state(*part, *alone) if count else torch.zeros(1, 0, 24)
            torch.testing.assert_close(found[row, :count], expected[0])
            torch.testing.assert_close([x[row] for x in state], [x[0] for x in alone])
            assert found[row, count:].eq(0).all()


def test_a_state_may_be_in_bfloat16_problems_too(variant):
    problem = make("table", 2, 40, 24, 3, 6).to(torch.bfloat16)._replace(bias=torch.randn(1, 40, 3, 6))
    expected, state = OPS.causal(*problem), empty_state(problem, 3)
    found = [OPS.causal_state(*piece(problem, a, b), *state) for a, b in ((0, 30), (30, 31), (31, 40))]
    torch.testing.assert_close(torch.cat(found, 1), expected)


# ----------------------------------------------------------------------------------------- operators are ordinary ones


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_operators_pass_the_checks_of_pytorch(kind, dtype, variant):
    problem = make(kind, 2, 20, 16, 2, 4).to(dtype)
    problem = problem._replace(first=documents(2, 20, 0.2, True))
    problem = Problem(
        *(
            x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() and i != 4 else x
            for i, x in enumerate(problem)
        )
    )
    torch.library.opcheck(OPS.causal.default, tuple(problem))
    detached = [x.detach() if torch.is_tensor(x) else x for x in problem]
    if dtype == torch.float32:
        torch.library.opcheck(OPS.causal_backward.default, (torch.randn_like(detached[2]), *detached, True))
        detached[5] = None
        torch.library.opcheck(OPS.causal_state.default, (*detached, *empty_state(problem, 2)))


# --------------------------------------------------------------------------------------------------------------- grids


class Grid(NamedTuple):
    """The arguments of `grid`."""

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    kernels: torch.Tensor
    rows: int
    columns: int
    hides_outside: bool = False


def eq_2_on_a_grid(query, key, value, kernels, rows, columns, hides_outside) -> torch.Tensor:
    """Eq. 2 as printed, query by query."""
    (heads, *size), width, outputs = kernels.shape, value.shape[2], []
    key = key.repeat_interleave(width // key.shape[2], 2)
    for i, j in ((i, j) for i in range(rows) for j in range(columns)):
        w = kernels.new_full((heads, rows, columns), -math.inf if hides_outside else 0.0)
        taps = [(i + a - size[0] // 2, j + b - size[1] // 2, a, b) for a in range(size[0]) for b in range(size[1])]
        taps = torch.tensor([x for x in taps if 0 <= x[0] < rows and 0 <= x[1] < columns]).unbind(1)
        w = w.index_put((torch.arange(heads)[:, None], *taps[:2]), kernels[:, taps[2], taps[3]])
        logits = key + w.flatten(1).T.repeat_interleave(width // heads, 1)  # (B, T, d)
        nothing = (logits == -math.inf).all(1, keepdim=True)
        weights = torch.softmax(logits.masked_fill(nothing, 0.0), 1).masked_fill(nothing, 0.0)
        outputs.append((weights * torch.where(weights == 0, 0.0, value)).sum(1))
    average = torch.stack(outputs, 1)
    return average if query is None else torch.sigmoid(query) * average


def make_grid(batch, rows, columns, width, heads, size, key_per_head=True, scale=1.0) -> Grid:
    torch.manual_seed(0)
    query, value = (torch.randn(batch, rows * columns, width) for _ in range(2))
    key = scale * torch.randn(batch, rows * columns, heads if key_per_head else width)
    return Grid(query, key, value, torch.randn(heads, *size), rows, columns)


def assert_grid_exact(problem: Grid, dtype=torch.float32, factor=1.0) -> None:
    rounded = Grid(*(x.to(dtype) for x in problem[:3]), *problem[3:])
    exact = Grid(*(x.double() for x in (*rounded[:3], problem.kernels)), *problem[4:])
    weight = torch.linspace(0.2, 1, problem.value.numel()).view(problem.value.shape).to(dtype)
    found, expected = with_gradients(OPS.grid, rounded, weight), with_gradients(eq_2_on_a_grid, exact, weight.double())
    allowed = factor * 2e-5 if dtype == torch.float32 else 5e-3
    largest = max((x.abs().max().item() for x in expected if x.numel()), default=0.0)
    for name, x, y in zip(("output", "query", "key", "value", "kernels"), found, expected):
        assert x.isfinite().all(), name
        if y.numel():
            error, scale = (x.double() - y).abs().max().item(), y.abs().max().item() if name == "output" else largest
            assert error <= allowed * scale, f"{name}: error {error:.3g} of {scale:.3g}"


# B, rows, columns, d, h, kernel size.
GRID_SHAPES = [
    (2, 1, 1, 8, 8, (1, 1)),
    (1, 3, 4, 24, 24, (3, 3)),
    (2, 7, 9, 20, 10, (5, 5)),
    (1, 14, 14, 16, 16, (11, 11)),
    (2, 5, 8, 37, 37, (3, 15)),
    (1, 1, 31, 16, 4, (1, 7)),
    (1, 4, 6, 48, 2, (27, 27)),
    (0, 3, 3, 8, 8, (3, 3)),
]


@pytest.mark.parametrize("shape", GRID_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("key_per_head", (True, False))
@pytest.mark.parametrize("hides_outside", (False, True))
def test_values_and_gradients_on_a_grid_are_those_of_eq_2(shape, dtype, key_per_head, hides_outside, variant):
    assert_grid_exact(make_grid(*shape, key_per_head)._replace(hides_outside=hides_outside), dtype)


GRID_HOSTILE = ["keys x 30", "keys x 90", "keys up to 1e4", "all keys 1e4", "all keys -1e4", "a rising ramp"]
GRID_HOSTILE += ["one huge key, early", "one tiny key", "hidden keys", "values with an offset"]


@pytest.mark.parametrize("values", GRID_HOSTILE)
@pytest.mark.parametrize("size", (1.0, 300.0))
@pytest.mark.parametrize("hides_outside", (False, True))
def test_hostile_values_on_a_grid_are_exact(values, size, hides_outside, variant):
    problem = HOSTILE[values](make_grid(2, 5, 7, 20, 10, (3, 5), values != "hidden keys"))
    kernels = size * problem.kernels.clamp(-2, 2) / 2
    factor = 50.0 if "1e4" in values or "ramp" in values or "huge" in values else 10.0
    assert_grid_exact(problem._replace(kernels=kernels, hides_outside=hides_outside), factor=factor)


def test_grids_with_threads_and_strides(variant):
    together = torch.randn(30, 3, 3 * 40).transpose(0, 1)
    problem = Grid(*together.chunk(3, -1), torch.randn(40, 3, 3), 5, 6)
    contiguous = Grid(*(x.contiguous() for x in problem[:3]), *problem[3:])
    before, weight = torch.get_num_threads(), torch.randn(40, 30, 3).permute(2, 1, 0)
    expected = with_gradients(OPS.grid, contiguous, weight)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            torch.testing.assert_close(with_gradients(OPS.grid, problem, weight), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_the_operators_of_a_grid_pass_the_checks_of_pytorch(variant):
    problem = make_grid(2, 3, 4, 8, 4, (3, 3))
    inputs = [x.requires_grad_() for x in problem[:4]]
    torch.library.opcheck(OPS.grid.default, (*inputs, *problem[4:]))
    detached = [x.detach() for x in inputs]
    torch.library.opcheck(OPS.grid_backward.default, (detached[2], *detached, *problem[4:], True))
    inputs = [x.detach().double().requires_grad_() for x in problem[:4]]
    assert torch.autograd.gradcheck(lambda *x: OPS.grid(*x, *problem[4:]), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: OPS.grid(*x, *problem[4:]), inputs, fast_mode=True)


def test_arguments_that_do_not_match_are_errors(variant):
    problem = make("table", 2, 20, 16, 2, 4)
    wrong = [
        {"query": torch.randn(2, 20, 8)},
        {"key": torch.randn(2, 20, 4)},
        {"bias": torch.randn(1, 20, 3, 4)},
        {"bias": torch.randn(3, 20, 2, 4)},
        {"bias": torch.randn(1, 20, 2, 4).bfloat16()},
        {"slopes": torch.ones(2)},
        {"first": torch.zeros(2, 19, dtype=torch.long)},
        {"first": torch.zeros(2, 20)},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="do not match"):
            OPS.causal(*problem._replace(**change))
    with pytest.raises(TypeError, match="bfloat16"):
        OPS.causal(*problem._replace(key=problem.key.bfloat16()))
    state = empty_state(problem, 2)
    for i in range(5):
        with pytest.raises(ValueError, match="do not match"):
            OPS.causal_state(*problem, *(x[..., :1, :0] if i == j else x for j, x in enumerate(state)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_right(kind, variant):
    problem = make(kind, 1, 9, 4, 2, 3).to(torch.float64)._replace(first=documents(1, 9, 0.2, False))
    inputs = [x.requires_grad_() for x in problem[:4] if x is not None]

    def run(*inputs):
        return OPS.causal(*inputs[:3], inputs[3] if len(inputs) > 3 else None, *problem[4:])

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_batched_gradients_are_the_gradients_one_by_one(variant):
    problem = make("table", 2, 20, 16, 2, 4)
    inputs = [x.requires_grad_() for x in problem[:4]]
    output, given = OPS.causal(*problem), torch.randn(3, 2, 20, 16)
    batched = torch.autograd.grad(output, inputs, given, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad(output, inputs, given[i], retain_graph=True)
        torch.testing.assert_close([x[i] for x in batched], list(expected), rtol=1e-4, atol=1e-5)


def test_a_compiled_program_has_one_node(variant):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    problem = make("table", 2, 20, 16, 2, 4)
    compiled = torch.compile(lambda *p: OPS.causal(*p), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*problem), OPS.causal(*problem))
    assert graphs == [[OPS.causal]] or graphs == [[OPS.causal.default]]


def test_a_thread_that_fails_is_an_error(variant):
    parallel_for = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2)(lambda *_: 1)
    two = ctypes.c_uint32(2)
    get_num_threads = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(
        lambda count: ctypes.memmove(count, ctypes.addressof(two), 4) and 0
    )
    functions = (ctypes.cast(function, ctypes.c_void_p) for function in (parallel_for, get_num_threads))
    operators.KERNELS.aft_use_threads_of_torch(*functions)
    try:
        with pytest.raises(RuntimeError, match="failed"):
            OPS.causal(*make("table", 4, 256, 64))
        with pytest.raises(RuntimeError, match="failed"):
            OPS.grid(*make_grid(4, 16, 16, 64, 64, (3, 3)))
        with pytest.raises(RuntimeError, match="failed"):
            OPS.table(*make("none", 4, 256, 64)[:3], torch.zeros(1, 256, 256), 0, False)
    finally:
        load_from(library_path(variant))  # with the threads of PyTorch
