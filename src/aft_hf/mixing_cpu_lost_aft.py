"""Queries of the chunked causal mixing whose sums lost their terms: how they are found and computed exactly.

`mixing_cpu_causal_aft.py` sums exp(K) relative to one reference for each chunk and feature. A query that sees only
keys far below that reference, for instance the first tokens of a chunk in which a much larger key comes later, has a
denominator near 0: it is lost. Here each lost query gets a softmax of its own over the keys of its window, with one
more term for the running sum of everything further back, and its part of the backward pass.

The lost queries of a chunk and feature see the same window, so keys and values are gathered once for all of them.
"""

import math
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from .mixing_cpu_chunks_aft import SMALLEST_EXPONENT, Chunks, Rows, Segment


# Below this size of biases, K + w relative to the largest one is precise in the dtype of the sums.
LARGEST_BIAS = 20.0

# Numbers of each tensor that is computed at once: what stays in a processor's cache.
PIECE_SIZE = 2**17


class Lost(NamedTuple):
    """Lost queries of one feature (or head) each, and their softmax for the backward pass."""

    index: torch.Tensor  # type: ignore[assignment]  # in the place of the method of tuples: (N,) in the flat (B, T, h k)
    log_sum: torch.Tensor  # (N,) log of the denominator in float64, inf where there is nothing to see
    far_inverse: torch.Tensor  # (N,) share of the running sum in the weights over its denominator, 0 without one


class Far(NamedTuple):
    """The running sums that lost queries see beyond their windows."""

    numerator: torch.Tensor  # (N, c / k)
    denominator: torch.Tensor  # (N,)
    reference: torch.Tensor  # (N,) in float64


class Places(NamedTuple):
    """Lost queries by their places in (h, R, T, k) of a segment."""

    head: torch.Tensor
    row: torch.Tensor
    token: torch.Tensor
    feature: torch.Tensor

    def at(self, which: torch.Tensor) -> "Places":
        return Places(*(x[which] for x in self))


