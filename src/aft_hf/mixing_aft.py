"""The AFT operation as pure functions: the reference form of Eq. 2 and its fast forms.

Zhai et al., "An Attention Free Transformer" (2021, arXiv 2105.14103) mix positions by

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')        (Eq. 2, before the query's gate)

element-wise in the features. Every function here takes `key` (B, h, T, k) and `value` (B, h, T, c) for h
position-bias heads; k is c (a key per feature) or 1 (a key per head, as in AFT-conv). Inside, tensors are laid out as
(h, ..., T, B, c): a position bias is shared by the batch, so one product with an (h, T, T) table serves every row.

No exponential here can overflow, and none that matters can underflow. Sums are carried as a `ScaledSums`, relative to
a maximum, and that maximum is only ever taken over positions which every query it serves can see: this is what keeps
a causal model causal in floating point, however large a later key is. Position biases are the one assumption: within
the block of one product they may span about 75 (the range of float32's exponential) wherever keys do too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


# The maximum of positions that are all masked: finite, so that differences of two such maxima are.
EMPTY = -1e30

# Positions per block in the linear-time causal forms, where the window does not ask for more.
CHUNK_SIZE = 32

# An exported program serves all lengths with the operations written out, so there has to be a longest one.
LONGEST_EXPORTED = 2**17

# Below this, a denominator has lost the terms it should hold to underflow (exp(-60)).
LOST = 1e-26


class ScaledSums(NamedTuple):
    """Sum of exp(K + w) V and of exp(K + w), both divided by exp(maximum); `maximum` carries no gradient."""

    numerator: torch.Tensor  # (..., T, B, c)
    denominator: torch.Tensor  # (..., T, B, k)
    maximum: torch.Tensor  # (..., T, B, k)

    def shifted(self, exponent: torch.Tensor) -> "ScaledSums":
        """The same sums with `exponent` added to every K + w."""
        return self._replace(maximum=self.maximum + exponent)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ScaledSums":
        """`function` applied to each of the three tensors."""
        return ScaledSums(*map(function, self))

    def narrow(self, length: int) -> "ScaledSums":
        """The first `length` positions."""
        return self.map(lambda x: x.narrow(-3, 0, length))

    def merge(self, other: "ScaledSums") -> "ScaledSums":
        """The sums over both sets of positions."""
        maximum = torch.maximum(self.maximum, other.maximum)
        scale, other_scale = torch.exp(self.maximum - maximum), torch.exp(other.maximum - maximum)
        return ScaledSums(
            self.numerator * scale + other.numerator * other_scale,
            self.denominator * scale + other.denominator * other_scale,
            maximum,
        )

    def average(self) -> torch.Tensor:
        """Eq. 2: the quotient of the sums; 0 where there was nothing to sum over."""
        empty = self.denominator == 0
        return (self.numerator / self.denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


# ------------------------------------------------------------------------------------------------- building blocks


def single_sums(key: torch.Tensor, value: torch.Tensor, exponent: torch.Tensor | float = 0.0) -> ScaledSums:
    """One position for each query: exp(K + exponent) V, for `key` and `value` (..., T, B, c)."""
    logits = key + exponent
    maximum = logits.detach().clamp_min(EMPTY)
    weights = torch.exp(logits - maximum)  # 1 in value, 0 for a masked key; the gradient is what matters
    return ScaledSums(weights * value, weights, maximum)


def block_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None) -> ScaledSums:
    """Sums over a block of positions that every query of the block sees.

    Args:
        key: (..., T', B, k), -inf where a position is masked for all queries.
        value: (..., T', B, c).
        bias: (..., T, T') position biases; None is 0, and then all queries share one sum (T = 1).
    """
    if bias is not None and bias.shape[-2] == 1:
        # One query, one maximum over K + w: exact for biases of any span, as those of a long decay are.
        key, bias = key + bias.mT.unsqueeze(-1).to(key.dtype), None
    key_maximum = key.detach().amax(-3, keepdim=True).clamp_min(EMPTY)
    weights = torch.exp(key - key_maximum)
    weighted = weights * value
    if bias is None:
        return ScaledSums(weighted.sum(-3, keepdim=True), weights.sum(-3, keepdim=True), key_maximum)
    bias = bias.to(key.dtype)
    bias_maximum = bias.detach().amax(-1, keepdim=True).clamp_min(EMPTY)
    table = torch.exp(bias - bias_maximum)
    return ScaledSums(_product(table, weighted), _product(table, weights), key_maximum + bias_maximum.unsqueeze(-1))


def _product(table: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """(..., T, T') x (..., T', B, c) -> (..., T, B, c), as one matrix product per leading index."""
    return (table @ features.flatten(-2)).unflatten(-1, features.shape[-2:])


def triangle_sums(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None) -> ScaledSums:
    """Causal sums (t' <= t) over a power of two of positions.

    Halves are joined from blocks of one position upwards. The left half of a block is visible to all of its right
    half, so `block_sums` may take its maximum, and log2(T) levels of small products give the whole triangle.

    Args:
        key, value: (..., T, B, k) and (..., T, B, c) with T a power of two.
        bias: (..., T, T) or None; only its lower triangle is read.
    """
    own_bias = 0.0 if bias is None else bias.diagonal(dim1=-2, dim2=-1)[..., None, None]
    sums = single_sums(key, value, own_bias)
    half = 1
    while half < key.shape[-3]:
        left_key, left_value = _halves(key, half)[0], _halves(value, half)[0]
        left, right = (ScaledSums(*part) for part in zip(*(_halves(x, half) for x in sums)))
        right = right.merge(block_sums(left_key, left_value, _left_of_right(bias, half)))
        sums = ScaledSums(*(torch.stack(pair, -4).flatten(-5, -3) for pair in zip(left, right)))
        half *= 2
    return sums


def _halves(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and right halves, each (..., T / 2 half, half, B, c), of all blocks of 2 half positions."""
    return x.unflatten(-3, (-1, 2, half)).unbind(-4)


def _left_of_right(bias: torch.Tensor | None, half: int) -> torch.Tensor | None:
    """The blocks (..., T / 2 half, half, half) by which each right half sees the left half beside it."""
    if bias is None:
        return None
    rows = bias.unflatten(-2, (-1, 2, half)).select(-3, 1)  # (..., pairs, half, T)
    blocks = rows.unflatten(-1, (-1, 2, half)).select(-2, 0)  # (..., pairs, half, pairs, half)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def prefix_sums(sums: ScaledSums, decay: torch.Tensor | float = 0.0) -> ScaledSums:
    """Inclusive prefix of `sums` along T, each step back costing `decay` (broadcast to (..., 1, 1, 1)) in exponent."""
    length, step = sums.maximum.shape[-3], 1
    if torch.compiler.is_exporting():
        torch._check(length <= LONGEST_EXPORTED)
        length = LONGEST_EXPORTED
    while step < length:
        sums = sums.merge(_delayed(sums, step).shifted(-decay * step))
        step *= 2
    return sums


def _delayed(sums: ScaledSums, steps: int) -> ScaledSums:
    """`sums` moved `steps` positions later along T; nothing comes in at the start."""
    length = sums.maximum.shape[-3]
    steps = torch.sym_min(steps, length)

    def delay(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, steps, 0), value=fill).narrow(-3, 0, length)

    return ScaledSums(delay(sums.numerator, 0.0), delay(sums.denominator, 0.0), delay(sums.maximum, EMPTY))


# ------------------------------------------------------------------------------------------------------- the forms


def reference_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Eq. 2 as printed, one query after the other: what every fast form is compared with.

    Args:
        key: (B, h, T', k).
        value: (B, h, T', c).
        position_bias: (1 or B, h, T, T'), or None for w = 0 (then T = T'); -inf hides a position.
        mask: boolean, broadcast to (B, h, T, T'); False hides a position.

    Returns:
        (B, h, T, c) in the dtype of `value`, computed in float64 for float64 inputs and in float32 otherwise.
        A query that sees nothing gives 0.
    """
    dtype, work = value.dtype, working_dtype(value)
    key, value = key.to(work), value.to(work)
    weights = (
        _query_weights(key, None if position_bias is None else position_bias[..., t, :], _mask_row(mask, t))
        for t in range(key.shape[-2] if position_bias is None else position_bias.shape[-2])
    )
    return torch.stack([(w * value).sum(-2) for w in weights], -2).to(dtype)


def _mask_row(mask: torch.Tensor | None, t: int) -> torch.Tensor | None:
    """What query `t` sees: row t of a (..., T, T') mask, or its only row."""
    return None if mask is None else mask[..., t if mask.shape[-2] > 1 else 0, :]


def _query_weights(key: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """exp(K_t' + w_t') / sum_t' exp(K_t' + w_t') of one query: (B, h, T', k) from a bias and a mask (.., T')."""
    logits = key if bias is None else key + bias.unsqueeze(-1).to(key.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask.unsqueeze(-1), -math.inf)
    return _softmax(logits, -2)


def _softmax(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax that gives 0, in value and gradient, where all of `dim` is hidden (-inf)."""
    nothing = (logits == -math.inf).all(dim, keepdim=True)
    return torch.softmax(logits.masked_fill(nothing, 0.0), dim).masked_fill(nothing, 0.0)


def mixing_weights(
    key: torch.Tensor, position_bias: torch.Tensor | None = None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The implicit attention of Eq. 3 without the query's gate: (B, h, k, T, T'), each row summing to 1.

    This is the one function that builds a T x T' x d tensor; it serves `output_attentions` and pictures only.
    """
    key = key.to(working_dtype(key)).transpose(-1, -2).unsqueeze(-2)  # (B, h, k, 1, T')
    logits = key if position_bias is None else key + position_bias.to(key.dtype).unsqueeze(-3)
    if mask is not None:
        logits = logits.masked_fill(~mask.unsqueeze(-3), -math.inf)
    return _softmax(logits, -1)


def dense_mixing(
    key: torch.Tensor, value: torch.Tensor, position_bias: torch.Tensor | None = None, *, causal: bool = False
) -> torch.Tensor:
    """Eq. 2 as products with the table exp(w): O(T^2 d) time, O(T d + h T^2) memory.

    Args:
        key: (B, h, T', k), -inf where a position is masked for all queries.
        value: (B, h, T', c).
        position_bias: (h, T, T'), finite; None is w = 0.
        causal: whether t' <= t only (then T = T').
    """
    key, value, restore = _to_working_layout(key, value)
    if not causal:
        queries = key.shape[1] if position_bias is None else position_bias.shape[-2]
        return restore(block_sums(key, value, position_bias).average().expand(-1, queries, -1, -1))
    length = key.shape[-3]
    size = power_of_two_from(min(length, 4 * CHUNK_SIZE))
    padding = -length % size
    key, value = _pad(key, value, padding)
    bias = torch.nn.functional.pad(position_bias, (0, padding, 0, padding))

    def triangle(start: int, stop: int) -> ScaledSums:
        """The causal sums of chunks start..stop: those of both halves, the left half seen by the right one."""
        lo, hi = start * size, stop * size
        if stop - start == 1:
            return triangle_sums(key[:, lo:hi], value[:, lo:hi], bias[:, lo:hi, lo:hi])
        middle = (start + stop) // 2
        mid = middle * size
        left, right = triangle(start, middle), triangle(middle, stop)
        right = right.merge(block_sums(key[:, lo:mid], value[:, lo:mid], bias[:, mid:hi, lo:mid]))
        return ScaledSums(*(torch.cat(pair, -3) for pair in zip(left, right)))

    return restore(triangle(0, key.shape[-3] // size).average()[:, :length])


def chunked_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    own_bias: torch.Tensor | None = None,
    previous_bias: torch.Tensor | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal Eq. 2 in linear time: the chunk itself, the chunk before it, and one running sum for all before.

    Position biases may be anything within the two chunks. Further back they are 0, or fall linearly with the
    distance: exp(w) is then a decay, and the sum a linear recurrence over chunks.

    Args:
        key: (B, h, T, k), -inf where a position is masked for all queries.
        value: (B, h, T, c).
        own_bias: (h, 1 or n, C, C) within each of the n = `count_chunks(T, C)` chunks, or None for 0.
        previous_bias: (h, 1 or n, C, C) from the chunk before each chunk (its first entry is not used), or None when
            what lies before a chunk has no other bias than its distance times `slopes`.
        chunk_size: C, a power of two.
        slopes: (h,), w = -slope * (t - t'); None is 0.
    """
    key, value, restore = _to_working_layout(key, value)
    length = key.shape[-3]
    chunks = count_chunks(length, chunk_size)
    padding = chunks * chunk_size - length
    key, value = (x.unflatten(1, (-1, chunk_size)) for x in _pad(key, value, padding))
    sums = triangle_sums(key, value, own_bias)  # (h, n, C, B, c)
    if chunks > 1:
        decay = 0.0 if slopes is None else slopes.to(key.dtype).view(-1, 1, 1, 1)
        if slopes is None:
            totals = block_sums(key, value)  # (h, n, 1, B, c)
        else:
            to_end = -slopes[:, None] * torch.arange(chunk_size - 1, -1, -1, device=key.device)  # (h, C)
            totals = block_sums(key, value, to_end.to(key.dtype)[:, None, None].expand(-1, chunks, -1, -1))
        totals = prefix_sums(totals.map(lambda x: x.squeeze(2)), decay * chunk_size)  # (h, n, B, c), along chunks
        if previous_bias is None:
            before = _delayed(totals, 1)
        else:
            before = _delayed(totals, 2)
            # The first chunk has none before it. A masked stand-in keeps all chunks in one product.
            one_before = (0, 0, 0, 0, 0, 0, 1, 0)
            previous_key = torch.nn.functional.pad(key, one_before, value=-math.inf)[:, :chunks]
            previous_value = torch.nn.functional.pad(value, one_before)[:, :chunks]
            sums = sums.merge(block_sums(previous_key, previous_value, previous_bias))
        before = before.map(lambda x: x.unsqueeze(2))
        if slopes is not None:
            steps = torch.arange(1, chunk_size + 1, device=key.device, dtype=key.dtype).view(-1, 1, 1)
            before = before.shifted(-decay.unsqueeze(1) * steps)
        sums = sums.merge(before)
    return restore(_unpad(sums.average().flatten(1, 2), padding))


def windowed_mixing(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, *, chunk_size: int = CHUNK_SIZE
) -> torch.Tensor:
    """Causal Eq. 2 where a query sees nothing but its window: chunk by chunk, with the chunk before it.

    Args:
        key: (B, h, T, k), -inf where a position is masked for all queries.
        value: (B, h, T, c).
        bias: (h, 1 or n, C, 2 C) from each of the n = `count_chunks(T, C)` chunks to the chunk before it and itself,
            -inf outside the window.
        chunk_size: C, with a window that does not reach beyond the chunk before.
    """
    length = key.shape[-2]
    padding = count_chunks(length, chunk_size) * chunk_size - length
    key = torch.nn.functional.pad(key, (0, 0, chunk_size, padding), value=-math.inf)
    value = torch.nn.functional.pad(value, (0, 0, chunk_size, padding))
    # (B, h, n, 2 C, c): every chunk behind the one before it
    key, value = (x.unfold(2, 2 * chunk_size, chunk_size).transpose(-1, -2) for x in (key, value))
    heads, chunks = key.shape[1:3]
    lags = torch.arange(chunk_size, 2 * chunk_size, device=bias.device)[:, None] - torch.arange(
        2 * chunk_size, device=bias.device
    )
    bias = bias.masked_fill(lags < 0, -math.inf).expand(-1, chunks, -1, -1)
    context = masked_mixing(key.flatten(1, 2), value.flatten(1, 2), bias.flatten(0, 1).unsqueeze(0))
    return _unpad(context.unflatten(1, (heads, chunks)).flatten(2, 3).unsqueeze(-2), padding).squeeze(-2)


def convolution_mixing(
    key: torch.Tensor, value: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """AFT-conv on a grid (Eq. 6) as a depth-wise convolution: O(T d s^2) time, no T x T table.

    The paper writes conv(exp(K) V, exp(w) - 1) + sum exp(K) V. Where w is negative that adds and subtracts the same
    terms, so here the window is convolved with exp(w) and the positions outside it are summed by themselves.

    Args:
        key: (B, h, T, 1) with T = rows * columns in raster order, -inf where masked.
        value: (B, h, T, c).
        kernel: (h, s, s) position biases, s odd; entry (i, j) is w for the position i - s // 2 rows below and
            j - s // 2 columns right of the query.
        grid_size: (rows, columns).
    """
    dtype, work = value.dtype, working_dtype(value)
    key, value, kernel = key.to(work), value.to(work), kernel.to(work)
    size = kernel.shape[-1]
    weights = torch.exp(key - key.detach().amax(-2, keepdim=True).clamp_min(EMPTY))
    features = torch.cat([weights * value, weights], -1)  # (B, h, T, c + 1)
    features = features.movedim(-1, 1).unflatten(-1, grid_size)  # (B, c + 1, h, rows, columns)

    near_row, near_column = (_near(n, size // 2, features) for n in grid_size)
    # Both parts relative to the largest bias: that of the kernel, or the 0 outside of it if there is an outside.
    covered = near_row.all() & near_column.all()
    maximum = kernel.detach().amax((-2, -1), keepdim=True)
    maximum = torch.where(covered, maximum, maximum.clamp_min(0.0))
    inside = torch.nn.functional.conv2d(
        features.flatten(0, 1), torch.exp(kernel - maximum).unsqueeze(1), padding=size // 2, groups=kernel.shape[0]
    ).view_as(features)
    outside = near_row @ (features @ (1 - near_column)) + (1 - near_row) @ features.sum(-1, keepdim=True)
    sums = inside + outside * torch.exp(-maximum.clamp_min(0.0))
    sums = sums.flatten(-2).movedim(1, -1)  # (B, h, T, c + 1)
    numerator, denominator = sums.split([value.shape[-1], 1], -1)
    return ScaledSums(numerator, denominator, denominator).average().to(dtype)


def _near(length: int, radius: int, like: torch.Tensor) -> torch.Tensor:
    """(length, length) with 1 where two coordinates are at most `radius` apart and 0 elsewhere."""
    position = torch.arange(length, device=like.device)
    return ((position[:, None] - position).abs() <= radius).to(like.dtype)


def grid_table(by_offset: torch.Tensor, grid_size: tuple[int, int], key_rows: int | None = None) -> torch.Tensor:
    """What is given for each offset from query to key, (h, rows + key_rows - 1, 2 columns - 1), as (h, T, T').

    Args:
        grid_size: (rows, columns) of the queries.
        key_rows: rows of the keys; by default those of the queries.
    """
    rows, columns = grid_size
    heads, keys = by_offset.shape[0], (key_rows or rows) * columns
    # First by the columns of query and key, with the rows of all keys one after the other: what a query needs is then
    # a window of these, and the copies are of long runs.
    by_column = by_offset.unfold(2, columns, 1).flip(2).transpose(1, 2).reshape(heads, columns, -1)
    windows = [by_column[..., row * columns :][..., :keys] for row in reversed(range(rows))]
    return torch.stack(windows, 1).flatten(1, 2)


def collect_grid_table(table: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """The transpose of `grid_table` of a grid by itself: (h, T, T) to (h, 2 rows - 1, 2 columns - 1)."""
    rows, columns = grid_size
    heads, positions = table.shape[0], rows * columns
    by_column = table.new_zeros(heads, columns, (2 * rows - 1) * columns)
    for row, of_row in enumerate(table.unflatten(1, grid_size).unbind(1)):
        by_column[..., (rows - 1 - row) * columns :][..., :positions] += of_row
    by_offset = table.new_zeros(heads, 2 * rows - 1, 2 * columns - 1)
    for column, of_column in enumerate(by_column.unflatten(2, (-1, columns)).unbind(1)):
        by_offset[..., columns - 1 - column :][..., :columns] += of_column
    return by_offset


def indexed_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    inside: torch.Tensor,
    bias: torch.Tensor | float,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Eq. 2 where each query has one position with a bias of its own and 0 for all others: no product at all.

    exp(w) = 1 + (exp(bias) - 1) at that position, so it is counted once more, exp(bias) - 1 times.

    Args:
        key: (B, h, T, k), -inf where masked.
        value: (B, h, T, c).
        index: (h, T), the position that each query selects.
        inside: (h, T) boolean, False where that position does not exist (beyond the sequence or the grid).
        bias: its position bias, > 0.
        causal: whether t' <= t only; the selected position must then be one of these.
    """
    key, value, restore = _to_working_layout(key, value)
    shape = (*index.shape, 1, 1)
    selected_key = key.gather(1, index.view(shape).expand(-1, -1, *key.shape[2:]))
    selected_key = selected_key.masked_fill(~inside.view(shape), -math.inf)
    selected_value = value.gather(1, index.view(shape).expand(-1, -1, *value.shape[2:]))
    everything = prefix_sums(single_sums(key, value)) if causal else block_sums(key, value)
    selected = single_sums(selected_key, selected_value, math.log(math.expm1(bias)))
    return restore(everything.merge(selected).average())


def masked_mixing(key: torch.Tensor, value: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
    """Eq. 2 under any pattern of visibility, -inf in `position_bias` hiding a position.

    One product when the keys that a query sees are not dwarfed by keys hidden from it. Where they are (their sum
    underflows), the maximum has to be each query's own and Eq. 2 is evaluated query by query instead.

    Args:
        key: (B, h, T', k).
        value: (B, h, T', c).
        position_bias: (1 or B, h, T, T').
    """
    shared = position_bias.shape[0] == 1
    if torch.compiler.is_exporting():  # without a look at values: query by query, all at once
        weights = _query_weights(widen(key).unsqueeze(-3), position_bias, None)  # (B, h, T, T', k)
        return (weights * widen(value).unsqueeze(-3)).sum(-2).to(value.dtype)
    work_key, work_value, restore = _to_working_layout(key, value, fold_batch=not shared)
    sums = block_sums(work_key, work_value, position_bias.to(work_key.dtype).flatten(0, 1))
    sees_something = ((key > -math.inf).any(-1).unsqueeze(-2) & (position_bias > -math.inf)).any(-1)  # (B, h, T)
    lost = restore(sums.denominator.detach() < LOST) & sees_something.unsqueeze(-1)
    if not lost.any():
        return restore(sums.average())

    def one_query(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (_query_weights(key, bias, None) * value).sum(-2)

    key, value = key.to(work_key.dtype), value.to(work_key.dtype)
    queries = position_bias.unbind(-2)
    # Recomputed in the backward pass: what the weights of all queries would take is T x T x d.
    rows = [checkpoint(one_query, key, value, bias, use_reentrant=False) for bias in queries]
    return torch.stack(rows, -2).to(restore.dtype)


# --------------------------------------------------------------------------------------------------------- layouts


def working_dtype(x: torch.Tensor) -> torch.dtype:
    """Sums run in float32 at least."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that sums over it run in."""
    dtype = working_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def fold(x: torch.Tensor) -> torch.Tensor:
    """(B, h, T, c) -> (B h, T, 1, c): each row of the batch with position biases of its own."""
    return x.flatten(0, 1).unsqueeze(2)


def unfold(x: torch.Tensor, batch_size: int) -> torch.Tensor:
    """(B h, T, 1, c) -> (B, h, T, c)."""
    return x.squeeze(2).unflatten(0, (batch_size, -1))


class _Restore:
    """Undoes `_to_working_layout`: back to (B, h, T, c) and to the dtype that came in."""

    def __init__(self, batch_size: int, dtype: torch.dtype, folded: bool):
        self.batch_size, self.dtype, self.folded = batch_size, dtype, folded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = unfold(x, self.batch_size) if self.folded else x.permute(2, 0, 1, 3)
        return x if x.dtype == torch.bool else x.to(self.dtype)


def _to_working_layout(key: torch.Tensor, value: torch.Tensor, *, fold_batch: bool = False):
    """(B, h, T, c) -> (h, T, B, c), or (B h, T, 1, c) where every row of the batch has biases of its own."""
    restore = _Restore(value.shape[0], value.dtype, fold_batch)
    work = working_dtype(value)
    if fold_batch:
        return *(fold(x.to(work)) for x in (key, value)), restore
    return *(x.to(work).permute(1, 2, 0, 3).contiguous() for x in (key, value)), restore


def _pad(key: torch.Tensor, value: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., T, B, c) with `padding` masked positions appended."""
    pad = (0, 0, 0, 0, 0, padding)
    return torch.nn.functional.pad(key, pad, value=-math.inf), torch.nn.functional.pad(value, pad)


def _unpad(x: torch.Tensor, padding: int) -> torch.Tensor:
    """(..., T, B, c) without the `padding` last positions."""
    if torch.compiler.is_exporting():  # a slice would have to be proven shorter than x for all lengths
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -padding))
    return x.narrow(-3, 0, x.shape[-3] - padding)


def count_chunks(length: int, chunk_size: int) -> int:
    """Into how many chunks a sequence is cut, the last one padded.

    An exported program may not depend on whether there is one chunk or more, so there it always has two at least.
    """
    more = 2 * chunk_size if torch.compiler.is_exporting() else chunk_size
    return (length + more - 1) // chunk_size


def pad_to_power_of_two(
    key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., T, B, c) and biases (..., T, T) with masked positions appended until T is a power of two."""
    padding = power_of_two_from(key.shape[-3]) - key.shape[-3]
    return *_pad(key, value, padding), torch.nn.functional.pad(bias, (0, padding, 0, padding))


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
