"""The portable backend: Eq. 2 in plain PyTorch operations, for any device, dtype and problem.

Everything here can be traced, exported and differentiated any number of times and in every mode, since control flow
then depends on shapes alone. (Where values can be read, `scaled_sums_aft.py` and `_convolves` also use them, for a
more exact result.)
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from .mixing_backend_aft import Backend
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
from .scaled_sums_aft import (
    EMPTY,
    LARGEST_SPAN,
    ScaledSums,
    block_sums,
    can_read_values,
    delayed,
    flush_gradient,
    fold,
    join_heads,
    pad_positions,
    power_of_two_from,
    prefix_sums,
    prefix_sums_of_chunks,
    reversed_triangle_sums,
    single_sums,
    suffix_sums,
    triangle_sums,
    unfold,
    widen,
)


if TYPE_CHECKING:
    from .mixing_aft import Mixing


# Positions per chunk in the linear-time functions, unless the window requires larger chunks.
CHUNK_SIZE = 32

# Bidirectional windows are summed in chunks if a sequence has more chunks than this; a table is faster for fewer.
FEW_CHUNKS = 8

# Maximum number of entries of the table exp(w) of a grid; above it `_convolves` chooses.
LARGEST_GRID_TABLE = 2**24


class PortableBackend(Backend):
    """The backend that supports every problem."""

    name = "portable"

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        return True

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """Compute Eq. 2: (B, T, d) in the dtype of the values."""
        key, value = (flush_gradient(widen(x)) for x in problem.by_head())  # (B, h, T', k), (B, h, T', c)
        if problem.is_pairwise or problem.documents is not None or problem.padding_mask is not None:
            context = pairwise_mixing(key, value, *problem.table())
        else:
            # (h, T, B, c): the batch shares w, so its dimension is next to the features
            key, value = (x.permute(1, 2, 0, 3).contiguous() for x in (key, value))
            mixing = causal_mixing if problem.causal else bidirectional_mixing
            context = mixing(key, value, problem.biases).permute(2, 0, 1, 3)
        return join_heads(context).to(problem.value.dtype)


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


def chunked_window_mixing(
    key: torch.Tensor, value: torch.Tensor, tables: torch.Tensor, *, chunk_size: int
) -> torch.Tensor:
    """Like `chunked_mixing` with `tables`, but everything beyond the two chunks is hidden, and w may be -inf."""
    key, value, padding = _chunks(key, value, chunk_size)
    later = torch.ones_like(tables[0, 0], dtype=torch.bool).triu(chunk_size + 1)
    tables = tables.masked_fill(later, -math.inf)
    near_key = torch.cat(_neighbours(key, -math.inf, 1, 0), 2)  # (h, n, 2 C, B, k)
    near_value = torch.cat(_neighbours(value, 0.0, 1, 0), 2)
    return _unpadded(block_sums(near_key, near_value, tables, masked=True).average(), padding)


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
