"""The position biases w of Eq. 2: one small class for each structure that w can have.

A mixer makes an instance from its parameters. The instance answers every question about the geometry of w: the dense
table, w between any positions, and w of the window of each token. It holds tensors, not modules.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
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
        global_connectivity: whether positions beyond `reach` have w = 0; otherwise they are hidden (w = -inf).
    """

    relative = True
    ordered = True
    reach: int | None = None
    slopes: Tensor | None = None
    global_connectivity = True

    @property
    def device(self) -> torch.device:
        """The device of w."""
        return next(x.device for x in vars(self).values() if isinstance(x, Tensor))

    @property
    def outside(self) -> float:
        """The value of w beyond `reach`, for structures without slopes."""
        return 0.0 if self.global_connectivity else -math.inf

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return w between any positions of a sequence: (..., h, T, T') from positions (..., T) and (..., T')."""
        raise NotImplementedError

    def dense(self, length: int) -> Tensor:
        """Return w between the positions 0 .. T - 1, before any causal mask: (h, T, T)."""
        positions = torch.arange(length, device=self.device)
        return self.between(positions, positions)

    def by_lag(self, length: int, start: int | Tensor = 0) -> Tensor | None:
        """Return w from each of T tokens to the `reach` positions before it and to itself, itself last: (B or 1, T, h,
        reach + 1), or (1, 1, h, reach + 1) if w is the same for all tokens.

        Values for positions before the sequence are undefined. None for structures without a window,
        where w is 0 or decays with the distance. The first token has position `start`, or one position per row (B,).
        """
        return None


@dataclass(frozen=True, eq=False)
class NoBias(PositionBias):
    """w = 0 (Eq. 5)."""

    ordered = False
    reach = 0

    num_heads: int
    like: Tensor  # on the device of w

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        zeros = torch.zeros_like(queries[..., :, None] - keys[..., None, :], dtype=working_dtype(self.like))
        return zeros.unsqueeze(-3).repeat_interleave(self.num_heads, -3)


@dataclass(frozen=True, eq=False)
class LinearDecay(PositionBias):
    """w = -slope * (t - t') with one slope per head (ALiBi; Press et al., 2022, arXiv 2108.12409)."""

    reach = 0
    slopes: Tensor  # (h,)

    @classmethod
    def of(cls, heads: int, like: Tensor) -> "LinearDecay":
        """Return the biases with the slopes m_i = 2^(-8 i / h) of that paper, for i = 1 .. h."""
        return cls(torch.logspace(-8.0 / heads, -8.0, heads, 2.0, device=like.device, dtype=working_dtype(like)))

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        lags = queries[..., :, None] - keys[..., None, :]
        return -self.slopes[:, None, None] * lags.unsqueeze(-3)


@dataclass(frozen=True, eq=False)
class Dense(PositionBias):
    """A learned w for each pair of positions, factorized as w_tt' = m u_t . v_t' (Eq. 7) or m times one table.

    Positions of padding may lie beyond the table. They get the biases of its last position, which are never used.
    """

    query: Tensor  # u, (h, P, d'), or the table (h, P, P)
    key: Tensor | None = None  # v, (h, P, d'); None where `query` is the table
    multiplier: float = 1.0  # m

    relative = False

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries, keys = (x.clamp(0, self.query.shape[1] - 1) for x in (queries, keys))
        if self.key is None:
            return self._multiplied(self.query[:, queries[..., :, None], keys[..., None, :]]).movedim(0, -3)
        return (self._multiplied(self.query[:, queries]) @ widen(self.key[:, keys]).mT).movedim(0, -3)

    def dense(self, length: int) -> Tensor:
        if self.key is None:
            return self._multiplied(self.query[:, :length, :length])
        return torch.bmm(self._multiplied(self.query[:, :length]), widen(self.key[:, :length]).mT)

    def spans(self, limit: float) -> bool:
        """Whether two learned w differ by more than `limit`."""
        if self.key is not None:
            u, v = (vector_norm(x, dim=-1).amax() for x in (self._multiplied(self.query), widen(self.key)))
            if 2 * u * v <= limit:  # |u . v| is at most |u| |v|
                return False
        positions = self.query.shape[1]
        w: Any = self.dense(positions) if self.reach is None else self.by_lag(positions)
        return bool(w.amax() - w.amin() > limit)

    def _multiplied(self, rows: Tensor) -> Tensor:
        """Return m times rows of u or of the table, which are fewer numbers than all of u or of w."""
        return widen(rows) if self.multiplier == 1.0 else widen(rows) * self.multiplier


@dataclass(frozen=True, eq=False)
class Window(Dense):
    """Learned as in `Dense` for |t - t'| < size, and 0 or hidden outside (Eq. 4)."""

    size: int = 1
    global_connectivity: bool = True

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.size - 1

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self._windowed(super().between(queries, keys), queries, keys)

    def dense(self, length: int) -> Tensor:
        positions = torch.arange(length, device=self.device)
        return self._windowed(super().dense(length), positions, positions)

    def by_lag(self, length: int, start: int | Tensor = 0) -> Tensor:
        reach, size = self.reach, min(max(self.reach, SMALLEST_PRODUCT), max(length, 1))
        start = start.view(-1, 1, 1) if isinstance(start, Tensor) else start
        # Not for one token, nor exported, where the number of chunks is not known.
        if length == 1 or torch.compiler.is_exporting():
            queries = torch.arange(length, device=self.device).view(1, -1, 1) + start
            return super().between(queries, queries + torch.arange(-reach, 1, device=self.device)).squeeze(-2)
        # Row i of a table has its window from column i on: in rows longer by one, all start in the first column.
        chunks = (length + size - 1) // size
        positions = torch.arange(chunks * size, device=self.device).view(1, chunks, size) + start
        tables = super().between(positions, positions[..., :1] + torch.arange(-reach, size, device=self.device))
        windows = nn.functional.pad(tables.flatten(-2), (0, size)).unflatten(-1, (size, reach + size + 1))
        return windows[..., : reach + 1].transpose(2, 3).flatten(1, 2)[:, :length]  # (B or 1, T, h, s)

    def _windowed(self, bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[..., :, None] - keys[..., None, :]).abs().unsqueeze(-3)
        return bias.masked_fill(distance >= self.size, self.outside)


@dataclass(frozen=True, eq=False)
class LagKernel(PositionBias):
    """A learned w for each lag t - t' within a kernel, 0 or hidden outside (Eq. 6 on a sequence)."""

    kernels: Tensor  # (h, s): the lags 0 .. s - 1 if causal, else s // 2 .. -(s // 2)
    causal: bool
    global_connectivity: bool = True

    @property
    def reach(self) -> int:  # type: ignore[override]
        size = self.kernels.shape[1]
        return size - 1 if self.causal else size // 2

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        size = self.kernels.shape[1]
        lags = queries[..., :, None] - keys[..., None, :]
        index = lags if self.causal else size // 2 - lags
        inside = (index >= 0) & (index < size)
        bias = self.kernels[:, index.clamp(0, size - 1)]
        return bias.masked_fill(~inside, self.outside).movedim(0, -3)

    def by_lag(self, length: int, start: int | Tensor = 0) -> Tensor:
        kernels = self.kernels.flip(-1) if self.causal else self.kernels[:, : self.reach + 1]
        return kernels.unflatten(0, (1, 1, -1))


@dataclass(frozen=True, eq=False)
class GridKernel(PositionBias):
    """A learned w for each offset within an s x s kernel on a grid in raster order, 0 or hidden outside (Eq. 6)."""

    kernels: Tensor  # (h, s or 1, s): entry (i, j) is w for a key i - s // 2 rows below, j - s // 2 columns right
    grid_size: tuple[int, int]
    global_connectivity: bool = True

    ordered = False

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        length = math.prod(self.grid_size)
        queries, keys = (x.clamp(0, length - 1) for x in (queries, keys))
        return self.dense(length)[:, queries[..., :, None], keys[..., None, :]].movedim(0, -3)

    def dense(self, length: int) -> Tensor:
        rows, columns = self.grid_size
        offsets = nn.functional.pad(self.kernels, (columns - 1, columns - 1, rows - 1, rows - 1), value=self.outside)
        top, left = (size // 2 for size in self.kernels.shape[1:])
        offsets = offsets[:, top : top + 2 * rows - 1, left : left + 2 * columns - 1]  # w by the offset to the key
        places = ((torch.arange(n, device=self.device), n) for n in self.grid_size)
        down, right = (x - x[:, None] + n - 1 for x, n in places)
        return offsets[:, :, right][:, down].transpose(2, 3).flatten(3).flatten(1, 2)


__all__ = ["Dense", "GridKernel", "LagKernel", "LinearDecay", "NoBias", "PositionBias", "Window"]
