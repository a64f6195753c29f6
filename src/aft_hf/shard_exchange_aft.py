"""What the processes that share a sequence tell each other, for any number of tokens: one state, and one window.

Everything before a piece of a sequence enters Eq. 2 as two sums for each feature. They are those of one token with the
key log(sum of exp(K + w)) and the value of the average. So each process puts what lies before its piece in front of
it, as such a token and the last `reach` tokens as they are, and any backend computes the rest as if the piece were the
whole sequence.

To get there, each process receives the last `reach` tokens before its piece, sums over the tokens that lie farther
back than `reach` for the next piece, and gathers the sums of all processes. The backward pass is the same in reverse.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from .scaled_sums_aft import EMPTY, ScaledSums, working_dtype
from .sequence_shards_aft import SequenceShard


# What lies far back is put into so many tokens: the key of one cannot hold a logarithm more exactly than keys of its
# size are spaced. The second token has the rest.
FAR_TOKENS = 2

# Numbers of a piece that are summed at once: what is computed for it again in the backward pass is not kept.
NUMBERS_AT_ONCE = 2**22


def with_past(
    shard: SequenceShard,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    num_heads: int,
    reach: int,
    slopes: torch.Tensor | None = None,
    hides_outside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece of a sequence with what comes before it, as tokens in front: keys and values, float32 at least.

    Args:
        key: (B, T, h k), real tokens first in each row; -inf for the others.
        value: (B, T, d).
        num_heads: h.
        reach: the largest distance at which w may differ from 0.
        slopes: (h,), for w = -slope * distance.
        hides_outside: whether nothing beyond `reach` is seen.

    Returns:
        (B, E + T, h k) and (B, E + T, d) with E = `count_of_past` tokens in front, those that do not exist hidden.
    """
    return _WithPast.apply(_Exchange(shard, num_heads, reach, slopes, hides_outside), key, value)


def count_of_past(reach: int, hides_outside: bool) -> int:
    """E, how many tokens `with_past` puts in front."""
    return reach if hides_outside else FAR_TOKENS + reach


@torch.no_grad()
def state_at_end(
    shard: SequenceShard, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, ScaledSums | None]:
    """What generation goes on from after the last piece, in every process. The arguments are those of `with_past`.

    Returns:
        The last `reach` keys and values of each row on the right, (B, reach, h k) and (B, reach, d), with keys of -inf
        where a row is shorter; and the sums over what lies before them, (B, h, c) and (B, h, k), as the last token
        sees them, or None where nothing beyond `reach` is seen.
    """
    exchange = _Exchange(shard, **options)
    own = exchange.forward(key, value)[2]
    keys, values = exchange.new_window(key, value, exchange.reach)
    if exchange.reach > 0:
        exchange.receive_window(key, value, keys, values, to_end=True)
    if own is None:
        return keys, values, None
    return keys, values, exchange.combined(exchange.gathered(own), *shard.received(shard.size))


