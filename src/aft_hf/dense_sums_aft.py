"""The direct form by a table of all pairs of positions.

Both sums of Eq. 2 lie side by side as c + k features: exp(K) V, then exp(K), which is copied to its place because exp
is several times slower on rows that are apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .direct_mixing_aft import TableSums, by_position, gradient_of_inputs, gradient_of_sums, inference_dtype
from .mixing_aft import collect_grid_table, grid_table, working_dtype


# Bytes of the features in a block: few enough to stay in the cache, many enough for products to be efficient.
BLOCK_SIZE = 2**22

# Columns that a product should have at least.
FEWEST_COLUMNS = 256


class DenseSums(TableSums):
    """All positions in one product with the table exp(w): O(T^2 d) time, no tensor larger than a block and its table.

    Position biases are (h, T, T), or on a grid (h, 2 rows - 1, 2 columns - 1), by the offset from query to key.

    Args:
        grid_size: (rows, columns) of the grid, or None.
        causal: whether t' <= t only.
    """

    def __init__(self, grid_size: tuple[int, int] | None = None, causal: bool = False):
        self.grid_size, self.causal = grid_size, causal

    def forward(self, key, value, bias, inverse=None):
        dtype = inference_dtype(value) if inverse is None else working_dtype(value)
        exp_bias = torch.exp(bias).to(dtype)
        context = by_position(value)
        for block in self._blocks(key, value, dtype):
            sums = block.product(block.features(key, value), self.table(exp_bias[block.heads]))
            numerator, denominator = block.parts(sums)
            denominator = self._reciprocal(denominator)
            if inverse is not None:
                block.of(inverse).copy_(denominator)
            block.of(context).copy_(numerator.mul_(denominator))
        return context

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed):
        dtype = working_dtype(value)
        exp_bias = torch.exp(bias).to(dtype)
        key_gradient, value_gradient = by_position(key), by_position(value)
        bias_gradient = torch.zeros_like(bias) if bias_needed else None
        for block in self._blocks(key, value, dtype):
            features = block.features(key, value)
            of_sums = torch.empty_like(features)
            inputs = (block.load(x) for x in (gradient, context, inverse))
            gradient_of_sums(*inputs, *block.parts(of_sums), block.feature_dim)
            exp_biases = exp_bias[block.heads]
            if bias_needed:
                of_table = block.gradient_of_table(of_sums, features)
                bias_gradient[block.heads] += self.collect(of_table) * exp_biases
            of_features = block.product(of_sums, self.table(exp_biases).mT)
            gradients = block.of(key_gradient), block.of(value_gradient)
            gradient_of_inputs(block.parts(of_features), block.parts(features), *gradients, block.feature_dim)
        return key_gradient, value_gradient, bias_gradient

    def _blocks(self, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> Iterator["_Block"]:
        """The heads and rows that are taken at once. Rows share a table, so they stay together where they can."""
        rows, heads, length = key.shape[:3]
        width = value.shape[3] + key.shape[3]
        room = BLOCK_SIZE // (dtype.itemsize * length)
        heads_at_once = min(heads, max(1, room // (rows * width + length)))
        rows_at_once = max(FEWEST_COLUMNS // width, room // (heads_at_once * width), 1)
        layout = _BlockOfHeads if heads > 1 else _BlockOfRows
        for head in range(0, heads, heads_at_once):
            for row in range(0, rows, rows_at_once):
                yield layout(slice(head, head + heads_at_once), slice(row, row + rows_at_once), value.shape[3], dtype)

    def table(self, exp_bias):
        """(h, T, T)."""
        if self.grid_size is None:
            return exp_bias.tril() if self.causal else exp_bias
        return grid_table(exp_bias, self.grid_size)

    @staticmethod
    def product(summands, table):
        return torch.bmm(summands.flatten(1, 2), table.mT).view_as(summands)

    @staticmethod
    def gradient_of_table(of_sums: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """That of `product`, (h, T, T)."""
        return torch.bmm(of_sums.flatten(1, 2).mT, summands.flatten(1, 2))

    def size(self, features, length):
        return (features + length) * length

    def collect(self, of_table: torch.Tensor) -> torch.Tensor:
        """The transpose of `table`: what (h, T, T) gives each position bias."""
        if self.grid_size is None:
            return of_table.tril() if self.causal else of_table
        return collect_grid_table(of_table, self.grid_size)


@dataclass(frozen=True)
class _Block:
    """Some heads and rows of the batch, and how their features lie in memory."""

    heads: slice
    rows: slice
    width: int
    dtype: torch.dtype
    feature_dim: ClassVar[int]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The block of (B, h, T, c)."""
        raise NotImplementedError

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """The same to calculate with. Where that transposes, it is a pass of its own, which is faster than a product
        of factors in different orders.
        """
        return self.of(x).to(self.dtype).contiguous()

    def product(self, features: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Sums over the last dimension of the table, (h, T, T), for each feature."""
        raise NotImplementedError

    def gradient_of_table(self, of_sums: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """That of `product`, (h, T, T)."""
        raise NotImplementedError

    def features(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """exp(K) V, then exp(K)."""
        keys, values = self.load(key), self.load(value)
        shape = list(values.shape)
        shape[self.feature_dim] += keys.shape[self.feature_dim]
        features = torch.empty(shape, dtype=self.dtype, device=value.device)
        weighted, weights = self.parts(features)
        weights.copy_(torch.exp(keys))
        torch.mul(values, weights, out=weighted)
        return features

    def parts(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both sums, of c and of k features."""
        return both.tensor_split((self.width,), self.feature_dim)


class _BlockOfHeads(_Block):
    """(h, B, W, T): one product for a head, with long runs of positions however few features it has."""

    feature_dim = -2
    product = staticmethod(DenseSums.product)
    gradient_of_table = staticmethod(DenseSums.gradient_of_table)

    def of(self, x):
        return x[self.rows, self.heads].permute(1, 0, 3, 2)


class _BlockOfRows(_Block):
    """(B, T, W), where there is one head: nothing has to be transposed, and there is one product for a row."""

    feature_dim = -1

    def of(self, x):
        return x[self.rows].squeeze(1)

    def product(self, features, table):
        return torch.bmm(table.expand(len(features), -1, -1), features)

    def gradient_of_table(self, of_sums, features):
        return torch.bmm(of_sums, features.mT).sum(0, keepdim=True)
