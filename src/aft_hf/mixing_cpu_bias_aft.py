"""Tables of exp(w) for the CPU backend: construction, products and gradients.

Both sums of Eq. 2 are products of exp(K) V and exp(K) with a table of exp(w). Three classes make such tables from the
position biases of a layer: `DenseTables` from one bias per pair of positions, `GridTables` from one bias per offset on
a grid, and `BandTables` from the kernels of an AFT-conv, for the rows of the grid that a kernel reaches.
`ConvolutionTables` replace the product with a table by a convolution with these kernels. `choose_tables` chooses the
class for kernels on a grid.

A factor exp(-r) that is common to all terms of a query cancels in Eq. 2. Moderate exponents therefore need no shift,
and larger ones are shifted by their maximum (`relative_exp`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from .activations_aft import onednn_is_enabled
from .position_biases_aft import collect_grid_table, grid_table
from .scaled_sums_aft import EMPTY, largest_size


# Exponents up to this absolute value need no shift: the product of two exponentials is far from float32's limits.
MODERATE = 20.0

# The exponent to which the maximum of a shifted table is mapped, to use the range of float32 on both sides of 1.
TOP = 20.0

# Exponentials of lower exponents are set to 0. The bound avoids subnormal numbers, also in products with values:
# processors of Intel calculate with them up to 40 times slower, and multiply matrices with them 200 times slower.
FLOOR = {torch.float32: -82.0, torch.float64: -700.0}

# In the backward pass, the references of keys are increased by up to LARGEST_INCREASE, whose exponential is finite in
# float32: exponentials of keys are divided by exp(increase), and gradients are multiplied by it, until the smallest
# denominator is larger than the smallest precise one by a factor of exp(INCREASE_MARGIN).
LARGEST_INCREASE = 85.0
INCREASE_MARGIN = 10.0

# Maximum number of entries of a table of all pairs of positions on a grid.
LARGEST_TABLE = 2**24

# Rows of queries in one product with a band. More rows mean fewer copies of keys, but a larger table.
QUERY_ROWS = 4

# The cost of one table entry, and of one number that is copied for a further product with a band, in multiplications
# of a product. Measured on CPUs.
TABLE_COST = 200
COPY_COST = 600

# The cost of a convolution for one feature, in multiplications of a product: for each entry of the kernel, and for the
# other passes. Measured on CPUs. Beyond LARGEST_CONTIGUOUS_WINDOW, oneDNN has a fast convolution only for images whose
# channels are the last dimension in memory (channels_last), so features are transposed twice; in the contiguous layout
# it takes 25 times as long.
LARGEST_CONTIGUOUS_WINDOW = 13
CONTIGUOUS_COST = (1, 100)
CHANNELS_LAST_COST = (2, 200)

# Instruction sets for which oneDNN has a fast convolution.
FAST_CONVOLUTIONS = ("AVX2", "AVX512")

# The smallest position bias of a convolution, in which exp(w) - 1 of the kernel and the 1 of all positions may cancel:
# rounding errors grow by up to exp(2).
LOWEST_CONVOLVED = -2.0


def is_moderate(x: torch.Tensor) -> bool:
    """Whether no exponent in x exceeds `MODERATE` in absolute value; False if x contains NaN."""
    return largest_size(x) <= MODERATE


def relative_exp(
    x: torch.Tensor, maximum: torch.Tensor, top: float = TOP, increase: torch.Tensor | None = None
) -> torch.Tensor:
    """exp(x - maximum + top - increase) in the dtype of the maximum, and 0 where this exponent is below `FLOOR`.

    The exponentials with and without an increase, which has the shape of the maximum, are rounded alike.
    """
    floor = FLOOR[maximum.dtype]
    exponents = x - (maximum.clamp_min(EMPTY) - top)
    if increase is None:
        weights = exponents.clamp_min_(floor).exp_()
    else:
        weights = torch.maximum(exponents, increase + floor, out=exponents).exp_().mul_(torch.exp(-increase))
    return torch.threshold_(weights, math.exp(floor + 0.01), 0.0)


class Table(NamedTuple):
    """exp(w), up to a factor per query."""

    entries: torch.Tensor
    top: float  # no entry is larger than exp(top)
    outside: torch.Tensor | None = None  # `BandTables` only: the entry for w = 0, with the same factor, (h, 1, 1)

    def part(self, start: int, end: int) -> "Table":
        """Return the part of a causal table for the queries from start to end, and the keys that these see."""
        return self._replace(entries=self.entries[:, start:end, :end])


class Tables(Protocol):
    """The interface of the classes that make tables, for T positions, W features, and the h heads of a layer or block.

    Attributes:
        causal: whether a query sees only t' <= t.
    """

    @property
    def causal(self) -> bool: ...

    def table(self, bias: torch.Tensor, dtype: torch.dtype) -> Table:
        """Return exp(w) in the form that `product` requires."""

    def product(self, summands: torch.Tensor, table: Table) -> torch.Tensor:
        """Return the sums of the summands (h, W, B, T) that each query sees, weighted by the table: (h, W, B, T)."""

    def visible(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the biases, with -inf for keys that are hidden from a query."""

    def rows(self, visible: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, end: int) -> torch.Tensor:
        """Return w from N queries to the keys before `end`: (N, end)."""

    def size(self, features: int, length: int) -> int:
        """Return how many numbers the product and the table of one head have.

        Args:
            features: features of the head in all rows of a batch together.
            length: T.
        """


