"""The portable form of Eq. 2: plain PyTorch operations for any device, dtype and structure of w.

Everything here can be traced, exported and differentiated any number of times and in every mode, since control flow
then depends on shapes alone. Where values can be read, `block_sums` also uses them, for biases of any span.

`Averages` holds Eq. 2 over some positions with the logarithm of its denominator, by which parts are merged. The layout
is (..., T, B, c): the batch shares w, so one product with a table serves every row. No exponential can overflow, and
none that matters can underflow. Causal parts are shifted only by positions that all their queries see, which keeps a
causal model causal in floating point.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

from .position_biases_aft import Dense, GridKernel, LagKernel, LinearDecay, NoBias, PositionBias, Window


# -------- tensors and their modes


def _are_eager(*tensors: torch.Tensor) -> bool:
    """Whether tensors are ordinary ones, of a program that is not traced or transformed by torch.func."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) in (torch.Tensor, nn.Parameter) for x in tensors)


def can_read_values(*tensors: torch.Tensor) -> bool:
    """Whether control flow may depend on the values of tensors: only for eager tensors on a CPU, without transforms.

    On an accelerator, the host would have to wait for the values.
    """
    return _are_eager(*tensors) and all(x.device.type == "cpu" for x in tensors)


def are_plain_tensors(*tensors: torch.Tensor) -> bool:
    """Whether operations on tensors run eagerly, and only reverse-mode gradients are computed.

    False if a program is traced or compiled, for tensor subclasses, and for tensors of torch.func, of batched
    gradients, and of forward-mode differentiation.
    """
    if not _are_eager(*tensors) or any(torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors):
        return False
    return all(unpack_dual(x).tangent is None for x in tensors)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs only the `forward` of its class, without hooks or a replaced `forward`."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return "forward" not in vars(module) and not module_hooks._has_any_global_hook()


def full_precision(device_type: str) -> AbstractContextManager[object]:
    """Return a context that disables autocast.

    It is a null context if autocast is not enabled, since the overhead of calls dominates a decoding step.
    """
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if enabled else nullcontext()


def flush_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return x; on a CPU, subnormal numbers in its gradient are set to 0, since products with them take many times
    longer.
    """
    if not (x.requires_grad and can_read_values(x)):
        return x
    x = x.view_as(x)  # a hook on the argument itself would stay after this call
    tiny = torch.finfo(x.dtype).tiny
    # Gradients of gradients call the hook without a gradient, too.
    x.register_hook(lambda gradient: None if gradient is None else nn.functional.hardshrink(gradient, tiny))
    return x


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, T, h c) -> (B, h, T, c)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, h, T, c) -> (B, T, h c)."""
    return x.transpose(1, 2).flatten(-2)


def fold(x: torch.Tensor) -> torch.Tensor:
    """(B, h, T, c) -> (B h, T, 1, c): each row of the batch with position biases of its own."""
    return x.flatten(0, 1).unsqueeze(2)


def unfold(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B h, T, 1, c) -> (B, h, T, c), the inverse of `fold`."""
    return x.squeeze(2).unflatten(0, (-1, num_heads))


def power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


# -------- partial sums


# The logarithm of a sum over nothing. It is finite, so that the difference of two of them is finite.
EMPTY = -1e30

# exp(x) for x below this is set to 0: CPUs take many times longer for subnormal numbers, and for products with them.
FLOOR = -82.0

# The logarithm of the smallest denominator that cannot have lost significant terms to underflow.
LOST = -60.0

# Where values cannot be read, biases are raised to the largest bias in their row of a table minus this.
LARGEST_SPAN = 65.0

# Maximum number of logits that are computed at once.
LOGITS_AT_ONCE = 2**22

# `triangle_sums` pads sequences of up to this length to a power of two, and splits longer ones.
LONGEST_PADDED = 128

# In an exported program, blocks of this many positions are averaged by their logits, not in log2 steps: the time of
# exporters grows with the number of operations.
EXPORTED_BLOCK = 32


def floored_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x), and 0 where x is below `FLOOR`."""
    return nn.functional.threshold(x, FLOOR, -math.inf).exp()


