"""The lambda layer of LambdaNetworks (Bello 2021) for images, with full context."""

import torch
from torch import nn


class LambdaLayer(nn.Module):
    """y_n = (softmax(K)^T V + E_n^T V)^T q_n, where E_n embeds the offsets from patch n to all patches (Eq. 1 and 2).

    Queries and keys are batch-normalized, as the AFT paper says. An output projection follows, because the layer would
    otherwise have fewer parameters than in Table 7 of the AFT paper.

    Args:
        hidden_size: width d.
        num_heads: number of queries of a patch, which share one lambda; divides d.
        key_dim: width |k| of a query or key.
        grid_size: (rows, columns) of patches.
    """

    def __init__(self, hidden_size: int, num_heads: int, key_dim: int, grid_size: tuple[int, int]):
        super().__init__()
        self.num_heads, self.grid_size = num_heads, grid_size
        rows, columns = grid_size
        self.q_proj = nn.Linear(hidden_size, num_heads * key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.q_norm = nn.BatchNorm1d(num_heads * key_dim)
        self.k_norm = nn.BatchNorm1d(key_dim)
        self.offsets = nn.Parameter(torch.empty(2 * rows - 1, 2 * columns - 1, key_dim))
        self.reset_offsets()

    def reset_offsets(self) -> None:
        """Draw the embeddings of offsets from a standard normal distribution."""
        nn.init.normal_(self.offsets)

    def embeddings(self) -> torch.Tensor:
        """E, (T, T, |k|): row n has the embeddings of the offsets from patch n."""
        row, column = (torch.arange(size, device=self.offsets.device) for size in self.grid_size)
        row, column = (x - x[:, None] + len(x) - 1 for x in (row, column))
        return self.offsets[row[:, None, :, None], column[None, :, None, :]].flatten(2, 3).flatten(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d).

        Raises:
            ValueError: the number of patches is not that of the grid.
        """
        if x.shape[1] != self.grid_size[0] * self.grid_size[1]:
            raise ValueError(f"{x.shape[1]} patches do not match the grid of {self.grid_size}")
        query = self.q_norm(self.q_proj(x).mT).mT.unflatten(-1, (self.num_heads, -1))  # (B, T, h, k)
        key = self.k_norm(self.k_proj(x).mT).softmax(-1)  # (B, k, T)
        value = self.v_proj(x)
        content = key @ value  # (B, k, v)
        position = torch.einsum("nmk,bmv->bnkv", self.embeddings().to(value.dtype), value)
        return self.o_proj((query @ (content.unsqueeze(1) + position)).flatten(2))
