"""The position biases w of Eq. 2: one small class for each structure that w can have.

A mixer makes an instance from its parameters. The instance answers every question about the geometry of w: the dense
table, w between any positions, w of chunks of a sequence, and w of the next token. It holds tensors, not modules.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return x in its `working_dtype`."""
    dtype = working_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


# Tables of a window are made by products of at least this many positions.
SMALLEST_PRODUCT = 32


class PositionBias:
    """The base class of all structures of w.

    Attributes:
        relative: whether w depends only on the offset between two positions.
        ordered: whether w depends on the order of the tokens in a sequence.
        reach: the largest distance at which w can differ from its value outside; None if there is no such limit. 0
            with slopes, which describe w at every distance.
        slopes: (h,) if w = -slope * distance for every distance; None otherwise.
        hides_outside: whether positions beyond `reach` are hidden (w = -inf); otherwise they have w = 0.
        device: the device on which w is computed.
    """

    relative = True
    ordered = True
    reach: int | None = 0
    slopes: torch.Tensor | None = None
    hides_outside = False
    device: torch.device

    @property
    def columns(self) -> int:
        """Positions in a row of the grid; 1 for a sequence, where each position is a row."""
        return 1

    @property
    def reach_of_rows(self) -> int | None:
        """The largest distance between two rows at which w can differ from its value outside."""
        return self.reach

    @property
    def outside(self) -> float:
        """The value of w beyond `reach`, for structures without slopes."""
        return -math.inf if self.hides_outside else 0.0

    def between(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return w between any positions of a sequence: (..., h, T, T') from positions (..., T) and (..., T')."""
        raise NotImplementedError

    def dense(self, length: int) -> torch.Tensor:
        """Return w between the positions 0 .. T - 1, before any causal mask: (h, T, T)."""
        positions = torch.arange(length, device=self.device)
        return self.between(positions, positions)

    def of_chunks(self, count: int, size: int, *, following: bool = False) -> torch.Tensor:
        """Return w from each of n chunks of C positions to the chunk before it and to itself: (h, n, C, 2 C).

        n is 1 if all chunks have the same biases. `following` adds w to the chunk after it: (h, n, C, 3 C).
        """
        starts = torch.arange(1 if self.relative else count, device=self.device) * size
        queries = starts[:, None] + torch.arange(size, device=self.device)
        keys = starts[:, None] + torch.arange(-size, (2 if following else 1) * size, device=self.device)
        return self.between(queries, keys).movedim(-3, 0)

    def from_position(self, start: int, length: int) -> "PositionBias":
        """Return the biases of a sequence of `length` tokens whose first token has position `start`.

        `start` may be negative. w is undefined for positions before 0 and beyond a learned table.
        """
        return self

    def with_more_rows(self, count: int) -> "PositionBias":
        """Return the biases of a grid with `count` more rows, if w depends on the number of rows."""
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors from which w is computed."""
        return [x for x in vars(self).values() if isinstance(x, torch.Tensor)]

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        """Return w from a token to the `reach` positions before it and to itself: (B or 1, h, reach + 1), itself last.

        Values for positions before the start of the sequence are undefined. None for structures without a window,
        where w is 0 or decays with the distance.

        Args:
            position: the position of the token, or one position per row (B,).
        """
        return None

    def by_lag(self, length: int, start: int | torch.Tensor = 0) -> torch.Tensor | None:
        """Return `next_token` for T positions: (B or 1, T, h, reach + 1), or (1, 1, h, reach + 1) if w is the same for
        all positions.

        Args:
            length: T.
            start: the first position, or one per row (B,).
        """
        bias = self.next_token(0)
        return None if bias is None else bias.unsqueeze(1)


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

    Positions of padding may lie beyond the table. They get the biases of its last position, which are never used.
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
        raise NotImplementedError("w of all positions before a token has no fixed size: use `between`")

    def dense(self, length: int) -> torch.Tensor:
        if self.key is None:
            return self._multiplied(self.query[:, :length, :length])
        return self._multiplied(self.query[:, :length]) @ widen(self.key[:, :length]).mT

    def of_neighbours(self, count: int, size: int, *, following: bool = False) -> torch.Tensor:
        """Return `of_chunks` without a window; w is undefined for positions before 0 and beyond the table."""
        if self.key is None:
            return PositionBias.of_chunks(self, count, size, following=following)
        # The factors of a chunk are contiguous, which avoids a gather here and a scatter in the backward pass.
        length = min(count * size, self.query.shape[1])
        padding = count * size - length
        queries, keys = self._multiplied(self.query[:, :length]), widen(self.key[:, :length])
        if padding > 0:
            queries, keys = (nn.functional.pad(x, (0, 0, 0, padding)) for x in (queries, keys))
        queries, keys = (x.unflatten(1, (count, size)) for x in (queries, keys))
        before = nn.functional.pad(queries[:, 1:] @ keys[:, :-1].mT, (0, 0, 0, 0, 1, 0))  # 0 for the first chunk
        parts = [before, queries @ keys.mT]
        if following:
            parts.append(nn.functional.pad(queries[:, :-1] @ keys[:, 1:].mT, (0, 0, 0, 0, 0, 1)))
        return torch.cat(parts, -1)

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        """Return m times rows of u or of the table, which are fewer numbers than all of u or of w."""
        return widen(rows) if self.multiplier == 1.0 else widen(rows) * self.multiplier


@dataclass(frozen=True, eq=False)
class Window(Dense):
    """Learned as in `Dense` for |t - t'| < size, and 0 or hidden outside (Eq. 4)."""

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
        # A program for all lengths cuts its table from the table of the longest sequence, whose sizes are static:
        # exporters are slow on operations with dynamic sizes.
        most = (self.query.shape[1] + 2 * size - 1) // size
        table = self._of_chunks(most, size, following)
        return nn.functional.pad(table, (0, 0, 0, 0, 0, count - most))

    def _of_chunks(self, count: int, size: int, following: bool) -> torch.Tensor:
        if self.key is None:
            return super().of_chunks(count, size, following=following)
        bias = self.of_neighbours(count, size, following=following)
        positions = torch.arange(size, (3 + following) * size, device=self.device)
        return self._windowed(bias, positions[size : 2 * size], positions)

    def by_lag(self, length: int, start: int | torch.Tensor = 0) -> torch.Tensor:
        if isinstance(start, torch.Tensor):
            positions = (start[:, None] + torch.arange(length, device=start.device)).clamp_max(self.query.shape[1] - 1)
            return self.by_lag(self.query.shape[1])[0, positions]
        if start > 0:
            cut = cast(Window, self.from_position(start - self.reach, length + self.reach))
            return cut.by_lag(length + self.reach)[:, self.reach :]
        # In the table (C, 2 C) of a chunk, row i has its window from column i + C - reach on. In rows that are longer
        # by one, the windows of all rows start in the same column.
        size = max(1 << max(self.reach - 1, 0).bit_length(), SMALLEST_PRODUCT)
        count = max((length + size - 1) // size, 1)
        chunks = Dense.of_neighbours(self, count, size)  # (h, n, C, 2 C)
        chunks = nn.functional.pad(chunks.flatten(-2), (0, size)).unflatten(-1, (size, 2 * size + 1))
        windows = chunks[..., size - self.reach : size + 1].flatten(1, 2)[:, :length]  # (h, T, s)
        return windows.transpose(0, 1).unsqueeze(0)

    def _windowed(self, bias: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = (queries[..., :, None] - keys[..., None, :]).abs().unsqueeze(-3)
        return bias.masked_fill(distance >= self.size, self.outside)

    def next_token(self, position: int | torch.Tensor) -> torch.Tensor | None:
        if isinstance(position, int):
            # The rows are contiguous in memory, so slices cost less than a gather.
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
    """A learned w for each lag t - t' within a kernel, 0 or hidden outside (Eq. 6 on a sequence)."""

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
    """A learned w for each offset within an s x s kernel on a grid in raster order, 0 or hidden outside (Eq. 6)."""

    kernels: torch.Tensor  # (h, s, s): entry (i, j) is w for a key i - s // 2 rows below, j - s // 2 columns right
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
        """Return w by the offset from query to key: (h, 2 rows - 1, 2 columns - 1), offset 0 in the middle."""
        rows, columns = self.grid_size
        padding = (columns - 1, columns - 1, rows - 1, rows - 1)
        offsets = nn.functional.pad(self.kernels, padding, value=self.outside)
        centre = self.kernels.shape[-1] // 2
        return offsets[:, centre : centre + 2 * rows - 1, centre : centre + 2 * columns - 1]

    def dense(self, length: int) -> torch.Tensor:
        return grid_table(self.by_offset(), self.grid_size)


@dataclass(frozen=True, eq=False)
class SelectedPosition(PositionBias):
    """w at one position of a kernel for each head, and 0 elsewhere (Eq. 10 at inference)."""

    kernel: LagKernel | GridKernel  # w * one-hot
    index: torch.Tensor  # (h,), the selected position in the flattened kernel
    size: torch.Tensor  # (h,), w at that position

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
        """Return the position that each query of each head selects, (h, T), and whether it exists in the sequence."""
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
    """Return `length` entries of one dimension from `start` on, with 0 outside the tensor."""
    first, last = max(start, 0), min(start + length, x.shape[dim])
    x, padding = x.narrow(dim, first, last - first), (first - start, start + length - last)
    return x if padding == (0, 0) else nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + list(padding))


def grid_table(by_offset: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Expand numbers by offset from query to key, (h, 2 rows - 1, 2 columns - 1), to a table (h, T, T)."""
    rows, columns = grid_size
    heads, keys = by_offset.shape[0], rows * columns
    # The numbers are first ordered by the columns of query and key, with all key rows concatenated. The entries of a
    # query are then a contiguous window, so long runs are copied.
    by_column = by_offset.unfold(2, columns, 1).flip(2).transpose(1, 2).reshape(heads, columns, -1)
    windows = [by_column[..., row * columns :][..., :keys] for row in reversed(range(rows))]
    return torch.stack(windows, 1).flatten(1, 2)


__all__ = ["Dense", "GridKernel", "LagKernel", "LinearDecay", "NoBias", "PositionBias", "SelectedPosition", "Window"]
