"""The first queries of a causal problem on a CPU, each by a softmax over the keys that it sees.

The largest key so far grows fastest over the first queries. Both algorithms of the CPU backend sum exp(K) relative to
the largest of many keys, so with large keys they would lose most of these queries to underflow, which are few.
"""

import math

import torch

from .scaled_sums_aft import EMPTY, FLOOR, working_dtype


# Number of first queries. Their time and memory grow with its square.
FIRST = 16

# If no bias exceeds this in absolute value, exponentials relative to the largest visible key do not overflow, and one
# term is at least exp(-MODERATE_BIAS). Otherwise they are relative to the largest K + w.
MODERATE_BIAS = 20.0


def first_averages(keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 2 for the first queries of G groups of features.

    Args:
        keys: (G, k, B, F), finite.
        values: (G, c, B, F), finite, with k = c or k = 1.
        bias: (G or 1, F, F), -inf for hidden keys, which include the later ones; in float64 if K + w would lose digits
            in float32.

    Returns:
        (G, c, B, F), in float32 at least; 0 for a query that sees no key.
    """
    return _averages(_weights(keys, bias), _values_of_keys(values, keys)).flatten(1, 2)


def first_gradients(
    keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, of_averages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `first_averages` for keys (G, k, B, F), values (G, c, B, F) and biases of each group
    (G, F, F), from the gradient of its result (G, c, B, F).
    """
    weights, by_key = _weights(keys, bias), _values_of_keys(values, keys)  # (G, k, B, F, F), (G, k, c / k, B, F)
    upstream = _values_of_keys(of_averages, keys)
    # The difference comes before the product: values may share an offset that is large next to their differences.
    differences = by_key.unsqueeze(-2) - _averages(weights, by_key).unsqueeze(-1)  # (G, k, c / k, B, F, F)
    of_logits = differences.mul_(upstream.unsqueeze(-1)).sum(2).mul_(weights)  # (G, k, B, F, F)
    of_values = (upstream.unsqueeze(-1) * weights.unsqueeze(2)).sum(-2)
    return of_logits.sum(-2), of_values.flatten(1, 2), of_logits.sum((1, 2))


def _weights(keys: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the softmax weight of each key for each query, (G, k, B, F, F); 0 for a query that sees no key."""
    working = working_dtype(keys)
    floor, dtype = FLOOR[working], torch.promote_types(working, bias.dtype)
    keys, bias, hidden = keys.to(dtype).contiguous(), bias.to(dtype)[:, None, None], bias[:, None, None] == -math.inf
    if torch.equal(hidden, torch.ones_like(hidden).triu(1)):
        largest = keys.cummax(-1).values.unsqueeze(-1)  # several times faster
    else:
        largest = keys.unsqueeze(-2).masked_fill(hidden, EMPTY).amax(-1, keepdim=True)
    # Biases are added to differences of keys, so that they are not rounded away next to large keys. Hidden keys may
    # exceed the largest key that a query sees.
    logits = (keys.unsqueeze(-2) - largest).clamp_max_(0.0).add_(bias)
    if not float(bias.masked_fill(hidden, 0.0).abs().amax()) <= MODERATE_BIAS:
        logits -= logits.amax(-1, keepdim=True).clamp_min_(EMPTY)
    weights = torch.threshold_(logits.clamp_min_(floor).exp_(), math.exp(floor + 0.01), 0.0)
    return weights.div_(weights.sum(-1, keepdim=True).clamp_min_(math.exp(floor))).to(working)


def _averages(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the averages (G, k, c / k, B, F)."""
    return (weights.unsqueeze(2) * values.unsqueeze(-2)).sum(-1)


def _values_of_keys(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return (G, c, B, F) as (G, k, c / k, B, F), in float32 at least."""
    return values.to(working_dtype(values)).contiguous().unflatten(1, (keys.shape[1], -1))