@dataclass(frozen=True)
class DenseTables:
    """Tables from one bias per pair of positions: biases (h, T, T)."""

    causal: bool = False

    def table(self, bias: torch.Tensor, dtype: torch.dtype) -> Table:
        if is_moderate(bias):
            entries = torch.exp(bias)
            return Table((entries.tril_() if self.causal else entries).to(dtype), _top(bias))
        visible = self.visible(bias)
        return Table(relative_exp(visible, visible.amax(-1, keepdim=True)).to(dtype), TOP)

    @staticmethod
    def product(summands: torch.Tensor, table: Table) -> torch.Tensor:
        return torch.bmm(summands.flatten(1, 2), table.entries.mT).unflatten(1, summands.shape[1:3])

    def bias_gradient(self, of_table: torch.Tensor, table: Table, bias: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the biases from the gradient of the table; overwrites `of_table`."""
        of_bias = of_table.mul_(table.entries)
        return of_bias.tril_() if self.causal else of_bias  # 0 times infinity, if a later key is large

    def visible(self, bias: torch.Tensor) -> torch.Tensor:
        if not self.causal:
            return bias
        return bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu_(1), -math.inf)

    def rows(self, visible: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, end: int) -> torch.Tensor:
        return visible[..., :end][heads, queries]

    def add_rows(self, sums: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `rows` (N, T) to the `sums` of the position biases, the transpose of the method `rows`."""
        sums[..., : rows.shape[1]].index_put_((heads, queries), rows.to(sums.dtype), accumulate=True)

    @staticmethod
    def size(features: int, length: int) -> int:
        return (features + length) * length


@dataclass(frozen=True)
class GridTables(DenseTables):
    """Tables from one bias per offset from query to key: (h, 2 rows - 1, 2 columns - 1), offset 0 in the middle."""

    grid_size: tuple[int, int] = (1, 1)

    def table(self, bias: torch.Tensor, dtype: torch.dtype) -> Table:
        if is_moderate(bias):
            return Table(grid_table(torch.exp(bias).to(dtype), self.grid_size), _top(bias))
        return super().table(grid_table(bias, self.grid_size), dtype)

    def bias_gradient(self, of_table: torch.Tensor, table: Table, bias: torch.Tensor) -> torch.Tensor:
        if is_moderate(bias):
            return collect_grid_table(of_table, self.grid_size) * torch.exp(bias)
        return collect_grid_table(of_table.mul_(table.entries), self.grid_size)

    def rows(self, visible: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, end: int) -> torch.Tensor:
        return visible[self._places(heads, queries)]

    def add_rows(self, sums: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, rows: torch.Tensor) -> None:
        sums.index_put_(self._places(heads, queries), rows.to(sums.dtype), accumulate=True)

    def _places(self, heads: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The indices of the biases of N queries."""
        (rows, columns), (down, right) = self.grid_size, _offsets(queries, self.grid_size)
        return heads[:, None], down + rows - 1, right + columns - 1


@dataclass(frozen=True)
class BandTables:
    """Tables from kernels (h, s, s), s odd, on a large grid: O(T d s columns) time, without gradients.

    All biases are 0 beyond the rows that a kernel reaches. So a few rows of queries at a time are multiplied with the
    band of key rows around them, by one table that serves all such blocks, and all rows outside the band are summed.
    Unlike in a convolution with exp(w) - 1 plus the sum over all keys, no terms cancel.
    """

    grid_size: tuple[int, int]
    window: int  # s
    causal = False

    def table(self, bias: torch.Tensor, dtype: torch.dtype) -> Table:
        """Return the table from a block of query rows to its band: (h, QUERY_ROWS columns, band columns)."""
        rows, columns = QUERY_ROWS, self.grid_size[1]
        side = columns - 1 - self._reach  # negative if the kernel is wider than the grid
        by_offset, outside = nn.functional.pad(bias, (side, side, rows - 1, rows - 1)), bias.new_zeros(len(bias), 1, 1)
        if is_moderate(bias):
            top, by_offset, outside = _top(bias), torch.exp(by_offset), torch.exp(outside)
        else:
            maximum = bias.amax((-2, -1), keepdim=True).clamp_min(0.0)
            top, by_offset, outside = TOP, relative_exp(by_offset, maximum), relative_exp(outside, maximum)
        return Table(grid_table(by_offset.to(dtype), (rows, columns), self._band), top, outside)

    def product(self, summands: torch.Tensor, table: Table) -> torch.Tensor:
        (rows, columns), blocks = self.grid_size, self._blocks
        by_row = summands.flatten(1, 2).unflatten(2, self.grid_size)  # (h, W B, rows, columns)
        filled = nn.functional.pad(by_row, (0, 0, self._reach, self._reach + blocks * QUERY_ROWS - rows)).flatten(2)
        bands = filled.unfold(2, self._band * columns, QUERY_ROWS * columns).flatten(1, 2)
        sums = torch.bmm(bands, table.entries.mT).unflatten(1, (-1, blocks))
        assert table.outside is not None
        sums += (self._beyond(by_row) * table.outside).unsqueeze(-1).to(sums.dtype)
        return sums.flatten(2)[..., : rows * columns].reshape(summands.shape)

    @staticmethod
    def visible(bias: torch.Tensor) -> torch.Tensor:
        return bias

    def rows(self, visible: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, end: int) -> torch.Tensor:
        down, right = (x + self._reach for x in _offsets(queries, self.grid_size))
        inside = (down >= 0) & (down < self.window) & (right >= 0) & (right < self.window)
        last = self.window - 1
        return visible[heads[:, None], down.clamp(0, last), right.clamp(0, last)].where(inside, 0.0)

    def size(self, features: int, length: int) -> int:
        queries, keys = QUERY_ROWS * self.grid_size[1], self._band * self.grid_size[1]
        return (features * self._blocks + queries) * keys

    def _beyond(self, by_row: torch.Tensor) -> torch.Tensor:
        """Return the sum of all rows outside the band of each block of queries: (h, W B, blocks), at least float32."""
        dtype = torch.promote_types(by_row.dtype, torch.float32)
        of_rows = nn.functional.pad(by_row.sum(-1, dtype=dtype), (1, 1))
        before, after = of_rows.cumsum(-1), of_rows.flip(-1).cumsum(-1).flip(-1)  # rows < i; rows >= i - 1
        first = torch.arange(self._blocks, device=by_row.device) * QUERY_ROWS - self._reach
        rows = by_row.shape[2]
        return before[..., first.clamp_min(0)] + after[..., (first + self._band).clamp_max(rows) + 1]

    @property
    def _reach(self) -> int:
        return self.window // 2

    @property
    def _band(self) -> int:
        return QUERY_ROWS + 2 * self._reach

    @property
    def _blocks(self) -> int:
        return -(-self.grid_size[0] // QUERY_ROWS)


@dataclass(frozen=True)
class ConvolutionTables(BandTables):
    """Kernels (h, s, s), s odd, for a convolution (Eq. 6): O(T d s^2) time, without gradients, in float32.

    Sums are a depthwise convolution with exp(w) - 1, plus the sum over all positions. A query sees all positions with
    weights of at least exp(LOWEST_CONVOLVED), so no query is lost to underflow.
    """

    def table(self, bias: torch.Tensor, dtype: torch.dtype) -> Table:
        return Table(torch.expm1(bias).to(dtype).unsqueeze(1), _top(bias))

    def product(self, summands: torch.Tensor, table: Table) -> torch.Tensor:
        features = summands.flatten(0, 1)  # (h W, B, T)
        images = features.unflatten(2, self.grid_size).transpose(0, 1)
        if self.window > LARGEST_CONTIGUOUS_WINDOW:
            images = images.contiguous(memory_format=torch.channels_last)
        kernels = table.entries.repeat_interleave(summands.shape[1], 0)
        convolved = nn.functional.conv2d(images, kernels, padding=self._reach, groups=len(kernels))
        sums = torch.empty_like(features)
        torch.add(convolved.transpose(0, 1).flatten(2), features.sum(-1, keepdim=True), out=sums)
        return sums.view_as(summands)

    @staticmethod
    def can_convolve(kernels: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether a convolution of features in this dtype with these kernels is fast and precise."""
        fast = onednn_is_enabled() and torch.backends.cpu.get_cpu_capability() in FAST_CONVOLUTIONS
        if not fast or dtype not in (torch.float16, torch.float32):  # float16 is computed in float32
            return False
        lowest, highest = kernels.aminmax()
        return float(lowest) >= LOWEST_CONVOLVED and float(highest) <= MODERATE

    def size(self, features: int, length: int) -> int:
        return 4 * features * length  # summands, transposed images, convolved images and sums


def choose_tables(
    grid_size: tuple[int, int],
    window: int,
    num_heads: int,
    features: int,
    *,
    with_gradients: bool,
    convolution: bool = False,
) -> GridTables | BandTables | None:
    """Choose the fastest tables for kernels (h, s, s) on a grid; None if no table fits.

    Times are estimated in multiplications per query and head; the constants were measured on CPUs.

    Args:
        grid_size: (rows, columns).
        window: s, the size of the kernels.
        num_heads: h.
        features: the number of values and keys of one head in all rows of a batch, B (c + 1).
        with_gradients: whether gradients are needed, which only `GridTables` supports.
        convolution: the result of `ConvolutionTables.can_convolve`.
    """
    (rows, columns), length = grid_size, grid_size[0] * grid_size[1]
    grid, band = GridTables(grid_size=grid_size), BandTables(grid_size, window)
    fits = num_heads * length**2 <= LARGEST_TABLE
    if with_gradients:
        return grid if fits else None
    reached, copies = QUERY_ROWS + window - 1, (window - 1) / QUERY_ROWS
    band_time = reached * columns * (features + TABLE_COST * QUERY_ROWS / rows) + copies * COPY_COST * features
    times: dict[GridTables | BandTables, float] = {band: band_time}
    if fits:
        times[grid] = length * (features + TABLE_COST)
    if convolution:
        of_entry, of_passes = CONTIGUOUS_COST if window <= LARGEST_CONTIGUOUS_WINDOW else CHANNELS_LAST_COST
        times[ConvolutionTables(grid_size, window)] = features * (of_entry * window**2 + of_passes)
    return min(times, key=lambda tables: times[tables])


def _top(bias: torch.Tensor) -> float:
    """Return the largest exponent of a table of moderate biases, at least 0, the exponent of w = 0."""
    return max(float(bias.amax()), 0.0)


def _offsets(queries: torch.Tensor, grid_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets from N queries to all keys, in rows (down) and columns (right): (N, T) each."""
    rows, columns = grid_size
    keys, queries = torch.arange(rows * columns, device=queries.device), queries[:, None]
    return keys // columns - queries // columns, keys % columns - queries % columns
