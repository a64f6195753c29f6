"""The structures of w: every method of each against loops over its definition."""

import math
from itertools import product

import pytest
import torch

from aft_hf.position_biases_aft import (
    Dense,
    GridKernel,
    LagKernel,
    LinearDecay,
    NoBias,
    SelectedPosition,
    Window,
)


HEADS, POSITIONS, RANK = 2, 12, 3
GRID = (3, 4)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, HEADS, POSITIONS, RANK).unbind()


def table() -> torch.Tensor:
    return torch.randn(HEADS, POSITIONS, POSITIONS)


def selected(kernel) -> SelectedPosition:
    index = torch.randint(kernel.kernels[0].numel(), (HEADS,))
    flat = torch.zeros_like(kernel.kernels.flatten(1)).scatter(1, index[:, None], -1.5)
    chosen = type(kernel)(*(flat.view_as(kernel.kernels) if x is kernel.kernels else x for x in vars(kernel).values()))
    return SelectedPosition(chosen, index, torch.full((HEADS,), -1.5))


BIASES = {
    "no bias": lambda: NoBias(HEADS, torch.device("cpu"), torch.float32),
    "decay": lambda: LinearDecay(torch.tensor([0.5, 0.1])),
    "factors": lambda: Dense(*factors()),
    "table": lambda: Dense(table()),
    "factors, multiplied": lambda: Dense(*factors(), multiplier=3.0),
    "table, multiplied": lambda: Dense(table(), multiplier=3.0),
    "window of factors": lambda: Window(*factors(), size=3),
    "window of a table": lambda: Window(table(), size=3),
    "window of factors, multiplied": lambda: Window(*factors(), size=3, multiplier=3.0),
    "window of a table, multiplied": lambda: Window(table(), size=3, multiplier=3.0),
    "window alone": lambda: Window(*factors(), size=3, hides_outside=True),
    "window of one": lambda: Window(*factors(), size=1),
    "lags": lambda: LagKernel(torch.randn(HEADS, 5), causal=False),
    "causal lags": lambda: LagKernel(torch.randn(HEADS, 4), causal=True),
    "lags alone": lambda: LagKernel(torch.randn(HEADS, 5), causal=False, hides_outside=True),
    "grid": lambda: GridKernel(torch.randn(HEADS, 3, 3), GRID),
    "grid alone": lambda: GridKernel(torch.randn(HEADS, 3, 3), GRID, hides_outside=True),
    "grid, large kernel": lambda: GridKernel(torch.randn(HEADS, 9, 9), GRID),
    "selected lag": lambda: selected(LagKernel(torch.randn(HEADS, 5), causal=False)),
    "selected causal lag": lambda: selected(LagKernel(torch.randn(HEADS, 4), causal=True)),
    "selected on a grid": lambda: selected(GridKernel(torch.randn(HEADS, 3, 3), GRID)),
}
RELATIVE_1D = ("no bias", "decay", "lags", "causal lags", "lags alone", "selected lag", "selected causal lag")
WINDOWS = ("window of factors", "window of a table", "window alone", "window of one")
WINDOWS += ("window of factors, multiplied", "window of a table, multiplied")
each = pytest.mark.parametrize("name", BIASES)


def by_definition(biases, head: int, query: int, key: int) -> float:
    """Return w between two positions by its definition."""
    if isinstance(biases, SelectedPosition):
        return by_definition(biases.kernel, head, query, key)
    if isinstance(biases, NoBias):
        return 0.0
    if isinstance(biases, LinearDecay):
        return -biases.slopes[head].item() * (query - key)
    outside = -math.inf if biases.hides_outside else 0.0
    if isinstance(biases, LagKernel):
        size = biases.kernels.shape[1]
        place = query - key if biases.causal else key - query + size // 2
        return biases.kernels[head, place].item() if 0 <= place < size else outside
    if isinstance(biases, GridKernel):
        columns, size = biases.grid_size[1], biases.kernels.shape[1]
        row, column = key // columns - query // columns + size // 2, key % columns - query % columns + size // 2
        return biases.kernels[head, row, column].item() if 0 <= row < size and 0 <= column < size else outside
    if isinstance(biases, Window) and abs(query - key) >= biases.size:
        return outside
    if biases.key is None:
        return biases.multiplier * biases.query[head, query, key].item()
    return biases.multiplier * (biases.query[head, query] @ biases.key[head, key]).item()


@each
def test_the_dense_table_is_w_by_its_definition(name):
    biases = BIASES[name]()
    dense = biases.dense(POSITIONS)
    assert dense.shape == (HEADS, POSITIONS, POSITIONS)
    for i, t, s in product(range(HEADS), range(POSITIONS), range(POSITIONS)):
        assert dense[i, t, s].item() == pytest.approx(by_definition(biases, i, t, s), abs=1e-5)


@each
def test_w_between_positions_is_an_entry_of_the_dense_table(name):
    biases = BIASES[name]()
    dense = biases.dense(POSITIONS)
    queries, keys = torch.randint(POSITIONS, (2, 5)), torch.randint(POSITIONS, (2, 7))
    between = biases.between(queries, keys)
    assert between.shape == (2, HEADS, 5, 7)
    for row in range(2):
        torch.testing.assert_close(between[row], dense[:, queries[row][:, None], keys[row]])
    torch.testing.assert_close(biases.between(queries[0], keys[0]), between[0])


