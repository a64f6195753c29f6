"""The portable form of Eq. 2: plain PyTorch operations for any device, dtype and structure of w.

Everything here can be traced, exported and differentiated any number of times and in every mode, since control flow
then depends on shapes alone. (Where values can be read, some functions also use them, for a more exact result.)

All functions work on partial sums of Eq. 2 with a log-sum-exp shift (`ScaledSums`), in the layout (..., T, B, c): the
batch shares the position biases, so one product with an (h, T, T) table serves every row. No exponential can
overflow, and none that matters can underflow. Causal sums take the shift only over positions that are visible to every
query that uses it, which keeps a causal model causal in floating point, however large a later key is.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from .position_biases_aft import (
    Dense,
    GridKernel,
    LagKernel,
    LinearDecay,
    NoBias,
    PositionBias,
    SelectedPosition,
    Window,
)


# ------------------------------------------------------------------------------------------- tensors and their modes


def can_read_values(*tensors: torch.Tensor) -> bool:
    """Whether control flow may depend on the values of tensors: only for eager tensors on a CPU, without transforms.

    On an accelerator, the host would have to wait for the values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return all(x.device.type == "cpu" and type(x) in (torch.Tensor, nn.Parameter) for x in tensors)


def are_plain_tensors(*tensors: torch.Tensor) -> bool:
    """Whether tensors are plain: operations on them run eagerly, and only reverse-mode gradients are computed.

    False if a program is traced or compiled, for tensor subclasses, and for tensors of torch.func, of batched
    gradients, and of forward-mode differentiation.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if any(type(x) not in (torch.Tensor, nn.Parameter) for x in tensors):
        return False
    if any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors):
        return False
    return all(unpack_dual(x).tangent is None for x in tensors)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs only the `forward` of its class, without hooks or a replaced `forward`."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return "forward" not in vars(module) and not module_hooks._has_any_global_hook()


def differentiable_gradients(
    output: torch.Tensor, inputs: tuple[torch.Tensor | None, ...], needed: tuple[bool, ...], gradient: torch.Tensor
) -> Iterator[torch.Tensor | None]:
    """Return differentiable gradients of the inputs that are needed, and None for the others."""
    wanted = [x for x, need in zip(inputs, needed) if need and x is not None]
    found = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
    return (next(found) if need else None for need in needed)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast converts float32 on a device; None if autocast is not enabled."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """Return a context that disables autocast.

    It is a null context if autocast is not enabled, since the overhead of calls dominates a decoding step.
    """
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, T, h c) -> (B, h, T, c)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, h, T, c) -> (B, T, h c)."""
    return x.transpose(1, 2).flatten(-2)


def fold(x: torch.Tensor) -> torch.Tensor:
    """(B, h, T, c) -> (B h, T, 1, c): each row of the batch with position biases of its own."""
    return x.flatten(0, 1).unsqueeze(2)


def unfold(x: torch.Tensor, batch_size: int) -> torch.Tensor:
    """(B h, T, 1, c) -> (B, h, T, c), the inverse of `fold`."""
    return x.squeeze(2).unflatten(0, (batch_size, -1))


def power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


# ------------------------------------------------------------------------------- the portable form: partial sums


# The maximum over positions that are all hidden. It is finite, so that the difference of two such maxima is finite.
EMPTY = -1e30

# exp(x) for x below this is set to 0: CPUs take many times longer for exponentials that are subnormal numbers, and for
# products with them.
FLOOR = {torch.float32: -82.0, torch.float64: -700.0}

# The logarithm of the smallest denominator, relative to the largest key and the largest bias, that cannot have lost
# significant terms to underflow. A query with a smaller denominator is called lost.
LOST = -60.0

# If the biases span at most SMALL_SPAN, lost queries are summed again by products without the largest keys, up to
# LEVELS times, as long as more than the share FEW_LOST of all queries is lost.
SMALL_SPAN = 20.0
LEVELS = 5
FEW_LOST = 1 / 256

# Where values cannot be read, the largest distance of a bias from the largest bias in its row of a table. Biases
# farther below are raised to this distance.
LARGEST_SPAN = 75.0

# An exported program contains each operation separately, and export time grows with their number. In an export, the
# log2(T) levels therefore start at blocks of this many positions, which are summed from the logits of all pairs.
EXPORTED_BLOCK = 32

# The longest sequence of an exported program with such levels over all positions.
LONGEST_EXPORTED = 2**17

# Maximum number of logits of lost queries that are computed at once.
LOGITS_AT_ONCE = 2**24