class _WithPast(torch.autograd.Function):
    """`with_past` to autograd. All processes run it, and its backward pass, at the same point."""

    @staticmethod
    def forward(
        ctx: Any, exchange: "_Exchange", key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange, ctx.dtypes = exchange, (key.dtype, value.dtype)
        keys, values, own, far = exchange.forward(key, value)
        ctx.save_for_backward(keys, values, *(own or ()), *(far or ()))
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_keys: torch.Tensor, of_values: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        keys, values, *sums = ctx.saved_tensors
        own, far = (ScaledSums(*sums[:3]), ScaledSums(*sums[3:])) if sums else (None, None)
        of_key, of_value = ctx.exchange.backward(keys, values, own, far, of_keys, of_values)
        return None, of_key.to(ctx.dtypes[0]), of_value.to(ctx.dtypes[1])


class _Exchange:
    """Both passes of `with_past`. Sums are laid out as (B, h, c) and (B, h, k), gathered ones with N in front."""

    def __init__(
        self, shard: SequenceShard, num_heads: int, reach: int, slopes: torch.Tensor | None, hides_outside: bool
    ):
        self.shard, self.num_heads, self.reach, self.slopes = shard, num_heads, reach, slopes
        self.far_tokens = count_of_past(reach, hides_outside) - reach

    # --------------------------------------------------------------------------------------------------- forward

    def forward(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ScaledSums | None, ScaledSums | None]:
        """Keys and values with the past in front, and the sums over this piece and over what lies far back: None
        where that is not seen.
        """
        past = self.far_tokens + self.reach
        keys, values = self.new_window(key, value, past + key.shape[1])
        keys[:, past:], values[:, past:] = key, value
        if self.reach > 0:
            self.receive_window(key, value, keys[:, self.far_tokens :], values[:, self.far_tokens :])
        if not self.far_tokens:
            return keys, values, None, None
        own = self._sums(keys, values)
        far = self.combined(self.gathered(own), *self.shard.received())
        self._put_far(far, keys, values)
        return keys, values, own, far

    def new_window(self, key: torch.Tensor, value: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of hidden tokens, (B, length, h k) and (B, length, d)."""
        dtype = working_dtype(value)
        hidden = key.new_full((len(key), length, key.shape[-1]), -math.inf, dtype=dtype)
        return hidden, value.new_zeros((len(key), length, value.shape[-1]), dtype=dtype)

    def receive_window(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        to_end: bool = False,
    ) -> None:
        """Send tokens to the pieces that need them; what comes goes into the first `reach` of keys and values."""
        routes = self.shard.routes(self.reach, to_end=to_end)
        sent = torch.cat([x.flatten(0, 1)[routes.sent] for x in (key, value)], -1)
        received = self._exchange(sent, routes.sent_sizes, routes.received_sizes)
        row, slot = routes.received // self.reach, routes.received % self.reach
        keys[row, slot], values[row, slot] = received.to(keys.dtype).split([key.shape[-1], value.shape[-1]], -1)

    def _exchange(self, tokens: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        """Tokens (M, c) for other pieces, so many for each, in return for theirs."""
        received = tokens.new_empty(sum(taken), tokens.shape[-1])
        distributed.all_to_all_single(received, tokens.contiguous(), taken, given, group=self.shard.group)
        return received

    def _sums(self, keys: torch.Tensor, values: torch.Tensor) -> ScaledSums:
        """Over what this piece adds to the sums of those after it, as they see its last token."""
        total = None
        for key, value in self._summed_parts(keys, values):
            maximum = key.amax(1).clamp_min(EMPTY)
            weights = torch.exp(key - maximum.unsqueeze(1))
            sums = ScaledSums((weights * value).sum(1), weights.sum(1), maximum)
            total = sums if total is None else total.merge(sums)
        assert total is not None  # a piece has tokens
        return total

    def _summed_parts(self, keys: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K + w and V of the tokens to sum over, (B, t, h, k) and (B, t, h, c) for some of them at a time."""
        for start, stop in self._parts(keys.shape[1], values[:, 0].numel()):
            key, value = (x[:, start:stop].unflatten(-1, (self.num_heads, -1)) for x in (keys, values))
            hidden, bias = self._bias(start, stop, keys)
            key = key if bias is None else key + bias
            yield key if hidden is None else key.masked_fill(hidden, -math.inf), value

    def _parts(self, length: int, numbers: int) -> list[tuple[int, int]]:
        """Where the tokens to sum over start and end, some at a time, counted with what is in front."""
        first, last = self.far_tokens, length - self.reach
        step = max(1, NUMBERS_AT_ONCE // numbers)
        return [(start, min(start + step, last)) for start in range(first, last, step)]

    def _bias(self, start: int, stop: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of tokens start .. stop, which are not summed over, (B, t, 1, 1), and w, (B, t, h, 1)."""
        shard = self.shard
        if shard.is_whole and self.slopes is None:
            return None, None
        place = torch.arange(start - self.far_tokens, stop - self.far_tokens, device=like.device)
        first, last = shard.last_tokens(self.reach).to(like.device).unbind(-1)
        outside = (place < first[:, None]) | (place >= last[:, None])
        hidden = None if shard.is_whole else outside[:, :, None, None]
        if self.slopes is None:
            return hidden, None
        distance = (last[:, None] - 1 - place).clamp_min(0)  # padding stands behind the last token
        return hidden, (-distance[..., None].to(like.dtype) * self.slopes.to(like.dtype)).unsqueeze(-1)

    def gathered(self, sums: ScaledSums) -> ScaledSums:
        """The sums of all processes, (N, B, h, c) and (N, B, h, k)."""
        widths = [x.shape[-1] for x in sums]
        return ScaledSums(*self.shard.gather(torch.cat(sums, -1)).split(widths, -1))

    def combined(self, sums: ScaledSums, counts: torch.Tensor, distances: torch.Tensor) -> ScaledSums:
        """The sum over those of all processes that count, (N, B), as seen from the given distances."""
        maximum = sums.maximum + self._decays(distances, sums.maximum)
        maximum = maximum.masked_fill(~counts.to(maximum.device)[..., None, None], EMPTY)
        largest = maximum.amax(0)
        scale = torch.exp(maximum - largest) * counts.to(maximum)[..., None, None]
        return ScaledSums((sums.numerator * scale).sum(0), (sums.denominator * scale).sum(0), largest)

    def _decays(self, distances: torch.Tensor, like: torch.Tensor) -> torch.Tensor | float:
        """w at distances (N, B), as (N, B, h, 1)."""
        if self.slopes is None:
            return 0.0
        return (-distances.to(like)[..., None] * self.slopes.to(like)).unsqueeze(-1)

    def _put_far(self, far: ScaledSums, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what lies far back as tokens: one a little smaller than the sums, and one that holds the rest."""
        exists = far.denominator > 0
        denominator = far.denominator.masked_fill(~exists, 1.0)
        values[:, : self.far_tokens] = (far.numerator / denominator).flatten(1).unsqueeze(1)
        logarithm = far.maximum + denominator.log()
        key = logarithm - 2 * torch.finfo(logarithm.dtype).eps * logarithm.abs()
        rest = (denominator * torch.exp(far.maximum - key) - 1).clamp_min(torch.finfo(logarithm.dtype).tiny)
        for place, logits in enumerate((key + rest.log(), key)):
            if self.slopes is not None:  # at the distance of its place
                logits = logits + self.slopes.to(logits)[:, None] * (self.far_tokens - 1 - place)
            keys[:, place] = logits.masked_fill(~exists, -math.inf).flatten(1)

    # -------------------------------------------------------------------------------------------------- backward

    def backward(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: ScaledSums | None,
        far: ScaledSums | None,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of key and value from those of what `forward` gave."""
        past, width = self.far_tokens + self.reach, keys.shape[-1]
        of_keys, of_values = (x.clone(memory_format=torch.contiguous_format) for x in (of_keys, of_values))
        if own is not None and far is not None:
            of_own = self._gradient_of_own(own, far, of_keys, of_values)
            self._add_from_sums(keys, values, of_own, of_keys, of_values)
        of_key, of_value = of_keys[:, past:], of_values[:, past:]
        if self.reach > 0:
            routes = self.shard.routes(self.reach)
            row, slot = routes.received // self.reach, routes.received % self.reach + self.far_tokens
            window = torch.cat([of_keys[row, slot], of_values[row, slot]], -1)
            window = self._exchange(window, routes.received_sizes, routes.sent_sizes)
            row, slot = routes.sent // of_key.shape[1], routes.sent % of_key.shape[1]
            for x, gradient in zip((of_key, of_value), window.split([width, values.shape[-1]], -1)):
                x.index_put_((row, slot), gradient, accumulate=True)
        return of_key, of_value

    def _gradient_of_own(
        self, own: ScaledSums, far: ScaledSums, of_keys: torch.Tensor, of_values: torch.Tensor
    ) -> ScaledSums:
        """The gradients of the sums over this piece, in all pieces after it; the maximum is the shift of own."""
        exists = far.denominator > 0
        denominator = far.denominator.masked_fill(~exists, 1.0)
        of_key, of_average = (
            x[:, : self.far_tokens].sum(1).unflatten(-1, (self.num_heads, -1)) for x in (of_keys, of_values)
        )
        average = far.numerator / denominator
        from_values = (of_average * average).unflatten(-1, (of_key.shape[-1], -1)).sum(-1)
        of_sums = of_average / denominator, (of_key - from_values) / denominator
        of_numerator, of_denominator = (x.masked_fill(~exists, 0.0) for x in of_sums)
        gathered = self.gathered(ScaledSums(of_numerator, of_denominator, far.maximum))
        counts, distances = self.shard.given()
        exponent = own.maximum + self._decays(distances, own.maximum) - gathered.maximum
        counts = counts.to(exponent.device)[..., None, None]
        scale = torch.exp(exponent.masked_fill(~counts, -math.inf))
        return ScaledSums((gathered.numerator * scale).sum(0), (gathered.denominator * scale).sum(0), own.maximum)

    def _add_from_sums(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        of_own: ScaledSums,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
    ) -> None:
        """Add the gradients that the tokens have through the sums over this piece."""
        of_numerator, of_denominator, maximum = (x.unsqueeze(1) for x in of_own)
        parts = self._parts(keys.shape[1], values[:, 0].numel())
        for (start, stop), (key, value) in zip(parts, self._summed_parts(keys, values)):
            weights = torch.exp(key - maximum)
            of_value = of_numerator * weights
            of_key = (of_value * value).unflatten(-1, (key.shape[-1], -1)).sum(-1) + of_denominator * weights
            of_keys[:, start:stop] += of_key.flatten(2)
            of_values[:, start:stop] += of_value.flatten(2)


__all__ = ["count_of_past", "state_at_end", "with_past"]
