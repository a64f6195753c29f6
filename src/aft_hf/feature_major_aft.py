"""A whole mixer at inference with the positions last in memory: Eq. 2 and its projections without a transposition.

A linear layer usually writes (B, T, d), while the sums over positions are products of rows of positions. Computed from
the left, W X^T, one product writes key, value and query as (features, B T), those of a head one behind the other.
Everything else happens where they lie: exp(K), exp(K) V, the quotient and the gate of the query. The key's bias is left
out, since it multiplies both sums of Eq. 2 by the same; the value's bias is added to the average of the values.
"""

from typing import NamedTuple

import torch
from torch import nn

from .activations_aft import is_linear, is_untouched, runs_as_written
from .direct_mixing_aft import BLOCK_SIZE, LARGEST_VALUE, MODERATE, DenseSums, largest_size


class Projections(NamedTuple):
    """The modules of a mixer; a query of None is no gate."""

    query: nn.Module | None
    activation: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    def of_input(self) -> list[nn.Module]:
        return [self.key, self.value] if self.query is None else [self.key, self.value, self.query]

    def are_plain(self) -> bool:
        """Whether they do no more than their weights and a sigmoid say, so that no call of theirs is missed."""
        gated = self.query is None or (type(self.activation) is nn.Sigmoid and is_untouched(self.activation))
        ends = is_linear(self.output) or (type(self.output) is nn.Identity and is_untouched(self.output))
        return gated and ends and all(map(is_linear, self.of_input()))


def runs_by_feature(x: torch.Tensor, projections: Projections) -> bool:
    """Whether `feature_major_mixing` can take the place of these modules for an input (B, T, d)."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() == 0 or not runs_as_written(x):
        return False
    if torch.is_autocast_enabled("cpu") or x.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    layers = [*projections.of_input(), projections.output]
    return projections.are_plain() and all(p.dtype == x.dtype for layer in layers for p in layer.parameters())


def feature_major_mixing(
    x: torch.Tensor, projections: Projections, sums: DenseSums, bias: torch.Tensor
) -> torch.Tensor | None:
    """The output of a mixer for which `runs_by_feature`; None where keys, values or biases are too large for that.

    Args:
        x: (B, T, d), query, key and value in one.
        projections: d -> d, but d -> h for a key per head.
        sums: how positions are summed.
        bias: position biases as `sums` takes them.

    Returns:
        (B, T, d).
    """
    batch, length, width = x.shape
    groups = _groups(len(bias), width, projections.key.out_features, batch * length * x.element_size())
    features = _project(projections.of_input(), groups, x.flatten(0, 1)).view(groups, -1, batch, length)
    keys_values = projections.key.out_features // groups, width // groups
    summed = sum(keys_values)
    keys, values, query = features.tensor_split((keys_values[0], summed), 1)
    small = [bias] if projections.key.bias is None else [bias, projections.key.bias]
    if not largest_size(*small) <= MODERATE:
        return None
    if not (largest_size(features) <= MODERATE or _are_moderate(keys, values)):
        return None
    values.mul_(keys.exp_())
    exp_bias, shift = torch.exp(bias).to(x.dtype), _as_features(projections.value.bias, groups)
    parts, known = groups // len(bias), None
    for block in _blocks(groups, parts, summed * features[0, 0].nbytes + length * length * x.element_size()):
        heads = slice(block.start // parts, (block.stop - 1) // parts + 1)
        if heads != known:
            table, known = sums.table(exp_bias[heads]).mT, heads
        product = torch.bmm(features[block, :summed].flatten(1, 2), table)
        denominator, numerator = product.unflatten(1, (summed, batch)).split(keys_values, 1)
        average, inverse = values[block], denominator.reciprocal_()
        if shift is None:
            torch.mul(numerator, inverse, out=average)
        else:
            torch.addcmul(shift[block], numerator, inverse, out=average)
    context = values
    if projections.query is not None:
        if projections.query.bias is not None:
            query.add_(_as_features(projections.query.bias, groups))
        context = nn.functional.glu(features[:, keys_values[0] :], 1)  # the average times sigmoid(Q)
    return projections.output(context.reshape(width, -1).mT).contiguous().view(batch, length, width)


def _groups(heads: int, width: int, keys: int, nbytes: int) -> int:
    """Into how many parts the features are cut, each with its keys and then its values: those of a head with one key,
    or else of a part of a head that is small enough to be summed at once.

    Args:
        nbytes: of one feature.
    """
    if keys == heads:
        return heads
    of_head = width // heads
    fitting = (n for n in range(1, of_head) if of_head % n == 0 and 2 * (of_head // n) * nbytes <= BLOCK_SIZE)
    return heads * next(fitting, of_head)


def _project(layers: list[nn.Linear], groups: int, x: torch.Tensor) -> torch.Tensor:
    """What the layers make of (B T, d) without their biases, of one group after the other: (features, B T)."""
    weights = [layer.weight.view(groups, -1, x.shape[1]) for layer in layers]
    return torch.mm(torch.cat(weights, 1).flatten(0, 1), x.mT)


def _as_features(bias: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    return None if bias is None else bias.view(groups, -1, 1, 1)


def _are_moderate(key: torch.Tensor, value: torch.Tensor) -> bool:
    return largest_size(key) <= MODERATE and largest_size(value) <= LARGEST_VALUE  # never with NaN


def _blocks(groups: int, parts: int, nbytes: int) -> list[slice]:
    """What is summed at once: a part of a head, or as many heads as fit."""
    step = 1 if parts > 1 else max(1, BLOCK_SIZE // nbytes)
    return [slice(first, min(first + step, groups)) for first in range(0, groups, step)]