class Averages(NamedTuple):
    """Eq. 2 over some positions, and the logarithm of its denominator."""

    average: torch.Tensor  # (..., T, B, c); 0 where there are no positions
    logsumexp: torch.Tensor  # (..., T, B, k); about `EMPTY` where there are no positions

    @classmethod
    def of(cls, numerator: torch.Tensor, denominator: torch.Tensor, maximum: torch.Tensor | float) -> "Averages":
        """Return the averages for the sums of exp(K + w) V and exp(K + w), both divided by exp(maximum)."""
        # Not clamped to the smallest number: gradients of queries that see no key would overflow.
        denominator = nn.functional.threshold(denominator, torch.finfo(denominator.dtype).tiny, 1.0)
        return cls(numerator / denominator, maximum + denominator.log())

    def shifted(self, exponent: torch.Tensor | float) -> "Averages":
        """Return the averages with `exponent` added to every K + w."""
        return self._replace(logsumexp=self.logsumexp + exponent)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Averages":
        """Apply `function` to both tensors."""
        return Averages(*map(function, self))

    def flipped(self) -> "Averages":
        """Reverse the order of the positions."""
        return self.map(lambda x: x.flip(-3))

    def merge(self, other: "Averages") -> "Averages":
        """Return the averages over the positions of both."""
        weight = torch.sigmoid(other.logsumexp - self.logsumexp)
        # logaddexp takes longer, and has no second derivatives for large differences.
        larger = torch.maximum(self.logsumexp, other.logsumexp) - torch.maximum(weight, 1 - weight).log()
        return Averages(torch.lerp(self.average, other.average, weight), larger)


def block_sums(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None, *, masked: bool = False
) -> Averages:
    """Average over a block of positions by one product with exp(w).

    A query from which the large keys are hidden by -inf, or that sees them only at small biases, can lose significant
    terms to underflow. If values can be read, the block is then averaged by its logits. Otherwise masked blocks always
    are, and biases without a mask are raised to the largest bias of their row minus `LARGEST_SPAN`.

    Keys are (..., T', B, k), -inf where a position is hidden from all queries, and values (..., T', B, c). The bias is
    (..., T, T'), and has entries of -inf if `masked`; None for w = 0, when all queries share one average (T = 1).
    """
    if not masked and (bias is None or bias.shape[-2] == 1):
        # One maximum over K + w is exact for biases of any span, such as those of a long decay.
        key = key if bias is None else key + bias.mT.unsqueeze(-1).to(key.dtype)
        if key.shape[-3] == 1:
            return Averages(value, key.clamp_min(EMPTY))
        maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
        weights = floored_exp(key - maximum)
        return Averages.of((weights * value).sum(-3, keepdim=True), weights.sum(-3, keepdim=True), maximum)
    assert bias is not None
    bias = flush_gradient(bias.to(key.dtype))
    readable = can_read_values(key, value, bias) and bias.numel() > 0
    if masked and not readable:
        return _averages_by_logits(key, value, bias)
    largest = bias.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    relative = bias - largest
    given, unknown = (key, value), None
    if masked:
        key, value, unknown = _without_unknown(key, value)
    maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = floored_exp(key - maximum)
    table = floored_exp(relative if readable else relative.clamp_min(-LARGEST_SPAN))
    features = torch.cat([weights * value, weights], -1)  # (..., T', B, c + k)
    sums = flush_gradient(table @ flush_gradient(features.flatten(-2))).unflatten(-1, features.shape[-2:])
    numerator, denominator = sums.tensor_split((value.shape[-1],), -1)
    if readable and (masked or float(relative.detach().amin()) < LOST):
        lost = (denominator.detach() < math.exp(LOST)) & (maximum > EMPTY)
        if (lost & (largest > EMPTY).unsqueeze(-1)).any():
            return _averages_by_logits(*given, bias)
    averages = Averages.of(numerator, denominator, maximum + largest.unsqueeze(-1))
    return averages if unknown is None else _with_unknown(averages, unknown, bias)


