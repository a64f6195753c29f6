"""The portable form of Eq. 2: plain PyTorch operations for any device and dtype.

The functions at the end have the arguments of the operators of aft-hf, which compute the same faster.
Everything can be traced, exported and differentiated in every mode: control flow depends on values only where the host
can read them without waiting.

`Averages` holds Eq. 2 over some positions with the logarithm of its denominator, by which parts are merged. No
exponential can overflow, and none that matters can underflow. A query is never shifted by a key that it does not see,
which keeps a causal model causal in floating point.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .position_biases_aft import GridKernel, PositionBias, widen


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, h c) -> (B, h, T, c)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, h, T, c) -> (B, T, h c)."""
    return x.transpose(1, 2).flatten(-2)


def power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def read(x: Tensor) -> Any:
    """Return the values of a tensor as numbers; None if the host cannot know them: in traced programs, and on meta."""
    if torch.compiler.is_compiling():
        return None
    try:
        values = x.tolist()
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # under vmap, or for a tensor without data
        return None
    return None if isinstance(values, torch.types.py_sym_types) else values


def _ask_now(condition: Callable[[], Tensor], *tensors: Tensor) -> bool | None:
    """Return whether a condition holds, without waiting for an accelerator: None if a tensor is not on a CPU."""
    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return None
    with torch.no_grad():
        return read(condition())


