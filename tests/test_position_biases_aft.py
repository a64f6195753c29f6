"""The structures of w: every method of each against its dense table, which test_mixers_aft.py defines."""

from itertools import product

import pytest
import torch

from aft_hf.position_biases_aft import (
    Dense,
    GridKernel,
    LagKernel,
    LinearDecay,
    NoBias,
    Window,
)


HEADS, POSITIONS, RANK = 2, 12, 3
GRID = (3, 4)


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, HEADS, POSITIONS, RANK).unbind()


def table() -> torch.Tensor:
    return torch.randn(HEADS, POSITIONS, POSITIONS)


BIASES = {
    "no bias": lambda: NoBias(HEADS, torch.empty(0)),
    "decay": lambda: LinearDecay(torch.tensor([0.5, 0.1])),
    "factors": lambda: Dense(*factors()),
    "table": lambda: Dense(table()),
    "factors, multiplied": lambda: Dense(*factors(), multiplier=3.0),
    "table, multiplied": lambda: Dense(table(), multiplier=3.0),
    "window of factors": lambda: Window(*factors(), size=3),
    "window of a table": lambda: Window(table(), size=3),
    "window of factors, multiplied": lambda: Window(*factors(), size=3, multiplier=3.0),
    "window of a table, multiplied": lambda: Window(table(), size=3, multiplier=3.0),
    "window alone": lambda: Window(*factors(), size=3, global_connectivity=False),
    "window of one": lambda: Window(*factors(), size=1),
    "lags": lambda: LagKernel(torch.randn(HEADS, 5), causal=False),
    "causal lags": lambda: LagKernel(torch.randn(HEADS, 4), causal=True),
    "lags alone": lambda: LagKernel(torch.randn(HEADS, 5), causal=False, global_connectivity=False),
    "grid": lambda: GridKernel(torch.randn(HEADS, 3, 3), GRID),
    "grid alone": lambda: GridKernel(torch.randn(HEADS, 3, 3), GRID, global_connectivity=False),
    "grid, large kernel": lambda: GridKernel(torch.randn(HEADS, 9, 9), GRID),
}
RELATIVE_1D = ("no bias", "decay", "lags", "causal lags", "lags alone")
WINDOWS = ("window of factors", "window of a table", "window alone", "window of one")
WINDOWS += ("window of factors, multiplied", "window of a table, multiplied")
each = pytest.mark.parametrize("name", BIASES)


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


@pytest.mark.parametrize("name", [*WINDOWS, "causal lags"])
@pytest.mark.parametrize(
    ("length", "start"), ((1, 0), (1, 1), (1, 11), (5, 0), (5, 7), (12, 0), (5, (0, 7)), (1, (4, 11)))
)
def test_w_by_lag_is_that_of_the_window_of_each_token(name, length, start):
    biases = BIASES[name]()
    dense, reach = biases.dense(POSITIONS), biases.reach
    actual = biases.by_lag(length, start if isinstance(start, int) else torch.tensor(start))
    rows = (start,) if isinstance(start, int) else start
    for i, t in product(range(len(rows)), range(length)):
        position = rows[i] + t
        known = min(position, reach) + 1  # w is undefined for positions before the start
        of_token = actual[min(i, len(actual) - 1), min(t, actual.shape[1] - 1)]  # (h, reach + 1)
        torch.testing.assert_close(of_token[:, -known:], dense[:, position, position + 1 - known : position + 1])


@each
def test_beyond_its_reach_w_is_0_or_hidden_or_falls_by_its_slopes_and_what_is_relative_depends_on_distances(name):
    biases = BIASES[name]()
    if biases.reach is None:
        return
    dense, slopes = biases.dense(POSITIONS), biases.slopes
    for t, s in product(range(POSITIONS), range(POSITIONS)):
        if abs(t - s) > biases.reach:
            expected = torch.full((HEADS,), biases.outside) if slopes is None else -slopes * (t - s)
            torch.testing.assert_close(dense[:, t, s], expected)
    if name in ("no bias", "decay"):
        assert biases.by_lag(3) is None and biases.reach == 0
    assert biases.relative or name not in RELATIVE_1D
    if name in RELATIVE_1D:
        positions = torch.arange(1000, 1000 + POSITIONS)
        torch.testing.assert_close(biases.between(positions, positions), dense)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_w_is_computed_in_float32_at_least(dtype):
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for biases in (Dense(*(x.to(dtype) for x in factors())), Window(table().to(dtype), size=3)):
        assert biases.dense(POSITIONS).dtype == expected
        assert biases.between(torch.arange(3), torch.arange(3)).dtype == expected
    assert Window(table().to(dtype), size=3).by_lag(5).dtype == expected
