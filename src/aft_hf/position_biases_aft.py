"""What the position biases w of Eq. 2 are: one small class for each structure that w can have.

A mixer makes one of these from its parameters. It answers every question about the geometry of w: the dense table,
w between any positions, w of chunks of a sequence, and w of the next token. It holds tensors, not modules.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .activations_aft import full_precision, runs_as_written
from .scaled_sums_aft import widen


class PositionBias:
    """The base class of all structures.

    Attributes:
        relative: whether w depends on the distance between two positions alone.
        ordered: whether w depends on the order of the tokens in a sequence at all.
        reach: the largest distance at which w can differ from its value far away; None where there is none.
        slopes: (h,) where w = -slope * distance for every distance; None where w is 0 far away.
        hides_outside: whether positions farther away than `reach` are hidden (w = -inf) instead of w = 0.
        device: where w is computed.
    """

    relative = True
    ordered = True
    reach: int | None = 0
    slopes: torch.Tensor | None = None
    hides_outside = False
    device: torch.device

    @property
    def columns(self) -> int:
        """Positions in a row of a grid; 1 for a sequence, each position of which is a row."""
        return 1

    @property
    def reach_of_rows(self) -> int | None:
        """The largest distance between two rows at which w can differ from its value far away."""
        return self.reach

    @property
    def outside(self) -> float:
        """w beyond `reach`, where there are no slopes."""
        return -math.inf if self.hides_outside else 0.0

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """w between any positions of a sequence: (..., T) and (..., T') give (..., h, T, T')."""
        raise NotImplementedError

    def dense(self, length: int) -> torch.Tensor:
        """w for the positions 0 .. T - 1, before any causal mask: (h, T, T)."""
        positions = torch.arange(length, device=self.device)
        return self.between(positions, positions)

    def of_chunks(self, count: int, size: int, *, following: bool = False) -> torch.Tensor:
        """w from each of n chunks of C positions to the chunk before it and to itself: (h, n, C, 2 C).

        n is 1 where all chunks have the same biases. `following` adds the chunk after: (h, n, C, 3 C).
        """
        starts = torch.arange(1 if self.relative else count, device=self.device) * size
        queries = starts[:, None] + torch.arange(size, device=self.device)
        keys = starts[:, None] + torch.arange(-size, (2 if following else 1) * size, device=self.device)
        return self.between(queries, keys).movedim(-3, 0)

    def from_position(self, start: int, length: int) -> "PositionBias":
        """The w of a sequence whose first token has the position `start` of this one.

        `start` may be negative: w of positions before 0, and of those beyond a learned table, has no meaning.
        """
        return self

    def with_more_rows(self, count: int) -> "PositionBias":
        """The w of so many rows more, where it depends on the number of rows."""
        return self

    def tensors(self) -> list[torch.Tensor]:
        """What w is made of."""
        return [x for x in vars(self).values() if isinstance(x, torch.Tensor)]

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        """w from a token to the `reach` positions before it and to itself: (B or 1, h, reach + 1), the token last.

        What is returned for positions before the start of the sequence has no meaning. None where w is 0 or falls
        with the distance.

        Args:
            position: of the token, or (B,).
        """
        return None


@dataclass(frozen=True, eq=False)
class NoBias(PositionBias):
    """w = 0 (Eq. 5)."""

    ordered = False

    num_heads: int
    device: torch.device
    dtype: torch.dtype

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        lags = queries[..., :, None] - keys[..., None, :]
        return lags.new_zeros(lags.shape, dtype=self.dtype).unsqueeze(-3).repeat_interleave(self.num_heads, -3)


@dataclass(frozen=True, eq=False)
class LinearDecay(PositionBias):
    """w = -slope * (t - t') with one slope per head (ALiBi; Press et al., 2022, arXiv 2108.12409)."""

    slopes: torch.Tensor  # (h,)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only, as every field is
        return self.slopes.device

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        lags = queries[..., :, None] - keys[..., None, :]
        return -self.slopes[:, None, None] * lags.unsqueeze(-3)


@dataclass(frozen=True, eq=False)
class Dense(PositionBias):
    """A learned w for each pair of positions, factorized as w_tt' = m u_t . v_t' (Eq. 7) or m times one table.

    Positions of padding may lie beyond the table: they get the biases of its last position, and nobody reads them.
    """

    query: torch.Tensor  # u, (h, P, d'), or the table (h, P, P)
    key: torch.Tensor | None = None  # v, (h, P, d'); None where `query` is the table
    multiplier: float = 1.0  # m

    relative = False
    reach = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only, as every field is
        return self.query.device

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        queries, keys = (x.clamp(0, self.query.shape[1] - 1) for x in (queries, keys))
        if self.key is None:
            return self._multiplied(self.query[:, queries[..., :, None], keys[..., None, :]]).movedim(0, -3)
        return (self._multiplied(self.query[:, queries]) @ widen(self.key[:, keys]).mT).movedim(0, -3)

    def from_position(self, start: int, length: int) -> "Dense":
        if self.key is None:
            return replace(self, query=_cut(_cut(self.query, 1, start, length), 2, start, length))
        return replace(self, query=_cut(self.query, 1, start, length), key=_cut(self.key, 1, start, length))

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError("w of all positions before a token has no fixed size: ask `between`")

    def dense(self, length: int) -> torch.Tensor:
        if self.key is None:
            return self._multiplied(self.query[:, :length, :length])
        return self._multiplied(self.query[:, :length]) @ widen(self.key[:, :length]).mT

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        """m times rows of u or of the table, which are fewer numbers than u has, or w."""
        return widen(rows) if self.multiplier == 1.0 else widen(rows) * self.multiplier


@dataclass(frozen=True, eq=False)
class Window(Dense):
    """As `Dense` for |t - t'| < size, and 0 or hidden beyond (Eq. 4)."""

    size: int = 1
    hides_outside: bool = False

    @property
    def reach(self) -> int:  # type: ignore[override]  # read only, as every field is
        return self.size - 1

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self._windowed(super().between(queries, keys), queries, keys)

    def dense(self, length: int) -> torch.Tensor:
        positions = torch.arange(length, device=self.device)
        return self._windowed(super().dense(length), positions, positions)

    def of_chunks(self, count: int, size: int, *, following: bool = False) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            return self._of_chunks(count, size, following)
        # A program of all lengths cuts its table from that of the longest one, whose sizes are known: exporters take
        # long for what has sizes that are not.
        most = (self.query.shape[1] + 2 * size - 1) // size
        table = self._of_chunks(most, size, following)
        return nn.functional.pad(table, (0, 0, 0, 0, 0, count - most))

    def _of_chunks(self, count: int, size: int, following: bool) -> torch.Tensor:
        if self.key is None:
            return super().of_chunks(count, size, following=following)
        # The factors of a chunk lie side by side: no gather here, no scatter in the backward pass.
        length = min(count * size, self.query.shape[1])
        padding = count * size - length
        queries, keys = self._multiplied(self.query[:, :length]), widen(self.key[:, :length])
        if padding > 0:
            queries, keys = (nn.functional.pad(x, (0, 0, 0, padding)) for x in (queries, keys))
        queries, keys = (x.unflatten(1, (count, size)) for x in (queries, keys))
        if runs_as_written(queries, keys):
            bias = _ProductsOfNeighbours.apply(queries, keys)
        else:
            bias = _products_of_neighbours(queries, keys)
        if following:
            after = nn.functional.pad(queries[:, :-1] @ keys[:, 1:].mT, (0, 0, 0, 0, 0, 1))
            bias = torch.cat([bias, after], -1)
        positions = torch.arange(size, (3 + following) * size, device=self.device)
        return self._windowed(bias, positions[size : 2 * size], positions)

    def _windowed(self, bias: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = (queries[..., :, None] - keys[..., None, :]).abs().unsqueeze(-3)
        return bias.masked_fill(distance >= self.size, self.outside)

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        if isinstance(position, int):
            # The rows lie side by side in memory: slices cost less than a gather.
            first = max(position - self.reach, 0)
            row, count = self.query.narrow(1, position, 1), position + 1 - first
            if self.key is None:
                bias = self._multiplied(row.narrow(2, first, count))
            else:
                bias = torch.bmm(self._multiplied(row), widen(self.key.narrow(1, first, count)).mT)
            bias = bias.squeeze(1).unsqueeze(0)
            return nn.functional.pad(bias, (self.size - count, 0)) if count < self.size else bias
        positions = position[:, None]
        lags = torch.arange(-self.reach, 1, device=self.device)
        return Dense.between(self, positions, positions + lags).squeeze(-2)


@dataclass(frozen=True, eq=False)
class LagKernel(PositionBias):
    """A learned w for each lag t - t' within a kernel, 0 or hidden beyond (Eq. 6 on a sequence)."""

    kernels: torch.Tensor  # (h, s): the lags 0 .. s - 1 if causal, else s // 2 .. -(s // 2)
    causal: bool
    hides_outside: bool = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only, as every field is
        return self.kernels.device

    @property
    def reach(self) -> int:  # type: ignore[override]  # read only, as every field is
        size = self.kernels.shape[1]
        return size - 1 if self.causal else size // 2

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        size = self.kernels.shape[1]
        lags = queries[..., :, None] - keys[..., None, :]
        index = lags if self.causal else size // 2 - lags
        inside = (index >= 0) & (index < size)
        bias = self.kernels[:, index.clamp(0, size - 1)]
        return bias.masked_fill(~inside, self.outside).movedim(0, -3)

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        return self.kernels.flip(-1).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class GridKernel(PositionBias):
    """A learned w for each offset within an s x s kernel on a grid in raster order, 0 or hidden beyond (Eq. 6)."""

    kernels: torch.Tensor  # (h, s, s): entry (i, j) for the position i - s // 2 rows below, j - s // 2 columns right
    grid_size: tuple[int, int]
    hides_outside: bool = False

    ordered = False
    reach = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only, as every field is
        return self.kernels.device

    @property
    def columns(self) -> int:
        return self.grid_size[1]

    @property
    def reach_of_rows(self) -> int:
        return self.kernels.shape[-1] // 2

    def with_more_rows(self, count: int) -> "GridKernel":
        rows, columns = self.grid_size
        return replace(self, grid_size=(rows + count, columns))

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows, columns = self.grid_size
        last = rows * columns - 1
        queries, keys = queries.clamp(0, last)[..., :, None], keys.clamp(0, last)[..., None, :]
        down, right = keys // columns - queries // columns, keys % columns - queries % columns
        return self.by_offset()[:, down + rows - 1, right + columns - 1].movedim(0, -3)

    def by_offset(self) -> torch.Tensor:
        """w by the offset from query to key: (h, 2 rows - 1, 2 columns - 1), no offset in the middle."""
        rows, columns = self.grid_size
        padding = (columns - 1, columns - 1, rows - 1, rows - 1)
        offsets = nn.functional.pad(self.kernels, padding, value=self.outside)
        centre = self.kernels.shape[-1] // 2
        return offsets[:, centre : centre + 2 * rows - 1, centre : centre + 2 * columns - 1]

    def dense(self, length: int) -> torch.Tensor:
        return grid_table(self.by_offset(), self.grid_size)


@dataclass(frozen=True, eq=False)
class SelectedPosition(PositionBias):
    """w at one position of a kernel for each head, and 0 for all others (Eq. 10 at inference)."""

    kernel: LagKernel | GridKernel  # w * one-hot
    index: torch.Tensor  # (h,), the position in the flattened kernel
    size: torch.Tensor  # (h,), w there

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read only, as every field is
        return self.index.device

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self.kernel.tensors()]

    @property
    def ordered(self) -> bool:  # type: ignore[override]  # read only, as every field is
        return self.kernel.ordered

    @property
    def reach(self) -> int | None:  # type: ignore[override]  # read only, as every field is
        return self.kernel.reach

    @property
    def columns(self) -> int:
        return self.kernel.columns

    @property
    def reach_of_rows(self) -> int | None:
        return self.kernel.reach_of_rows

    def with_more_rows(self, count: int) -> "SelectedPosition":
        kernel = self.kernel.with_more_rows(count)
        assert isinstance(kernel, (LagKernel, GridKernel))
        return replace(self, kernel=kernel)

    @property
    def hides_outside(self) -> bool:  # type: ignore[override]  # read only, as every field is
        return self.kernel.hides_outside

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.kernel.between(queries, keys)

    def dense(self, length: int) -> torch.Tensor:
        return self.kernel.dense(length)

    def of_chunks(self, count: int, size: int, *, following: bool = False) -> torch.Tensor:
        return self.kernel.of_chunks(count, size, following=following)

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        return self.kernel.next_token(position)

    def places(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The position that each query of each head selects, (h, T), and whether it exists."""
        positions, selected = torch.arange(length, device=self.device), self.index[:, None]
        size = self.kernel.kernels.shape[-1]
        if isinstance(self.kernel, LagKernel):
            place = positions - selected if self.kernel.causal else positions + selected - size // 2
            return place.clamp(0, length - 1), (place >= 0) & (place < length)
        rows, columns = self.kernel.grid_size
        row = positions // columns + selected // size - size // 2
        column = positions % columns + selected % size - size // 2
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return (row * columns + column).clamp(0, length - 1), inside


def _cut(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """`length` entries of one dimension from `start` on, 0 where there are none."""
    first, last = max(start, 0), min(start + length, x.shape[dim])
    x, padding = x.narrow(dim, first, last - first), (first - start, start + length - last)
    return x if padding == (0, 0) else nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + list(padding))


def _products_of_neighbours(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """u of each chunk with v of the chunk before it, 0 for the first, and its own: (h, n, C, d') to (h, n, C, 2 C)."""
    before = nn.functional.pad(queries[:, 1:] @ keys[:, :-1].mT, (0, 0, 0, 0, 1, 0))
    return torch.cat([before, queries @ keys.mT], -1)


class _ProductsOfNeighbours(torch.autograd.Function):
    """`_products_of_neighbours` with gradients that need no copies of factors: 2 to 3 % less for a training step."""

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(queries, keys)
        return _products_of_neighbours(queries, keys)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = ctx.saved_tensors
        before, own = gradient.tensor_split(2, -1)
        before = before[:, 1:]
        with full_precision(gradient.device.type):
            of_queries, of_keys = own @ keys, own.mT @ queries
            of_queries[:, 1:] += before @ keys[:, :-1]
            of_keys[:, :-1] += before.mT @ queries[:, 1:]
        return of_queries, of_keys


def grid_table(by_offset: torch.Tensor, grid_size: tuple[int, int], key_rows: int | None = None) -> torch.Tensor:
    """What is given for each offset from query to key, (h, rows + key_rows - 1, 2 columns - 1), as (h, T, T').

    Args:
        grid_size: (rows, columns) of the queries.
        key_rows: rows of the keys; by default those of the queries.
    """
    rows, columns = grid_size
    heads, keys = by_offset.shape[0], (key_rows or rows) * columns
    # First by the columns of query and key, with the rows of all keys one after the other: what a query needs is then
    # a window of these, and the copies are of long runs.
    by_column = by_offset.unfold(2, columns, 1).flip(2).transpose(1, 2).reshape(heads, columns, -1)
    windows = [by_column[..., row * columns :][..., :keys] for row in reversed(range(rows))]
    return torch.stack(windows, 1).flatten(1, 2)


def collect_grid_table(table: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """The transpose of `grid_table` of a grid with itself: (h, T, T) to (h, 2 rows - 1, 2 columns - 1)."""
    rows, columns = grid_size
    heads, positions = table.shape[0], rows * columns
    by_column = table.new_zeros(heads, columns, (2 * rows - 1) * columns)
    for row, of_row in enumerate(table.unflatten(1, grid_size).unbind(1)):
        by_column[..., (rows - 1 - row) * columns :][..., :positions] += of_row
    by_offset = table.new_zeros(heads, 2 * rows - 1, 2 * columns - 1)
    for column, of_column in enumerate(by_column.unflatten(2, (-1, columns)).unbind(1)):
        by_offset[..., columns - 1 - column :][..., :columns] += of_column
    return by_offset


__all__ = ["Dense", "GridKernel", "LagKernel", "LinearDecay", "NoBias", "PositionBias", "SelectedPosition", "Window"]
