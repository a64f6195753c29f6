"""Causal attention with a feature map phi in place of the softmax: Linear Transformer and Performer.

Both compute y_t = phi(q_t) sum_t' phi(k_t') v_t'^T / phi(q_t) sum_t' phi(k_t') over t' <= t, which is linear in the
sequence length (Katharopoulos et al. 2020, Eq. 9).
"""

import math

import torch
from torch import nn


CHUNK_SIZE = 64

# Added to the features of a Performer, relative to the largest one of the same query or key, so that no feature is 0
# and no average is 0 / 0.
EPSILON = 1e-6


def causal_linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exponent: torch.Tensor | None = None
) -> torch.Tensor:
    """Averages of values with weights phi(q_t) . phi(k_t') over t' <= t, in time linear in T.

    Args:
        query, key: non-negative features, (B, h, T, m).
        value: (B, h, T, v).
        exponent: logarithms of factors of the keys, (B, h, T), without gradients. Default: 0. Each sum is divided by
            the largest factor up to its position, so that no factor overflows and no later key changes a result.

    Returns:
        (B, h, T, v).
    """
    length = query.shape[2]
    # The denominator is the numerator of an additional value, which is 1.
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    exponent = key.new_zeros(key.shape[:3]) if exponent is None else exponent
    query, key, value, exponent = (
        nn.functional.pad(x, (0, 0, 0, -length % CHUNK_SIZE)).unflatten(2, (-1, CHUNK_SIZE))
        for x in (query, key, value, exponent.unsqueeze(-1))
    )
    largest = exponent.flatten(2, 3).cummax(2).values.view_as(exponent)  # (B, h, chunks, CHUNK_SIZE, 1)
    end = largest[..., -1, :]  # (B, h, chunks, 1)
    states = (key * (exponent - end.unsqueeze(-1)).exp()).mT @ value  # (B, h, chunks, m, v + 1)
    states = torch.einsum("bhij,bhjmv->bhimv", (end.mT - end).exp().tril(), states)
    before = nn.functional.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
    end_before = nn.functional.pad(end[:, :, :-1], (0, 0, 1, 0), value=-math.inf).unsqueeze(-1)
    sums = (query @ key.mT * (exponent.mT - largest).exp().tril()) @ value
    sums = sums + (query * (end_before - largest).exp()) @ before
    sums = sums.flatten(2, 3)[:, :, :length]
    # elu(x) + 1 rounds to 0 for x below -17. If all features of a query are 0, the output is 0 and not 0 / 0.
    return sums[..., :-1] / sums[..., -1:].clamp_min(EPSILON**2)


class LinearAttention(nn.Module):
    """Causal linear attention with phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, Eq. 7).

    Args:
        hidden_size: width d.
        num_heads: h, which divides d.
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def context(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The averages of the values, (B, h, T, d_h)."""
        return causal_linear_attention(nn.functional.elu(query) + 1, nn.functional.elu(key) + 1, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d)."""
        projected = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        # Sums over the sequence lose precision in float16 and bfloat16.
        query, key, value = (y.float().unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected)
        with torch.autocast(x.device.type, enabled=False):
            context = self.context(query, key, value)
        return self.o_proj(context.transpose(1, 2).flatten(2).to(x.dtype))


class Performer(LinearAttention):
    """Causal attention with positive orthogonal random features, which approximate softmax attention: FAVOR+.

    phi(x) = exp(W x - |x|^2 / 2) / sqrt(m) of x / d_h^(1/4) (Choromanski et al. 2021, Lemma 1), W drawn once.

    Args:
        hidden_size, num_heads: as in `LinearAttention`.
        num_features: m. Default: d_h log d_h, as in Table 1 of the AFT paper.
    """

    directions: torch.Tensor  # W, (m, d_h)

    def __init__(self, hidden_size: int, num_heads: int, num_features: int | None = None):
        super().__init__(hidden_size, num_heads)
        size = hidden_size // num_heads
        self.num_features = max(int(size * math.log(size)), 1) if num_features is None else num_features
        self.register_buffer("directions", torch.empty(self.num_features, size))
        self.reset_directions()

    @torch.no_grad()
    def reset_directions(self) -> None:
        """Draw W: blocks of orthogonal rows with the lengths of normal vectors (section 2.4)."""
        count, size = self.directions.shape
        if self.directions.is_meta:
            return
        orthogonal, triangular = torch.linalg.qr(torch.randn(-(-count // size), size, size))
        # LAPACK chooses the signs of the triangle; without this correction the directions would not be uniform.
        orthogonal = orthogonal * triangular.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        lengths = torch.randn(count, size).norm(dim=1, keepdim=True)
        self.directions.copy_(orthogonal.mT.flatten(0, 1)[:count] * lengths)

    def context(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = (x * query.shape[-1] ** -0.25 for x in (query, key))
        of_query, of_key = (
            x @ self.directions.float().mT - x.square().sum(-1, keepdim=True) / 2 for x in (query, key)
        )
        # The factor of a query cancels in the quotient. That of a key does not.
        factor_of_query, factor_of_key = (x.detach().amax(-1, keepdim=True) for x in (of_query, of_key))
        query, key = torch.exp(of_query - factor_of_query) + EPSILON, torch.exp(of_key - factor_of_key) + EPSILON
        return causal_linear_attention(query, key, value, factor_of_key.squeeze(-1))