class LostQueries:
    """Lost queries of `sums`. Tensors are indexed in the flat (B, T, h k), where k = c or k = 1 for keys per head."""

    def __init__(self, sums: Chunks):
        # The sums own this object: a reference back would keep their tensors until garbage is collected.
        self.sums, self.dtype = weakref.proxy(sums), sums.dtype
        self.key, self.value = sums.key, sums.value
        self.size, self.span = sums.chunk_size, (1 + sums.before) * sums.chunk_size
        self.length, self.width = sums.key.shape[1:]

    @cached_property
    def biases(self) -> torch.Tensor:
        """w from each query of a chunk to its window of S keys, -inf where a key comes after the query:
        (h or 1, n or 1, C, S), in float64 where sums K + w would lose digits.
        """
        place = torch.arange(self.span, device=self.key.device)
        lag = place[-self.size :, None] - place
        if self.sums.tables is not None:
            biases = self.sums.tables.detach().to(self.dtype)
            largest = biases.masked_fill(biases == -math.inf, 0.0).abs().amax()
            biases = biases if float(largest) <= LARGEST_BIAS else biases.double()
        elif self.sums.slopes is not None:
            biases = (-self.sums.slopes.to(self.dtype)[:, None, None] * lag).unsqueeze(1)
        else:
            biases = torch.zeros(1, 1, *lag.shape, dtype=self.dtype, device=lag.device)
        return biases.masked_fill(lag < 0, -math.inf)

    # ---------------------------------------------------------------------------------------------------- search

    def find(self, rows: Rows, segment: Segment, inverse, context, far, for_backward: bool):
        """The lost queries of a segment, as `Places` and by index, those left out that see nothing: their context is
        set to 0. Clears `inverse` for the backward pass.

        None, after one look at all numbers, where there are none.
        """
        most = math.exp(-self.sums.biases.lost_exponent(rows.seen is None))
        finite = math.isfinite(float(context.sum()))
        if finite and float(inverse.amax()) <= most:
            return None
        lost = inverse > most  # (h, R, T, k)
        by_feature = context.unflatten(-1, (inverse.shape[-1], -1))  # (h, R, T, k, c / k)
        if not finite:
            # Most often these are quotients 0 / 0 of the same queries.
            by_feature.masked_fill_(lost.unsqueeze(-1), 0.0)
            if not math.isfinite(float(context.sum())):
                lost |= ~by_feature.isfinite().all(-1)
        places = Places(*torch.unravel_index(lost.reshape(-1).nonzero().squeeze(-1), lost.shape))
        if far is not None and not finite:
            # Where what lies further back is NaN, so is the result.
            numerator, denominator = self.sums.far_parts(far)
            here = places.head, places.row, places.token // self.size, places.feature
            unknown = denominator[here].isnan() | numerator[here].isnan().all(-1)
            by_feature[places.at(unknown)] = math.nan
            places = places.at(~unknown)
        if for_backward:
            inverse[places] = 0
        position = places.token + segment.positions.start
        first = rows.first_visible() if self.sums.global_connectivity else None
        if first is not None:
            by_feature[places] = 0
            visible = position >= first[places.head, places.row, 0, places.feature]
            places, position = places.at(visible), position[visible]
        if len(position) == 0:
            return None
        index = ((places.row + rows.slice.start) * self.length + position) * self.width
        return places, index.add_(places.head * inverse.shape[-1]).add_(places.feature)

    def far(self, rows: Rows, segment: Segment, places: Places, far: torch.Tensor | None) -> Far | None:
        """What lost queries of a segment see of its running sums."""
        if far is None:
            return None
        here = places.head, places.row, places.token // self.size, places.feature
        numerator, denominator = (x[here] for x in self.sums.far_parts(far))
        reference = torch.zeros_like(denominator, dtype=torch.float64)
        references = rows.references_of_far(segment, self.sums.before)
        if references is not None:
            reference += references[here]
        if self.sums.slopes is not None:
            distance = places.token % self.size + self.size  # to the start of the chunk before
            reference -= self.sums.slope_of_features().double()[places.feature] * distance
        return Far(numerator, denominator, reference)

    # --------------------------------------------------------------------------------------------------- forward

    def redo(self, index: torch.Tensor, far: Far | None) -> tuple[Lost, torch.Tensor]:
        """The softmax of each lost query, and the averages (N, c / k)."""
        pieces = []
        for piece in self._pieces(index):
            window = _Window(self, index[piece])
            keys, biases = window.keys_of_queries(), window.biases_of_queries()
            top = (keys + biases).amax(-1)  # (N,)
            if far is not None:
                here = Far(*(x[piece] for x in far))
                of_far = here.denominator.double().log().add_(here.reference)
                top = torch.maximum(top, of_far.to(top.dtype))
            top.masked_fill_(top == -math.inf, 0.0)
            weights = _weights(keys, top, biases, self.dtype)  # (N, S)
            total = weights.sum(-1)
            sums = torch.bmm(weights.unsqueeze(1), window.values_of_queries()).squeeze(1)  # (N, c / k)
            share = torch.zeros_like(total)
            if far is not None:
                weight = torch.exp(of_far - top).to(self.dtype)
                total += weight
                inverse = (weight / here.denominator).masked_fill_(weight == 0, 0.0)
                sums += (inverse.unsqueeze(-1) * here.numerator).masked_fill_((weight == 0).unsqueeze(-1), 0.0)
                share = inverse / total.masked_fill(total == 0, 1.0)
            log_sum = (top.double() + total.double().log()).masked_fill_(total == 0, math.inf)
            pieces.append((index[piece], log_sum, share, sums / total.masked_fill(total == 0, 1.0).unsqueeze(-1)))
        *lost, average = map(torch.cat, zip(*pieces))
        return Lost(*lost), average

    # -------------------------------------------------------------------------------------------------- backward

    def gradient_of_far(self, lost: Lost, context: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What lost queries add to the gradients of the running sums: (G, h, B, n, W / G)."""
        index, share = lost.index, lost.far_inverse.unsqueeze(-1)
        heads, width = self.sums.heads, self.width
        chunks = -(-self.length // self.size)
        row, position = index // width // self.length, index // width % self.length
        place = position // self.size - 1 - self.sums.before
        reached = place >= 0
        target = ((row * chunks + place) * width + index % width)[reached]
        of_numerator = (share * self._at_queries(gradient, index).to(self.dtype))[reached]
        of_denominator = -(of_numerator * self._at_queries(context, index)[reached]).sum(-1)
        total = of_numerator.new_zeros(self.value.shape[0] * chunks * width, of_numerator.shape[-1] + 1)
        total.index_add_(0, target, torch.cat([of_numerator, of_denominator.unsqueeze(-1)], -1))
        total = total.view(-1, chunks, heads, width // heads, total.shape[-1]).permute(2, 0, 1, 3, 4)
        if self.sums.groups == 2:  # (h, B, n, c, 2)
            return torch.stack(total.unbind(-1))
        return total.squeeze(3).unsqueeze(0)

    def add_gradients(self, lost: Lost, context, gradient, key_gradient, value_gradient, tables_gradient) -> None:
        """What lost queries add to the gradients of the keys, values and biases of their windows."""
        of_keys = key_gradient.view(-1)
        of_values = value_gradient.view(len(of_keys), -1)
        for piece in self._pieces(lost.index):
            index = lost.index[piece]
            window = _Window(self, index)
            biases = window.biases_of_queries()
            # A log-sum is rounded to the dtype of the keys, and the rest goes into the gradient.
            log_sum = lost.log_sum[piece].to(biases.dtype)
            rest = torch.exp(log_sum.double() - lost.log_sum[piece]).nan_to_num_(1.0).to(self.dtype)
            weights = _weights(window.keys_of_queries(), log_sum, biases, self.dtype)  # (N, S)
            of_context = self._at_queries(gradient, index) * rest.unsqueeze(-1)  # (N, c / k)
            difference = window.values_of_queries() - self._at_queries(context, index).unsqueeze(1)
            of_logits = torch.bmm(difference, of_context.unsqueeze(-1)).squeeze(-1).mul_(weights)
            if not window.finite:
                of_logits.masked_fill_(window.hidden(), 0.0)
            window.add_to(of_keys.unsqueeze(-1), of_logits.unsqueeze(-1))
            window.add_to(of_values, weights.unsqueeze(-1) * of_context.unsqueeze(1))
            if tables_gradient is not None:
                tables_gradient.view(-1, self.span).index_add_(0, window.bias_rows, of_logits)

    # ---------------------------------------------------------------------------------------------------- shared

    def _at_queries(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The features of (B, T, d) that share a place in the flat (B, T, h k): (N, c / k)."""
        return x.view(self.key.numel(), -1).index_select(0, index)

    def _pieces(self, index: torch.Tensor) -> Iterator[slice]:
        step = max(1, PIECE_SIZE // (self.span * self.value.shape[-1] // self.width))
        return (slice(i, i + step) for i in range(0, len(index), step))


class _Window:
    """The windows of S keys and values that some lost queries see: one for all queries of a chunk and feature."""

    def __init__(self, lost: LostQueries, index: torch.Tensor):
        size, span, width = lost.size, lost.span, lost.width
        token = index // width
        place = token % lost.length % size
        own, self.of_query = torch.unique(index - place * width, return_inverse=True)  # the first query of each chunk
        lag = torch.arange(size - span, size, device=index.device)  # (S,)
        position = (own // width % lost.length).unsqueeze(-1) + lag
        missing = (position < 0) | (position >= lost.length)  # (M, S)
        own = own.unsqueeze(-1)
        self.tokens = torch.where(missing, own, own + lag * width).flatten()
        self.keys = lost.key.view(-1).index_select(0, self.tokens).view(missing.shape).to(lost.biases.dtype)
        self.keys.masked_fill_(missing, -math.inf)
        values = lost.value.view(lost.key.numel(), -1).index_select(0, self.tokens)
        self.values = values.view(*missing.shape, -1).to(lost.dtype)  # (M, S, c / k)
        # Infinity and NaN must not reach queries that do not see them.
        self.finite = float(self.keys.amax()) < math.inf and math.isfinite(float(self.values.sum()))
        heads, chunks = lost.biases.shape[:2]
        row = index % width // (width // heads) if heads > 1 else 0
        row = row * chunks + (token % lost.length // size if chunks > 1 else 0)
        self.bias_rows = row * size + place
        self.biases = lost.biases.flatten(0, 2)

    def biases_of_queries(self) -> torch.Tensor:
        return self.biases.index_select(0, self.bias_rows)

    def keys_of_queries(self) -> torch.Tensor:
        """(N, S), a copy."""
        keys = self.keys.index_select(0, self.of_query)
        return keys if self.finite else keys.masked_fill_(self.biases_of_queries() == -math.inf, -math.inf)

    def values_of_queries(self) -> torch.Tensor:
        """(N, S, c / k)"""
        values = self.values.index_select(0, self.of_query)
        return values if self.finite else values.masked_fill_(self.hidden().unsqueeze(-1), 0.0)

    def hidden(self) -> torch.Tensor:
        """Which keys a query does not see: (N, S)."""
        return (self.keys_of_queries() == -math.inf) | (self.biases_of_queries() == -math.inf)

    def add_to(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Adds x (N, S, w) to the rows of a gradient (B T h k, w)."""
        # Queries of one window are added row by row first, which is faster than by token.
        total = x.new_zeros(*self.keys.shape, x.shape[-1]).index_add_(0, self.of_query, x)
        gradient.index_add_(0, self.tokens, total.flatten(0, 1))


def _weights(keys: torch.Tensor, reference: torch.Tensor, biases: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(K - reference + w), in place of the keys. The difference comes first: it is exact where it matters."""
    exponents = keys.sub_(reference.unsqueeze(-1)).add_(biases)
    smallest = SMALLEST_EXPONENT[dtype]
    # exp(-inf) takes as long as a subnormal result.
    weights = exponents.to(dtype).clamp_(min=smallest).exp_()
    return torch.threshold_(weights, 2 * math.exp(smallest), 0.0)
