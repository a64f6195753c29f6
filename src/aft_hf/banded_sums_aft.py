"""AFT-conv on a large grid at inference: the direct form with products for the rows of the grid that a kernel reaches.

A table of all pairs of positions grows with T^2, but beyond the kernel all weights are exp(0) = 1. So a few rows of
queries at a time are multiplied with the rows of keys around them, by a table of exp(w) which serves all of them, and
the rows before and after these are added up. Unlike a convolution with exp(w) - 1 and the sum of all, nothing cancels.
"""

import torch
from torch import nn

from .direct_mixing_aft import TableSums, inference_dtype
from .mixing_aft import grid_table


# Rows of queries in one product: more make fewer copies of keys, and a larger table.
QUERY_ROWS = 4


class BandSums(TableSums):
    """O(T d s columns) time. Without gradients.

    Position biases are the kernels (h, s, s). Memory is for a table of O(s columns^2) for each head, and for keys and
    values (s + 3) / 4 times over: by heads in blocks where positions lie last in memory.

    Args:
        grid_size: (rows, columns) of the grid.
        window: s.
    """

    def __init__(self, grid_size: tuple[int, int], window: int):
        self.grid_size, self.reach = grid_size, window // 2

    def forward(self, key, value, bias, inverse=None):
        dtype = inference_dtype(value)
        keys, values = (x.to(dtype).permute(1, 3, 0, 2) for x in (key, value))  # (h, k, B, T)
        weights = torch.exp(keys)
        summands = torch.cat([weights, weights * values], 1)
        sums = self.product(summands, self.table(torch.exp(bias).to(dtype)))
        denominator, numerator = sums.tensor_split((1,), 1)
        return (numerator * self._reciprocal(denominator)).permute(2, 0, 3, 1).to(value.dtype)

    def table(self, exp_bias):
        """From some rows of queries to those around them, (h, QUERY_ROWS columns, band columns)."""
        rows, columns = QUERY_ROWS, self.grid_size[1]
        side = columns - 1 - self.reach  # where negative, the kernel is wider than the grid
        by_offset = nn.functional.pad(exp_bias, (side, side, rows - 1, rows - 1), value=1.0)
        return grid_table(by_offset, (rows, columns), self._band)

    def product(self, summands, table):
        (rows, columns), blocks = self.grid_size, self._blocks
        by_row = summands.flatten(1, 2).unflatten(2, self.grid_size)  # (h, W B, rows, columns)
        filled = nn.functional.pad(by_row, (0, 0, self.reach, self.reach + blocks * QUERY_ROWS - rows)).flatten(2)
        bands = filled.unfold(2, self._band * columns, QUERY_ROWS * columns).flatten(1, 2)
        sums = torch.bmm(bands, table.mT).unflatten(1, (-1, blocks))
        sums += self._beyond(by_row).unsqueeze(-1).to(sums.dtype)
        return sums.flatten(2)[..., : rows * columns].reshape(summands.shape)

    def size(self, features, length):
        queries, keys = QUERY_ROWS * self.grid_size[1], self._band * self.grid_size[1]
        return (features * self._blocks + queries) * keys

    def _beyond(self, by_row: torch.Tensor) -> torch.Tensor:
        """The sum of all rows outside the band of each block of queries: (h, W B, blocks) in float32 at least."""
        dtype = torch.promote_types(by_row.dtype, torch.float32)
        of_rows = nn.functional.pad(by_row.sum(-1, dtype=dtype), (1, 1))
        before, after = of_rows.cumsum(-1), of_rows.flip(-1).cumsum(-1).flip(-1)  # of the first i rows, from i - 1 on
        first = torch.arange(self._blocks, device=by_row.device) * QUERY_ROWS - self.reach
        rows = by_row.shape[2]
        return before[..., first.clamp_min(0)] + after[..., (first + self._band).clamp_max(rows) + 1]

    @property
    def _band(self) -> int:
        return QUERY_ROWS + 2 * self.reach

    @property
    def _blocks(self) -> int:
        return -(-self.grid_size[0] // QUERY_ROWS)
