"""The dense Synthesizer: each token predicts its attention weights from itself, without keys."""

import torch
from torch import nn


class DenseSynthesizer(nn.Module):
    """y_t = softmax over t' <= t of (W_2 relu(W_1 x_t))_t', times values (Tay et al. 2021, section 3.1).

    Args:
        hidden_size: width d.
        num_heads: h, which divides d. Each head has d / h hidden features and d / h values.
        max_positions: the longest sequence.
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int):
        super().__init__()
        self.num_heads, self.max_positions = num_heads, max_positions
        self.hidden = nn.Linear(hidden_size, hidden_size)
        # W_2 of all heads: (h, d / h, T).
        self.scores = nn.ModuleList(nn.Linear(hidden_size // num_heads, max_positions) for _ in range(num_heads))
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d).

        Raises:
            ValueError: the sequence has more than `max_positions` tokens.
        """
        length = x.shape[1]
        if length > self.max_positions:
            raise ValueError(f"{length} tokens are more than the {self.max_positions} positions of the Synthesizer")
        hidden = nn.functional.relu(self.hidden(x)).unflatten(-1, (self.num_heads, -1))
        scores = [score(hidden[:, :, head])[..., :length] for head, score in enumerate(self.scores)]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.stack(scores, 1).float().masked_fill(later, -torch.inf).softmax(-1)
        value = self.v_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.o_proj((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))