@pytest.mark.parametrize("name", [*RELATIVE_1D, *WINDOWS, "factors", "table"])
@pytest.mark.parametrize("following", (False, True))
@pytest.mark.parametrize("size", (4, 5))
@pytest.mark.parametrize("exporting", (False, True))
def test_w_of_chunks_is_that_between_their_positions(name, following, size, exporting, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    biases, chunks = BIASES[name](), -(-POSITIONS // size)
    found, dense = biases.of_chunks(chunks, size, following=following), biases.dense(POSITIONS)
    assert found.shape == (HEADS, 1 if biases.relative else chunks, size, (3 if following else 2) * size)
    found = found.expand(-1, chunks, -1, -1)
    for chunk, i, j in product(range(chunks), range(size), range(found.shape[-1])):
        query, key = chunk * size + i, (chunk - 1) * size + j
        if 0 <= key < POSITIONS and query < POSITIONS:
            torch.testing.assert_close(found[:, chunk, i, j], dense[:, query, key])


@pytest.mark.parametrize("factorized", (True, False))
@pytest.mark.parametrize("window", (10, 40))
@pytest.mark.parametrize(("length", "multiplier"), ((20, 1.0), (64, 5.0), (150, 1.0)))
def test_w_of_chunks_has_the_gradients_of_w_between_their_positions(factorized, window, length, multiplier):
    size = 16 if window == 10 else 64
    shapes = [(3, 160, 4)] * 2 if factorized else [(3, 160, 160)]
    learned = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    biases, results = Window(*learned, size=window, multiplier=multiplier), []
    for of_chunks in (biases.of_chunks, super(Window, biases).of_chunks):
        bias = of_chunks(-(-length // size), size)
        # For each query, the keys of its own chunk up to itself, and of the chunk before it if there is one.
        seen = [(t // size, t % size, slice(size if t < size else 0, size + t % size + 1)) for t in range(length)]
        flat = torch.cat([bias[:, chunk, place, keys] for chunk, place, keys in seen], 1)
        weight = torch.linspace(-1, 1, flat.numel(), dtype=flat.dtype).view_as(flat)
        results.append([flat, *torch.autograd.grad((weight * flat).sum(), learned)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", [*WINDOWS, "causal lags", "selected causal lag"])
def test_w_of_the_next_token_is_that_of_its_window_and_of_itself(name):
    biases = BIASES[name]()
    dense, reach = biases.dense(POSITIONS), biases.reach
    positions = torch.tensor([0, 1, 5, POSITIONS - 1])
    batched = biases.next_token(positions)
    for row, position in enumerate(positions.tolist()):
        alone = biases.next_token(position)
        assert alone.shape == (1, HEADS, reach + 1)
        known = min(position, reach) + 1  # w is undefined for positions before the start
        expected = dense[:, position, position + 1 - known : position + 1]
        torch.testing.assert_close(alone[0, :, -known:], expected)
        torch.testing.assert_close(batched[row if len(batched) > 1 else 0][:, -known:], expected)


@pytest.mark.parametrize("name", ("no bias", "decay"))
def test_there_is_no_window_where_w_is_0_or_falls_with_the_distance(name):
    biases = BIASES[name]()
    assert biases.next_token(3) is None and biases.reach == 0


@each
def test_beyond_its_reach_w_is_0_or_hidden_or_falls_by_its_slopes(name):
    biases = BIASES[name]()
    if biases.reach is None:
        return
    dense, slopes = biases.dense(POSITIONS), biases.slopes
    for t, s in product(range(POSITIONS), range(POSITIONS)):
        if abs(t - s) > biases.reach:
            expected = torch.full((HEADS,), biases.outside) if slopes is None else -slopes * (t - s)
            torch.testing.assert_close(dense[:, t, s], expected)


@pytest.mark.parametrize("name", RELATIVE_1D)
def test_what_is_relative_depends_on_the_distance_alone(name):
    biases, positions = BIASES[name](), torch.arange(POSITIONS)
    assert biases.relative
    torch.testing.assert_close(biases.between(positions + 1000, positions + 1000), biases.dense(POSITIONS))


@pytest.mark.parametrize("name", ("selected lag", "selected causal lag", "selected on a grid"))
def test_the_places_of_a_selection_are_where_its_table_is_not_0(name):
    biases = BIASES[name]()
    place, exists = biases.places(POSITIONS)
    expected = torch.zeros(HEADS, POSITIONS, POSITIONS)
    for i, t in product(range(HEADS), range(POSITIONS)):
        if exists[i, t]:
            expected[i, t, place[i, t]] = biases.size[i]
    torch.testing.assert_close(biases.dense(POSITIONS), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_w_is_computed_in_float32_at_least(dtype):
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for biases in (Dense(*(x.to(dtype) for x in factors())), Window(table().to(dtype), size=3)):
        assert biases.dense(POSITIONS).dtype == expected
        assert biases.between(torch.arange(3), torch.arange(3)).dtype == expected
        assert biases.of_chunks(2, 4).dtype == expected
    assert Window(table().to(dtype), size=3).next_token(5).dtype == expected


@pytest.mark.parametrize("make", (lambda: Dense(*factors()), lambda: Dense(table()), lambda: Window(table(), size=3)))
@pytest.mark.parametrize("start", (-3, 0, 2, POSITIONS - 2))
def test_biases_from_a_position_on_are_those_of_its_tokens(make, start):
    biases, length = make(), 5
    found = biases.from_position(start, length).dense(length)
    inside = [t for t in range(length) if 0 <= start + t < POSITIONS]
    places = torch.tensor([start + t for t in inside])
    expected = biases.dense(POSITIONS)[:, places][:, :, places]
    torch.testing.assert_close(found[:, inside][:, :, inside], expected)
    assert found.shape == (HEADS, length, length)
