"""Causal mixing on a CPU in linear time, forward and backward, for keys and position biases of any size.

The sequence is cut into chunks. Each query sums over its own chunk and the chunk before it by products with tables of
exp(w), and over everything further back by a running sum. Exponentials are relative to a reference, the log-sum-exp
shift of a chunk and feature: 0 for moderate keys, otherwise a fixed distance below the largest key so far
(`mixing_cpu_chunks_aft.py`). The backward pass raises it towards the smallest denominator of the chunk, so that hardly
any product is subnormal. Queries that see only keys far below their reference are detected by their denominators and
computed again, all queries of a window at once or each by a softmax (`mixing_cpu_lost_aft.py`), so no query depends on
later tokens. In long sequences whose largest key grows much within the first chunk, the first queries are computed
by a softmax (`mixing_cpu_first_aft.py`).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .activations_aft import are_plain_tensors, differentiable_gradients
from .mixing_cpu_chunks_aft import (
    Chunks,
    Options,
    Rows,
    Segment,
    add_products,
    pairs_of,
    products,
    scaled,
    tokens_of,
)
from .mixing_cpu_first_aft import FIRST, first_averages, first_gradients
from .mixing_cpu_lost_aft import Far, Lost, LostQueries
from .scaled_sums_aft import flush_subnormals, largest_size


# Values below 2^-SMALL_VALUES are multiplied by a power of two in the backward pass, in which their products with
# small gradients would underflow.
SMALL_VALUES = 7

# In shorter sequences, a softmax of the first queries takes longer than the computation of those that are lost.
SHORTEST_SEQUENCE = 32 * FIRST

# The same function of key, value and tables, composed of differentiable operations.
Differentiable = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def causal_mixing(
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor | None,
    slopes: torch.Tensor | None,
    *,
    num_heads: int,
    chunk_size: int,
    differentiable: Differentiable,
    global_connectivity: bool = True,
) -> torch.Tensor:
    """Causal Eq. 2: sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt') over t' <= t; 0 for a query that sees no
    key.

    Args:
        key: (B, T, h k) with k = c, or k = 1 for one key per head; -inf where a token is hidden from all queries.
        value: (B, T, h c).
        tables: w as (h, n or 1, C, 2 C) from each of n chunks to the chunk before it and to itself; further back w
            is 0. None for w = 0, or with `slopes`. Entries for t' > t and for t' < 0 are not used.
        slopes: (h,), for w = -slope (t - t'); None otherwise.
        num_heads: h.
        chunk_size: C.
        differentiable: computes the same function for gradients of gradients and batched gradients.
        global_connectivity: False to hide everything beyond the two chunks.

    Returns:
        (B, T, h c) in the dtype of `value`.
    """
    options = Options(slopes, num_heads, chunk_size, global_connectivity)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (key, value, tables)):
        return _CausalMixing.apply(options, differentiable, key, value, tables)
    return CausalSums(key, value, tables, options).forward(for_backward=False).context


def exponent_of_inverse(x: torch.Tensor) -> int:
    """Return the exponent of the power of two by which the largest number in x becomes about 1; 0 if it is 0 or not
    finite.
    """
    largest = largest_size(x)
    return min(max(-math.frexp(largest)[1], -100), 100) if math.isfinite(largest) and largest > 0 else 0


class _CausalMixing(torch.autograd.Function):
    """The autograd function of `CausalSums`."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        differentiable: Differentiable,
        key: torch.Tensor,
        value: torch.Tensor,
        tables: torch.Tensor | None,
    ) -> torch.Tensor:
        result = CausalSums(key, value, tables, options).forward(for_backward=True)
        ctx.options, ctx.differentiable = options, differentiable
        ctx.save_for_backward(key, value, tables, *result.tensors())
        return result.context.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        key, value, tables, *result = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not are_plain_tensors(gradient):
            with torch.enable_grad():
                inputs = key, value, tables
                output = ctx.differentiable(*inputs)
                return None, None, *differentiable_gradients(output, inputs, needed, gradient)
        with torch.autocast("cpu", enabled=False):
            sums, results = CausalSums(key, value, tables, ctx.options), _Result.of_tensors(*result)
            exponent = 0 if sums.moderate else exponent_of_inverse(value)
            if exponent < SMALL_VALUES:
                return None, None, *sums.backward(results, gradient, needed[2])
            # Gradients of keys and biases are proportional to the values: they are computed for larger values.
            results = results._replace(context=results.context * 2.0**exponent)
            sums = CausalSums(key, value * 2.0**exponent, tables, ctx.options)
            of_key, of_value, of_tables = sums.backward(results, gradient, needed[2])
            of_key = of_key * 2.0**-exponent
            return None, None, of_key, of_value, None if of_tables is None else of_tables * 2.0**-exponent


