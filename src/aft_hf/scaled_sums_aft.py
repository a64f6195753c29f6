"""Partial sums of Eq. 2 with a log-sum-exp shift: building blocks of the portable backend and the generation cache.

Sums have the layout (..., T, B, c), for instance (h, T, B, c) for h position-bias heads: the batch shares the position
biases, so one product with an (h, T, T) table serves every row.

No exponential here can overflow, and none that matters can underflow. A `ScaledSums` holds sums relative to a maximum
(the log-sum-exp shift). Causal sums take that maximum only over positions that are visible to every query that uses
it, which keeps a causal model causal in floating point, however large a later key is. With a mask, `block_sums` takes
it over all positions, and sums the queries that lose terms by this again.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def largest_size(x: torch.Tensor) -> float:
    """Return the largest absolute value in x; NaN if x contains NaN."""
    lowest, highest = x.detach().aminmax()
    return max(-float(lowest), float(highest))


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return x in its `working_dtype`."""
    dtype = working_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def can_read_values(*tensors: torch.Tensor) -> bool:
    """Whether control flow may depend on the values of tensors: only for eager tensors on a CPU, without transforms.

    On an accelerator, the host would have to wait for the values.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return all(x.device.type == "cpu" and type(x) in (torch.Tensor, nn.Parameter) for x in tensors)


def floored_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x); on a CPU, 0 where x is below `FLOOR`."""
    if not can_read_values(x):
        return torch.exp(x)
    small = x.detach() < FLOOR[x.dtype]
    hidden = x.detach() == -math.inf
    return torch.exp(x if torch.equal(small, hidden) else x.masked_fill(small, -math.inf))


def flush_subnormals(x: torch.Tensor) -> torch.Tensor:
    """Set subnormal numbers in x to 0, in place, and return x. In half precision, they are common and stay."""
    if x.dtype == working_dtype(x):
        torch.ops.aten.hardshrink.out(x, torch.finfo(x.dtype).tiny, out=x)
    return x


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


def power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
