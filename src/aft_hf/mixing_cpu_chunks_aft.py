"""The data layout of the chunked causal mixing on a CPU: chunks, references, features, biases and running sums.

The reference of a chunk and feature is its log-sum-exp shift, which is subtracted from keys before the exponential.
`mixing_cpu_causal_aft.py` computes sums and gradients in this layout; `mixing_cpu_lost_aft.py` computes the few
queries for which these sums are not precise.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from .mixing_cpu_bias_aft import FLOOR, INCREASE_MARGIN, LARGEST_INCREASE, MODERATE, is_moderate
from .scaled_sums_aft import EMPTY, flush_subnormals, largest_size, working_dtype


# Exponentials of lower exponents are not normal numbers, and take several times longer.
SMALLEST_EXPONENT = {torch.float32: -87.0, torch.float64: -708.0}

# Bytes of the features in a block: small enough for a processor's cache, and large enough to amortize the start of all
# passes over it.
BLOCK_SIZE = 2**22

# Maximum number of chunks in a block.
MOST_CHUNKS = 128

# A reference lies this far below the largest key. The range of float32 above the largest key, exp(88 - 60), is left
# for sums over tokens, biases and values; the range below it is used by smaller keys.
HEADROOM = 60.0

# Weights that are set to 0 are negligible in denominators from exp(LOST_EXPONENT) on: 64 terms of exp(-82) add less
# than float32 resolves.
LOST_EXPONENT = -60.0

# Terms that are smaller than a denominator by a factor of exp(NOTHING) are negligible.
NOTHING = 22.0

# If the largest bias of any query exceeds this in absolute value, the biases are relative to these largest biases.
LARGEST_BIAS = 20.0

# Sums over a window alone have few terms, so references lie lower by this margin, and the limit for biases is lower by
# the same margin.
WINDOW_MARGIN = 10.0

# The log of the largest permitted sum of exp(K) V.
LARGEST_SUM = {torch.float32: 84.0, torch.float64: 700.0}

# The log of the largest upstream gradient whose products with the values do not overflow.
GRADIENT_MARGIN = 8.0

# Running sums over chunks are relative to the first chunk, in float64, if they fall by at most exp(LARGEST_FALL). If
# the sums themselves are float64, they may be as large as float64 permits, which leaves no room for a fall.
LARGEST_FALL = {torch.float32: 600.0, torch.float64: 0.0}

# exp(w) is set to 0 for biases that are less than this margin above the smallest exponent, relative to the largest
# bias of the query. The bound on denominators is then higher.
BIAS_MARGIN = 7.0


class Options(NamedTuple):
    slopes: torch.Tensor | None
    num_heads: int
    chunk_size: int
    global_connectivity: bool


class Rows(NamedTuple):
    """R rows of the batch. Tensors have the shape (h, R, ...); h is 1 if one table serves all heads."""

    slice: slice
    key: torch.Tensor  # (h, R, T, k)
    value: torch.Tensor  # (h, R, T, c)
    own: torch.Tensor | None  # (h, R, n, k), the reference of each chunk of keys; None for 0
    # (h, R, n, k), the reference of the sums of each chunk of queries, at least that of all chunks which it sees
    seen: torch.Tensor | None
    increase: torch.Tensor | None = None  # (h, R, n, k), `own` less that of the forward pass

    def first_visible(self) -> torch.Tensor | None:
        """Return the first visible token, T if all are hidden: (h, R, 1, k). None if no token is hidden."""
        if float(self.key.amin()) > -math.inf:
            return None
        visible = self.key != -math.inf
        return visible.byte().argmax(2, keepdim=True).masked_fill_(~visible.any(2, keepdim=True), self.key.shape[2])

    def difference(self, start: int, seen_start: int, count: int) -> torch.Tensor | None:
        """Return the log of the factor that carries features of the chunks at `start` into sums of the chunks at
        `seen_start`: (h, R, count, 1, k), at most 0. None for 0.
        """
        if self.own is None or self.seen is None or (self.own is self.seen and start == seen_start):
            return None
        return difference(self.own, start, self.seen, seen_start, count).unsqueeze(-2)

    def references_of_far(self, segment: "Segment", before: int) -> torch.Tensor | None:
        """Return the references of the running sums that the chunks of a segment see: (h, R, n, k), None for 0."""
        return None if self.seen is None else at_chunks(self.seen, segment.start - 1 - before, segment.chunks)


class Segment(NamedTuple):
    """Consecutive chunks of C positions in a sequence; the last one may be shorter."""

    start: int
    chunks: int
    size: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.chunks

    @property
    def positions(self) -> slice:
        return slice(self.start * self.size, min(self.length, self.stop * self.size))

    def of(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the part of (h, n, ...) for these chunks; if n is 1, all chunks share it."""
        return tables[:, self.start : self.stop] if tables.shape[1] > 1 else tables


