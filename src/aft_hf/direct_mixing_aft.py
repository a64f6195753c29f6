"""The AFT operation with plain exponentials, for keys and position biases of moderate size.

The forms of `mixing_aft.py` are safe for any input, and pay for that with a maximum in every sum. Where no key and no
position bias is larger than `MODERATE`, exp(K) and exp(w) can be summed as they are: nothing overflows, and nothing
that matters underflows. What is left of Eq. 2 are a few element-wise passes around matrix products, and they run in
blocks that stay in a processor's cache. The gradients are written by hand: they compute exp(K) again rather than keep
it, so that training keeps no more than keys, values, the result and its denominators.

Inside, the two sums of Eq. 2 lie side by side as W = c + k features: exp(K) V, then exp(K), which is copied to its
place because exp is several times slower on rows that are apart. Causal sums of c = k features keep the two apart
instead, each in a piece of memory without gaps. They are kept in float32 at least. Only without
gradients, and where all positions see each other, values of bfloat16 make products of bfloat16, which are added up in
float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from .activations_aft import differentiable_gradients, runs_as_written
from .mixing_aft import collect_grid_table, grid_table, working_dtype


# The largest size of keys and of position biases here. exp(2 x 20) times any length and the size of any value that is
# met is far from float32's limits.
MODERATE = 20.0

# The largest size of values, for which the same holds.
LARGEST_VALUE = 1e12

# Bytes of the features in a block: few enough to stay in the cache, many enough for products to be efficient.
BLOCK_SIZE = 2**22

# The same for causal sums, which have more passes over a block, and each takes some time to start.
CAUSAL_BLOCK_SIZE = 2**23

# Chunks in a block, for which the running sums take a time that is quadratic.
MOST_CHUNKS = 128

# Columns that a product should have at least.
FEWEST_COLUMNS = 256


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
        inverse = _by_position(key, working_dtype(value))
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


class DenseSums(DirectSums):
    """All positions in one product with the table exp(w): O(T^2 d) time, no tensor larger than a block and its table.

    Position biases are (h, T, T), or on a grid (h, 2 rows - 1, 2 columns - 1), by the offset from query to key.

    Args:
        grid_size: (rows, columns) of the grid, or None.
        causal: whether t' <= t only.
    """

    def __init__(self, grid_size: tuple[int, int] | None = None, causal: bool = False):
        self.grid_size, self.causal = grid_size, causal

    def forward(self, key, value, bias, inverse=None):
        dtype = value.dtype if value.dtype == torch.bfloat16 and inverse is None else working_dtype(value)
        exp_bias = torch.exp(bias).to(dtype)
        context = _by_position(value)
        for block in self._blocks(key, value, dtype):
            sums = block.product(self.table(exp_bias[block.heads]), block.features(key, value))
            numerator, denominator = block.parts(sums)
            denominator = self._reciprocal(denominator)
            if inverse is not None:
                block.of(inverse).copy_(denominator)
            block.of(context).copy_(numerator.mul_(denominator))
        return context

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed):
        dtype = working_dtype(value)
        exp_bias = torch.exp(bias).to(dtype)
        key_gradient, value_gradient = _by_position(key), _by_position(value)
        bias_gradient = torch.zeros_like(bias) if bias_needed else None
        for block in self._blocks(key, value, dtype):
            features = block.features(key, value)
            of_sums = torch.empty_like(features)
            inputs = (block.load(x) for x in (gradient, context, inverse))
            gradient_of_sums(*inputs, *block.parts(of_sums), block.feature_dim)
            exp_biases = exp_bias[block.heads]
            if bias_needed:
                of_table = block.gradient_of_table(of_sums, features)
                bias_gradient[block.heads] += self.collect(of_table) * exp_biases
            of_features = block.product(self.table(exp_biases).mT, of_sums)
            gradients = block.of(key_gradient), block.of(value_gradient)
            gradient_of_inputs(block.parts(of_features), block.parts(features), *gradients, block.feature_dim)
        return key_gradient, value_gradient, bias_gradient

    def _blocks(self, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> Iterator["_Block"]:
        """The heads and rows that are taken at once. Rows share a table, so they stay together where they can."""
        rows, heads, length = key.shape[:3]
        width = value.shape[3] + key.shape[3]
        room = BLOCK_SIZE // (dtype.itemsize * length)
        heads_at_once = min(heads, max(1, room // (rows * width + length)))
        rows_at_once = max(FEWEST_COLUMNS // width, room // (heads_at_once * width), 1)
        layout = _BlockOfHeads if heads > 1 else _BlockOfRows
        for head in range(0, heads, heads_at_once):
            for row in range(0, rows, rows_at_once):
                yield layout(slice(head, head + heads_at_once), slice(row, row + rows_at_once), value.shape[3], dtype)

    def table(self, exp_bias: torch.Tensor) -> torch.Tensor:
        """exp(w) as (h, T, T)."""
        if self.grid_size is None:
            return exp_bias.tril() if self.causal else exp_bias
        return grid_table(exp_bias, self.grid_size)

    def product(self, summands: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The sums of (h, W, B, T) that each position sees, by the `table` of these heads."""
        return torch.bmm(summands.flatten(1, 2), table.mT).view_as(summands)

    def size(self, columns: int, length: int) -> int:
        """Numbers in a product for one head with so many features of all rows of a batch, and in its table."""
        return (columns + length) * length

    def collect(self, of_table: torch.Tensor) -> torch.Tensor:
        """The transpose of `table`: what (h, T, T) gives each position bias."""
        if self.grid_size is None:
            return of_table.tril() if self.causal else of_table
        return collect_grid_table(of_table, self.grid_size)


