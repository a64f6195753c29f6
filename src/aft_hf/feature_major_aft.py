"""A whole mixer at inference with the positions last in memory: Eq. 2 and its projections without a transposition.

A linear layer usually writes (B, T, d), while the sums over positions are products of rows of positions. Computed from
the left, W X^T, one product writes key, value and query as (features, B T), those of a group of features side by side.
Everything else happens where they lie: exp(K), exp(K) V, the average and the gate of the query.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .activations_aft import is_linear, is_untouched, runs_as_written
from .direct_mixing_aft import BLOCK_SIZE, LARGEST_VALUE, MODERATE, DenseSums, largest_size


# Features that a product should have at least, if their number can be divided.
FEWEST_FEATURES = 16


class Projections(NamedTuple):
    """The modules of a mixer; a query of None is no gate."""

    query: nn.Module | None
    activation: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    def of_input(self) -> list[nn.Module]:
        return [self.key, self.value] if self.query is None else [self.key, self.value, self.query]

    def are_plain(self, width: int, heads: int) -> bool:
        """Whether they do no more than their weights and a sigmoid say, so that no call of theirs is missed, and are
        of the usual sizes.
        """
        layers = self.of_input()
        gated = self.query is None or (type(self.activation) is nn.Sigmoid and is_untouched(self.activation))
        ends = is_linear(self.output) or (type(self.output) is nn.Identity and is_untouched(self.output))
        if not (gated and ends and all(map(is_linear, layers))):
            return False
        key_shape, *others = (tuple(layer.weight.shape) for layer in layers)
        usual = key_shape in ((width, width), (heads, width)) and all(shape == (width, width) for shape in others)
        biases = [layer.bias for layer in layers]
        whole = all(b is not None and b.shape == y.weight.shape[:1] for b, y in zip(biases, layers))
        return usual and (whole or all(b is None for b in biases))


def runs_by_feature(x: torch.Tensor, projections: Projections, heads: int) -> bool:
    """Whether `feature_major_mixing` can take the place of these modules for an input (B, T, d)."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() == 0 or not runs_as_written(x):
        return False
    if torch.is_autocast_enabled("cpu") or x.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    layers = [*projections.of_input(), projections.output]
    return projections.are_plain(x.shape[-1], heads) and all(
        p.dtype == x.dtype for y in layers for p in y.parameters()
    )


def feature_major_mixing(
    x: torch.Tensor,
    projections: Projections,
    sums: DenseSums,
    bias: torch.Tensor,
    safe: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """The output of a mixer for which `runs_by_feature`; None where a tensor turns out not to be a plain one.

    Args:
        x: (B, T, d), query, key and value in one.
        projections: d -> d, but d -> h for a key per head.
        sums: how positions are summed where keys, values and biases are moderate.
        bias: position biases as `sums` takes them.
        safe: the same context (B, h, T, c) from any keys (B, h, T, k), values (B, h, T, c) and biases.

    Returns:
        (B, T, d).
    """
    batch, length, width = x.shape
    heads, key_features = len(bias), projections.key.weight.shape[0]
    groups = _count_groups(heads, width, key_features, batch * length * x.element_size())
    features = _project(projections.of_input(), groups, x.flatten(0, 1)).view(groups, -1, batch, length)
    if not runs_as_written(features, bias):
        return None
    sizes = key_features // groups, width // groups
    keys, values, _ = features.tensor_split((sizes[0], sum(sizes)), 1)
    moderate = largest_size(bias) <= MODERATE and (  # never with NaN
        largest_size(features) <= MODERATE  # which is one look at everything in a row, and usually so
        or (largest_size(keys) <= MODERATE and largest_size(values) <= LARGEST_VALUE)
    )
    if moderate:
        _average(features, sizes, sums, bias)
    else:
        by_head = (y.reshape(heads, -1, batch, length).permute(2, 0, 3, 1) for y in (keys, values))
        values.copy_(safe(*by_head, bias).permute(1, 3, 0, 2).reshape(values.shape))
    context = values
    if projections.query is not None:
        context = nn.functional.glu(features[:, sizes[0] :], 1)  # values sigmoid(Q), with Q right behind the values
    return projections.output(context.reshape(width, -1).mT).contiguous().view(batch, length, -1)


def _average(features: torch.Tensor, sizes: tuple[int, int], sums: DenseSums, bias: torch.Tensor) -> None:
    """Eq. 2 without its gate, in the place of the values.

    Args:
        features: (groups, features, B, T), first the keys of each group, then its values.
        sizes: the number of both.
    """
    batch, length = features.shape[2:]
    keys, values, _ = features.tensor_split((sizes[0], sum(sizes)), 1)
    values.mul_(keys.exp_())
    exp_bias = torch.exp(bias).to(features.dtype)
    parts, table_heads = len(features) // len(bias), None
    # A part of a head at once, or as many heads as fit into a block with their tables.
    size = (sum(sizes) * batch + length) * length * features.element_size()
    step = 1 if parts > 1 else max(1, BLOCK_SIZE // size)
    for block in (slice(first, min(first + step, len(features))) for first in range(0, len(features), step)):
        heads = slice(block.start // parts, (block.stop - 1) // parts + 1)
        if heads != table_heads:
            table, table_heads = sums.table(exp_bias[heads]).mT, heads
        product = torch.bmm(features[block, : sum(sizes)].flatten(1, 2), table)
        denominator, numerator = product.unflatten(1, (sum(sizes), batch)).split(sizes, 1)
        torch.mul(numerator, denominator.reciprocal_(), out=values[block])


def _count_groups(heads: int, width: int, keys: int, size: int) -> int:
    """Into how many groups the features are cut: heads where these have one key each, or else parts of them that are
    small enough to be summed at once.

    Args:
        size: bytes of one feature.
    """
    if keys == heads:
        return heads
    of_head = width // heads
    divisors = [n for n in range(1, of_head // FEWEST_FEATURES + 1) if of_head % n == 0] or [1]
    return heads * next((n for n in divisors if 2 * (of_head // n) * size <= BLOCK_SIZE), divisors[-1])


def _project(layers: list[nn.Linear], groups: int, x: torch.Tensor) -> torch.Tensor:
    """What the layers make of (B T, d), of one group of features after the other: (features, B T)."""
    weight = torch.cat([layer.weight.view(groups, -1, x.shape[1]) for layer in layers], 1).flatten(0, 1)
    if layers[0].bias is None:
        return torch.mm(weight, x.mT)
    bias = torch.cat([layer.bias.view(groups, -1, 1) for layer in layers], 1).flatten(0, 1)
    return torch.addmm(bias, weight, x.mT)  # rounded once, after the bias
