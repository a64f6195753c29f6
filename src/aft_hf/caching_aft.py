"""The cache of generation: running sums over the past, and the last few keys and values.

The sums of Eq. 2 run over positions, so each layer caches one pair of sums (relative to a maximum) and the keys and
values of positions that have a position bias of their own: none for `simple` and `alibi`, the window for `local` and
`conv`, all of them for `full`. The cache of all types but `full` has a constant size, and a static cache keeps it at
the same place in memory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .mixing_aft import Mixing, gather, mix, mix_next, mix_prompt, without_padding
from .position_biases_aft import PositionBias
from .scaled_sums_aft import (
    EMPTY,
    ScaledSums,
    block_sums,
    fold,
    join_heads,
    pad_to_power_of_two,
    split_heads,
    triangle_sums,
    unfold,
    widen,
)
from .shard_exchange_aft import state_at_end


# Tokens that continue a cache are taken in pieces of this many, each with a table of its own.
PIECE_SIZE = 128


class AFTLayerState(CacheLayerMixin):
    """The state of one layer in transformers' cache machinery. All tensors have the batch in front.

    Args:
        window: how many of the last keys and values to keep; None for all. What leaves the window goes into the sums.

    Attributes:
        keys, values: (B, h, W, k) and (B, h, W, c) in float32, the last real tokens of each row on the right; a key
            of -inf where a row is shorter.
        numerator, denominator, maximum: `ScaledSums` over what lies before the window, (B, h, 1, c) and (B, h, 1, k).
        padding: (B,), how many of the tokens of each row were padding.
        history, history_mask: all keys (B, T, h k) and which of them are real (B, T), in the order in which they came;
            None unless attentions are asked for, which cannot be had from the sums.
        padded: whether rows may differ in `seen`.
    """

    # Those of the state are None until it is initialized.
    keys: torch.Tensor
    values: torch.Tensor
    numerator: torch.Tensor
    denominator: torch.Tensor
    maximum: torch.Tensor
    padding: torch.Tensor
    history: torch.Tensor | None
    history_mask: torch.Tensor | None
    cumulative_length: int

    is_sliding = False
    _state = ("keys", "values", "numerator", "denominator", "maximum", "padding", "history", "history_mask")

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self._clear()

    def _clear(self) -> None:
        for name in self._state:
            setattr(self, name, None)
        self.cumulative_length = 0
        self.padded = False
        self.is_empty = True
        self.is_initialized = False

    def _store(self, **tensors: torch.Tensor) -> None:
        """Replace tensors of the state."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """An empty state for keys (B, h, T, k) and values (B, h, T, c)."""
        batch, heads, _, key_width = key_states.shape
        shape, width = (batch, heads, self.window or 0), value_states.shape[-1]
        self.device = key_states.device
        self.keys = key_states.new_full((*shape, key_width), -torch.inf)
        self.values = value_states.new_zeros((*shape, width))
        self.numerator = value_states.new_zeros((batch, heads, 1, width))
        self.denominator = key_states.new_zeros((batch, heads, 1, key_width))
        self.maximum = key_states.new_full((batch, heads, 1, key_width), EMPTY)
        self.padding = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.is_initialized = True

    @property
    def seen(self) -> torch.Tensor:
        """(B,), the real tokens of each row: the position of its next one."""
        return self.cumulative_length - self.padding

    def sums(self) -> ScaledSums:
        """Over what lies before the window, in the layout of `ScaledSums` with the batch folded into the heads."""
        return ScaledSums(*(fold(x) for x in (self.numerator, self.denominator, self.maximum)))

    # ---------------------------------------------------------------------------------------------------- Eq. 2

    def mix(self, problem: Mixing, implementation: str = "auto") -> torch.Tensor:
        """Eq. 2 for new tokens, which see all before them and themselves, times sigmoid(query) where a query is given:
        (B, T, d). Takes them in.

        Args:
            problem: the keys and values of the new tokens, with their padding.
            implementation: as for `mixing_aft.mix`, which computes the first tokens.
        """
        if problem.shard is not None:
            self._take_in_pieces(problem)
            return mix(problem, implementation)
        one_token = problem.length == 1 and problem.padding_mask is None and self.is_initialized
        if one_token:
            context = mix_next(self, problem, implementation)
            if context is not None:
                return context
        # One next token of every row has a short way.
        windowed = self.window is not None and not problem.biases.hides_outside and implementation != "reference"
        if one_token and windowed:
            biases = problem.biases
            # `len` would fix the batch size of an exported program.
            key, value = (widen(x.view(x.shape[0], problem.num_heads, 1, -1)) for x in (problem.key, problem.value))
            context = self.step(key, value, self.next_bias(biases), biases.slopes).reshape(key.shape[0], 1, -1)
            return context if problem.query is None else torch.sigmoid(problem.query) * context
        order = counts = None
        if problem.padding_mask is not None:
            counts = problem.padding_mask.sum(-1)
            problem, order = without_padding(problem, moved=True)
        context = mix_prompt(self, problem, counts, implementation)
        if context is None:
            context = self._mix_prompt(problem, counts, implementation)
        return context if order is None else gather(context, order)

    def _mix_prompt(self, problem: Mixing, counts: torch.Tensor | None, implementation: str) -> torch.Tensor:
        """As `mixing_aft.mix_prompt`, by `mix` for the first tokens, in pieces behind the window for others."""
        biases = problem.biases
        key, value = (widen(x) for x in problem.by_head())
        if not self.is_initialized:
            context = mix(problem, implementation)
            self.update(key, value, counts, biases.slopes)
            return context
        pieces, start = [], 0
        for key_piece, value_piece in zip(key.split(PIECE_SIZE, 2), value.split(PIECE_SIZE, 2)):
            pieces.append(self._continue(key_piece, value_piece, biases))
            here = None if counts is None else (counts - start).clamp(0, key_piece.shape[2])
            self.update(key_piece, value_piece, here, biases.slopes)
            start += key_piece.shape[2]
        context = join_heads(torch.cat(pieces, 2))
        return context if problem.query is None else torch.sigmoid(problem.query) * context

    def _take_in_pieces(self, problem: Mixing) -> None:
        """Become the state after rows of which each process has a piece."""
        shard, biases, heads = problem.shard, problem.biases, problem.num_heads
        assert shard is not None
        if problem.padding_mask is not None:
            problem, _ = without_padding(problem, moved=True)
        key, value = problem.key, problem.value
        options: dict[str, Any] = {"slopes": biases.slopes, "hides_outside": biases.hides_outside}
        keys, values, sums = state_at_end(shard, key, value, num_heads=heads, reach=biases.reach, **options)
        keys, values = split_heads(keys, heads), split_heads(values, heads)
        self.lazy_initialization(keys, values)
        self._store(keys=keys, values=values)
        if sums is not None:
            numerator, denominator, maximum = (x.unsqueeze(2) for x in sums)
            self._store(numerator=numerator, denominator=denominator, maximum=maximum)
        self.cumulative_length += shard.total_length
        self._store(padding=self.cumulative_length - shard.starts[-1].to(self.device))
        self.padded, self.is_empty = bool(self.padding.any()), False

    def next_bias(self, biases: PositionBias) -> torch.Tensor | None:
        """w of the window and of the token itself, (B or 1, h, W + 1, 1); None where there is no window."""
        in_line = biases.relative or not self.padded
        bias = biases.next_token(self.cumulative_length if in_line else self.seen)
        return None if bias is None else bias.unsqueeze(-1)

    def _continue(self, key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
        """The context of new tokens, (B, h, T, c), from their own keys and values and those that are kept."""
        batch, _, length, _ = key.shape
        kept = self.keys.shape[2]
        rows = self.seen if self.padded and not biases.relative else self.seen[:1]
        queries = rows[:, None] + torch.arange(length, device=key.device)
        positions = rows[:, None] + torch.arange(-kept, length, device=key.device)
        bias = biases.between(queries, positions).to(key.dtype).expand(batch, -1, -1, -1)
        past_bias, own_bias = bias.flatten(0, 1).split([kept, length], -1)
        if biases.hides_outside:
            later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
            bias = torch.cat([past_bias, own_bias.masked_fill(later, -torch.inf)], -1)
            keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
            return unfold(block_sums(fold(keys), fold(values), bias, masked=True).average(), batch)
        sums = triangle_sums(*pad_to_power_of_two(fold(key), fold(value), own_bias)).narrow(0, length)
        if kept:
            sums = sums.merge(block_sums(fold(self.keys), fold(self.values), past_bias))
        far = self.sums()
        if biases.slopes is not None:
            steps = torch.arange(1, length + 1, device=key.device, dtype=key.dtype)
            slopes = biases.slopes.to(key.dtype).repeat(batch)
            far = far.shifted(-(slopes[:, None] * steps)[..., None, None])
        return unfold(sums.merge(far).average(), batch)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        counts: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens.

        Args:
            key_states, value_states: (B, h, T, k) and (B, h, T, c), float32; real tokens first, keys of padding -inf.
            counts: (B,), how many of the T tokens of each row are real; None for all of them.
            slopes: (h,), where w = -slope * distance; then there is no window.

        Returns:
            The keys and values of the window.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        past = self.sums()
        bias = None
        if slopes is not None:
            new = self.padding.new_full((1,), length) if counts is None else counts
            heads, rows = slopes.to(key_states.dtype), new.to(key_states.dtype)
            distance = rows[:, None, None] - 1 - torch.arange(length, device=new.device)  # (B, 1, T) to the last token
            bias = (-heads[:, None] * distance).expand(key_states.shape[0], -1, -1).flatten(0, 1).unsqueeze(1)
            # Padding stands behind the last token: its bias would be positive, its weight is 0.
            bias = bias.clamp_max(0.0)
            past = past.shifted((-heads * rows[:, None]).expand(key_states.shape[0], -1).reshape(-1, 1, 1, 1))
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        kept = keys.shape[2] if self.window is None else self.window
        if counts is None:
            leaving = keys.shape[2] - kept
            leaving_keys, leaving_values = keys[:, :, :leaving], values[:, :, :leaving]
            # Copies: views would hold on to the memory of all the tokens that were given.
            self._store(keys=keys[:, :, leaving:].clone(), values=values[:, :, leaving:].clone())
        else:
            # The window of each row ends at its own last real token.
            start = (self.keys.shape[2] + counts - kept)[:, None]  # (B, 1), negative where a row is short
            index = start + torch.arange(kept, device=start.device)
            before = torch.arange(keys.shape[2], device=start.device) < start  # (B, T)
            leaving_keys = keys.masked_fill(~before[:, None, :, None], -torch.inf)
            leaving_values = values
            kept_keys = _take(keys, index).masked_fill((index < 0)[:, None, :, None], -torch.inf)
            self._store(keys=kept_keys, values=_take(values, index))
        if leaving_keys.shape[2] > 0:
            past = past.merge(block_sums(fold(leaving_keys), fold(leaving_values), bias))
        numerator, denominator, maximum = (unfold(x, key_states.shape[0]) for x in past)
        self._store(numerator=numerator, denominator=denominator, maximum=maximum)
        self.count(length, counts)
        return self.keys, self.values

    def count(self, length: int, counts: torch.Tensor | None) -> None:
        """Note that each row has `length` more tokens, of which `counts`, (B,), are real (None for all)."""
        self.is_empty = False
        if counts is not None:
            self.padded = True
            self._store(padding=self.padding + (length - counts))
        self.cumulative_length += length

    def step(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take in one token of every row, and average what it sees: all before it, and itself.

        Args:
            key, value: (B, h, 1, k) and (B, h, 1, c), float32.
            bias: (B or 1, h, W + 1, 1), w of the window and of the token itself; None where there is no window.
            slopes: (h,), where w = -slope * distance; then there is no window.

        Returns:
            (B, h, 1, c).
        """
        self.cumulative_length += 1
        far = self.maximum if slopes is None else self.maximum - slopes.to(key.dtype).view(-1, 1, 1)
        if bias is None:
            self._take_in(key, value, far)
            return self.numerator / self.denominator
        window = self.keys.shape[2]
        keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        logits = keys + bias
        maximum = torch.maximum(logits.detach().amax(2, keepdim=True), far)
        # In memory that no gradient needs: new memory takes longer than what is done there.
        weights, scale = logits.sub_(maximum).exp_(), (far - maximum).exp_()
        denominator = torch.addcmul(weights.sum(2, keepdim=True), self.denominator, scale)
        numerator = torch.addcmul((weights * values).sum(2, keepdim=True), self.numerator, scale)
        self._take_in(keys.narrow(2, 0, 1), values.narrow(2, 0, 1), far)
        self._store(keys=keys.narrow(2, 1, window), values=values.narrow(2, 1, window))
        return numerator / denominator

    def _take_in(self, key: torch.Tensor, value: torch.Tensor, far: torch.Tensor) -> None:
        """Add one position to the sums, whose maximum is `far` by now."""
        maximum = torch.maximum(far, key.detach())
        weight, scale = (key - maximum).exp_(), (far - maximum).exp_()
        numerator = torch.addcmul(weight * value, self.numerator, scale)
        denominator = torch.addcmul(weight, self.denominator, scale)
        self._store(numerator=numerator, denominator=denominator, maximum=maximum)

    def tokens_after(self, length: int, limit: int) -> int:
        """How many tokens the longest row has after `length` more, to compare with a table of `limit` positions."""
        tokens = self.cumulative_length + length
        if tokens > limit and self.padded:
            tokens = int(self.seen.max()) + length  # padding takes no room in a table
        return tokens

    def check_batch_size(self, batch_size: int) -> None:
        """Raise where the state is of another batch."""
        if self.is_initialized and self.padding.shape[0] != batch_size:
            raise ValueError(f"the state is of a batch of {self.padding.shape[0]}, the input of {batch_size}")

    def record(self, problem: Mixing) -> Mixing:
        """Add the keys of new tokens to the history, before `mix`; returns the problem of all tokens so far."""
        if not self.is_empty and self.history is None:
            raise ValueError(
                "output_attentions needs all keys, and this state has kept the sums over them: ask for attentions "
                "from the first call on, or call with use_cache=False"
            )
        key, mask = problem.key, problem.padding_mask
        mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if mask is None else mask
        if self.history is not None and self.history_mask is not None:
            key, mask = torch.cat([self.history, key], 1), torch.cat([self.history_mask, mask], 1)
        self.history, self.history_mask = key, mask
        return replace(problem, key=key, padding_mask=mask, num_queries=key.shape[1])

    # What the library asks of a layer's state.

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in self._state:
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))

    def reset(self) -> None:
        self._clear()

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("the state of an AFT is a sum over the past: tokens cannot be taken out of it again")

    def nbytes(self) -> int:
        """Bytes that the state holds."""
        return sum(getattr(self, name).nbytes for name in self._state if getattr(self, name) is not None)