@dataclass(frozen=True)
class _Block:
    """Some heads and rows of the batch, and how their features lie in memory."""

    heads: slice
    rows: slice
    width: int
    dtype: torch.dtype
    feature_dim: ClassVar[int]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The block of (B, h, T, c)."""
        raise NotImplementedError

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """The same to calculate with. Where that transposes, it is a pass of its own, which is faster than a product
        of factors in different orders.
        """
        return self.of(x).to(self.dtype).contiguous()

    def product(self, table: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Sums over the last dimension of the table, (h, T, T), for each feature."""
        raise NotImplementedError

    def gradient_of_table(self, of_sums: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """That of `product`, (h, T, T)."""
        raise NotImplementedError

    def features(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """exp(K) V, then exp(K)."""
        keys, values = self.load(key), self.load(value)
        shape = list(values.shape)
        shape[self.feature_dim] += keys.shape[self.feature_dim]
        features = torch.empty(shape, dtype=self.dtype, device=value.device)
        weighted, weights = self.parts(features)
        weights.copy_(torch.exp(keys))
        torch.mul(values, weights, out=weighted)
        return features

    def parts(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both sums, of c and of k features."""
        return both.tensor_split((self.width,), self.feature_dim)


class _BlockOfHeads(_Block):
    """(h, B, W, T): one product for a head, with long runs of positions however few features it has."""

    feature_dim = -2

    def of(self, x):
        return x[self.rows, self.heads].permute(1, 0, 3, 2)

    def product(self, table, features):
        return torch.bmm(features.flatten(1, 2), table.mT).view_as(features)

    def gradient_of_table(self, of_sums, features):
        return torch.bmm(of_sums.flatten(1, 2).mT, features.flatten(1, 2))


class _BlockOfRows(_Block):
    """(B, T, W), where there is one head: nothing has to be transposed, and there is one product for a row."""

    feature_dim = -1

    def of(self, x):
        return x[self.rows].squeeze(1)

    def product(self, table, features):
        return torch.bmm(table.expand(len(features), -1, -1), features)

    def gradient_of_table(self, of_sums, features):
        return torch.bmm(of_sums, features.mT).sum(0, keepdim=True)


class ConvolutionSums(DirectSums):
    """AFT-conv on a grid as the paper writes it (Eq. 6): a depth-wise convolution with exp(w) - 1, and the sum of all.

    O(T d s^2) time and no table. Position biases are the kernels (h, s, s). For large negative ones, both parts almost
    cancel, so these are left to the safe form.

    Args:
        grid_size: (rows, columns) of the grid.
    """

    lowest_bias = -2.0

    def __init__(self, grid_size: tuple[int, int]):
        self.grid_size = grid_size

    def forward(self, key, value, bias, inverse=None):
        context = _by_position(value)
        features = self._features(key, value)
        everything = features.sum((2, 3), keepdim=True)
        sums = self._numerators_and_denominators(self._convolve(features, bias).add_(everything), value)
        numerator, denominator = sums[0], self._reciprocal(sums[1])
        if inverse is not None:
            inverse.copy_(denominator)
        return torch.mul(numerator, denominator, out=context)

    def backward(self, key, value, bias, context, inverse, gradient, bias_needed):
        key_gradient, value_gradient = _by_position(key), _by_position(value)
        features = self._features(key, value)
        of_sums = torch.empty_like(features)
        gradient_of_sums(gradient, context, inverse, *self._numerators_and_denominators(of_sums, value))
        with torch.enable_grad():
            inputs = features.requires_grad_(), bias.detach().requires_grad_()
            convolved = self._convolve(*inputs)
        of_features, of_bias = torch.autograd.grad(convolved, inputs, of_sums)
        of_features = of_features + of_sums.sum((2, 3), keepdim=True)
        parts = (self._numerators_and_denominators(x, value) for x in (of_features, features.detach()))
        gradient_of_inputs(*parts, key_gradient, value_gradient)
        return key_gradient, value_gradient, of_bias if bias_needed else None

    def _features(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """exp(K) V of all features, then exp(K) of all heads: (B, d + h, rows, columns), channels last in memory."""
        rows, heads, _, width = value.shape
        dtype = working_dtype(value)  # convolutions of bfloat16 are no faster
        features = value.new_empty(rows, *self.grid_size, heads * (width + 1), dtype=dtype).movedim(-1, 1)
        weighted, weights = self._numerators_and_denominators(features, value)
        weights.copy_(torch.exp(key.to(dtype)))
        torch.mul(value, weights, out=weighted)
        return features

    def _numerators_and_denominators(self, channels: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views (B, h, T, c) and (B, h, T, 1) of (B, d + h, rows, columns)."""
        heads, width = value.shape[1], value.shape[3]
        by_position = channels.movedim(1, -1).flatten(1, 2)  # (B, T, d + h)
        parts = by_position.split([heads * width, heads], -1)
        return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)

    def _convolve(self, features: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        kernels = torch.expm1(bias.to(features.dtype)).unsqueeze(1)
        heads, size = len(kernels), kernels.shape[-1]
        of_each = torch.cat([kernels.repeat_interleave(features.shape[1] // heads - 1, 0), kernels])
        return torch.nn.functional.conv2d(features, of_each, padding=size // 2, groups=features.shape[1])


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
        context = _by_position(value)
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
        key_gradient, value_gradient = _by_position(key), _by_position(value)
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
        rows_at_once = min(rows, max(1, CAUSAL_BLOCK_SIZE // (length * width * itemsize)))
        total = -(-length // size)
        chunks = max(1, min(MOST_CHUNKS, CAUSAL_BLOCK_SIZE // (rows_at_once * size * width * itemsize)))
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


# ------------------------------------------------------------------------------------------------- building blocks


def _by_position(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty (B, h, T, c) with memory in the order (B, T, h, c), as projections have it."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width, dtype=dtype or like.dtype).transpose(1, 2)


def _tokens(features: torch.Tensor) -> torch.Tensor:
    """(G, h, B, chunks, C, c) as (G, h, B, T, c)."""
    return features.flatten(3, 4)


def _parts(features: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, ..., W / G) as the part of the numerators (..., c) and that of the denominators (..., k)."""
    if len(features) == 2:
        return features.unbind()
    return features[0].tensor_split((value.shape[-1],), -1)


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