class Chunks:
    """Keys and values cut into chunks.

    The features are exp(K) V and exp(K), (G, h, R, chunks, C, W / G). They are stored in G = 2 groups if both are
    equally wide, and side by side (G = 1) if the features of a head share a key.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, tables: torch.Tensor | None, options: Options):
        self.key, self.value, self.tables = key.contiguous(), value.contiguous(), tables
        self.slopes, self.num_heads, self.chunk_size, self.global_connectivity = options
        self.headroom = HEADROOM if self.global_connectivity else HEADROOM + WINDOW_MARGIN
        self.room = math.inf
        self.dtype, self.length = working_dtype(value), value.shape[1]
        self.moderate = is_moderate(self.key)
        if not self.moderate:
            self.room = self._room_for_values()
            self.headroom = math.floor(min(self.headroom, self.room))  # references are integers
        per_feature = key.shape == value.shape
        # One product serves all heads if heads have no tables of their own.
        self.heads = 1 if tables is None and per_feature else self.num_heads
        self.groups, self.width = 2 if per_feature else 1, value.shape[-1] // self.heads
        self.before = 0 if tables is None else 1  # chunks before its own that a table reaches
        self.biases = Biases(self)
        self.fall = None if self.slopes is None else self.slope_of_features() * self.chunk_size  # (k,), per chunk

    def _room_for_values(self) -> float:
        """Return the log of the largest permitted exp(K - reference), for which sums over the values are finite."""
        largest = largest_size(self.value)
        if not math.isfinite(largest):  # NaN and infinities are detected by the results
            largest = float(self.value.nan_to_num(0.0, 0.0, 0.0).abs().amax())
        return LARGEST_SUM[self.dtype] - math.log(max(largest, 1.0) * self.length)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """View (B, T, h c) as (h, B, T, c)."""
        return x.view(*x.shape[:2], self.heads, -1).permute(2, 0, 1, 3)

    def blocks(self) -> Iterator[tuple[Rows, list[Segment]]]:
        """Yield the rows that are computed together, and the segments into which they are cut."""
        batch, size = self.value.shape[0], self.chunk_size
        position_size = (self.key.shape[-1] + self.value.shape[-1]) * self.dtype.itemsize
        at_once = min(batch, max(1, BLOCK_SIZE // max(1, self.length * position_size)))
        total = -(-self.length // size)
        chunks = max(1, min(MOST_CHUNKS, BLOCK_SIZE // (at_once * size * position_size)))
        segments = [Segment(i, min(chunks, total - i), size, self.length) for i in range(0, total, chunks)]
        key, value = self.by_head(self.key), self.by_head(self.value)
        highest = None if self.moderate else self._largest_keys()
        for row in range(0, batch, at_once):
            here = slice(row, row + at_once)
            own, seen = (None, None) if highest is None else self._references(*highest, here)
            yield Rows(here, key[:, here], value[:, here], own, seen), segments

    def _references(
        self, own: torch.Tensor, seen: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the references `own` and `seen` of some rows from the largest keys of all rows; None for 0.

        Both are the same tensor if the largest keys are.
        """
        highest = seen[:, rows]
        if self.room >= MODERATE and ((highest.abs() <= MODERATE) | (highest == EMPTY)).all():
            return None, None
        reference = highest - self.headroom
        return reference if own is seen else own[:, rows] - self.headroom, reference

    def _largest_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest keys of each chunk, and of all keys that its queries see: (h, B, n, k). EMPTY if all are
        hidden.

        They are rounded to integers, so that differences of keys and references are exact. With global connectivity,
        the second tensor is used for both.
        """
        # NaN and infinities are detected by the results.
        highest = largest_of_chunks(self.key, self.chunk_size, 1).to(self.dtype).nan_to_num_(EMPTY, EMPTY, EMPTY)
        own = self.by_head(highest).contiguous()
        if not self.global_connectivity:
            own = own.round_()
            return own, torch.cat([own[:, :, :1], torch.maximum(own[:, :, 1:], own[:, :, :-1])], 2)
        if self.fall is not None:
            # Relative to the start of each chunk. The last key of a chunk weighs more by up to the decay over a chunk.
            fallen = self._fallen(own.shape[2])
            own += fallen + self.fall
        seen = own.cummax(2).values
        if self.fall is not None:
            seen = (seen - fallen).masked_fill_(seen < EMPTY / 2, EMPTY)
        seen = seen.round_()
        return seen, seen

    def features(self, rows: Rows, segment: Segment) -> torch.Tensor:
        """Return exp(K) V and exp(K) of a segment, and of the chunk before it if tables reach it: (G, h, R, chunks, C,
        W / G). They are relative to the references of their chunks, and 0 outside the sequence.

        With an increase, exponentials are computed relative to the references of the forward pass, and then multiplied
        by exp(-increase): they are rounded as in the forward pass.
        """
        start, count = segment.start - self.before, segment.chunks + self.before
        references, increase = (None if x is None else at_chunks(x, start, count) for x in (rows.own, rows.increase))
        size, first = self.chunk_size, start * self.chunk_size
        tokens = slice(max(first, 0), max(min(first + count * size, self.length), 0))
        filled = slice(tokens.start - first, tokens.stop - first)
        shape = *rows.key.shape[:2], count, size
        width = rows.value.shape[-1] + (2 - self.groups) * rows.key.shape[-1]
        features = rows.value.new_empty(self.groups, *shape, width, dtype=self.dtype)
        # exp is several times slower on rows that are not contiguous
        weights = features[1] if self.groups == 2 else features.new_empty(*shape, rows.key.shape[-1])
        flat = weights.flatten(2, 3)
        flat[:, :, filled] = rows.key[:, :, tokens]
        if references is not None:
            weights -= (references if increase is None else references - increase).unsqueeze(-2)
        if self.slopes is not None:
            # Weights are relative to the start of their chunk: with a decay, later tokens weigh more than earlier ones
            place = torch.arange(size, device=weights.device, dtype=self.dtype)
            weights += place[:, None] * self.slope_of_features()  # (C, k)
        smallest = FLOOR[self.dtype] - 1.0
        if increase is not None:
            torch.maximum(weights, (increase + smallest).unsqueeze(-2), out=weights)
        elif references is not None:
            weights.clamp_(min=smallest)  # exp is slower where it underflows
        flat[:, :, filled].exp_()
        flat[:, :, : filled.start], flat[:, :, filled.stop :] = 0, 0
        if increase is not None:
            weights *= torch.exp(-increase).unsqueeze(-2)
        if references is not None:
            torch.threshold_(weights, math.exp(FLOOR[self.dtype]), 0.0)
        weighted, copy = self.parts(features)
        if self.groups == 1:
            copy.copy_(weights)
        weighted = weighted.flatten(2, 3)
        weighted[:, :, : filled.start], weighted[:, :, filled.stop :] = 0, 0
        torch.mul(flat[:, :, filled], rows.value[:, :, tokens], out=weighted[:, :, filled])
        return features

    def parts(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split (G, ..., W / G) into the numerators (..., c) and the denominators (..., k)."""
        first, second = features.unbind() if self.groups == 2 else features[0].tensor_split((self.width,), -1)
        return first, second

    def far_parts(self, far: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split running sums into numerators (h, R, n, k, c / k) and denominators (h, R, n, k)."""
        numerator, denominator = self.parts(far)
        return numerator.unflatten(-1, (denominator.shape[-1], -1)), denominator

    def running_sums(
        self, rows: Rows, segment: Segment, features: torch.Tensor, carry: torch.Tensor | None
    ) -> torch.Tensor:
        """Return, for each chunk of a segment and the chunk that follows, the running sum over all earlier chunks that
        its tables do not reach: (G, h, R, n + 1, W / G). Each sum is relative to the last chunk that it includes.
        """
        totals = features.new_empty(*features.shape[:3], segment.chunks + 1, features.shape[-1])
        totals[:, :, :, 0] = 0 if carry is None else carry
        torch.sum(features[:, :, :, : segment.chunks], -2, out=totals[:, :, :, 1:])
        self.accumulate(totals, rows.seen, segment.start - 1 - self.before)
        return totals

    def accumulate(self, totals: torch.Tensor, seen: torch.Tensor | None, start: int, reverse: bool = False) -> None:
        """Compute running sums along the chunks (G, h, R, n, W / G) in place, from the first chunk, which is `start`,
        to the last, or from the last to the first if `reverse`. They are accumulated in float64, so that errors do
        not grow with the length.
        """
        count = totals.shape[3] - 1
        decay = self.decay(seen, start, start + 1, count)
        if decay is None:  # PyTorch's cumsum accumulates in float64 on a CPU
            if reverse:
                totals.copy_(totals.flip(3).cumsum(3).flip(3))
            else:
                totals.cumsum_(3)
            return
        if count == 0:
            return
        fallen = nn.functional.pad(decay.double().expand(-1, -1, count, -1).cumsum(2), (0, 0, 1, 0))
        if float(fallen.amin()) >= -LARGEST_FALL[self.dtype]:
            weights = torch.exp(fallen if reverse else -fallen)
            sums = totals.double().mul_(weights)
            sums = sums.flip(3).cumsum(3).flip(3) if reverse else sums.cumsum_(3)
            totals.copy_(sums.div_(weights))
            flush_subnormals(totals)
            return
        decays = torch.exp(decay.double()).expand(-1, -1, count, -1).unbind(2)
        sums = totals.double()
        chunks = sums.unbind(3)
        for i in reversed(range(count)) if reverse else range(count):
            target, source = (i, i + 1) if reverse else (i + 1, i)
            chunks[target].addcmul_(chunks[source], decays[i])
        totals.copy_(sums)
        flush_subnormals(totals)

    def rows_of_backward(self, rows: Rows, inverse: torch.Tensor) -> tuple[Rows, torch.Tensor | None]:
        """Return the rows with the references of the backward pass, and these references less those of the forward
        pass, (h, R, n, k); the same rows and None if the references are 0.

        Gradients are products of exp(K - r) with exp(r) g / D, for references r, upstream gradients g and denominators
        D. In most chunks, all denominators are far larger than the smallest precise one. A higher reference then makes
        the first factor smaller, so that it is 0 where it is negligible, and hardly any product is subnormal.

        Args:
            rows: the rows with the references of the forward pass.
            inverse: (h, R, T, k), the reciprocals of the denominators; 0 for lost queries.
        """
        if rows.own is None or rows.seen is None:
            return rows, None
        smallest = largest_of_chunks(inverse, self.chunk_size, 2).log_().neg_()
        target = max(LOST_EXPONENT + INCREASE_MARGIN, self.biases.top + GRADIENT_MARGIN - self.room)
        largest_increase = max(0.0, min(LARGEST_INCREASE, self.headroom - target))
        seen = rows.seen + smallest.sub_(target).clamp_(0.0, largest_increase).floor_()
        if rows.own is rows.seen:
            # References do not fall from one chunk to the next, apart from the decay.
            fallen = 0.0 if self.fall is None else self._fallen(seen.shape[2])
            seen = ((seen + fallen).flip(2).cummin(2).values.flip(2) - fallen).round_()
            own = seen = torch.maximum(seen, rows.seen)
        else:
            following = torch.cat([seen[:, :, 1:], seen[:, :, -1:]], 2)
            own = torch.minimum(seen, following).clamp_(rows.own, rows.own + LARGEST_INCREASE)
        return rows._replace(own=own, seen=seen, increase=own - rows.own), seen - rows.seen

    def _fallen(self, count: int) -> torch.Tensor:
        """Return the decay of keys from the first chunk to each of `count` chunks: (count, k)."""
        assert self.fall is not None
        return torch.arange(count, dtype=self.dtype, device=self.fall.device)[:, None] * self.fall

    def decay(self, seen: torch.Tensor | None, start: int, later_start: int, count: int) -> torch.Tensor | None:
        """Return the log of the factor that carries running sums from the chunks at `start` to those at `later_start`:
        (h, R, count, k). None for 0.
        """
        exponent = None if seen is None else difference(seen, start, seen, later_start, count)
        if self.fall is None:
            return exponent
        fallen = self.fall * (start - later_start)
        return fallen.view(1, 1, 1, -1) if exponent is None else exponent.add_(fallen)

    def slope_of_features(self) -> torch.Tensor:
        """Return the slope of each key feature, (k,); only for biases with slopes."""
        assert self.slopes is not None
        return self.slopes.to(self.dtype).repeat_interleave(self.key.shape[-1] // self.num_heads)


class Biases:
    """exp(w) of the keys in a chunk (`own`) and in the chunk before it (`previous`), 0 for later keys.

    Each is (h, n or 1, C, C); `weights` holds both, (h, n or 1, C, 2 C), the chunk before first.
    """

    def __init__(self, sums: Chunks):
        size, dtype, tables = sums.chunk_size, sums.dtype, sums.tables
        self.far_weight, self.wide, self.headroom, self.room, self.top = None, False, sums.headroom, sums.room, 0.0
        if tables is None:
            self.own = torch.ones(1, 1, size, size, dtype=dtype, device=sums.value.device).tril()
            return
        hidden = torch.ones(size, 2 * size, dtype=torch.bool, device=tables.device).triu(size + 1)
        bias = tables.detach().to(dtype).masked_fill(hidden, -math.inf)
        if bias.shape[1] > 1:
            bias[:, 0, :, :size] = -math.inf
        # For smaller biases the gradient of exp(w), which is that of w divided by exp(w), may not be representable.
        self.smallest = max(SMALLEST_EXPONENT[dtype] + BIAS_MARGIN, GRADIENT_MARGIN - self.room)
        largest = bias.amax(-1, keepdim=True)  # (h, n or 1, C, 1)
        if sums.global_connectivity:
            largest.clamp_(min=0.0)
        if not float(largest.abs().amax()) <= LARGEST_BIAS - (sums.headroom - HEADROOM):
            largest.nan_to_num_(0.0, 0.0, 0.0)
            bias -= largest
            self.far_weight = self._exp(-largest) if sums.global_connectivity else None
        else:
            self.top = max(0.0, float(largest.amax()))
        self.weights = self._exp(bias)
        self.previous, self.own = self.weights.split(size, -1)

    def _exp(self, bias: torch.Tensor) -> torch.Tensor:
        negligible = (bias < self.smallest) & (bias > -math.inf)
        if not negligible.any():
            return torch.exp(bias)
        self.wide = True
        return torch.exp(bias).masked_fill_(negligible, 0)

    @cached_property
    def of_keys(self) -> torch.Tensor:
        """The tables for the backward pass, (h, n or 1, C, 2 C): exp(w) of the queries in a chunk of keys and in the
        next chunk.
        """
        following = self.previous
        if following.shape[1] > 1:
            following = torch.cat([following[:, 1:], torch.zeros_like(following[:, :1])], 1)
        return torch.cat([self.own.mT, following.mT], -1)

    def gradient(self, of_tables: torch.Tensor) -> torch.Tensor:
        """Return the gradient of w from the gradient of exp(w), which is transposed: (h, n or 1, 2 C, C)."""
        # The gradient for a pair of tokens that do not see each other may have overflowed.
        return torch.where(self.weights > 0, self.weights * of_tables.mT, 0.0)

    def lost_exponent(self, moderate: bool) -> float:
        """Return the exponent of the smallest denominator that is precise, for averages and gradients."""
        # Biases weigh the terms that were set to 0 up to exp(top) times as much.
        smallest = self.top + smallest_exponent(self.room)
        if not self.wide:
            return smallest
        left_out = max(LOST_EXPONENT + BIAS_MARGIN, self.smallest + NOTHING)
        return max(smallest, left_out + (MODERATE if moderate else self.headroom))


def smallest_exponent(room: float) -> float:
    """Return the exponent of the smallest denominator by which sums, and gradients of sums over values, may be
    divided, if sums over values can grow by a factor of exp(room) without overflow.
    """
    return max(LOST_EXPONENT, GRADIENT_MARGIN - room)


def tokens_of(features: torch.Tensor) -> torch.Tensor:
    """View (G, h, R, chunks, C, w) as (G, h, R, T, w)."""
    return features.flatten(3, 4)


def largest_of_chunks(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return the largest number in each chunk of `size` places along `dim`; the last chunk may be shorter."""
    whole = x.shape[dim] // size * size
    parts = [x.narrow(dim, 0, whole).unflatten(dim, (-1, size)).amax(dim + 1)]
    if whole < x.shape[dim]:
        parts.append(x.narrow(dim, whole, x.shape[dim] - whole).amax(dim, keepdim=True))
    return torch.cat(parts, dim)


def at_chunks(references: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return the references of `count` chunks from `start` on; places outside repeat the first or the last chunk."""
    last = references.shape[2] - 1
    if start >= 0 and start + count <= last + 1:
        return references[:, :, start : start + count]
    places = torch.arange(start, start + count, device=references.device).clamp_(0, last)
    return references.index_select(2, places)


def difference(own: torch.Tensor, start: int, seen: torch.Tensor, seen_start: int, count: int) -> torch.Tensor:
    """Return the log of the factor that carries features relative to `own` into sums relative to `seen`:
    (h, R, count, k), at most 0.
    """
    return at_chunks(own, start, count) - at_chunks(seen, seen_start, count)


def scaled(
    x: torch.Tensor, exponent: torch.Tensor | None, *, out: torch.Tensor | None = None, flush: bool = True
) -> torch.Tensor:
    """Return x exp(exponent), precise also where the exponential alone underflows but the product does not; x itself
    if there is no exponent or all are 0.

    Args:
        out: the tensor to write to; may be x.
        flush: whether subnormal results are set to 0.
    """
    if exponent is None:
        return x
    if not exponent.any():
        return x if out is None else out.copy_(x)
    if float(exponent.amin()) >= SMALLEST_EXPONENT[x.dtype]:
        product = torch.mul(x, torch.exp(exponent), out=out)
    else:
        root = torch.exp(exponent / 2)
        product = torch.mul(x, root, out=out).mul_(root)
    return flush_subnormals(product) if flush else product


def pairs_of(features: torch.Tensor) -> torch.Tensor:
    """View n + 1 chunks, (G, h, R, n + 1, C, w), as n pairs of successive chunks, (G, h, R, n, 2 C, w)."""
    size = features.shape[-2]
    return tokens_of(features).unfold(3, 2 * size, size).mT


def products(tables: torch.Tensor, features: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return the products of tables (h or 1, n or 1, C, C') with features (G, h, R, n, C', w)."""
    rows, chunks = features.shape[2:4]
    out = add_to
    if out is None:
        out = features.new_empty(*features.shape[:4], tables.shape[-2], features.shape[-1])
    # Rows may not be contiguous, so there is a batch of products for each row, or for each chunk if these are fewer.
    dim, others = (0, chunks) if rows <= chunks else (1, rows)
    tables = tables.expand(features.shape[1], chunks, -1, -1)
    for head, of_chunks in enumerate(tables):
        batches = [of_chunks] * rows if dim == 0 else [table.expand(others, -1, -1) for table in of_chunks]
        for x, y in zip(features[:, head], out[:, head]):
            for table, here, product in zip(batches, x.unbind(dim), y.unbind(dim)):
                torch.baddbmm(product, table, here, beta=0 if add_to is None else 1, out=product)
    return out


def add_products(of_tables: torch.Tensor, features: torch.Tensor, of_sums: torch.Tensor) -> None:
    """Add the gradient of each chunk's table, summed over rows, to `of_tables` (h, n or 1, C', C).

    Features are (G, h, R, n, C', w), and gradients of the sums (G, h, R, n, C, w).
    """
    for head, of_table in enumerate(of_tables):
        products = features.new_zeros(features.shape[3], *of_table.shape[-2:])
        for x, of_x in zip(features[:, head], of_sums[:, head]):
            for of_row, of_sums_row in zip(x, of_x):
                products.baddbmm_(of_row, of_sums_row.mT)
        of_table += products if len(of_table) > 1 else products.sum(0)
