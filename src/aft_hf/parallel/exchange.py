"""Communication between the processes that share a sequence: one pair of sums and one window of tokens per shard.

The tokens before a shard enter Eq. 2 only as two sums for each feature. These equal the sums of a single token whose
key is log(sum of exp(K + w)) and whose value is the average. So each process prepends such summary tokens and the last
`reach` tokens before its shard, unchanged, and any backend computes the result as if the shard were a whole sequence.

For this, each process receives the last `reach` tokens before its shard, sums over the tokens that are farther back
than `reach` for the next shard, and gathers the sums of all processes. The backward pass sends the gradients in the
opposite direction. The amount of communication does not depend on the number of tokens.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from ..mixing_aft import Mixing
from ..portable_aft import EMPTY
from ..position_biases_aft import working_dtype
from .shards import Shard


# The number of summary tokens. The key of one token holds the logarithm only to the spacing of floating point numbers
# of its size; the second token holds the remainder.
FAR_TOKENS = 2

# How many elements of a shard are summed at once. The backward pass recomputes the intermediate results, so only those
# of one part are in memory.
NUMBERS_AT_ONCE = 2**22


class ScaledSums(NamedTuple):
    """The sums of exp(K + w) V and of exp(K + w), both divided by exp(maximum); `maximum` carries no gradient."""

    numerator: Tensor  # (..., c)
    denominator: Tensor  # (..., k)
    maximum: Tensor  # (..., k)

    def merge(self, other: "ScaledSums") -> "ScaledSums":
        """Return the sums over the positions of both."""
        maximum = torch.maximum(self.maximum, other.maximum)
        scale, other_scale = torch.exp(self.maximum - maximum), torch.exp(other.maximum - maximum)
        return ScaledSums(
            self.numerator * scale + other.numerator * other_scale,
            self.denominator * scale + other.denominator * other_scale,
            maximum,
        )


def with_past(shard: Shard, problem: Mixing, reach: int) -> tuple[Tensor, Tensor]:
    """Prepend the tokens that stand for everything before a shard to its keys and values.

    Args:
        shard: the shard of this process.
        problem: the mixing of its tokens. In each row, real tokens come first; the keys of the others are -inf.
        reach: the largest distance at which w may differ from 0, other than by slopes.

    Returns:
        Keys (B, E + T, h k) and values (B, E + T, d) in float32, or float64 for float64. The E tokens in front are
        `FAR_TOKENS`, unless tokens beyond `reach` are hidden, and `reach` tokens. Those that do not exist are hidden.
    """
    return _WithPast.apply(_Exchange(shard, problem, reach), problem.key, problem.value)


@torch.no_grad()
def state_at_end(shard: Shard, problem: Mixing, reach: int) -> tuple[Tensor, Tensor, ScaledSums | None]:
    """Compute the cached state after the last shard, in every process. The arguments are those of `with_past`.

    Returns:
        The last `reach` keys and values of each row, right-aligned, (B, reach, h k) and (B, reach, d), with keys of
        -inf where a row is shorter; and the sums over the tokens before them, (B, h, c) and (B, h, k), as seen from
        the last token, or None if tokens beyond `reach` are hidden.
    """
    exchange, key, value = _Exchange(shard, problem, reach), problem.key, problem.value
    own = exchange.forward(key, value)[2]
    keys, values = exchange.new_window(key, value, reach)
    if reach > 0:
        exchange.receive_window(key, value, keys, values, to_end=True)
    if own is None:
        return keys, values, None
    return keys, values, exchange.combined(exchange.gathered(own), shard.size)


class _WithPast(torch.autograd.Function):
    """`with_past` as an autograd function. All processes must run its forward and backward pass at the same point."""

    @staticmethod
    def forward(ctx: Any, exchange: "_Exchange", key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.dtypes = exchange, (key.dtype, value.dtype)
        keys, values, own, far = exchange.forward(key, value)
        ctx.save_for_backward(keys, values, *(own or ()), *(far or ()))
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_keys: Tensor, grad_values: Tensor) -> tuple[None, Tensor, Tensor]:
        grad_key, grad_value = ctx.exchange.backward(*ctx.saved_tensors, grad_keys=grad_keys, grad_values=grad_values)
        return None, grad_key.to(ctx.dtypes[0]), grad_value.to(ctx.dtypes[1])


class _Exchange:
    """The forward and backward pass of `with_past`.

    Sums have the shapes (B, h, c) and (B, h, k); gathered sums have the number of shards N in front.
    """

    def __init__(self, shard: Shard, problem: Mixing, reach: int):
        self.shard, self.num_heads, self.reach, self.slopes = shard, problem.num_heads, reach, problem.biases.slopes
        self.far_tokens = FAR_TOKENS if problem.biases.global_connectivity else 0

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, ScaledSums | None, ScaledSums | None]:
        """Return the keys and values of `with_past`, the sums over this shard, and the sums over the tokens far back.

        Both sums are None if tokens beyond `reach` are hidden.
        """
        past = self.far_tokens + self.reach
        keys, values = self.new_window(key, value, past + key.shape[1])
        keys[:, past:], values[:, past:] = key, value
        if self.reach > 0:
            self.receive_window(key, value, keys[:, self.far_tokens :], values[:, self.far_tokens :])
        if not self.far_tokens:
            return keys, values, None, None
        own = self._sums(keys, values)
        far = self.combined(self.gathered(own), self.shard.rank)
        self._put_far(far, keys, values)
        return keys, values, own, far

    def new_window(self, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of hidden tokens, (B, length, h k) and (B, length, d)."""
        dtype = working_dtype(value)
        hidden = key.new_full((len(key), length, key.shape[-1]), -math.inf, dtype=dtype)
        return hidden, value.new_zeros((len(key), length, value.shape[-1]), dtype=dtype)

    def receive_window(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *, to_end: bool = False
    ) -> None:
        """Exchange tokens with other shards, and write the received ones into the first `reach` keys and values."""
        routes = self.shard.routes(self.reach, to_end=to_end)
        sent = torch.cat([key[routes.sent], value[routes.sent]], -1)
        received = self._exchange(sent, routes.sent_sizes, routes.received_sizes).to(keys.dtype)
        keys[routes.received], values[routes.received] = received.split([key.shape[-1], value.shape[-1]], -1)

    def _exchange(self, tokens: Tensor, given: list[int], taken: list[int]) -> Tensor:
        """Send tokens (M, c) to the other processes and receive theirs; `given` and `taken` are the counts of each."""
        received = tokens.new_empty(sum(taken), tokens.shape[-1])
        distributed.all_to_all_single(received, tokens.contiguous(), taken, given, group=self.shard.group)
        return received

    def _sums(self, keys: Tensor, values: Tensor) -> ScaledSums:
        """The sums that this shard adds for later shards, as seen from its last token."""
        total = None
        for _, key, value in self._summed_parts(keys, values):
            maximum = key.amax(1).clamp_min(EMPTY)
            weights = torch.exp(key - maximum.unsqueeze(1))
            sums = ScaledSums((weights * value).sum(1), weights.sum(1), maximum)
            total = sums if total is None else total.merge(sums)
        assert total is not None  # a shard has tokens
        return total

    def _summed_parts(self, keys: Tensor, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield parts of the tokens to sum over: their place, K + w and V, (B, t, h, k) and (B, t, h, c)."""
        last = keys.shape[1] - self.reach
        step = max(1, NUMBERS_AT_ONCE // max(values[:, 0].numel(), 1))
        for start in range(self.far_tokens, last, step):
            place = slice(start, min(start + step, last))
            key, value = (x[:, place].unflatten(-1, (self.num_heads, -1)) for x in (keys, values))
            yield place, self._with_bias(key, start - self.far_tokens), value

    def _with_bias(self, key: Tensor, start: int) -> Tensor:
        """K + w of the tokens from `start` on, counted from the first of the `reach` tokens before the shard; -inf for
        tokens that do not count: those within `reach` of the next shard, or not in the document that is open there.
        """
        shard = self.shard
        if shard.is_whole and self.slopes is None:
            return key
        first = shard.open_documents[shard.rank] - shard.starts[shard.rank] + self.reach
        first, count = torch.stack([first, shard.counts[shard.rank]]).to(key.device).unsqueeze(-1)
        place = torch.arange(start, start + key.shape[1], device=key.device)
        if self.slopes is not None:
            key = key + self._decay((count - 1 - place).clamp_min(0), key)  # padding comes after the last token
        if shard.is_whole:
            return key
        outside = (place < first) | (place >= count)
        return key.masked_fill(outside[:, :, None, None], -math.inf)

    def gathered(self, sums: ScaledSums) -> ScaledSums:
        """Gather the sums of all processes, (N, B, h, c) and (N, B, h, k)."""
        widths = [x.shape[-1] for x in sums]
        return ScaledSums(*self.shard.gather(torch.cat(sums, -1)).split(widths, -1))

    def combined(self, sums: ScaledSums, index: int) -> ScaledSums:
        """Add up those gathered sums that shard `index` receives, each decayed by its distance."""
        maximum = sums.maximum + self._decay(self.shard.distances[index], sums.maximum)
        counts = self.shard.continued[index].to(maximum.device)[..., None, None]
        maximum = maximum.masked_fill(~counts, EMPTY)
        largest = maximum.amax(0)
        scale = torch.exp(maximum - largest) * counts
        return ScaledSums((sums.numerator * scale).sum(0), (sums.denominator * scale).sum(0), largest)

    def _decay(self, distances: Tensor, like: Tensor) -> Tensor | float:
        """w at distances (m, n), as (m, n, h, 1)."""
        if self.slopes is None:
            return 0.0
        return (-distances.to(like)[..., None] * self.slopes.to(like)).unsqueeze(-1)

    def _put_far(self, far: ScaledSums, keys: Tensor, values: Tensor) -> None:
        """Write the sums over the tokens far back as two summary tokens: one with slightly less than the whole sum,
        and one with the remainder.
        """
        exists = far.denominator > 0
        denominator = far.denominator.masked_fill(~exists, 1.0)
        values[:, : self.far_tokens] = (far.numerator / denominator).flatten(1).unsqueeze(1)
        logarithm = far.maximum + denominator.log()
        key = logarithm - 2 * torch.finfo(logarithm.dtype).eps * logarithm.abs()
        rest = (denominator * torch.exp(far.maximum - key) - 1).clamp_min(torch.finfo(logarithm.dtype).tiny)
        for place, logits in enumerate((key + rest.log(), key)):
            if self.slopes is not None:  # cancels w at the distance where the summary token stands
                logits = logits + self.slopes.to(logits)[:, None] * (self.far_tokens - 1 - place)
            keys[:, place] = logits.masked_fill(~exists, -math.inf).flatten(1)

    # -------------------------------------------------------------------------------------------------- backward

    def backward(
        self, keys: Tensor, values: Tensor, *sums: Tensor, grad_keys: Tensor, grad_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of key and value from the results of `forward` and the gradients of keys and values."""
        past = self.far_tokens + self.reach
        grad_keys, grad_values = (x.clone(memory_format=torch.contiguous_format) for x in (grad_keys, grad_values))
        if sums:
            grad_own = self._gradient_of_own(ScaledSums(*sums[:3]), ScaledSums(*sums[3:]), grad_keys, grad_values)
            self._add_from_sums(keys, values, grad_own, grad_keys, grad_values)
        grad_key, grad_value = grad_keys[:, past:], grad_values[:, past:]
        if self.reach > 0:
            routes = self.shard.routes(self.reach)
            window = torch.cat([x[:, self.far_tokens :][routes.received] for x in (grad_keys, grad_values)], -1)
            window = self._exchange(window, routes.received_sizes, routes.sent_sizes)
            for x, gradient in zip((grad_key, grad_value), window.split([keys.shape[-1], values.shape[-1]], -1)):
                x.index_put_(routes.sent, gradient, accumulate=True)
        return grad_key, grad_value

    def _gradient_of_own(self, own: ScaledSums, far: ScaledSums, grad_keys: Tensor, grad_values: Tensor) -> ScaledSums:
        """The gradients of the sums over this shard, added up over all later shards, as `ScaledSums` whose maximum is
        that of `own`.
        """
        exists = far.denominator > 0
        denominator = far.denominator.masked_fill(~exists, 1.0)
        grad_key, grad_average = (
            x[:, : self.far_tokens].sum(1).unflatten(-1, (self.num_heads, -1)) for x in (grad_keys, grad_values)
        )
        average = far.numerator / denominator
        from_values = (grad_average * average).unflatten(-1, (grad_key.shape[-1], -1)).sum(-1)
        grad_sums = grad_average / denominator, (grad_key - from_values) / denominator
        grad_numerator, grad_denominator = (x.masked_fill(~exists, 0.0) for x in grad_sums)
        gathered = self.gathered(ScaledSums(grad_numerator, grad_denominator, far.maximum))
        to_others = slice(self.shard.size), self.shard.rank
        exponent = own.maximum + self._decay(self.shard.distances[to_others], own.maximum) - gathered.maximum
        counts = self.shard.continued[to_others].to(exponent.device)[..., None, None]
        scale = torch.exp(exponent.masked_fill(~counts, -math.inf))
        return ScaledSums((gathered.numerator * scale).sum(0), (gathered.denominator * scale).sum(0), own.maximum)

    def _add_from_sums(
        self, keys: Tensor, values: Tensor, grad_own: ScaledSums, grad_keys: Tensor, grad_values: Tensor
    ) -> None:
        """Add the gradients of keys and values that come from the sums over this shard."""
        grad_numerator, grad_denominator, maximum = (x.unsqueeze(1) for x in grad_own)
        for place, key, value in self._summed_parts(keys, values):
            weights = torch.exp(key - maximum)
            grad_value = grad_numerator * weights
            grad_key = (grad_value * value).unflatten(-1, (key.shape[-1], -1)).sum(-1) + grad_denominator * weights
            grad_keys[:, place] += grad_key.flatten(2)
            grad_values[:, place] += grad_value.flatten(2)


__all__ = ["state_at_end", "with_past"]
