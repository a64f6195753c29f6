"""The direct form from left to right in linear time.

exp(K) V and exp(K) lie apart, each in a piece of memory without gaps, where they are equally wide; otherwise side by
side.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .direct_mixing_aft import DirectSums, by_position, gradient_of_inputs, gradient_of_sums
from .mixing_aft import working_dtype


# Bytes of the features in a block. More than without an order: there are more passes over a block, and each takes some
# time to start.
BLOCK_SIZE = 2**23

# Chunks in a block, for which the running sums take a time that is quadratic.
MOST_CHUNKS = 128


class CausalSums(DirectSums):
    """The past in linear time: a product within each chunk of positions, and a running sum over the chunks before.

    Position biases are (h, n or 1, C, 2 C) from each of n chunks to the chunk before it and to itself, and 0 beyond.
    Or there are none, and w = -slope * distance.

    Args:
        chunk_size: C.
        slopes: (h,), or None for 0.
    """

    def __init__(self, chunk_size: int, slopes: torch.Tensor | None = None):
        self.chunk_size, self.slopes = chunk_size, slopes
        self.fades = slopes is not None

    def forward(self, key, value, bias, inverse=None):
        context = by_position(value)
        tables = self._tables(bias, value)
        views = self._together(bias, key, value, context, inverse)
        for rows, segments in self._blocks(*views[:2]):
            self._forward_rows(*(None if x is None else x[rows].transpose(0, 1) for x in views), tables, segments)
        return context

    def _forward_rows(self, key, value, context, inverse, tables, segments) -> None:
        """Some rows, (h, B, T, k) and (h, B, T, c), from left to right."""
        decay = self._decay(segments, value)
        carry = None  # the sums over what lies before the chunks of a product
        for segment in segments:
            here, chunks = segment.positions, segment.chunks
            features = self._features(key, value, segment, tables)
            earlier = _running_sums(features[:, :, :, :chunks], carry, decay)
            carry = earlier[:, :, :, -1]
            sums = self._sums(segment.of(tables), features, earlier[:, :, :, :-1], 0)
            numerator, denominator = _parts(_tokens(sums)[:, :, :, : here.stop - here.start], value)
            denominator = self._reciprocal(denominator, None if inverse is None else inverse[:, :, here])
            torch.mul(numerator, denominator, out=context[:, :, here])

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed):
        key_gradient, value_gradient = by_position(key), by_position(value)
        tables = self._tables(bias, value)
        of_tables = torch.zeros_like(tables.mT, memory_format=torch.contiguous_format) if bias_needed else None
        views = self._together(bias, key, value, context, inverse, gradient, key_gradient, value_gradient)
        for rows, segments in self._blocks(*views[:2]):
            self._backward_rows(*(x[rows].transpose(0, 1) for x in views), tables, of_tables, segments)
        return key_gradient, value_gradient, tables * of_tables.mT if bias_needed else None

    def _backward_rows(
        self, key, value, context, inverse, gradient, key_gradient, value_gradient, tables, of_tables, segments
    ) -> None:
        """Some rows from right to left, since a key counts for the queries after it."""
        decay = self._decay(segments, value).flip(1, 2)
        tables_of_keys = self._tables_of_keys(tables)
        before = tables.shape[-1] // self.chunk_size - 1
        carry = following = None
        for segment in reversed(segments):
            here, chunks = segment.positions, segment.chunks
            count = here.stop - here.start
            features = self._features(key, value, segment, tables)
            of_sums = torch.empty_like(features)  # of the chunks, then of the one that follows
            tokens = _tokens(of_sums)
            gradient_of_sums(
                *(x[:, :, here] for x in (gradient, context, inverse)), *_parts(tokens[:, :, :, :count], value)
            )
            if following is None:
                tokens[:, :, :, count:] = 0
            else:
                of_sums[:, :, :, chunks:] = following
            following = of_sums[:, :, :, :before]
            later = _running_sums(of_sums[:, :, :, before:], carry, decay, reverse=True)
            carry = later[:, :, :, 0]
            of_features = self._sums(segment.of(tables_of_keys), of_sums, later[:, :, :, 1:], -1)
            if of_tables is not None:
                _add_gradient_of_tables(segment.of(of_tables), of_sums, features, chunks)
            parts = (_parts(_tokens(x)[:, :, :, :count], value) for x in (of_features, features[:, :, :, before:]))
            gradient_of_inputs(*parts, key_gradient[:, :, here], value_gradient[:, :, here])

    def _sums(self, tables: torch.Tensor, features: torch.Tensor, far: torch.Tensor, place: int) -> torch.Tensor:
        """The products of n chunks, and `far` from them, (G, h, B, n, W / G): (G, h, B, n, C, W / G).

        Without position biases the token at `place` counts for all of its chunk. What is far is then added to that
        token, in place, rather than to each of the sums.
        """
        chunks = far.shape[3]
        if tables.shape[-1] == self.chunk_size:
            features[..., place, :] += far
            return _product_of_chunks(tables, features, chunks)
        return _product_of_chunks(tables, features, chunks).add_(far.unsqueeze(-2))

    def _together(self, bias: torch.Tensor | None, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        """(B, h, T, c) as (B, 1, T, h c) where heads have no tables of their own: one product serves them all."""
        if bias is not None:
            return list(tensors)
        return [None if x is None else x.transpose(1, 2).flatten(2).unsqueeze(1) for x in tensors]

    def _blocks(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[slice, list["_Segment"]]]:
        """Rows that are taken at once, and the segments into which they are cut."""
        rows, heads, length = key.shape[:3]
        size, width = self.chunk_size, heads * (key.shape[3] + value.shape[3])
        itemsize = working_dtype(value).itemsize
        rows_at_once = min(rows, max(1, BLOCK_SIZE // (length * width * itemsize)))
        total = -(-length // size)
        chunks = max(1, min(MOST_CHUNKS, BLOCK_SIZE // (rows_at_once * size * width * itemsize)))
        segments = [_Segment(i, min(chunks, total - i), size, length) for i in range(0, total, chunks)]
        for row in range(0, rows, rows_at_once):
            yield slice(row, row + rows_at_once), segments

    def _features(self, key, value, segment: "_Segment", tables: torch.Tensor) -> torch.Tensor:
        """exp(K) V and exp(K) of a segment, and of the chunk before it if tables reach there, 0 where there is no
        token: (G, h, B, chunks, C, W / G). Each is one of G = 2 groups where they are equally wide, else G = 1.
        """
        size, here = self.chunk_size, segment.positions
        before = tables.shape[-1] - size
        groups, width = (2, value.shape[-1]) if key.shape == value.shape else (1, value.shape[-1] + key.shape[-1])
        features = value.new_empty(
            groups, *value.shape[:2], segment.chunks + before // size, size, width, dtype=working_dtype(value)
        )
        first, start = here.start - before, max(here.start - before, 0)
        tokens, filled = slice(start, here.stop), slice(start - first, here.stop - first)
        flat = _tokens(features)
        flat[:, :, :, : filled.start] = 0
        flat[:, :, :, filled.stop :] = 0
        weighted, weights = _parts(flat[:, :, :, filled], value)
        if groups == 2:
            torch.exp(key[:, :, tokens].to(weights.dtype), out=weights)
        else:  # exp is several times slower on rows that are apart
            weights.copy_(torch.exp(key[:, :, tokens].to(weights.dtype)))
        if self.slopes is not None:
            # In units of a weight at the start of its chunk: what a later token counts more than an earlier one.
            place = torch.arange(size, device=value.device)
            growth = torch.exp(place[:, None] * self._slope_of_features(value)).to(features.dtype)  # (C, c)
            features[1] *= growth
        torch.mul(weights, value[:, :, tokens], out=weighted)
        return features

    def _decay(self, segments: list["_Segment"], value: torch.Tensor) -> torch.Tensor:
        """What is left at each of n chunks, and at the one that would follow, of the sum that lies before them, and of
        those of n chunks: (h or 1, n + 1, n + 1).
        """
        places = torch.arange(segments[0].chunks + 1, device=value.device, dtype=working_dtype(value))
        slopes = places.new_zeros(1) if self.slopes is None else self.slopes.to(places.dtype)
        distance = (places[:, None] - (places - 1).clamp(min=0)).clamp(min=0)
        return torch.exp(-self.chunk_size * slopes[:, None, None] * distance).tril()

    def _slope_of_features(self, value: torch.Tensor) -> torch.Tensor:
        slopes = self.slopes.to(working_dtype(value))
        return slopes.repeat_interleave(value.shape[-1] // slopes.shape[0])

    def _tables(self, bias: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        """exp(w), (h, n or 1, C, C or 2 C), 0 where a key comes after the query."""
        size, dtype = self.chunk_size, working_dtype(value)
        if bias is None:
            return torch.ones(1, 1, size, size, dtype=dtype, device=value.device).tril()
        visible = torch.ones(size, 2 * size, dtype=dtype, device=value.device).tril(size)
        return torch.exp(bias).to(dtype).mul_(visible)

    def _tables_of_keys(self, tables: torch.Tensor) -> torch.Tensor:
        """The same weights as a chunk of keys has them: for its own queries, and for those of the chunk after it."""
        size = self.chunk_size
        if tables.shape[-1] == size:
            return tables.mT.contiguous()
        before, own = tables.split(size, -1)
        after = torch.cat([before[:, 1:], torch.zeros_like(before[:, :1])], 1) if before.shape[1] > 1 else before
        return torch.cat([own.mT, after.mT], -1)


class _Segment(NamedTuple):
    """Consecutive chunks of C positions in a sequence, of which the last one may be cut short."""

    start: int
    chunks: int
    size: int
    length: int

    @property
    def positions(self) -> slice:
        return slice(self.start * self.size, min(self.length, (self.start + self.chunks) * self.size))

    def of(self, tables: torch.Tensor) -> torch.Tensor:
        """The part of (h, n, ...) for these chunks; all have one where n is 1."""
        return tables[:, self.start : self.start + self.chunks] if tables.shape[1] > 1 else tables


def _tokens(features: torch.Tensor) -> torch.Tensor:
    """(G, h, B, chunks, C, c) as (G, h, B, T, c)."""
    return features.flatten(3, 4)


def _parts(features: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, ..., W / G) as the part of the numerators (..., c) and that of the denominators (..., k)."""
    if len(features) == 2:
        return features.unbind()
    return features[0].tensor_split((value.shape[-1],), -1)