class _Result(NamedTuple):
    """The context, and the results of the forward pass that the backward pass needs."""

    context: torch.Tensor  # (B, T, d), in float32 at least if there is a backward pass
    # (B, T, h k), reciprocals of the denominators, 0 for lost queries and first queries that are computed by a softmax
    inverse: torch.Tensor | None
    lost: Lost

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.context, self.inverse, *self.lost

    @classmethod
    def of_tensors(cls, context: torch.Tensor, inverse: torch.Tensor | None, *lost: torch.Tensor) -> "_Result":
        return cls(context, inverse, Lost(*lost))


class CausalSums(Chunks):
    """The sums of `causal_mixing` and their gradients."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, tables: torch.Tensor | None, options: Options):
        super().__init__(key, value, tables, options)
        self.lost = LostQueries(self)
        self.first = self._count_first()  # number of first queries that are computed by a softmax

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, for_backward: bool) -> _Result:
        # The backward pass subtracts the context, so it is not rounded to half precision.
        context = torch.empty_like(self.value, dtype=self.dtype if for_backward else None)
        inverse = torch.empty_like(self.key, dtype=self.dtype) if for_backward else None
        found: list[tuple[torch.Tensor, Far | None]] = []
        for rows, segments in self.blocks():
            inverse_of_rows = None if inverse is None else self.by_head(inverse)[:, rows.slice]
            found += self._forward_rows(rows, segments, self.by_head(context)[:, rows.slice], inverse_of_rows)
        if self.first:
            context[:, : self.first] = self._from_groups(first_averages(*self._first_inputs()))
        return _Result(context, inverse, self.lost.restore(found, context))

    def _forward_rows(
        self, rows: Rows, segments: list[Segment], context: torch.Tensor, inverse: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, Far | None]]:
        """Compute some rows from left to right, and yield the lost queries of each segment (`LostQueries.find`)."""
        carry = None  # the running sum over all chunks that the tables of a segment do not reach
        for segment in segments:
            here = segment.positions
            features = self.features(rows, segment)
            far = None
            if self.global_connectivity:
                far = self.running_sums(rows, segment, features, carry)  # (G, h, R, n + 1, W / G)
                carry = far[:, :, :, -1]
            sums = self._sums(rows, segment, features, far)
            numerator, denominator = self.parts(tokens_of(sums)[:, :, :, : here.stop - here.start])
            reciprocal = denominator if inverse is None else inverse[:, :, here]
            torch.reciprocal(denominator, out=reciprocal)
            exact = context[:, :, here] if context.dtype == self.dtype else numerator
            torch.mul(numerator, reciprocal, out=exact)
            if segment.start == 0 and self.first:
                exact[:, :, : self.first], reciprocal[:, :, : self.first] = 0, 0
            lost = self.lost.find(rows, segment, reciprocal, exact, far, for_backward=inverse is not None)
            if lost is not None:
                yield lost
            if exact is numerator:
                context[:, :, here] = exact

    def _sums(self, rows: Rows, segment: Segment, features: torch.Tensor, far: torch.Tensor | None) -> torch.Tensor:
        """Return the sums of each query of a segment, relative to `rows.seen`: (G, h, R, n, C, W / G).

        The features are overwritten if there are no tables.
        """
        start, chunks = segment.start, segment.chunks
        if far is not None:
            far = far[:, :, :, :-1]
            far = scaled(far, self.decay(rows.seen, start - 1 - self.before, start, chunks))
        if self.tables is None:
            assert far is not None  # a window has tables
            # Without tables, all queries of a chunk see its first token, so the running sum is added to that token.
            features[..., 0, :] += far
            return products(self.biases.own, features)
        exponents = rows.difference(start, start, chunks), rows.difference(start - 1, start, chunks)
        if all(x is None or not x.any() for x in exponents):
            sums = products(segment.of(self.biases.weights), pairs_of(features))
        else:
            sums = products(segment.of(self.biases.own), features[:, :, :, 1:])
            # Sums of small values may be subnormal next to normal denominators.
            sums = scaled(sums, exponents[0], out=sums, flush=False)
            previous = products(segment.of(self.biases.previous), features[:, :, :, :-1])
            sums += scaled(previous, exponents[1], out=previous, flush=False)
        if far is not None:
            weight = self.biases.far_weight
            far = far.unsqueeze(-2)
            sums += far if weight is None else far * segment.of(weight).unsqueeze(1)
        return sums

    # -------------------------------------------------------------------------------------------------- backward

    def backward(
        self, result: _Result, gradient: torch.Tensor, tables_needed: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients of key, value and tables (None unless needed)."""
        assert result.inverse is not None  # the forward pass ran with `for_backward`
        gradient = gradient.contiguous()
        any_lost = len(result.lost.index) > 0
        exponent = 0
        if not self.moderate:
            # The largest gradient is about 2^9 (see GRADIENT_MARGIN), so that products of small ones do not underflow.
            exponent = 9 + exponent_of_inverse(gradient)
            gradient = gradient.to(self.dtype) * 2.0**exponent
        # Gradients of several parts are added in the dtype of the sums, and rounded once.
        wide = any_lost or not self.moderate
        key_gradient, value_gradient = (
            torch.empty_like(x, dtype=self.dtype if wide else x.dtype) for x in (self.key, self.value)
        )
        of_tables = None
        if tables_needed:
            of_tables = torch.zeros_like(self.biases.weights.mT, memory_format=torch.contiguous_format)
        of_far = None
        if any_lost and self.global_connectivity:
            of_far = self.lost.gradient_of_far(result.lost, result.context, gradient)
        for rows, segments in self.blocks():
            whole = result.context, result.inverse, gradient, key_gradient, value_gradient
            here = (self.by_head(x)[:, rows.slice] for x in whole)
            self._backward_rows(rows, segments, *here, of_tables=of_tables, of_far=of_far)
        tables_gradient = None if of_tables is None else self.biases.gradient(of_tables)
        if any_lost:
            self.lost.add_gradients(
                result.lost, result.context, gradient, key_gradient, value_gradient, tables_gradient
            )
        if self.first:
            self._add_first_gradients(gradient, key_gradient, value_gradient, tables_gradient)
        if exponent != 0:
            for x in (key_gradient, value_gradient, tables_gradient):
                if x is not None:
                    x *= 2.0**-exponent
        if not self.moderate:
            flush_subnormals(key_gradient)
            flush_subnormals(value_gradient)
        if tables_gradient is not None and self.tables is not None:
            tables_gradient = tables_gradient.to(self.tables.dtype)
        return key_gradient.to(self.key.dtype), value_gradient.to(self.value.dtype), tables_gradient

    def _backward_rows(
        self,
        rows: Rows,
        segments: list[Segment],
        context: torch.Tensor,
        inverse: torch.Tensor,
        gradient: torch.Tensor,
        key_gradient: torch.Tensor,
        value_gradient: torch.Tensor,
        *,
        of_tables: torch.Tensor | None,
        of_far: torch.Tensor | None,
    ) -> None:
        """Compute the gradients of some rows from right to left, since a key contributes to the queries after it."""
        rows, increase = self.rows_of_backward(rows, inverse)
        carry = None
        # Gradients of the sums of the chunk after a segment, and the totals of the first chunks after it.
        following: torch.Tensor | float = 0.0
        ahead: torch.Tensor | float = 0.0
        for segment in reversed(segments):
            here = segment.positions
            count = here.stop - here.start
            features = self.features(rows, segment)
            of_sums = torch.empty_like(features)  # of the chunks, then of the chunk that follows
            tokens = tokens_of(of_sums)
            tokens[:, :, :, count:] = 0
            of_sums[:, :, :, segment.chunks :] = following
            inverse_here = inverse[:, :, here]
            if increase is not None:
                factor = torch.exp(increase[:, :, segment.start : segment.stop])
                inverse_here = factor.repeat_interleave(segment.size, 2)[:, :, :count] * inverse_here
            self._gradient_of_sums(gradient[:, :, here], context[:, :, here], inverse_here, tokens[:, :, :, :count])
            following = of_sums[:, :, :, : self.before].clone()
            later = None
            if self.global_connectivity:
                extra = None if of_far is None else of_far[:, :, rows.slice, segment.start : segment.stop]
                if extra is not None and increase is not None:
                    extra = extra * factor
                later, ahead = self._later_sums(rows, segment, of_sums, ahead, carry, extra)
                carry = later[:, :, :, :1]
            of_features = self._gradient_of_features(rows, segment, of_sums, later, features, of_tables)
            of_inputs = key_gradient[:, :, here], value_gradient[:, :, here]
            features_here = tokens_of(features[:, :, :, self.before :])[:, :, :, :count]
            self._gradient_of_inputs(tokens_of(of_features)[:, :, :, :count], features_here, *of_inputs)

    def _gradient_of_features(
        self,
        rows: Rows,
        segment: Segment,
        of_sums: torch.Tensor,
        later: torch.Tensor | None,
        features: torch.Tensor,
        of_tables: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply the transpose of `_sums`, and add to the gradients of the tables. `of_sums` is overwritten."""
        start, chunks = segment.start, segment.chunks
        if self.tables is None:
            assert later is not None
            of_sums[..., -1, :] += later
            return products(self.biases.own.mT, of_sums)
        tables = segment.of(self.biases.of_keys)
        exponents = rows.difference(start, start, chunks), rows.difference(start - 1, start, chunks + 1)
        if all(x is None or not x.any() for x in exponents):
            of_features = products(tables, pairs_of(of_sums))
            if of_tables is not None:
                add_products(segment.of(of_tables), pairs_of(features), of_sums[:, :, :, :-1])
        else:
            table, table_of_next = tables.split(segment.size, -1)
            own = scaled(of_sums[:, :, :, :-1], exponents[0])
            of_features = products(table, own)
            if of_tables is not None:
                add_products(segment.of(of_tables)[..., segment.size :, :], features[:, :, :, 1:], own)
            previous = scaled(of_sums, exponents[1], out=of_sums)  # overwrites `own`, too, if it is a view
            products(table_of_next, previous[:, :, :, 1:], of_features)
            if of_tables is not None:
                of_table = segment.of(of_tables)[..., : segment.size, :]
                add_products(of_table, features[:, :, :, :-1], previous[:, :, :, :-1])
        return of_features if later is None else of_features.add_(later.unsqueeze(-2))

    def _later_sums(
        self,
        rows: Rows,
        segment: Segment,
        of_sums: torch.Tensor,
        ahead: torch.Tensor | float,
        carry: torch.Tensor | None,
        extra: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the running sums at each chunk of a segment, (G, h, R, n, W / G), and the totals of
        the first chunks, which the segment before needs.
        """
        reach, chunks = 1 + self.before, segment.chunks
        totals = of_sums.new_empty(*of_sums.shape[:3], chunks + reach, of_sums.shape[-1])
        here = of_sums[:, :, :, :chunks]
        weight = self.biases.far_weight
        torch.sum(here if weight is None else here * segment.of(weight).unsqueeze(1), -2, out=totals[:, :, :, :chunks])
        totals[:, :, :, chunks:] = ahead
        ahead, later = totals[:, :, :, :reach].clone(), totals[:, :, :, reach:]
        later = scaled(later, self.decay(rows.seen, segment.start, segment.start + reach, chunks))
        if extra is not None:
            later += extra
        if carry is not None:
            later[:, :, :, -1:] += scaled(carry, self.decay(rows.seen, segment.stop - 1, segment.stop, 1))
        self.accumulate(later, rows.seen, segment.start, reverse=True)
        return later, ahead

    def _gradient_of_sums(
        self, gradient: torch.Tensor, context: torch.Tensor, inverse: torch.Tensor, of_sums: torch.Tensor
    ) -> None:
        """Write the gradients of both sums into `of_sums`, from the gradient of their quotients."""
        of_numerator, of_denominator = self.parts(of_sums)
        torch.mul(gradient, inverse, out=of_numerator)
        if self.groups == 2:
            torch.mul(of_numerator, context, out=of_denominator)
        else:
            torch.sum(of_numerator * context, -1, keepdim=True, out=of_denominator)
        of_denominator.neg_()

    def _gradient_of_inputs(
        self,
        of_features: torch.Tensor,
        features: torch.Tensor,
        key_gradient: torch.Tensor,
        value_gradient: torch.Tensor,
    ) -> None:
        """Write the gradients of K and V, from the gradients of exp(K) V and exp(K), which are overwritten."""
        (of_weighted, of_weights), (weighted, weights) = self.parts(of_features), self.parts(features)
        torch.mul(of_weighted, weights, out=value_gradient)
        from_values = of_weighted.mul_(weighted)
        if self.groups == 1:
            from_values = from_values.sum(-1, keepdim=True)
        torch.addcmul(from_values, of_weights, weights, out=key_gradient)

    # --------------------------------------------------------------------------------------------- first queries

    def _count_first(self) -> int:
        """Return the number of first queries that are computed by a softmax: as many as are often lost, or none."""
        if self.moderate or self.length < SHORTEST_SEQUENCE:
            return 0
        chunk = self.key[:, : self.chunk_size].to(self.dtype)  # a maximum is computed faster in this dtype
        if not float((chunk.amax(1) - chunk[:, 0]).amax()) > self.lost.near:
            return 0
        count = min(FIRST, self.chunk_size, self.length)
        return count if all(bool(x[:, :count].isfinite().all()) for x in (self.key, self.value)) else 0

    def _first_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the first keys (G, k, B, F) and values (G, c, B, F), and their biases (G, F, F); G is h, or 1 if all
        heads share the biases.
        """
        bias = self.lost.biases[:, 0, : self.first, -self.chunk_size :][..., : self.first]
        return self._to_groups(self.key, len(bias)), self._to_groups(self.value, len(bias)), bias

    def _add_first_gradients(
        self,
        gradient: torch.Tensor,
        key_gradient: torch.Tensor,
        value_gradient: torch.Tensor,
        tables_gradient: torch.Tensor | None,
    ) -> None:
        """Add the gradients from the first queries to those of keys, values and tables."""
        key, value, bias = self._first_inputs()
        of_key, of_value, of_bias = first_gradients(key, value, bias, self._to_groups(gradient, len(bias)))
        key_gradient[:, : self.first] += self._from_groups(of_key)
        value_gradient[:, : self.first] += self._from_groups(of_value)
        if tables_gradient is not None:
            tables_gradient[:, 0, : self.first, -self.chunk_size :][..., : self.first] += of_bias

    def _to_groups(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """View the first positions of (B, T, G w) as (G, w, B, F)."""
        return x[:, : self.first].unflatten(-1, (groups, -1)).permute(2, 3, 0, 1)

    @staticmethod
    def _from_groups(x: torch.Tensor) -> torch.Tensor:
        """View (G, w, B, F) as (B, F, G w)."""
        return x.flatten(0, 1).permute(1, 2, 0)