def floored_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x); on a CPU, 0 where x is below `FLOOR`."""
    if not can_read_values(x):
        return torch.exp(x)
    small = x.detach() < FLOOR[x.dtype]
    hidden = x.detach() == -math.inf
    return torch.exp(x if torch.equal(small, hidden) else x.masked_fill(small, -math.inf))


def flush_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return x; on a CPU, subnormal numbers in its gradient are set to 0 before the backward pass uses them."""
    if not (x.requires_grad and can_read_values(x)):
        return x
    x = x.view_as(x)  # a hook on the argument itself would stay after this call
    tiny = torch.finfo(x.dtype).tiny

    def flush(gradient: torch.Tensor | None) -> torch.Tensor | None:
        # Gradients of gradients call the hook without a gradient, too.
        return None if gradient is None else nn.functional.hardshrink(gradient, tiny)

    x.register_hook(flush)
    return x


class ScaledSums(NamedTuple):
    """The sums of exp(K + w) V and of exp(K + w), both divided by exp(maximum); `maximum` carries no gradient."""

    numerator: torch.Tensor  # (..., T, B, c)
    denominator: torch.Tensor  # (..., T, B, k)
    maximum: torch.Tensor  # (..., T, B, k)

    def shifted(self, exponent: torch.Tensor | float) -> "ScaledSums":
        """Return the sums with `exponent` added to every K + w."""
        return self._replace(maximum=self.maximum + exponent)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ScaledSums":
        """Apply `function` to each of the three tensors."""
        return ScaledSums(*map(function, self))

    def narrow(self, start: int, length: int) -> "ScaledSums":
        """Return the sums of `length` positions from `start` on."""
        return self.map(lambda x: x.narrow(-3, start, length))

    def merge(self, other: "ScaledSums") -> "ScaledSums":
        """Return the sums over the positions of both."""
        maximum = torch.maximum(self.maximum, other.maximum)
        scale, other_scale = floored_exp(self.maximum - maximum), floored_exp(other.maximum - maximum)
        return ScaledSums(
            self.numerator * scale + other.numerator * other_scale,
            self.denominator * scale + other.denominator * other_scale,
            maximum,
        )

    def average(self) -> torch.Tensor:
        """Return the quotient of the sums (Eq. 2); 0 where the sums are empty."""
        empty = self.denominator == 0
        return (self.numerator / self.denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def single_sums(key: torch.Tensor, value: torch.Tensor, exponent: torch.Tensor | float = 0.0) -> ScaledSums:
    """Sums of one position each: exp(K + exponent) V, for `key` (..., T, B, k) and `value` (..., T, B, c)."""
    logits = key + exponent
    maximum = logits.detach().clamp_min(EMPTY)
    weights = torch.exp(logits - maximum)  # 1, or 0 for a hidden key; computed for its gradient
    return ScaledSums(weights * value, weights, maximum)


def block_sums(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None, *, masked: bool = False
) -> ScaledSums:
    """Sums over a block of positions as one product with exp(w).

    The largest key and the largest bias of a row are subtracted before the exponentials. A query from which the large
    keys or biases are hidden by -inf, or that sees large keys only at small biases, can lose significant terms to
    underflow. If values can be read, such lost queries are detected by their denominators and summed again: as long as
    there are many, by a product without the largest keys, which no lost query sees, and finally from their own logits.
    If values cannot be read, masked biases are summed from the logits of all pairs, and biases without a mask are
    clamped to at least the largest bias of their row minus `LARGEST_SPAN`.

    Args:
        key: (..., T', B, k), -inf where a position is hidden from all queries.
        value: (..., T', B, c).
        bias: (..., T, T') position biases; None for w = 0, in which case all queries share one sum (T = 1).
        masked: whether `bias` has entries of -inf, which hide a position from a query.
    """
    if bias is None:
        return _shared_sums(key, value)
    if bias.shape[-2] == 1 and not masked:
        # One query needs one maximum over K + w, which is exact for biases of any span, such as those of a long decay.
        return _shared_sums(key + bias.mT.unsqueeze(-1).to(key.dtype), value)
    bias = bias.to(key.dtype)
    exact = can_read_values(key, value, bias) and min(x.numel() for x in (key, value, bias)) > 0
    if masked and not exact:
        return _sums_of_logits(key, value, bias)
    if exact:
        return _checked_sums(key, value, bias, masked)
    bias_maximum = bias.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    return _table_sums(key, value, torch.exp((bias - bias_maximum).clamp_min(-LARGEST_SPAN)), bias_maximum)


def _checked_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, masked: bool) -> ScaledSums:
    """`block_sums` that reads the denominators and sums lost queries again."""
    bias_maximum = bias.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    relative = bias - bias_maximum
    table = floored_exp(relative)
    clean_key, clean_value, unknown, span = key, value, None, math.inf
    if masked:
        span = -float(relative.detach().masked_fill(bias == -math.inf, 0.0).amin())
        if not (float(key.detach().amax()) < math.inf and float(value.detach().abs().amax()) < math.inf):
            unknown = ~(value.isfinite() & (key < math.inf)).all(-1, keepdim=True)  # (..., T', B, 1)
            # In a product, NaN and infinities of hidden positions would reach every query.
            clean_key, clean_value = key.masked_fill(unknown, -math.inf), value.masked_fill(unknown, 0.0)
    sums = _table_sums(clean_key, clean_value, table, bias_maximum)
    if unknown is None and float(sums.denominator.detach().amin()) >= math.exp(LOST):
        return sums
    lost = sums.denominator.detach() < math.exp(LOST)
    if lost.any():
        sees = _product((bias > -math.inf).to(key.dtype), (clean_key > -math.inf).to(key.dtype)) > 0
        lost = lost & sees  # the other queries see no key, so their sums are 0
    for _ in range(LEVELS if span <= SMALL_SPAN else 0):
        if float(lost.mean(dtype=key.dtype)) < FEW_LOST:
            break
        # A lost query sees none of these keys: with one of them, its denominator would be large enough.
        hidden = clean_key.detach() > clean_key.detach().amax(-3, keepdim=True) + (LOST + span)
        clean_key, clean_value = clean_key.masked_fill(hidden, -math.inf), clean_value.masked_fill(hidden, 0.0)
        again = _table_sums(clean_key, clean_value, table, bias_maximum)
        sums = ScaledSums(*(torch.where(lost, x, y) for x, y in zip(again, sums)))
        lost = lost & (again.denominator.detach() < math.exp(LOST))
    if unknown is not None:
        lost = lost | (_product((bias > -math.inf).to(key.dtype), unknown.to(key.dtype)) > 0)
    return _with_lost_queries(sums, lost, key, value, bias) if lost.any() else sums


