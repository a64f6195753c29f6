"""The AFT operation with plain exponentials, for keys and position biases of moderate size.

The forms of `mixing_aft.py` are safe for any input, and pay for that with a maximum in every sum. Where no key and no
position bias is larger than `MODERATE`, exp(K) and exp(w) can be summed as they are: nothing overflows, and nothing
that matters underflows. What is left of Eq. 2 are a few element-wise passes around matrix products, and they run in
blocks that stay in a processor's cache. The gradients are written by hand: they compute exp(K) again rather than keep
it, so that training keeps no more than keys, values, the result and its denominators.

How the sums are taken is up to `DirectSums`: by a table of all pairs (`dense_sums_aft.py`), by a convolution or by
bands of a grid (`convolution_sums_aft.py`, `banded_sums_aft.py`), or from left to right (`causal_sums_aft.py`). They
are kept in float32 at least. Only `TableSums` without gradients make products of bfloat16 from values of bfloat16, and
these are added up in float32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from .activations_aft import differentiable_gradients, runs_as_written
from .mixing_aft import working_dtype


# The largest size of keys and of position biases here. exp(2 x 20) times any length and the size of any value that is
# met is far from float32's limits.
MODERATE = 20.0

# The largest size of values, for which the same holds.
LARGEST_VALUE = 1e12


def direct_mixing(
    sums: "DirectSums",
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    safe: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Eq. 2 by `sums` where keys and biases are moderate, otherwise by `safe`.

    Args:
        sums: how to sum.
        key: (B, h, T', k), -inf where a position is masked for all queries.
        value: (B, h, T', c).
        bias: position biases as `sums` takes them, or None.
        safe: the same function of (key, value, bias), for any of them, made of differentiable operations.

    Returns:
        (B, h, T, c) in the dtype of `value`.
    """
    if not _depends_on_values_alone(key, value) or (bias is None and key.shape[-1] != value.shape[-1]):
        return safe(key, value, bias)
    size, sums.hidden = _largest_visible(key, bias)
    moderate = size <= MODERATE and not (sums.hidden and sums.fades)  # never with NaN
    if not moderate or (sums.lowest_bias is not None and float(bias.detach().amin()) < sums.lowest_bias):
        return safe(key, value, bias)
    if not largest_size(value.detach().transpose(1, 2)) <= LARGEST_VALUE:
        return safe(key, value, bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (key, value, bias)):
        return _DirectMixing.apply(sums, safe, key, value, bias)
    return sums.forward(key, value, bias)