def recomputed(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call a function without keeping its intermediate results for the backward pass, if possible."""
    wrapped = torch.compiler.is_compiling() or any(torch.func.debug_unwrap(x) is not x for x in tensors)
    if wrapped or not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


# -------- partial sums. Keys are (..., T, N, k), values and averages (..., T, N, c), for N rows that share w


# The logarithm of a sum over nothing: finite, so that the difference of two is finite.
EMPTY = -1e30

# exp(x) for x below this is set to 0: CPUs take many times longer for subnormal numbers.
# This and the next two limits are for float32; those of float64 are `FARTHER` times as large.
FLOOR = -82.0

# The logarithm of the smallest denominator that cannot have lost significant terms to underflow.
LOST = -60.0

# The logarithm of the smallest denominator that divides sums.
SMALLEST = -70.0

FARTHER = 8.0

# Where values cannot be read, biases are raised to the largest one of their row minus this.
LARGEST_SPAN = 65.0

LOGITS_AT_ONCE = 2**22

# Triangles of at most this many positions are one block.
SMALLEST_TRIANGLE = 32


def floored_exp(x: Tensor) -> Tensor:
    """exp(x), and 0 where x is below `FLOOR`."""
    floor = _limit(FLOOR, x)
    if torch.compiler.is_exporting():
        return nn.functional.threshold(x, floor, -math.inf).exp()  # fewer operations
    return nn.functional.threshold(x.clamp_min(floor - 1).exp(), math.exp(floor), 0.0)  # exp(-inf) takes longer


def _limit(exponent: float, x: Tensor) -> float:
    """Return an exponent for the dtype of x."""
    return exponent * FARTHER if x.dtype == torch.float64 else exponent


class Averages(NamedTuple):
    """Eq. 2 over some positions, and the logarithm of its denominator."""

    average: Tensor  # 0 where there are no positions
    logsumexp: Tensor  # about `EMPTY` where there are no positions

    @classmethod
    def of(cls, numerator: Tensor, denominator: Tensor, maximum: Tensor | float) -> "Averages":
        """Return the averages for the sums of exp(K + w) V and exp(K + w), both divided by exp(maximum)."""
        # Smaller ones are those of queries that see no key, or are computed again: their gradients would overflow.
        denominator = nn.functional.threshold(denominator, math.exp(_limit(SMALLEST, denominator)), 1.0)
        if denominator.requires_grad and not torch.compiler.is_exporting():  # second derivatives divide by its square
            scale = denominator.detach()
            numerator, denominator, maximum = numerator / scale, denominator / scale, maximum + scale.log()
        return cls(numerator / denominator, maximum + denominator.log())

    def shifted(self, exponent: Tensor | float) -> "Averages":
        """Return the averages with `exponent` added to every K + w."""
        return self._replace(logsumexp=self.logsumexp + exponent)

    def hidden(self, mask: Tensor) -> "Averages":
        """Return the averages over nothing where the mask is True."""
        return Averages(self.average.masked_fill(mask, 0.0), self.logsumexp.masked_fill(mask, EMPTY))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Averages":
        """Apply `function` to both tensors."""
        return Averages(*map(function, self))

    def merge(self, other: "Averages") -> "Averages":
        """Return the averages over the positions of both."""
        weight = torch.sigmoid(other.logsumexp - self.logsumexp)
        # logaddexp takes longer, and has no second derivatives for large differences. Both choices must agree where
        # the weights round to 1/2: the gradient of two maxima would go to one side alone.
        own = self.logsumexp >= other.logsumexp
        larger = torch.where(own, self.logsumexp, other.logsumexp) - torch.where(own, 1 - weight, weight).log()
        return Averages(torch.lerp(self.average, other.average, weight), larger)

    def padded(self, after: int, before: int = 0) -> "Averages":
        """Append and prepend averages over nothing; negative numbers remove."""
        return Averages(*pad_positions(*self[::-1], after, before, EMPTY)[::-1])


def total(key: Tensor, value: Tensor) -> Averages:
    """Average over all positions, for queries that all see the same logits: (..., 1, N, c)."""
    if key.shape[-3] == 1 and not key.requires_grad:  # else its gradient would be None
        return Averages(value, key.clamp_min(EMPTY))
    maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = floored_exp(key - maximum)
    return Averages.of((weights * value).sum(-3, keepdim=True), weights.sum(-3, keepdim=True), maximum)


def block_sums(key: Tensor, value: Tensor, bias: Tensor, *, masked: bool = False) -> Averages:
    """Average over a block of positions for queries with biases of their own, by one product with exp(w).

    A query that sees the large keys not at all, or at small biases, can lose significant terms to underflow. If values
    can be read, blocks with such queries are computed in float64, or averaged by their logits if that loses terms,
    too. Otherwise all masked blocks are averaged by their logits, and biases without a mask are raised to the largest
    bias of their row minus `LARGEST_SPAN`.

    Args:
        key: (..., T', N, k), -inf where a position is hidden from all queries.
        value: (..., T', N, c).
        bias: (..., T, T'), with entries of -inf if `masked`.
        masked: whether biases hide positions from some queries.
    """
    bias = bias if bias.dtype == key.dtype else bias.to(key.dtype)
    if bias.shape[-2] == 1 and not masked:  # one maximum over K + w is exact for biases of any span
        return total(key + bias.mT.unsqueeze(-1), value)
    if masked:
        careful = _ask_now(lambda: ~(value.isfinite().all() & (key < math.inf).all()), key, value, bias)
        if careful is not False:  # NaN in a hidden position would reach every query of a product
            return _by_logits(key, value, bias)
    largest = bias.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    relative = bias - largest
    if not masked:
        limit = _limit(LOST, key)
        careful = _ask_now(lambda: relative.amin() < limit if relative.numel() else relative.new_zeros(()), key, bias)
    maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = floored_exp(key - maximum)
    table = relative.clamp_min(_limit(-LARGEST_SPAN, key)).exp() if careful is None else floored_exp(relative)
    numerator, denominator = ((table @ x.flatten(-2)).unflatten(-1, x.shape[-2:]) for x in (weights * value, weights))
    averages = Averages.of(numerator, denominator, maximum + largest.unsqueeze(-1))
    if masked or careful:
        lost = (
            (denominator.detach() < math.exp(_limit(LOST, key))) & (maximum > EMPTY) & (largest > EMPTY).unsqueeze(-1)
        )
        heads, biases = key.shape[-1], bias.expand(*lost.shape[:-3], *bias.shape[-2:])
        count = read(lost.sum())
        if count is None:  # under vmap
            return _by_logits(key, value, bias)
        if 0 < count * value.shape[-3] * (value.shape[-1] // heads) <= key.numel():
            *block, query, row, feature = place = lost.nonzero(as_tuple=True)
            logits = biases[(*block, query)].double()  # (n, T')
            logits = logits + key.movedim(-3, -1)[(*block, row, feature)]
            values = value.movedim(-3, -1).unflatten(-2, (heads, -1))[(*block, row, feature)]
            exact = total(logits[..., None, None], values.mT.unsqueeze(-2)).map(lambda x: x.flatten(1).to(key.dtype))
            average = averages.average.unflatten(-1, (heads, -1)).index_put(place, exact.average)
            return Averages(average.flatten(-2), averages.logsumexp.index_put(place, exact.logsumexp.squeeze(-1)))
        if count:  # where all that a query sees is hidden, nothing is lost
            sees = (bias > -math.inf).to(key.dtype) @ (key > -math.inf).flatten(-2).to(key.dtype)
            nothing = lost & (sees == 0).view_as(lost)
            averages = averages._replace(logsumexp=averages.logsumexp.masked_fill(nothing, EMPTY))
            lost = lost & ~nothing
        if count and read(lost.any()):
            place = lost.flatten(-3).any(-1).nonzero(as_tuple=True)
            given = key[place], value[place], biases[place]
            if key.dtype == torch.float64:
                exact = _by_logits(*given)
            else:
                exact = block_sums(*(x.double() for x in given), masked=masked).map(lambda x: x.to(key.dtype))
            return Averages(*(x.index_put(place, y) for x, y in zip(averages, exact)))
    return averages


def _by_logits(key: Tensor, value: Tensor, bias: Tensor) -> Averages:
    """`block_sums` from the logits of all pairs, some queries at a time: O(T T' N k) exponentials."""
    nan = key.isnan()
    unknown = (nan | ~value.isfinite()) & (key != -math.inf)  # (..., T', N, c)
    key, value = key.masked_fill(nan, -math.inf), value.masked_fill(unknown, 0.0)

    def some_queries(key: Tensor, value: Tensor, bias: Tensor) -> Averages:
        logits = key.unsqueeze(-4) + bias[..., None, None]  # (..., t, T', N, k)
        maximum = logits.detach().amax(-3).clamp_min(EMPTY)
        weights = floored_exp(logits - maximum.unsqueeze(-3))
        if key.shape[-1] == 1 and not torch.compiler.is_exporting():  # products would depend on the size of the batch
            numerator = (weights.squeeze(-1).movedim(-1, -3) @ value.movedim(-2, -3)).movedim(-3, -2)
        else:
            numerator = (weights * value.unsqueeze(-4)).sum(-3)
        return Averages.of(numerator, weights.sum(-3), maximum)

    at_once = max(1, LOGITS_AT_ONCE // max(1, key.numel()))
    if torch.compiler.is_exporting() or at_once >= bias.shape[-2]:  # a program serves any length: all queries at once
        averages = some_queries(key, value, bias)
    else:
        parts = [recomputed(some_queries, key, value, rows) for rows in bias.split(at_once, -2)]
        averages = Averages(*(torch.cat(x, -3) for x in zip(*parts)))
    sees = (bias > -math.inf).to(bias.dtype) @ unknown.flatten(-2).to(bias.dtype) > 0
    return averages._replace(average=averages.average.masked_fill(sees.unflatten(-1, unknown.shape[-2:]), math.nan))


def triangle_sums(key: Tensor, value: Tensor, bias: Tensor) -> Averages:
    """Causal averages (t' <= t), for biases (..., T, T) of which the lower triangle is read.

    The left half of a block is visible to all of its right half, so `block_sums` may use the maximum of the left half:
    from small triangles upwards, each level doubles their size.
    """
    length = key.shape[-3]
    half = min(SMALLEST_TRIANGLE, power_of_two_from(length))
    size = half * power_of_two_from(-(-length // half))
    if length < size:
        key, value = pad_positions(key, value, size - length)
        bias = nn.functional.pad(bias, (0, size - length, 0, size - length))
    later = torch.ones(half, half, dtype=torch.bool, device=key.device).triu(1)
    blocks, of_blocks = (x.unflatten(-3, (-1, half)) for x in (key, value))
    small = block_sums(blocks, of_blocks, _diagonals(bias, half).masked_fill(later, -math.inf), masked=True)
    sums = small.map(lambda x: x.flatten(-4, -3))
    while half < size:
        (left_key, _), (left_value, _) = (_halves(x, half) for x in (key, value))
        left, right = (Averages(*part) for part in zip(*(_halves(x, half) for x in sums)))
        right = right.merge(block_sums(left_key, left_value, _diagonals(bias, 2 * half)[..., half:, :half]))
        sums = Averages(*(torch.stack(pair, -4).flatten(-5, -3) for pair in zip(left, right)))
        half *= 2
    return sums if length == size else sums.map(lambda x: x.narrow(-3, 0, length))


def _halves(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """The left and right halves, each (..., T / (2 half), half, N, c), of all blocks of 2 half positions."""
    return x.unflatten(-3, (-1, 2, half)).unbind(-4)


def _diagonals(bias: Tensor, size: int) -> Tensor:
    """w within each block of `size` positions: (..., T, T) -> (..., T / size, size, size)."""
    blocks = bias.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def prefix_sums(sums: Averages, decay: Tensor | None = None) -> Averages:
    """Averages over each position of (L, T, N, c) and all before it, in O(T) operations: pairs of positions are
    merged, summed by this function, and merged with the position between them.

    A step to a position lowers the exponent of all before it by its decay, (L or 1, T or 1, 1, 1), which starts a
    document if it is `-EMPTY`; None for 0.
    """
    if torch.compiler.is_exporting():
        return _exported_prefix_sums(sums, decay)
    length = sums.logsumexp.shape[1]
    if length == 1:
        return total(*sums[::-1])
    if length % 2:
        longer = decay if decay is None or decay.shape[1] == 1 else nn.functional.pad(decay, (0, 0, 0, 0, 0, 1))
        return prefix_sums(sums.padded(1), longer).map(lambda x: x.narrow(1, 0, length))
    first, second = (Averages(*x) for x in zip(*(x.unflatten(1, (-1, 2)).unbind(2) for x in sums)))
    both = to_first = to_second = decay
    if decay is not None:
        to_first, to_second = (decay, decay) if decay.shape[1] == 1 else decay.unflatten(1, (-1, 2)).unbind(2)
        both = to_first + to_second
    seconds = prefix_sums(_decayed(first, to_second).merge(second), both)
    firsts = _decayed(seconds.padded(-1, 1), to_first).merge(first)
    return Averages(*(torch.stack(pair, 2).flatten(1, 2) for pair in zip(firsts, seconds)))


def _decayed(sums: Averages, decay: Tensor | None) -> Averages:
    """Return sums as seen from the next position; nothing where that starts a document."""
    if decay is None:
        return sums
    if decay.shape[1] < sums.logsumexp.shape[1]:
        return sums.shifted(-decay)
    return sums.shifted(-decay).hidden(decay > -EMPTY / 2)


def _exported_prefix_sums(sums: Averages, decay: Tensor | None) -> Averages:
    """`prefix_sums` from the logits of all pairs in each chunk, and of all pairs of chunks, for a constant decay."""
    length, size, device = sums.logsumexp.shape[1], SMALLEST_TRIANGLE, sums.logsumexp.device
    padding = count_chunks(length, size) * size - length
    rate = sums.logsumexp.new_zeros(1, 1, 1, 1) if decay is None else decay

    def inclusive(sums: Averages, rate: Tensor) -> Averages:
        places = torch.arange(sums.logsumexp.shape[-3], device=device)
        lag = (places - places[:, None])[None, None]
        bias = (rate * lag).to(sums.logsumexp.dtype).masked_fill(lag > 0, -math.inf)
        return _by_logits(sums.logsumexp, sums.average, bias)

    inside = inclusive(sums.padded(padding).map(lambda x: x.unflatten(1, (-1, size))), rate)  # (L, n, C, N, c)
    totals = inside.map(lambda x: x[:, :, -1].unsqueeze(1))  # (L, 1, n, N, c)
    before = inclusive(totals, size * rate).padded(-1, 1).map(lambda x: x.squeeze(1).unsqueeze(2))
    steps = torch.arange(-1, -size - 1, -1, device=device).view(-1, 1, 1)
    return inside.merge(before.shifted(rate.unsqueeze(1) * steps)).map(lambda x: unpadded(x, padding))


def hide(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Hide positions, whatever their keys and values are."""
    return key.masked_fill(mask, -math.inf), value.masked_fill(mask, 0.0)


def pad_positions(
    key: Tensor, value: Tensor, after: int, before: int = 0, hidden: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """Append and prepend hidden positions to key (..., T, N, k) and value (..., T, N, c); negative numbers remove."""
    if not torch.compiler.is_compiling() and before == after == 0:
        return key, value  # `pad` would copy them
    pad = (0, 0, 0, 0, before, after)
    return nn.functional.pad(key, pad, value=hidden), nn.functional.pad(value, pad)


def count_chunks(length: int, size: int) -> int:
    """The number of chunks of a sequence; at least two in an exported program."""
    more = 2 * size if torch.compiler.is_exporting() else size
    return (length + more - 1) // size


def unpadded(x: Tensor, padding: int) -> Tensor:
    """(L, n, C, N, c) as (L, T, N, c) without the `padding` last positions."""
    if not torch.compiler.is_compiling():
        return x.flatten(1, 2).narrow(1, 0, x.shape[1] * x.shape[2] - padding)
    # In an exported program, a slice would have to be proven shorter than x for all lengths.
    return nn.functional.pad(x.flatten(1, 2), (0, 0, 0, 0, 0, -padding))


def tables_by_lag(windows: Tensor, before: int) -> Tensor:
    """Convert w by lag of T queries, (..., T, s), to tables (..., T, before + T) of `before` earlier keys, at least
    s - 1, and of the T keys of the queries themselves; 0 outside the window.
    """
    rows, size = windows.shape[-2:]
    # Row i has its window from column i on: in rows longer by one, all windows start in the same column.
    padded = nn.functional.pad(windows, (before + 1 - size, rows)).flatten(-2)
    return padded[..., : rows * (before + rows)].unflatten(-1, (rows, before + rows))


# -------- Eq. 2 for each structure of w. The arguments are those of the operators, see `kernels/operators.py`

# Positions per chunk, unless the window requires larger chunks.
CHUNK_SIZE = 32

# New tokens that continue a state are seen by tables of at most this many.
PIECE_SIZE = 128

# Grids are convolved, where that is precise, if their table exp(w) has more entries than this.
LARGEST_GRID_TABLE = 2**22


def by_head(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys (B, h, T, k) and values (B, h, T, c): NaN where a key is NaN or infinite, and 0 where it is -inf."""
    key, value = (widen(split_heads(x, heads)) for x in (key, value))
    if _ask_now(lambda: key.sum().isfinite(), key):  # then all keys are finite
        return key, value
    key = key.masked_fill(key == math.inf, math.nan)
    return key, value.masked_fill(key == -math.inf, 0.0).masked_fill(key.isnan(), math.nan)


def finish(query: Tensor | None, average: Tensor, dtype: torch.dtype, first: Tensor | None = None) -> Tensor:
    """Join the heads of averages (B, h, T, c), and multiply by the gate if there is one; 0 before `first`."""
    context = join_heads(average)
    if first is not None:  # in padding, the query and the gradient may be NaN
        padding = (first > torch.arange(first.shape[1], device=first.device)).unsqueeze(-1)
        context = context.masked_fill(padding, 0.0)
        query = query if query is None else query.masked_fill(padding, 0.0)
    context = context if query is None else torch.sigmoid(widen(query)) * context
    return context if context.dtype == dtype else context.to(dtype)


def num_heads(bias: Tensor | None, slopes: Tensor | None) -> int:
    """Return the number of heads that the biases of the causal operators have."""
    return bias.shape[2] if bias is not None else 1 if slopes is None else slopes.shape[0]


def causal(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    first: Tensor | None,
    global_connectivity: bool,
) -> Tensor:
    """Compute the operator `causal`: (B, T, d)."""
    given = by_head(key, value, num_heads(bias, slopes))
    average = causal_averages(*given, bias, slopes, first, global_connectivity).average
    return finish(query, average, value.dtype, first)


def causal_averages(
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    first: Tensor | None,
    global_connectivity: bool,
) -> Averages:
    """`causal` for keys (B, h, T, k) and values (B, h, T, c), with the logarithms of the denominators."""
    (batch, heads, length), rows_share_w = key.shape[:3], first is None and (bias is None or len(bias) == 1)
    tokens = torch.arange(length, device=key.device)
    if first is not None:
        key, value = hide(key, value, (first > tokens)[:, None, :, None])
    decay = None if slopes is None else slopes.to(key.dtype).view(-1, 1, 1, 1)
    if rows_share_w:  # (h, T, B, c)
        key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (key, value))
    else:  # (B h, T, 1, c)
        key, value = (x.flatten(0, 1).unsqueeze(2) for x in (key, value))
        decay = decay if decay is None else decay.repeat(batch, 1, 1, 1)
    if bias is not None:
        bias = bias if bias.dtype == key.dtype else bias.to(key.dtype)
        sums = _window_sums(key, value, bias, first, global_connectivity)
    else:
        if first is not None:  # all tokens but those that continue a document start anew
            starts = (first >= tokens).to(key.dtype).repeat_interleave(heads, 0)[..., None, None] * -EMPTY
            decay = starts if decay is None else starts + decay
        sums = prefix_sums(Averages(value, key.clamp_min(EMPTY)), decay)
    if rows_share_w:
        return sums.map(lambda x: x.permute(2, 0, 1, 3))
    return sums.map(lambda x: x.squeeze(2).unflatten(0, (batch, heads)))


def _window_sums(
    key: Tensor, value: Tensor, bias: Tensor, first: Tensor | None, global_connectivity: bool
) -> Averages:
    """Causal averages with a window, for (L, T, N, c) and w by lag (B or 1, P or 1, h, s): a chunk of queries sees
    itself and the chunk before it with their biases, and all others as sums.
    """
    length, device = key.shape[1], key.device
    if torch.compiler.is_exporting():  # the program serves all lengths with one size
        size = power_of_two_from(max(bias.shape[-1] - 1, CHUNK_SIZE))
    else:
        bias = bias[..., -max(length, 1) :]
        size = power_of_two_from(min(max(bias.shape[-1] - 1, CHUNK_SIZE), max(length, 1)))
    window = bias.shape[-1]
    chunks = count_chunks(length, size)
    padding = chunks * size - length
    tokens = torch.arange(chunks * size, device=device)
    starts = tokens if first is None else nn.functional.pad(first, (0, padding))  # (B, n C)
    if bias.shape[1] > 1:
        if first is not None:
            position = (tokens - starts).clamp(0, bias.shape[1] - 1)  # (B, n C)
            rows = torch.arange(len(bias), device=device)[:, None]
            bias = bias[rows.expand(len(position), 1) if len(bias) > 1 else 0, position]
        elif bias.shape[1] == length:
            bias = nn.functional.pad(bias, (0, 0, 0, 0, 0, padding))
        else:
            bias = bias[:, tokens.clamp_max(bias.shape[1] - 1)]
    bias = bias.transpose(1, 2).flatten(0, 1)  # (L or h, n C or 1, s)
    if len(bias) < len(key):
        bias = bias.repeat(len(key) // len(bias), 1, 1)
    windows = bias.unflatten(1, (-1, size)) if bias.shape[1] > 1 else bias.unsqueeze(1).expand(-1, -1, size, -1)
    tables = tables_by_lag(windows, size)  # (L, n or 1, C, 2 C)
    own_key, own_value = (x.unflatten(1, (-1, size)) for x in pad_positions(key, value, padding))
    before = pad_positions(key, value, padding - size, size)
    before_key, before_value = (x.unflatten(1, (-1, size)) for x in before)
    if not global_connectivity or first is not None:
        lag = tokens[:size, None] + size - torch.arange(2 * size, device=device)
        hidden = lag < 0 if global_connectivity else (lag < 0) | (lag >= window)
        if first is not None:
            place = torch.arange(-size, size, device=device) + tokens[::size, None, None]  # (n, 1, 2 C)
            unseen = place < starts.unflatten(1, (-1, size)).unsqueeze(-1)  # (B, n, C, 2 C)
            hidden = (hidden | unseen).repeat_interleave(len(key) // len(starts), 0)
        keys, values = torch.cat([before_key, own_key], 2), torch.cat([before_value, own_value], 2)
        sums = block_sums(keys, values, tables.masked_fill(hidden, -math.inf), masked=True)
    else:
        sums = triangle_sums(own_key, own_value, tables[..., size:])
        if chunks > 1:
            sums = sums.merge(block_sums(before_key, before_value, tables[..., :size]))
    if chunks > 1 and global_connectivity:
        sums = sums.merge(_far_sums(own_key, own_value, first if first is None else starts))
    return sums.map(lambda x: unpadded(x, padding))


def _far_sums(key: Tensor, value: Tensor, first: Tensor | None) -> Averages:
    """Averages over the chunks before the last one that the queries of each chunk see with biases, as far as these
    belong to the document of the query: (L, n, C or 1, N, c) from chunks (L, n, C, N, c) and starts (B, n C).
    """
    chunks, size = key.shape[1:3]
    if first is None:
        return prefix_sums(total(key, value).map(lambda x: x.squeeze(2))).padded(-2, 2).map(lambda x: x.unsqueeze(2))
    heads, tokens = len(key) // len(first), torch.arange(chunks * size, device=key.device)
    starts = first.unflatten(1, (-1, size)).repeat_interleave(heads, 0)  # (L, n, C)
    begin = tokens[::size].view(-1, 1)  # of each chunk
    # Sums run over the document of the last token of each chunk.
    earlier = (tokens.view(chunks, size) < starts[..., -1:])[..., None, None]
    totals = total(*hide(key, value, earlier)).map(lambda x: x.squeeze(2))
    decay = (starts[..., -1:] >= begin).to(key.dtype).unsqueeze(-1) * -EMPTY  # (L, n, 1, 1)
    sums = prefix_sums(totals, decay).padded(-2, 2).map(lambda x: x.unsqueeze(2))
    hidden = (starts >= begin - size)[..., None, None]
    return Averages(*(x.expand(-1, -1, size, -1, -1) for x in sums)).hidden(hidden)


def causal_state(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    first: Tensor | None,
    global_connectivity: bool,
    keys: Tensor,
    values: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    maximum: Tensor,
    *,
    context: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the operator `causal_state`: the context, (B, T, d), unless it is given, and the next state."""
    (heads, window), length, device = keys.shape[1:3], value.shape[1], value.device
    count, tokens = None, torch.arange(length, device=device)
    key, new_values = by_head(key, value, heads)
    if first is not None:
        count = (first <= tokens).sum(1)
        key, new_values = hide(key, new_values, (first > tokens)[:, None, :, None])
    # The tokens before the window enter as one, whose key is the logarithm of the sum of exp(K + w).
    far = Averages.of(numerator, denominator, maximum)
    far_value, far_key = far.map(lambda x: x.to(key.dtype))
    all_keys, all_values = torch.cat([far_key, keys, key], 2), torch.cat([far_value, values, new_values], 2)
    state = _next_state(far, all_keys[:, :, 1:], all_values[:, :, 1:], window, count, slopes, global_connectivity)
    if context is not None:
        return context, state
    past = 1 + window
    if length > PIECE_SIZE:
        longer = bias if bias is None or bias.shape[1] == 1 else nn.functional.pad(bias, (0, 0, 0, 0, past, 0))
        average = causal_averages(all_keys, all_values, longer, slopes, None, global_connectivity).average[:, :, past:]
    else:
        if bias is not None:
            windows = bias[:, :length].transpose(1, 2).expand(-1, -1, length, -1)
            table = tables_by_lag(windows, past).to(key.dtype)
        lag = past + tokens[:, None] - torch.arange(past + length, device=device)
        if bias is None:
            table = key.new_zeros(1, heads, 1, 1).expand(-1, -1, length, past + length)
            table = table if slopes is None else (-slopes.to(key.dtype).view(-1, 1, 1) * lag).unsqueeze(0)
        masked = length > 1  # a single token sees all
        if masked:
            hidden = lag < 0 if global_connectivity else (lag < 0) | (lag > window)
            table = table.masked_fill(hidden, -math.inf)
        sums = block_sums(all_keys.unsqueeze(3), all_values.unsqueeze(3), table, masked=masked)
        average = sums.average.squeeze(3)
    return finish(query, average, value.dtype, first), state


def _next_state(
    far: Averages,
    keys: Tensor,
    values: Tensor,
    window: int,
    count: Tensor | None,
    slopes: Tensor | None,
    global_connectivity: bool,
) -> tuple[Tensor, ...]:
    """Return the tensors of a state after new tokens, of which each row has `count`, (B,); None if all are real.

    Keys (B, h, W + T, k) and values are those of the window and of the new tokens; `far` are the sums before them.
    """
    places, length = torch.arange(keys.shape[2], device=keys.device), keys.shape[2] - window
    if count is None:
        last_keys, last_values = keys[:, :, length:], values[:, :, length:]
        keys, values, distance = keys[:, :, :length], values[:, :, :length], (length - 1 - places[:length])[None, None]
    else:
        end = count[:, None, None]
        index = (end + places[:window]).unsqueeze(-1)
        last_keys, last_values = (x.take_along_dim(index, 2) for x in (keys, values))
        distance = end - 1 - places  # (B, 1, W + T)
        keys, values = hide(keys, values, (distance < 0).unsqueeze(-1))
    if global_connectivity:  # tokens leave the window for the sums
        if slopes is not None:  # there is no window, so the last token is the last one of the sums
            slopes = slopes.to(keys.dtype).view(-1, 1)
            keys = keys - (slopes * distance.clamp_min(0)).unsqueeze(-1)
            far = far.shifted(-(slopes * (distance[..., :1] + 1)).unsqueeze(-1))
        leaving = total(keys.unsqueeze(3), values.unsqueeze(3)).map(lambda x: x.squeeze(3).to(far.average.dtype))
        far = far.merge(leaving)
    maximum = far.logsumexp.to(keys.dtype)
    denominator = (far.logsumexp - maximum).clamp(-1.0, 1.0).exp()  # that of an empty sum is not defined
    return last_keys, last_values, far.average * denominator, denominator, maximum


def window(biases: PositionBias, key: Tensor, value: Tensor) -> Tensor:
    """Compute Eq. 2 with a window on both sides, (B, h, T, c): a chunk of queries sees itself and the chunks beside it
    with their biases, and all others as sums. Keys are (B, h, T, k) and values (B, h, T, c).
    """
    length, reach = key.shape[2], biases.reach or 0
    size = power_of_two_from(max(reach, CHUNK_SIZE))
    chunks = count_chunks(length, size)
    own = pad_positions(key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), chunks * size - length)  # (h, n C, B, c)
    beside = [pad_positions(*own, size * side, -size * side) for side in (-1, 0, 1)]
    keys, values = (torch.cat([x.unflatten(1, (-1, size)) for x in parts], 2) for parts in zip(*beside))
    queries = torch.arange(size if biases.relative else chunks * size, device=key.device).view(-1, size)
    tables = biases.between(queries, queries[:, :1] + torch.arange(-size, 2 * size, device=key.device))
    # (h, n, 3 C, B, c), with w (h, n or 1, C, 3 C)
    sums = block_sums(keys, values, tables.transpose(0, 1), masked=not biases.global_connectivity)
    if biases.global_connectivity:
        totals = total(*(x.unflatten(1, (-1, size)) for x in own)).map(lambda x: x.squeeze(2))
        before = prefix_sums(totals).padded(-2, 2)
        after = prefix_sums(totals.map(lambda x: x.flip(1))).padded(-2, 2).map(lambda x: x.flip(1))
        sums = sums.merge(before.merge(after).map(lambda x: x.unsqueeze(2)))
    return unpadded(sums.average, chunks * size - length).permute(2, 0, 1, 3)


def grid(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    kernels: Tensor,
    rows: int,
    columns: int,
    global_connectivity: bool,
) -> Tensor:
    """Compute the operator `grid`: (B, T, d)."""
    biases = GridKernel(kernels, (rows, columns), global_connectivity)
    key, values = (x.permute(1, 2, 0, 3) for x in by_head(key, value, len(kernels)))
    if global_connectivity and _convolves(biases):
        average = _convolution(key, values, biases)
    else:
        average = block_sums(key, values, biases.dense(rows * columns), masked=not global_connectivity).average
    return finish(query, average.permute(2, 0, 1, 3), value.dtype)


def table(query: Tensor | None, key: Tensor, value: Tensor, bias: Tensor, causal: bool, masked: bool = True) -> Tensor:
    """Compute the operator `table`: (B, T, d). `masked` says whether w may be -inf.

    The table may be longer than the sequence, since an exported program serves all lengths with one size.
    """
    heads, more = len(bias), bias.shape[-1] - key.shape[1]
    # (h, T, B, c): the rows share w.
    key, values = (x.permute(1, 2, 0, 3).contiguous() for x in by_head(key, value, heads))
    if torch.compiler.is_exporting():
        key, values = pad_positions(key, values, more)
    bias = bias.to(key.dtype)
    sums = triangle_sums(key, values, bias) if causal else block_sums(key, values, bias, masked=masked)
    average = sums.average
    if torch.compiler.is_exporting():
        average = nn.functional.pad(average, (0, 0, 0, 0, 0, -more))
    return finish(query, average.permute(2, 0, 1, 3), value.dtype)


def pairwise(key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
    """Compute Eq. 2 with a table (B or 1, h, T, T') and a mask (B or 1, 1, T, T'), None if no w is -inf: (B, h, T, c)
    from keys (B, h, T', k) and values (B, h, T', c).
    """
    bias, masked = (bias, False) if visible is None else (bias.masked_fill(~visible, -math.inf), True)
    if len(bias) == 1:
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        return block_sums(key, value, bias.squeeze(0), masked=masked).average.permute(2, 0, 1, 3)
    return block_sums(key.unsqueeze(3), value.unsqueeze(3), bias, masked=masked).average.squeeze(3)


def _convolves(biases: GridKernel) -> bool:
    """Whether a grid is convolved: its table is too large, and a convolution is precise or values cannot be read."""
    if torch.compiler.is_exporting():  # the program serves all sizes
        return True
    kernels = biases.kernels
    if len(kernels) * math.prod(biases.grid_size) ** 2 <= LARGEST_GRID_TABLE:
        return False
    return not _ask_now(lambda: kernels.amax().clamp_min(0.0) - kernels.amin() > LARGEST_SPAN, kernels)


def _convolution(key: Tensor, value: Tensor, biases: GridKernel) -> Tensor:
    """AFT-conv on a grid (Eq. 6) as a depth-wise convolution: O(T d s^2) time, no T x T table.

    The paper writes conv(exp(K) V, exp(w) - 1) + sum exp(K) V. Where w is negative that adds and subtracts the same
    terms, so here the window is convolved with exp(w), and the positions outside it are summed by themselves.
    Biases are clamped to at least the largest bias minus `LARGEST_SPAN`.
    """
    kernel, grid_size = biases.kernels.to(key.dtype), biases.grid_size
    reach, width = [size // 2 for size in kernel.shape[1:]], value.shape[-1]
    weights = torch.exp(key - key.detach().amax(1, keepdim=True).clamp_min(EMPTY))
    features = torch.cat([weights * value, weights], -1)  # (h, T, B, c + k)
    features = features.permute(2, 3, 0, 1).unflatten(-1, grid_size)  # (B, c + k, h, rows, columns)

    near_row, near_column = (_near(n, radius, features) for n, radius in zip(grid_size, reach))
    # Both parts are relative to the largest bias: that of the kernel, or 0 if some positions lie outside the kernel.
    covered = near_row.all() & near_column.all()
    maximum = kernel.detach().amax((-2, -1), keepdim=True)
    maximum = torch.where(covered, maximum, maximum.clamp_min(0.0))
    table = torch.exp((kernel - maximum).clamp_min(-LARGEST_SPAN))
    inside = nn.functional.conv2d(
        features.flatten(0, 1), table.unsqueeze(1), padding=reach, groups=kernel.shape[0]
    ).view_as(features)
    outside = near_row @ (features @ (1 - near_column)) + (1 - near_row) @ features.sum(-1, keepdim=True)
    sums = inside + outside * torch.exp(-maximum.clamp(0.0, LARGEST_SPAN))
    sums = sums.flatten(-2).permute(2, 3, 0, 1)  # (h, T, B, c + k)
    # In ONNX a split is a sequence, which onnxruntime fails to run after it has quantized the program.
    return Averages.of(sums[..., :width], sums[..., width:], 0.0).average


def _near(length: int, radius: int, like: Tensor) -> Tensor:
    """(length, length) with 1 where two coordinates are at most `radius` apart and 0 elsewhere."""
    position = torch.arange(length, device=like.device)
    return ((position[:, None] - position).abs() <= radius).to(like.dtype)