def _table_sums(key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, bias_maximum: torch.Tensor) -> ScaledSums:
    """The sums as products of a table (..., T, T') of exp(w - bias_maximum) with exp(K) V and exp(K)."""
    key, value = flush_gradient(key), flush_gradient(value)
    key_maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = floored_exp(key - key_maximum)
    maximum = key_maximum + bias_maximum.unsqueeze(-1)
    return ScaledSums(_product(table, weights * value), _product(table, weights), maximum)


def _shared_sums(key: torch.Tensor, value: torch.Tensor) -> ScaledSums:
    """The sums over all positions, (..., 1, B, c), for w = 0."""
    maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = floored_exp(key - maximum)
    return ScaledSums((weights * value).sum(-3, keepdim=True), weights.sum(-3, keepdim=True), maximum)


def _product(table: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """(..., T, T') x (..., T', B, c) -> (..., T, B, c), as one matrix product per leading index."""
    products = flush_gradient(table @ flush_gradient(features.flatten(-2)))
    return products.unflatten(-1, features.shape[-2:])


def _sums_of_logits(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> ScaledSums:
    """`block_sums` from the logits of some queries at a time, without reading values: O(T T' d) exponentials."""

    def some_queries(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> ScaledSums:
        hidden = (bias == -math.inf)[..., None, None]  # also hides NaN
        logits = (key.unsqueeze(-4) + bias[..., None, None]).masked_fill(hidden, -math.inf)  # (..., t, T', B, k)
        maximum = logits.detach().amax(-3).clamp_min(EMPTY)
        weights = torch.exp(logits - maximum.unsqueeze(-3))
        values = value.unsqueeze(-4).masked_fill(logits == -math.inf, 0.0)
        return ScaledSums((weights * values).sum(-3), weights.sum(-3), maximum)

    if torch.compiler.is_exporting():  # the program serves any length, so all queries are computed at once
        return some_queries(key, value, bias)
    at_once = max(1, LOGITS_AT_ONCE // max(1, key.numel() // key.shape[-1] * value.shape[-1]))
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        # Recomputed in the backward pass, since the logits of all queries take T x T' x d numbers.
        parts = [checkpoint(some_queries, key, value, rows, use_reentrant=False) for rows in bias.split(at_once, -2)]
    else:
        parts = [some_queries(key, value, rows) for rows in bias.split(at_once, -2)]
    return ScaledSums(*(torch.cat(x, -3) for x in zip(*parts)))


def _with_lost_queries(
    sums: ScaledSums, lost: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> ScaledSums:
    """Replace the sums of the `lost` queries (..., T, B, k) in `sums` by sums of their own logits."""
    leading = lost.shape[:-3]
    key, value = (x.expand(*leading, *x.shape[-3:]).flatten(0, -4) for x in (key, value))
    bias = bias.expand(*leading, *bias.shape[-2:]).flatten(0, -3)
    shared = key.shape[-1] != value.shape[-1]  # one key for all features of a head

    def some_queries(
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        head: torch.Tensor,
        query: torch.Tensor,
        row: torch.Tensor,
        feature: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        biases = bias[head, query]  # (N, T')
        logits = (key[head, :, row, feature] + biases).masked_fill(biases == -math.inf, -math.inf)
        values = value[head, :, row] if shared else value[head, :, row, feature].unsqueeze(-1)  # (N, T', c or 1)
        maximum = logits.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
        weights = torch.exp(logits - maximum)
        values = values.masked_fill((logits == -math.inf).unsqueeze(-1), 0.0)
        return torch.einsum("ns,nsc->nc", weights, values), weights.sum(-1, keepdim=True), maximum

    place = lost.flatten(0, -4).nonzero()
    at_once = max(1, LOGITS_AT_ONCE // (bias.shape[-1] * (value.shape[-1] if shared else 1)))
    parts = []
    for some in place.split(at_once):
        # Recomputed in the backward pass, since the logits take T' numbers for each query.
        parts.append(checkpoint(some_queries, key, value, bias, *some.unbind(1), use_reentrant=False))
    again = ScaledSums(*(torch.cat(x) for x in zip(*parts)))

    def put(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        index = place[:, :3] if rows.shape[-1] == x.shape[-1] else place
        rows = rows if rows.shape[-1] == x.shape[-1] else rows.squeeze(-1)
        flat = x.expand(*leading, *lost.shape[-3:-1], x.shape[-1]).flatten(0, -4)
        return flat.index_put(tuple(index.unbind(1)), rows).view(*leading, *flat.shape[1:])

    return ScaledSums(*(put(x, rows) for x, rows in zip(sums, again)))


def triangle_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None) -> ScaledSums:
    """Causal sums (t' <= t) over T positions, T a power of two.

    Blocks are merged in pairs, from blocks of one position upwards. The left half of a block is visible to all of its
    right half, so `block_sums` may use the maximum of the left half, and log2(T) levels of small products give the
    whole triangle.

    Args:
        key, value: (..., T, B, k) and (..., T, B, c) with T a power of two.
        bias: (..., T, T), of which only the lower triangle is read; None for w = 0.
    """
    if torch.compiler.is_exporting():
        half = min(key.shape[-3], EXPORTED_BLOCK)
        sums = _triangles_of_logits(key, value, bias, half)
    else:
        half = 1
        own_bias = 0.0 if bias is None else bias.diagonal(dim1=-2, dim2=-1)[..., None, None]
        sums = single_sums(key, value, own_bias)
    while half < key.shape[-3]:
        left_key, left_value = _halves(key, half)[0], _halves(value, half)[0]
        left, right = (ScaledSums(*part) for part in zip(*(_halves(x, half) for x in sums)))
        right = right.merge(block_sums(left_key, left_value, _left_of_right(bias, half)))
        sums = ScaledSums(*(torch.stack(pair, -4).flatten(-5, -3) for pair in zip(left, right)))
        half *= 2
    return sums


def _triangles_of_logits(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, size: int) -> ScaledSums:
    """The causal sums within each block of `size` positions, from the logits of all pairs."""
    key_blocks, value_blocks = key.unflatten(-3, (-1, size)), value.unflatten(-3, (-1, size))
    if bias is None:
        bias = key.new_zeros(size, size)
    else:
        blocks = bias.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))  # (..., T / size, size, T / size, size)
        bias = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).to(key.dtype)
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    sums = _sums_of_logits(key_blocks, value_blocks, bias.masked_fill(later, -math.inf))
    return sums.map(lambda x: x.flatten(-4, -3))


def _halves(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and right halves, each (..., T / (2 half), half, B, c), of all blocks of 2 half positions."""
    return x.unflatten(-3, (-1, 2, half)).unbind(-4)


def _left_of_right(bias: torch.Tensor | None, half: int) -> torch.Tensor | None:
    """w from each right half to the left half of the same block: (..., T / (2 half), half, half)."""
    if bias is None:
        return None
    rows = bias.unflatten(-2, (-1, 2, half)).select(-3, 1)  # (..., pairs, half, T)
    blocks = rows.unflatten(-1, (-1, 2, half)).select(-2, 0)  # (..., pairs, half, pairs, half)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def reversed_triangle_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> ScaledSums:
    """Like `triangle_sums`, for t' >= t."""
    sums = triangle_sums(key.flip(-3), value.flip(-3), bias.flip(-2, -1))
    return sums.map(lambda x: x.flip(-3))


def prefix_sums(sums: ScaledSums, decay: torch.Tensor | float = 0.0) -> ScaledSums:
    """Inclusive prefix sums along T; each step back lowers the exponent by `decay` (broadcast to (..., 1, 1, 1))."""
    length, step = sums.maximum.shape[-3], 1
    if torch.compiler.is_exporting():
        torch._check(length <= LONGEST_EXPORTED)
        length = LONGEST_EXPORTED
    while step < length:
        sums = sums.merge(delayed(sums, step).shifted(-decay * step))
        step *= 2
    return sums


def prefix_sums_of_chunks(sums: ScaledSums, decay: torch.Tensor | float = 0.0) -> ScaledSums:
    """`prefix_sums` over chunks, which are so few that an exported program computes all pairs of chunks at once."""
    if not torch.compiler.is_exporting():
        return prefix_sums(sums, decay)
    chunks = torch.arange(sums.maximum.shape[-3], device=sums.maximum.device)
    distance = (chunks[:, None] - chunks)[..., None, None]
    decay = decay.unsqueeze(-1) if isinstance(decay, torch.Tensor) else decay
    exponent = sums.maximum.unsqueeze(-4) - (decay * distance).to(sums.maximum.dtype)  # (..., T, T, B, k)
    exponent = exponent.masked_fill(distance < 0, -math.inf)
    maximum = exponent.detach().amax(-3).clamp_min(EMPTY)
    weights = torch.exp(exponent - maximum.unsqueeze(-3))
    numerator, denominator = ((weights * x.unsqueeze(-4)).sum(-3) for x in (sums.numerator, sums.denominator))
    return ScaledSums(numerator, denominator, maximum)


def suffix_sums(sums: ScaledSums) -> ScaledSums:
    """Inclusive suffix sums along T."""
    return prefix_sums(sums.map(lambda x: x.flip(-3))).map(lambda x: x.flip(-3))


def delayed(sums: ScaledSums, steps: int) -> ScaledSums:
    """Shift `sums` by `steps` positions to later places along T (earlier, if negative); empty sums fill the gap."""
    length = sums.maximum.shape[-3]
    later = torch.sym_min(max(steps, 0), length)
    earlier = torch.sym_min(max(-steps, 0), length)

    def delay(x: torch.Tensor, fill: float) -> torch.Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, 0, later, earlier), value=fill)
        return padded.narrow(-3, earlier, length)

    return ScaledSums(delay(sums.numerator, 0.0), delay(sums.denominator, 0.0), delay(sums.maximum, EMPTY))


def pad_positions(key: torch.Tensor, value: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append `padding` hidden positions to key (..., T, B, k) and value (..., T, B, c)."""
    pad = (0, 0, 0, 0, 0, padding)
    return nn.functional.pad(key, pad, value=-math.inf), nn.functional.pad(value, pad)


def pad_to_power_of_two(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append hidden positions to (..., T, B, c), and to biases (..., T, T), until T is a power of two."""
    padding = power_of_two_from(key.shape[-3]) - key.shape[-3]
    return *pad_positions(key, value, padding), nn.functional.pad(bias, (0, padding, 0, padding))


# --------------------------------------------------------------------- the portable form: one algorithm per structure


# Positions per chunk in the linear-time functions, unless the window requires larger chunks.
CHUNK_SIZE = 32

# Bidirectional windows are summed in chunks if a sequence has more chunks than this; a table is faster for fewer.
FEW_CHUNKS = 8

# Maximum number of entries of the table exp(w) of a grid; above it `_convolves` chooses.
LARGEST_GRID_TABLE = 2**24


def portable_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias, *, causal: bool) -> torch.Tensor:
    """Eq. 2 by the algorithm for the structure of w, for rows that are one sequence each.

    Args:
        key: (B, h, T, k).
        value: (B, h, T, c).
        biases: w.
        causal: whether position t sees only t' <= t.

    Returns:
        (B, h, T, c).
    """
    # (h, T, B, c): the batch shares w, so its dimension is next to the features
    key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (key, value))
    mixing = causal_mixing if causal else bidirectional_mixing
    return mixing(key, value, biases).permute(2, 0, 1, 3)


def pairwise_mixing(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """Eq. 2 with any table and any visibility mask: O(T T' d) time, and a T x T' table per row with biases of its own.

    Args:
        key: (B, h, T', k).
        value: (B, h, T', c).
        bias: (B or 1, h, T, T').
        visible: (B or 1, 1, T, T') boolean; None if every key is visible to every query.

    Returns:
        (B, h, T, c).
    """
    if visible is not None:
        bias = bias.masked_fill(~visible, -math.inf)
    if len(bias) == 1:
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        return block_sums(key, value, bias.squeeze(0), masked=True).average().permute(2, 0, 1, 3)
    return unfold(block_sums(fold(key), fold(value), bias.flatten(0, 1), masked=True).average(), len(key))


# In the functions below, keys are (h, T, B, k), and values and results are (h, T, B, c).


def causal_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Causal Eq. 2 by the algorithm for the structure of w."""
    length = key.shape[1]
    if isinstance(biases, (NoBias, LinearDecay)):
        return chunked_mixing(key, value, None, biases.slopes, chunk_size=CHUNK_SIZE)
    if biases.reach is None:
        # An exported program serves all lengths with the operations of the longest one.
        longest = biases.query.shape[1] if torch.compiler.is_exporting() and isinstance(biases, Dense) else length
        return halved_mixing(key, value, biases.dense(longest))
    if biases.hides_outside:
        return causal_window_mixing(key, value, biases)
    size = chunk_size(biases.reach, length)
    return chunked_mixing(key, value, biases.of_chunks(count_chunks(length, size), size), chunk_size=size)


def bidirectional_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Bidirectional Eq. 2 by the algorithm for the structure of w."""
    length = key.shape[1]
    if isinstance(biases, NoBias):
        return block_sums(key, value).average().repeat(1, length, 1, 1)
    if isinstance(biases, SelectedPosition) and not biases.hides_outside:
        return selected_position_mixing(key, value, biases)
    biases = getattr(biases, "kernel", biases)
    if isinstance(biases, GridKernel) and not biases.hides_outside and _convolves(biases, length):
        return convolution_mixing(key, value, biases)
    if isinstance(biases, (Window, LagKernel)) and not is_short(biases.reach, length):
        return banded_mixing(key, value, biases, chunk_size=power_of_two_from(max(biases.reach, CHUNK_SIZE)))
    return block_sums(key, value, biases.dense(length), masked=biases.hides_outside).average()


def is_short(reach: int, length: int) -> bool:
    """Whether a table of all pairs of positions takes less time than chunks with their neighbours."""
    # An exported program serves all lengths.
    return not torch.compiler.is_exporting() and length <= FEW_CHUNKS * power_of_two_from(max(reach, CHUNK_SIZE))


def _convolves(biases: GridKernel, length: int) -> bool:
    """Whether a grid is convolved: its table is too large, and a convolution is precise or values cannot be read."""
    if torch.compiler.is_exporting():  # the program serves all sizes
        return True
    if len(biases.kernels) * length * length <= LARGEST_GRID_TABLE:
        return False
    kernels = biases.kernels.detach()
    return not (can_read_values(kernels) and kernels.amax().clamp_min(0.0) - kernels.amin() > LARGEST_SPAN)


def chunk_size(reach: int, length: int) -> int:
    """C, a power of two: at least `reach`, so that positions two chunks back are beyond the reach of every query; or
    less if one chunk holds the whole sequence.
    """
    size = power_of_two_from(max(reach, CHUNK_SIZE))
    # An exported program serves all lengths with one size.
    return size if torch.compiler.is_exporting() else min(size, power_of_two_from(length))


def count_chunks(length: int, chunk_size: int) -> int:
    """The number of chunks of a sequence, the last one padded.

    An exported program may not depend on whether there is one chunk or more, so it always uses at least two.
    """
    more = 2 * chunk_size if torch.compiler.is_exporting() else chunk_size
    return (length + more - 1) // chunk_size


def _chunks(key: torch.Tensor, value: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cut keys and values into chunks, (h, n, C, B, k) and (h, n, C, B, c), padded by hidden positions at the end.

    The third result is the number of hidden positions.
    """
    padding = count_chunks(key.shape[1], size) * size - key.shape[1]
    key, value = pad_positions(key, value, padding)
    return key.unflatten(1, (-1, size)), value.unflatten(1, (-1, size)), padding


def _unpadded(x: torch.Tensor, padding: int) -> torch.Tensor:
    """(h, n, C, B, c) as (h, T, B, c) without the `padding` last positions."""
    x = x.flatten(1, 2)
    if torch.compiler.is_exporting():  # a slice would have to be proven shorter than x for all lengths
        return nn.functional.pad(x, (0, 0, 0, 0, 0, -padding))
    return x.narrow(1, 0, x.shape[1] - padding)


def _neighbours(x: torch.Tensor, fill: float, *steps: int) -> list[torch.Tensor]:
    """For each of `steps`, return for every chunk (h, n, C, B, c) the chunk that many places before it (after it, if
    negative); `fill` beyond the ends.
    """
    count = x.shape[1]
    most = max(map(abs, steps))
    padded = nn.functional.pad(x, (0, 0, 0, 0, 0, 0, most, most), value=fill)
    return [padded[:, most - step : most - step + count] for step in steps]


def chunked_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    *,
    chunk_size: int,
) -> torch.Tensor:
    """Causal Eq. 2 in linear time: sums over the chunk itself and the chunk before it, and a running sum for the rest.

    Args:
        key: (h, T, B, k).
        value: (h, T, B, c).
        tables: w from each of n chunks to the chunk before it and to itself, (h, n or 1, C, 2 C); further back w is 0.
            None for w = 0, or with `slopes`.
        slopes: (h,), for w = -slope * distance: exp(w) is then a decay, and the sum a linear recurrence over chunks.
        chunk_size: C, a power of two.
    """
    key, value, padding = _chunks(key, value, chunk_size)
    chunks = key.shape[1]
    own_bias = previous_bias = None
    if tables is not None:
        previous_bias, own_bias = tables.tensor_split(2, -1)
    elif slopes is not None:
        positions = torch.arange(chunk_size, device=key.device)
        own_bias = LinearDecay(slopes).between(positions, positions).unsqueeze(1)
    sums = triangle_sums(key, value, own_bias)  # (h, n, C, B, c)
    if chunks > 1:
        decay: torch.Tensor | float = 0.0
        to_end = None
        if slopes is not None:
            decay = slopes.to(key.dtype).view(-1, 1, 1, 1)
            distance = torch.arange(chunk_size - 1, -1, -1, device=key.device)
            to_end = (-slopes[:, None] * distance)[:, None, None].expand(-1, chunks, -1, -1)
        totals = block_sums(key, value, to_end)  # (h, n, 1, B, c)
        totals = prefix_sums_of_chunks(
            totals.map(lambda x: x.squeeze(2)), decay * chunk_size
        )  # (h, n, B, c), along chunks
        if previous_bias is None:
            before = delayed(totals, 1)
        else:
            before = delayed(totals, 2)
            # No chunk precedes the first one. A hidden stand-in keeps all chunks in one product.
            (previous_key,), (previous_value,) = _neighbours(key, -math.inf, 1), _neighbours(value, 0.0, 1)
            sums = sums.merge(block_sums(previous_key, previous_value, previous_bias))
        before = before.map(lambda x: x.unsqueeze(2))
        if isinstance(decay, torch.Tensor):
            steps = torch.arange(1, chunk_size + 1, device=key.device, dtype=key.dtype).view(-1, 1, 1)
            before = before.shifted(-decay.unsqueeze(1) * steps)
        sums = sums.merge(before)
    return _unpadded(sums.average(), padding)


def causal_window_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Causal Eq. 2 if a query sees only itself and the `reach` positions before it.

    Chunks are so short that each query sees its own chunk from the start of the chunk on. Of the `reach` positions
    before the chunk, the first ones are visible to its first queries only, the others to all its queries.
    """
    reach = biases.reach
    assert reach is not None
    size = (1 << (reach + 1).bit_length()) // 2  # the largest power of two that is not above reach + 1
    key, value, padding = _chunks(key, value, size)
    queries = torch.arange(key.shape[1] * size, device=key.device).view(-1, size)  # (n, C)

    def earlier(steps: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and w of `count` positions, which start `steps` positions before each chunk."""
        front = (0, 0, 0, 0, steps, count)
        keys = nn.functional.pad(key.flatten(1, 2), front, value=-math.inf)
        values = nn.functional.pad(value.flatten(1, 2), front)
        index = torch.arange(count, device=key.device) + queries[:, :1]  # (n, count)
        bias = biases.between(queries, index - steps).movedim(-3, 0)  # (h, n, C, count)
        return keys[:, index], values[:, index], bias.masked_fill(bias == -math.inf, 0.0)  # hidden pairs are not read

    sums = triangle_sums(*earlier(0, size))
    if reach > 0:
        keys, values, bias = earlier(reach, size)
        own = (torch.arange(size, device=key.device) >= reach).view(-1, 1, 1)  # already counted
        sums = sums.merge(reversed_triangle_sums(keys.masked_fill(own, -math.inf), values.masked_fill(own, 0.0), bias))
    if reach > size:
        sums = sums.merge(block_sums(*earlier(reach - size, reach - size)))
    return _unpadded(sums.average(), padding)


def banded_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias, *, chunk_size: int) -> torch.Tensor:
    """Bidirectional Eq. 2 with a window in linear time: each chunk sees itself and both neighbouring chunks with their
    biases, and everything else, unless hidden, as one sum.
    """
    key, value, padding = _chunks(key, value, chunk_size)
    bias = biases.of_chunks(key.shape[1], chunk_size, following=True)  # (h, n or 1, C, 3 C)
    near_key = torch.cat(_neighbours(key, -math.inf, 1, 0, -1), 2)  # (h, n, 3 C, B, k)
    near_value = torch.cat(_neighbours(value, 0.0, 1, 0, -1), 2)
    sums = block_sums(near_key, near_value, bias, masked=biases.hides_outside)
    if not biases.hides_outside:
        totals = block_sums(key, value).map(lambda x: x.squeeze(2))  # (h, n, B, c)
        before, after = delayed(prefix_sums(totals), 2), delayed(suffix_sums(totals), -2)
        sums = sums.merge(before.merge(after).map(lambda x: x.unsqueeze(2)))
    return _unpadded(sums.average(), padding)


def halved_mixing(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Causal Eq. 2 with a w for each pair of positions, by recursive halving: the right half sees the whole left half.

    Args:
        key: (h, T, B, k).
        value: (h, T, B, c).
        bias: (h, P, P) with P = T or, in an exported program for all lengths up to P, P >= T.
    """
    length, longest = key.shape[1], bias.shape[-1]
    # An exported program has one triangle, since each further one would add operations of its own.
    size = power_of_two_from(longest if torch.compiler.is_exporting() else min(longest, 4 * CHUNK_SIZE))
    padded = -(-longest // size) * size
    bias = nn.functional.pad(bias, (0, padded - longest, 0, padded - longest))
    key, value = pad_positions(key, value, padded - length)
    context = _halved_sums(key, value, bias, size).average()
    return nn.functional.pad(context, (0, 0, 0, 0, 0, length - padded))


def _halved_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, size: int) -> ScaledSums:
    """The causal sums over all blocks of `size` tokens, by recursive halving."""
    blocks = bias.shape[-1] // size
    if blocks == 1:
        return triangle_sums(key, value, bias)
    mid = blocks // 2 * size
    left = _halved_sums(key[:, :mid], value[:, :mid], bias[:, :mid, :mid], size)
    right = _halved_sums(key[:, mid:], value[:, mid:], bias[:, mid:, mid:], size)
    right = right.merge(block_sums(key[:, :mid], value[:, :mid], bias[:, mid:, :mid]))
    return ScaledSums(*(torch.cat(pair, -3) for pair in zip(left, right)))


def selected_position_mixing(key: torch.Tensor, value: torch.Tensor, biases: SelectedPosition) -> torch.Tensor:
    """Eq. 2 if w is nonzero at one selected position of each query and 0 elsewhere (Eq. 10): by indexing, no product.

    The result merges the sums over all positions before the selected one, the selected position with its w, and all
    positions after it. (Adding exp(w) - 1 times that position to the sum over all would cancel where w is negative.)
    """
    place, exists = biases.places(key.shape[1])  # (h, T)
    place = place[..., None, None]
    exists = exists[..., None, None]
    each = single_sums(key, value)
    before, after = delayed(prefix_sums(each), 1), delayed(suffix_sums(each), -1)

    def take(x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, place.expand(-1, -1, *x.shape[2:]))

    selected = each.map(take).shifted(biases.size.to(key.dtype).view(-1, 1, 1, 1))
    # The sums carry w in their maximum, which has no gradient, so the gradient of w has to come from the weights.
    scale = torch.exp(biases.size - biases.size.detach()).to(key.dtype).view(-1, 1, 1, 1)
    selected = ScaledSums(selected.numerator * scale, selected.denominator * scale, selected.maximum.detach())
    sums = before.map(take).merge(selected).merge(after.map(take))
    everything = block_sums(key, value).average()
    return torch.where(exists, sums.average(), everything)


def convolution_mixing(key: torch.Tensor, value: torch.Tensor, biases: GridKernel) -> torch.Tensor:
    """AFT-conv on a grid (Eq. 6) as a depth-wise convolution: O(T d s^2) time, no T x T table.

    The paper writes conv(exp(K) V, exp(w) - 1) + sum exp(K) V. Where w is negative that adds and subtracts the same
    terms, so here the window is convolved with exp(w), and the positions outside it are summed by themselves.
    Biases are clamped to at least the largest bias minus `LARGEST_SPAN`.
    """
    kernel, grid_size = biases.kernels.to(key.dtype), biases.grid_size
    size = kernel.shape[-1]
    weights = torch.exp(key - key.detach().amax(1, keepdim=True).clamp_min(EMPTY))
    features = torch.cat([weights * value, weights], -1)  # (h, T, B, c + 1)
    features = features.permute(2, 3, 0, 1).unflatten(-1, grid_size)  # (B, c + 1, h, rows, columns)

    near_row, near_column = (_near(n, size // 2, features) for n in grid_size)
    # Both parts are relative to the largest bias: that of the kernel, or 0 if some positions lie outside the kernel.
    covered = near_row.all() & near_column.all()
    maximum = kernel.detach().amax((-2, -1), keepdim=True)
    maximum = torch.where(covered, maximum, maximum.clamp_min(0.0))
    table = torch.exp((kernel - maximum).clamp_min(-LARGEST_SPAN))
    inside = nn.functional.conv2d(
        features.flatten(0, 1), table.unsqueeze(1), padding=size // 2, groups=kernel.shape[0]
    ).view_as(features)
    outside = near_row @ (features @ (1 - near_column)) + (1 - near_row) @ features.sum(-1, keepdim=True)
    sums = inside + outside * torch.exp(-maximum.clamp(0.0, LARGEST_SPAN))
    sums = sums.flatten(-2).permute(2, 3, 0, 1)  # (h, T, B, c + 1)
    # In ONNX a split is a sequence, which onnxruntime fails to run after it has quantized the program.
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    return ScaledSums(numerator, denominator, denominator).average()


def _near(length: int, radius: int, like: torch.Tensor) -> torch.Tensor:
    """(length, length) with 1 where two coordinates are at most `radius` apart and 0 elsewhere."""
    position = torch.arange(length, device=like.device)
    return ((position[:, None] - position).abs() <= radius).to(like.dtype)