def _depends_on_values_alone(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether values may be looked at, and the gradients by hand are all that can be asked for.

    Not on accelerators, which a look at values would make wait in every layer.
    """
    return key.device.type == "cpu" and key.numel() > 0 and runs_as_written(key, value)


def _largest_visible(key: torch.Tensor, bias: torch.Tensor | None) -> tuple[float, bool]:
    """The largest absolute value of visible keys and of biases, and whether there are hidden keys."""
    in_memory = key.detach().transpose(1, 2)
    lowest, highest = (float(x) for x in in_memory.aminmax())
    hidden = lowest == -torch.inf
    if hidden:
        lowest = float(in_memory.nan_to_num(neginf=0.0).amin())
    others = [] if bias is None else [largest_size(bias.detach())]
    return _largest(-lowest, highest, *others), hidden


def largest_size(*tensors: torch.Tensor) -> float:
    """The largest absolute value in tensors; NaN if there is one."""
    return _largest(*(abs(float(x)) for tensor in tensors for x in tensor.aminmax()))


def _largest(*numbers: float) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


class _DirectMixing(torch.autograd.Function):
    """`DirectSums` to autograd."""

    @staticmethod
    def forward(ctx: Any, sums: "DirectSums", safe: Callable, key, value, bias) -> torch.Tensor:
        inverse = by_position(key, working_dtype(value))
        context = sums.forward(key, value, bias, inverse)
        ctx.sums, ctx.safe = sums, safe
        ctx.save_for_backward(key, value, bias, context, inverse)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        key, value, bias, context, inverse = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # the gradient of this gradient is wanted
            inputs = key, value, bias
            return None, None, *differentiable_gradients(ctx.safe(*inputs), inputs, needed, gradient)
        with torch.autocast("cpu", enabled=False):
            return None, None, *ctx.sums.backward(key, value, bias, context, inverse, gradient, needed[2])


class DirectSums:
    """A way to sum, forward and backward; tensors are as in `direct_mixing`.

    Attributes:
        hidden: whether there are keys of -inf, and so perhaps queries that see nothing.
        fades: whether weights fall to nothing with the distance, so that a query which does not see itself may have
            lost all that it sees.
        lowest_bias: the smallest position bias for which the sums are precise, or None.
    """

    hidden = False
    fades = False
    lowest_bias: float | None = None

    def forward(self, key, value, bias, inverse=None) -> torch.Tensor:
        """The context; the reciprocals of the denominators, (B, h, T, k), go into `inverse`."""
        raise NotImplementedError

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed: bool) -> tuple:
        """The gradients of key, value and bias (None unless needed)."""
        raise NotImplementedError

    def _reciprocal(self, denominator: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """In place or in `out`; 0 where there was nothing to sum over."""
        if self.hidden:
            denominator.masked_fill_(denominator == 0, torch.inf)
        return denominator.reciprocal_() if out is None else torch.reciprocal(denominator, out=out)


class TableSums(DirectSums):
    """A way to sum by products with a table of exp(w), which `feature_major_aft.py` takes step by step: with gradients
    that of `DenseSums` only.
    """

    def table(self, exp_bias: torch.Tensor) -> torch.Tensor:
        """exp(w) as `product` takes it, from exp of the position biases of some heads."""
        raise NotImplementedError

    def product(self, summands: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The sums of (h, W, B, T) that each position sees, by the `table` of these heads."""
        raise NotImplementedError

    def size(self, features: int, length: int) -> int:
        """Numbers in a product for one head with so many features of all rows of a batch, and in its table."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------- building blocks


def inference_dtype(x: torch.Tensor) -> torch.dtype:
    """What products with a table are made of where no gradients are needed: bfloat16 stays as it is."""
    return x.dtype if x.dtype == torch.bfloat16 else working_dtype(x)


def by_position(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty (B, h, T, c) with memory in the order (B, T, h, c), as projections have it."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width, dtype=dtype or like.dtype).transpose(1, 2)


def gradient_of_sums(
    gradient: torch.Tensor,
    context: torch.Tensor,
    inverse: torch.Tensor,
    of_numerator: torch.Tensor,
    of_denominator: torch.Tensor,
    feature_dim: int = -1,
) -> None:
    """From the gradient of the quotients to those of both sums, written into the last two.

    A denominator that the features of a head share adds up over them: `feature_dim`.
    """
    torch.mul(gradient, inverse, out=of_numerator)
    if of_denominator.shape == of_numerator.shape:
        torch.mul(of_numerator, context, out=of_denominator)
    else:
        torch.sum(of_numerator * context, feature_dim, keepdim=True, out=of_denominator)
    of_denominator.neg_()


def gradient_of_inputs(
    of_features: tuple[torch.Tensor, torch.Tensor],
    features: tuple[torch.Tensor, torch.Tensor],
    key_gradient: torch.Tensor,
    value_gradient: torch.Tensor,
    feature_dim: int = -1,
) -> None:
    """From the gradients of exp(K) V and exp(K), and these themselves, to those of K and V, written into the last two.
    The gradients that are given are overwritten.

    A key that the features of a head share adds up over them: `feature_dim`.
    """
    (of_weighted, of_weights), (weighted, weights) = of_features, features
    torch.mul(of_weighted, weights, out=value_gradient)
    from_values = of_weighted.mul_(weighted)
    if weights.shape != weighted.shape:
        from_values = from_values.sum(feature_dim, keepdim=True)
    torch.addcmul(from_values, of_weights, weights, out=key_gradient)