def _without_unknown(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hide positions with NaN or infinities, which would reach every query of a product, and return where they are."""
    unknown = ~(value.isfinite() & (key < math.inf)).all(-1, keepdim=True)
    return key.masked_fill(unknown, -math.inf), value.masked_fill(unknown, 0.0), unknown


def _with_unknown(averages: Averages, unknown: torch.Tensor, bias: torch.Tensor) -> Averages:
    """Return the averages with NaN for the queries that see an unknown position."""
    visible = (bias > -math.inf).to(bias.dtype)
    sees = (visible @ unknown.squeeze(-1).to(bias.dtype)).unsqueeze(-1) > 0  # (..., T, B, 1)
    return averages._replace(average=averages.average.masked_fill(sees, math.nan))


def _averages_by_logits(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> Averages:
    """`block_sums` from the logits of all pairs, some queries at a time: O(T T' B k) exponentials."""
    key, value, unknown = _without_unknown(key, value)

    def some_queries(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> Averages:
        logits = key.unsqueeze(-4) + bias[..., None, None]  # (..., t, T', B, k)
        maximum = logits.detach().amax(-3).clamp_min(EMPTY)
        weights = floored_exp(logits - maximum.unsqueeze(-3))
        if key.shape[-1] == 1 and not torch.compiler.is_exporting():  # products would depend on the size of the batch
            numerator = (weights.squeeze(-1).movedim(-1, -3) @ value.movedim(-2, -3)).movedim(-3, -2)
        else:
            numerator = (weights * value.unsqueeze(-4)).sum(-3)
        return Averages.of(numerator, weights.sum(-3), maximum)

    if torch.compiler.is_exporting():  # the program serves any length, so all queries are computed at once
        return _with_unknown(some_queries(key, value, bias), unknown, bias)
    parts, at_once = [], max(1, LOGITS_AT_ONCE // max(1, key.numel()))
    for rows in bias.split(at_once, -2):
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            # Recomputed in the backward pass, since the logits of all queries take T x T' x d numbers.
            parts.append(checkpoint(some_queries, key, value, rows, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(some_queries(key, value, rows))
    return _with_unknown(Averages(*(torch.cat(x, -3) for x in zip(*parts))), unknown, bias)


def triangle_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> Averages:
    """Causal averages (t' <= t) over (..., T, B, c), for biases (..., T, T) of which the lower triangle is read.

    The left half of a block is visible to all of its right half, so `block_sums` may use the maximum of the left half,
    and log2(T) levels of small products, from single positions upwards, give the whole triangle.
    """
    length, exporting = key.shape[-3], torch.compiler.is_exporting()
    size = power_of_two_from(length)
    if LONGEST_PADDED < length < size and not exporting:
        middle = size // 2
        (left_key, right_key), (left_value, right_value) = (x.tensor_split((middle,), -3) for x in (key, value))
        left = triangle_sums(left_key, left_value, bias[..., :middle, :middle])
        right = triangle_sums(right_key, right_value, bias[..., middle:, middle:])
        right = right.merge(block_sums(left_key, left_value, bias[..., middle:, :middle]))
        return Averages(*(torch.cat(pair, -3) for pair in zip(left, right)))
    if length < size:
        key, value = pad_positions(key, value, size - length)
        bias = nn.functional.pad(bias, (0, size - length, 0, size - length))
    bias = bias.to(key.dtype)
    if not exporting and torch.is_grad_enabled() and are_plain_tensors(key, value, bias):
        sums = Averages(*_Triangle.apply(key, value, flush_gradient(bias)))
    else:
        sums = _padded_triangle_sums(key, value, bias)
    return sums if length == size else sums.map(lambda x: x.narrow(-3, 0, length))


def _padded_triangle_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> Averages:
    """`triangle_sums` for a length that is a power of two."""
    size, half = key.shape[-3], 1
    in_place = not torch.is_grad_enabled() and are_plain_tensors(key, value, bias)
    if torch.compiler.is_exporting():
        half = min(size, EXPORTED_BLOCK)
        later = torch.ones(half, half, dtype=torch.bool, device=key.device).triu(1)
        biases = _diagonal_blocks(bias, half).masked_fill(later, -math.inf)
        blocks, of_blocks = (x.unflatten(-3, (-1, half)) for x in (key, value))
        sums = _averages_by_logits(blocks, of_blocks, biases).map(lambda x: x.flatten(-4, -3))
    else:
        key_and_bias = (key + bias.diagonal(dim1=-2, dim2=-1)[..., None, None]).clamp_min(EMPTY)
        sums = Averages(value.clone() if in_place else value, key_and_bias)
    while half < size:
        (left_key, _), (left_value, _) = (_halves(x, half) for x in (key, value))
        left, right = (Averages(*part) for part in zip(*(_halves(x, half) for x in sums)))
        block = block_sums(left_key, left_value, _diagonal_blocks(bias, 2 * half)[..., half:, :half])
        merged = right.merge(block)
        if in_place:
            for x, y in zip(right, merged):
                x.copy_(y)
        else:
            sums = Averages(*(torch.stack(pair, -4).flatten(-5, -3) for pair in zip(left, merged)))
        half *= 2
    return sums


class _Triangle(torch.autograd.Function):
    """`_padded_triangle_sums` that keeps only its inputs and results for the backward pass."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = _padded_triangle_sums(key, value, bias)
        ctx.save_for_backward(key, value, bias, *sums)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, average, logsumexp = ctx.saved_tensors
        again, found = torch.is_grad_enabled(), cast(Any, None)
        with full_precision(average.device.type):
            if not again and are_plain_tensors(*gradients):
                found = _triangle_gradients(*inputs, average, logsumexp, *gradients)
            if found is None:
                with torch.enable_grad():
                    inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs]
                    sums = _padded_triangle_sums(*inputs)
                found = torch.autograd.grad(sums, inputs, gradients, create_graph=again, materialize_grads=True)
        return tuple(found)


def _triangle_gradients(*given: torch.Tensor) -> list[torch.Tensor] | None:
    """The gradients of key, value and bias, from these, the results, and their gradients; None after underflow.

    That of K + w is exp(K + w - logsumexp) (of_average (V - average) + of_logsumexp), summed over shared features.
    """
    key, value, bias, average, logsumexp, of_average, of_logsumexp = given
    rest = of_logsumexp - (of_average * average).sum_to_size(logsumexp.shape)
    own = floored_exp(key + bias.diagonal(dim1=-2, dim2=-1)[..., None, None] - logsumexp)
    of_value = own * of_average
    of_key = (of_value * value).sum_to_size(key.shape) + own * rest
    of_bias = torch.zeros_like(bias)
    diagonal = of_bias.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(of_key.sum((-2, -1)).sum_to_size(diagonal.shape))
    readable, half = can_read_values(key) and key.numel() > 0, 1
    while half < key.shape[-3]:
        keys, values, of_keys, of_values = (_halves(x, half)[0] for x in (key, value, of_key, of_value))
        queries, others, sums = (_halves(x, half)[1] for x in (of_average, rest, logsumexp))
        biases, of_biases = (_diagonal_blocks(x, 2 * half)[..., half:, :half] for x in (bias, of_bias))
        largest, maximum = biases.amax(-1, keepdim=True), keys.amax(-3, keepdim=True).clamp_min(EMPTY)
        exponent = maximum + largest.unsqueeze(-1) - sums
        if readable and exponent.amax() > -LOST:
            return None
        table, weights, scale = biases - largest, floored_exp(keys - maximum), floored_exp(exponent)
        table = floored_exp(table if readable else table.clamp_min(-LARGEST_SPAN))
        features = torch.cat([weights * values, weights], -1)
        products = torch.cat([scale * queries, scale * others], -1).flatten(-2)
        products = nn.functional.hardshrink(products, torch.finfo(key.dtype).tiny)
        found = (table.mT @ products).unflatten(-1, features.shape[-2:])
        of_biases.copy_((table * (products @ features.flatten(-2).mT)).sum_to_size(of_biases.shape))
        found, others = found.tensor_split((value.shape[-1],), -1)
        of_values += weights * found
        of_keys += weights * ((found * values).sum_to_size(keys.shape) + others)
        half *= 2
    return [of_key, of_value, of_bias]


def _halves(x: torch.Tensor, half: int) -> tuple[torch.Tensor, ...]:
    """The left and right halves, each (..., T / (2 half), half, B, c), of all blocks of 2 half positions."""
    return x.unflatten(-3, (-1, 2, half)).unbind(-4)


def _diagonal_blocks(bias: torch.Tensor, size: int) -> torch.Tensor:
    """w within each block of `size` positions: (..., T, T) -> (..., T / size, size, size)."""
    blocks = bias.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def prefix_sums(sums: Averages, decay: torch.Tensor | float = 0.0) -> Averages:
    """Averages over each position of (h, T, B, c) and all before it, in O(T) operations: pairs of positions are
    merged, summed by this function, and merged with the position between them.

    Each step back lowers the exponent by `decay`, a number or (h, 1, 1, 1).
    """
    if torch.compiler.is_exporting():
        return _exported_prefix_sums(sums, decay)
    length = sums.logsumexp.shape[-3]
    if length == 1:
        return sums
    if length % 2:
        sums = delayed(sums, 0, 1)
    first, second = (Averages(*x) for x in zip(*(x.unflatten(-3, (-1, 2)).unbind(-3) for x in sums)))
    seconds = prefix_sums(first.shifted(-decay).merge(second), 2 * decay)
    firsts = delayed(seconds, 1, -1).shifted(-decay).merge(first)
    sums = Averages(*(torch.stack(pair, -3).flatten(-4, -3) for pair in zip(firsts, seconds)))
    return sums.map(lambda x: x.narrow(-3, 0, length)) if length % 2 else sums


def _exported_prefix_sums(sums: Averages, decay: torch.Tensor | float) -> Averages:
    """`prefix_sums` from the logits of all pairs in each chunk, and of all pairs of chunks."""
    length, size, device = sums.logsumexp.shape[-3], EXPORTED_BLOCK, sums.logsumexp.device
    padding = count_chunks(length, size) * size - length

    def inclusive(sums: Averages, decay: torch.Tensor | float) -> Averages:
        places = torch.arange(sums.logsumexp.shape[-3], device=device)
        distance = (places[:, None] - places)[None, None]
        bias = (-decay * distance).to(sums.logsumexp.dtype).masked_fill(distance < 0, -math.inf)
        return _averages_by_logits(sums.logsumexp, sums.average, bias)

    chunks = delayed(sums, 0, padding).map(lambda x: x.unflatten(1, (-1, size)))
    inside = inclusive(chunks, decay)  # (h, n, C, B, c)
    totals = inside.map(lambda x: x[:, :, -1].unsqueeze(1))  # (h, 1, n, B, c)
    before = delayed(inclusive(totals, size * decay), 1, -1).map(lambda x: x.squeeze(1).unsqueeze(2))
    steps = torch.arange(1, size + 1, device=device).view(-1, 1, 1)
    before = before.shifted(-(decay.unsqueeze(1) if isinstance(decay, torch.Tensor) else decay) * steps)
    return inside.merge(before).map(lambda x: _unpadded(x, padding))


def delayed(sums: Averages, before: int, after: int) -> Averages:
    """Add that many empty sums in front and at the end of T; remove as many if negative."""
    pad = (0, 0, 0, 0, before, after)
    return Averages(nn.functional.pad(sums.average, pad), nn.functional.pad(sums.logsumexp, pad, value=EMPTY))


def pad_positions(
    key: torch.Tensor, value: torch.Tensor, after: int, before: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and prepend hidden positions to key (..., T, B, k) and value (..., T, B, c)."""
    if not torch.compiler.is_compiling() and before == after == 0:
        return key, value  # `pad` would copy them
    pad = (0, 0, 0, 0, before, after)
    return nn.functional.pad(key, pad, value=-math.inf), nn.functional.pad(value, pad)


# -------- one algorithm per structure


# Positions per chunk in the linear-time functions, unless the window requires larger chunks.
CHUNK_SIZE = 32

# Bidirectional `chunked_mixing` is for sequences with more chunks than this; a table is faster for fewer.
FEW_CHUNKS = 16

# Grids are convolved, where that is precise, if their table exp(w) has more entries than this (`_convolves`).
LARGEST_GRID_TABLE = 2**22


def portable_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias, *, causal: bool) -> torch.Tensor:
    """Eq. 2 by the algorithm for the structure of w, for rows that are one sequence each: (B, h, T, c) from keys
    (B, h, T, k) and values (B, h, T, c).
    """
    # (h, T, B, c): the batch shares w, so its dimension is next to the features
    key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (key, value))
    mixing = causal_mixing if causal else bidirectional_mixing
    return mixing(key, value, biases).permute(2, 0, 1, 3)


def pairwise_mixing(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """Eq. 2 with any table (B or 1, h, T, T') and any mask (B or 1, 1, T, T'), where None hides nothing: (B, h, T, c)
    from keys (B, h, T', k) and values (B, h, T', c).
    """
    if visible is not None:
        bias = bias.masked_fill(~visible, -math.inf)
    if len(bias) == 1:
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        return block_sums(key, value, bias.squeeze(0), masked=True).average.permute(2, 0, 1, 3)
    return unfold(block_sums(fold(key), fold(value), bias.flatten(0, 1), masked=True).average, key.shape[1])


# In the functions below, keys are (h, T, B, k), and values and results are (h, T, B, c).


def causal_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Causal Eq. 2 by the algorithm for the structure of w."""
    length = key.shape[1]
    if isinstance(biases, (NoBias, LinearDecay)):
        decay = 0.0 if biases.slopes is None else biases.slopes.to(key.dtype).view(-1, 1, 1, 1)
        return prefix_sums(Averages(value, key.clamp_min(EMPTY)), decay).average
    if biases.reach is not None and biases.hides_outside:
        return _window_sums(key, value, biases.between, biases.reach).average
    if biases.reach is not None:
        return chunked_mixing(key, value, biases, causal=True)
    if not torch.compiler.is_exporting() or not isinstance(biases, Dense):
        return triangle_sums(key, value, biases.dense(length)).average
    # An exported program serves all lengths with the operations of the longest one.
    longest = biases.query.shape[1]
    key, value = pad_positions(key, value, longest - length)
    sums = triangle_sums(key, value, biases.dense(longest))
    return nn.functional.pad(sums.average, (0, 0, 0, 0, 0, length - longest))


def bidirectional_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Bidirectional Eq. 2 by the algorithm for the structure of w."""
    length = key.shape[1]
    if isinstance(biases, NoBias):
        return block_sums(key, value).average.repeat(1, length, 1, 1)
    if isinstance(biases, GridKernel) and not biases.hides_outside and _convolves(biases, length):
        return convolution_mixing(key, value, biases)
    if isinstance(biases, (Window, LagKernel)) and (biases.hides_outside or not is_short(biases.reach, length)):
        mixing = window_mixing if biases.hides_outside else partial(chunked_mixing, causal=False)
        if torch.is_grad_enabled() and _are_eager(key, value):
            # Recomputed in the backward pass: the sums would keep many times the memory of the inputs.
            return checkpoint(mixing, key, value, biases, use_reentrant=False, preserve_rng_state=False)
        return mixing(key, value, biases)
    return block_sums(key, value, biases.dense(length), masked=biases.hides_outside).average


def is_short(reach: int, length: int) -> bool:
    """Whether a table of all pairs of positions takes less time than running sums."""
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


def count_chunks(length: int, size: int) -> int:
    """The number of chunks of a sequence, the last one padded; at least two in an exported program for all lengths."""
    more = 2 * size if torch.compiler.is_exporting() else size
    return (length + more - 1) // size


def _unpadded(x: torch.Tensor, padding: int) -> torch.Tensor:
    """(h, n, C, B, c) as (h, T, B, c) without the `padding` last positions."""
    if not torch.compiler.is_compiling():
        return x.flatten(1, 2).narrow(1, 0, x.shape[1] * x.shape[2] - padding)
    # In an exported program, a slice would have to be proven shorter than x for all lengths.
    return nn.functional.pad(x.flatten(1, 2), (0, 0, 0, 0, 0, -padding))


def chunked_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias, *, causal: bool) -> torch.Tensor:
    """Eq. 2 with a window: a chunk of queries sees itself and the chunks beside it with their biases, all others as
    sums.
    """
    length, size = key.shape[1], power_of_two_from(max(cast(int, biases.reach), CHUNK_SIZE))
    if not torch.compiler.is_exporting():  # an exported program serves all lengths with one size
        size = min(size, power_of_two_from(length))
    chunks = count_chunks(length, size)
    padding = chunks * size - length
    queries = torch.arange(size if biases.relative else chunks * size, device=key.device).view(-1, size)
    beside = torch.arange(-size, size if causal else 2 * size, device=key.device)
    bias = biases.between(queries, queries[:, :1] + beside).movedim(-3, 0)  # (h, n or 1, C, 2 C or 3 C)
    # (h, n, C, B, c)
    own_key, own_value = (x.unflatten(1, (-1, size)) for x in pad_positions(key, value, padding))
    if causal:
        sums = triangle_sums(own_key, own_value, bias[..., size:])
        if chunks > 1:
            keys, values = (x.unflatten(1, (-1, size)) for x in pad_positions(key, value, padding - size, size))
            sums = sums.merge(block_sums(keys, values, bias[..., :size]))
    else:
        padded = pad_positions(key, value, padding + size, size)
        keys, values = (x.unfold(1, 3 * size, size).movedim(-1, 2) for x in padded)
        sums = block_sums(keys, values, bias)
    if chunks > 1:
        totals = block_sums(own_key, own_value).map(lambda x: x.squeeze(2))
        sums = sums.merge(delayed(prefix_sums(totals), 2, -2).map(lambda x: x.unsqueeze(2)))
        if not causal:
            after = delayed(prefix_sums(totals.flipped()), 2, -2).flipped()
            sums = sums.merge(after.map(lambda x: x.unsqueeze(2)))
    return _unpadded(sums.average, padding)


def window_mixing(key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
    """Bidirectional Eq. 2 in a window alone: the causal one, and that of the reversed sequence without the query."""
    last, reach = key.shape[1] - 1, cast(int, biases.reach)
    sums = _window_sums(key, value, biases.between, reach)
    if reach > 0:
        key_after, value_after = pad_positions(key.flip(1)[:, :-1], value.flip(1)[:, :-1], 0, before=1)
        after = _window_sums(
            key_after, value_after, lambda queries, keys: biases.between(last - queries, last + 1 - keys), reach - 1
        )
        sums = sums.merge(after.flipped())
    return sums.average


def _window_sums(key: torch.Tensor, value: torch.Tensor, between: Callable[..., torch.Tensor], reach: int) -> Averages:
    """Averages over each position and the `reach` positions before it, for w `between` queries and keys.

    Each query sees its own, short chunk from its start on. Of the `reach` positions before the chunk, the first ones
    are visible to its first queries only, the others to all its queries.
    """
    size = (1 << (reach + 1).bit_length()) // 2  # the largest power of two that is not above reach + 1
    chunks = count_chunks(key.shape[1], size)
    padding = chunks * size - key.shape[1]
    queries = torch.arange(chunks * size, device=key.device).view(-1, size)  # (n, C)

    def earlier(steps: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and w of `count` positions, which start `steps` positions before each chunk."""
        index = torch.arange(count, device=key.device) + queries[:, :1]  # (n, count)
        keys, values = pad_positions(key, value, padding + count, before=steps)
        bias = between(queries, index - steps).movedim(-3, 0)  # (h, n, C, count)
        return keys[:, index], values[:, index], bias.masked_fill(bias == -math.inf, 0.0)  # hidden pairs are not read

    sums = triangle_sums(*earlier(0, size))
    if reach > 0:
        keys, values, bias = earlier(reach, size)
        own = (torch.arange(size, device=key.device) >= reach).view(-1, 1, 1)  # already counted
        keys, values = keys.masked_fill(own, -math.inf), values.masked_fill(own, 0.0)
        sums = sums.merge(triangle_sums(keys.flip(-3), values.flip(-3), bias.flip(-2, -1)).flipped())
    if reach > size:
        sums = sums.merge(block_sums(*earlier(reach - size, reach - size)))
    return sums.map(lambda x: _unpadded(x, padding))


def convolution_mixing(key: torch.Tensor, value: torch.Tensor, biases: GridKernel) -> torch.Tensor:
    """AFT-conv on a grid (Eq. 6) as a depth-wise convolution: O(T d s^2) time, no T x T table.

    The paper writes conv(exp(K) V, exp(w) - 1) + sum exp(K) V. Where w is negative that adds and subtracts the same
    terms, so here the window is convolved with exp(w), and the positions outside it are summed by themselves.
    Biases are clamped to at least the largest bias minus `LARGEST_SPAN`.
    """
    kernel, grid_size = biases.kernels.to(key.dtype), biases.grid_size
    size, width = kernel.shape[-1], value.shape[-1]
    weights = torch.exp(key - key.detach().amax(1, keepdim=True).clamp_min(EMPTY))
    features = torch.cat([weights * value, weights], -1)  # (h, T, B, c + k)
    features = features.permute(2, 3, 0, 1).unflatten(-1, grid_size)  # (B, c + k, h, rows, columns)

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
    sums = sums.flatten(-2).permute(2, 3, 0, 1)  # (h, T, B, c + k)
    # In ONNX a split is a sequence, which onnxruntime fails to run after it has quantized the program.
    return Averages.of(sums[..., :width], sums[..., width:], 0.0).average


def _near(length: int, radius: int, like: torch.Tensor) -> torch.Tensor:
    """(length, length) with 1 where two coordinates are at most `radius` apart and 0 elsewhere."""
    position = torch.arange(length, device=like.device)
    return ((position[:, None] - position).abs() <= radius).to(like.dtype)