def _running_sums(
    features: torch.Tensor, start: torch.Tensor | None, decay: torch.Tensor, reverse: bool = False
) -> torch.Tensor:
    """The sums over what is before each of n chunks, and before the one that would follow: (G, h, B, n, C, c) to
    (G, h, B, n + 1, c). In reverse, over what is after the chunk that would precede, and after each.

    Args:
        start: (G, h, B, c), the sum before the first chunk, or after the last; None for 0.
        decay: of `CausalSums`, for n chunks or more; in reverse, flipped.
    """
    size = features.shape[3] + 1
    totals = features.new_empty(*features.shape[:3], size, features.shape[-1])
    first, others = (-1, slice(0, -1)) if reverse else (0, slice(1, None))
    totals[:, :, :, first] = 0 if start is None else start
    torch.sum(features, -2, out=totals[:, :, :, others])
    decay = decay[:, -size:, -size:] if reverse else decay[:, :size, :size]
    return torch.einsum("sij,ghbjsc->ghbisc", decay, totals.unflatten(-1, (len(decay), -1))).flatten(-2)


def _product_of_chunks(tables: torch.Tensor, features: torch.Tensor, chunks: int) -> torch.Tensor:
    """Each chunk's table (h, n or 1, C, S) with the S positions from it on: (G, h, B, slots, C, c) to
    (G, h, B, n, C, c).
    """
    product = torch.empty_like(features)
    for head, table in enumerate(tables):
        table = _tables_of_windows(table, *features.shape[2:4])
        for x, out in zip(features[:, head], product[:, head]):
            windows = _windows(x, table.shape[-1])
            torch.bmm(table[: len(windows)], windows, out=out.flatten(0, 1)[: len(windows)])
    return product[:, :, :, :chunks]