class AFTStaticLayerState(AFTLayerState):
    """A state for `torch.compile` and CUDA graphs: its tensors are updated in place, and its length is a tensor.

    For inference with types whose state has a constant size.

    Args:
        window: how many of the last keys and values to keep.
        max_length: the most tokens that a row may have; not checked, since to look at the length would be to wait.
    """

    cumulative_length: torch.Tensor  # type: ignore[assignment]  # as in the static layers of the library

    is_compileable = True

    def __init__(self, window: int, max_length: int):
        super().__init__(window)
        self.max_length = max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            self._allocate(key_states, value_states)
            return
        with torch.inference_mode(False):  # to be updated in any mode
            self._allocate(key_states, value_states)
        for tensor in (*self._tensors().values(), self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = torch.zeros((), dtype=torch.long, device=self.device)
        self.padded = True  # one program for rows with and without padding

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self._state if getattr(self, name) is not None}

    def _store(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def tokens_after(self, length: int, limit: int) -> int:
        """The new tokens alone: where the cache is made, `max_length` is compared with the limit."""
        return length

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        """Empty the state in place."""
        if self.is_initialized:
            self.history = self.history_mask = None
            self.is_empty = True
            for tensor in (*self._tensors().values(), self.cumulative_length):
                tensor.zero_()
            self.keys.fill_(-torch.inf)
            self.maximum.fill_(EMPTY)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for tensor in self._tensors().values():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class AFTCache(Cache):
    """The state of a whole model, one `AFTLayerState` for each layer.

    Args:
        windows: for each layer, how many keys and values it keeps; None for all.
        max_length: for a static cache, the most tokens that a row may have; None for a cache that is not static.

    Raises:
        ValueError: a static cache for a layer that keeps all keys and values.
    """

    layers: list[AFTLayerState]  # type: ignore[assignment]  # the library counts its own classes up

    def __init__(self, windows: list[int | None], max_length: int | None = None):
        super().__init__(layers=[_new_state(window, max_length) for window in windows])

    def nbytes(self) -> int:
        """Bytes that the state holds."""
        return sum(layer.nbytes() for layer in self.layers)


def _new_state(window: int | None, max_length: int | None) -> AFTLayerState:
    """As of `AFTCache`, for one layer."""
    if max_length is None:
        return AFTLayerState(window)
    if window is None:
        raise ValueError(
            'a static cache needs layers with a state of constant size: aft_type "full" keeps all keys and values'
        )
    return AFTStaticLayerState(window, max_length)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[b, :, index[b, i]] of (B, h, T, c) for (B, W); negative indices give the first entry."""
    shape = (x.shape[0], x.shape[1], index.shape[1], x.shape[3])
    return x.gather(2, index.clamp_min(0)[:, None, :, None].expand(shape))


__all__ = ["AFTCache", "AFTLayerState", "AFTStaticLayerState"]