def _tables_of_windows(tables: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    """Tables (n or 1, C, S) for the windows of all rows. A window into two rows goes unused."""
    if len(tables) == 1:
        return tables.expand(rows * slots, -1, -1)
    if rows == 1:
        return tables
    padded = tables.new_zeros(rows, slots, *tables.shape[1:])
    padded[:, : len(tables)] = tables
    return padded.flatten(0, 1)


def _add_gradient_of_tables(
    of_tables: torch.Tensor, of_sums: torch.Tensor, features: torch.Tensor, chunks: int
) -> None:
    """Adds the gradient of each chunk's table, summed over rows, to (h, n or 1, S, C): a product of windows with
    gradients is faster than one of gradients with windows.
    """
    rows, slots, size = features.shape[2:5]
    span = of_tables.shape[-2]
    for head, of_table in enumerate(of_tables):
        products = features.new_empty(rows * slots, span, size)
        for group, (x, of_x) in enumerate(zip(features[:, head], of_sums[:, head])):
            windows = _windows(x, span)
            gradients = of_x.flatten(0, 1)[: len(windows)].mT
            products[: len(windows)].baddbmm_(windows, gradients, beta=min(group, 1))
        products = products.view(rows, slots, span, size)[:, :chunks]
        of_table += products.sum(0) if len(of_table) > 1 else products.sum((0, 1))


def _windows(features: torch.Tensor, span: int) -> torch.Tensor:
    """(B, slots, C, c) as overlapping windows of `span` positions, one from each slot on: (n, span, c)."""
    rows, slots, size, width = features.shape
    return features.as_strided((rows * slots - span // size + 1, span, width), (size * width, width, 1))
