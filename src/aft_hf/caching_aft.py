"""The generation cache: running sums over the past, and a window of recent keys and values.

Each layer caches the two running sums of Eq. 2 with their log-sum-exp shift. It also caches the keys and values of the
positions that have a position bias of their own: none for `simple` and `alibi`, a window for `local` and `conv`, all
for `full`. So the cache has a constant size for all types except `full`. A static cache also keeps its memory
addresses.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .mixing_aft import Mixing, backends_for, gather, has_state_operator, mix, without_padding
from .portable_aft import (
    EMPTY,
    ScaledSums,
    block_sums,
    fold,
    join_heads,
    pad_to_power_of_two,
    triangle_sums,
    unfold,
)
from .position_biases_aft import PositionBias, widen


# New tokens that continue a cache are processed in chunks of this size, each with its own table of position biases.
PIECE_SIZE = 128


class AFTLayerState(CacheLayerMixin):
    """The cached state of one layer. The batch is the first dimension of all tensors.

    Args:
        window: how many of the last keys and values to keep; None for all. Tokens that leave the window are added to
            the sums.

    Attributes:
        keys, values: (B, h, W, k) and (B, h, W, c): the last real tokens of each row, right-aligned. Keys are -inf
            where a row has fewer than W tokens. These and the sums are in float32, or float64 for float64 inputs.
        numerator, denominator, maximum: `ScaledSums` over the tokens before the window, (B, h, 1, c) and
            (B, h, 1, k).
        padding: (B,), the number of padding tokens of each row.
        history, history_mask: all keys (B, T, h k) in order, and (B, T), False for padding. None unless
            `output_attentions` is used, since attentions cannot be computed from the sums.
        padded: whether rows may have different numbers of real tokens (`seen`).
    """

    # All tensors are None until the state is initialized.
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

    def __copy__(self) -> "AFTLayerState":
        """Return a copy with tensors of its own, since steps update the tensors in place."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._map(torch.clone)
        return other

    def _clear(self) -> None:
        for name in self._state:
            setattr(self, name, None)
        self.cumulative_length = 0
        self.padded = False
        self.is_empty = True
        self.is_initialized = False

    def _store(self, **tensors: torch.Tensor) -> None:
        """Replace the named tensors of the state."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate an empty state for keys (B, h, T, k) and values (B, h, T, c)."""
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
        """(B,), the number of real tokens of each row, which is also the position of its next token."""
        return self.cumulative_length - self.padding

    def sums(self) -> ScaledSums:
        """The sums over the tokens before the window, as `ScaledSums` with the batch folded into the heads."""
        return ScaledSums(*(fold(x) for x in (self.numerator, self.denominator, self.maximum)))

    # ---------------------------------------------------------------------------------------------------- Eq. 2

    def mix(self, problem: Mixing, implementation: str = "auto") -> torch.Tensor:
        """Compute Eq. 2 for new tokens and add them to the state.

        Each new token sees itself and all tokens before it, cached ones included.

        Args:
            problem: the keys and values of the new tokens, with their padding mask.
            implementation: as for `mixing_aft.mix`, which computes the tokens of an empty cache.

        Returns:
            (B, T, d), multiplied by sigmoid(query) if the problem has a query.
        """
        if problem.shard is not None:
            problem.shard.take_in(self, problem)
            return mix(problem, implementation)
        by_operator = self.window is not None and has_state_operator(problem, implementation)
        if self.is_initialized:
            by_operator &= self.numerator.dtype == torch.float32 and not self.numerator.requires_grad
        one_token = problem.length == 1 and problem.padding_mask is None and self.is_initialized
        if one_token and by_operator:
            return self._mix_by_operator(problem, None)
        if one_token:
            for backend in backends_for(implementation):
                if (context := backend.step(self, problem)) is not None:
                    return context
        # Fast path: exactly one new token in every row.
        windowed = self.window is not None and not problem.biases.hides_outside and implementation != "reference"
        if one_token and windowed:
            biases = problem.biases
            # Not `len(x)`, which would fix the batch size of an exported program.
            key, value = (widen(x.view(x.shape[0], problem.num_heads, 1, -1)) for x in (problem.key, problem.value))
            context = self.step(key, value, self.next_bias(biases), biases.slopes).reshape(key.shape[0], 1, -1)
            return context if problem.query is None else torch.sigmoid(problem.query) * context
        order = counts = None
        if problem.padding_mask is not None:
            counts = problem.padding_mask.sum(-1)
            problem, order = without_padding(problem, moved=True)
        mix_tokens = self._mix_by_operator if by_operator else partial(self._mix_prompt, implementation=implementation)
        context = mix_tokens(problem, counts)
        return context if order is None else gather(context, order)

    def _mix_by_operator(self, problem: Mixing, counts: torch.Tensor | None) -> torch.Tensor:
        """Compute and add tokens, of which `counts`, (B,), are real in each row (None: all), by `causal_state`."""
        biases, length, first = problem.biases, problem.length, None
        if not self.is_initialized:
            self.lazy_initialization(*(widen(x[:, :, :0]) for x in problem.by_head()))
        if counts is not None:
            tokens = torch.arange(length, device=counts.device)
            first = torch.where(tokens < counts[:, None], 0, length)  # padding sees nothing
        in_line = biases.relative or not self.padded
        if length == 1:
            bias = biases.next_token(self.cumulative_length if in_line else self.seen)
            bias = bias if bias is None else bias.unsqueeze(1)
        else:
            bias = biases.by_lag(length, self.cumulative_length if in_line else self.seen)
        state = ("keys", "values", "numerator", "denominator", "maximum")
        if not all(getattr(self, name).is_contiguous() for name in state):
            self._store(**{name: getattr(self, name).contiguous() for name in state})
        context = torch.ops.aft_hf_v1.causal_state(
            *(problem.query, problem.key, problem.value),
            *(x if x is None else x.float() for x in (bias, biases.slopes)),
            *(first, biases.hides_outside),
            *(getattr(self, name) for name in state),
        )
        self.count(length, counts)
        return context

    def _mix_prompt(self, problem: Mixing, counts: torch.Tensor | None, implementation: str) -> torch.Tensor:
        """Compute several tokens, of which `counts`, (B,), are real in each row (None: all), and add them.

        Tokens of an empty cache are computed by `mix`, tokens that continue a cache in chunks of `PIECE_SIZE`.
        """
        for backend in backends_for(implementation):
            if (context := backend.prefill(self, problem, counts)) is not None:
                return context
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

    def set_to(
        self, keys: torch.Tensor, values: torch.Tensor, sums: ScaledSums | None, length: int, real: torch.Tensor
    ) -> None:
        """Set the state to that after whole rows of `length` tokens, of which `real`, (B,), are no padding.

        Args:
            keys, values: the window, (B, h, W, k) and (B, h, W, c).
            sums: the sums over the tokens before it, (B, h, c) and (B, h, k); None if those are hidden.
        """
        self.lazy_initialization(keys, values)
        self._store(keys=keys, values=values)
        if sums is not None:
            numerator, denominator, maximum = (x.unsqueeze(2) for x in sums)
            self._store(numerator=numerator, denominator=denominator, maximum=maximum)
        self.cumulative_length += length
        self._store(padding=self.cumulative_length - real.to(self.device))
        self.padded, self.is_empty = bool(self.padding.any()), False

    def next_bias(self, biases: PositionBias) -> torch.Tensor | None:
        """w from the next token to the window and to itself, (B or 1, h, W + 1, 1); None if there is no window."""
        in_line = biases.relative or not self.padded
        bias = biases.next_token(self.cumulative_length if in_line else self.seen)
        return None if bias is None else bias.unsqueeze(-1)

    def _continue(self, key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
        """The averages of Eq. 2 for new tokens, (B, h, T, c), over their own keys and values and the cached ones."""
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
        """Add new tokens to the state.

        Args:
            key_states, value_states: (B, h, T, k) and (B, h, T, c), in the dtype of the state. In each row, real
                tokens come first; keys of padding are -inf.
            counts: (B,), how many of the T tokens of each row are real; None if all are.
            slopes: (h,), for w = -slope * distance, which has no window; otherwise None.

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
            # Padding comes after the last real token, so its bias would be positive. Its weight is 0 anyway.
            bias = bias.clamp_max(0.0)
            past = past.shifted((-heads * rows[:, None]).expand(key_states.shape[0], -1).reshape(-1, 1, 1, 1))
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        kept = keys.shape[2] if self.window is None else self.window
        if counts is None:
            leaving = keys.shape[2] - kept
            leaving_keys, leaving_values = keys[:, :, :leaving], values[:, :, :leaving]
            # Copies, since views would keep the memory of all the given tokens allocated.
            self._store(keys=keys[:, :, leaving:].clone(), values=values[:, :, leaving:].clone())
        else:
            # The window of each row ends at its own last real token.
            start = (self.keys.shape[2] + counts - kept)[:, None]  # (B, 1), negative if a row has too few tokens
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
        """Update the token counts: each row has `length` new tokens, of which `counts`, (B,), are real (None: all)."""
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
        """Add one token to every row, and compute its average of Eq. 2 over all tokens before it and itself.

        Args:
            key, value: (B, h, 1, k) and (B, h, 1, c), in the dtype of the state.
            bias: (B or 1, h, W + 1, 1), w from the token to the window and to itself; None if there is no window.
            slopes: (h,), for w = -slope * distance, which has no window; otherwise None.

        Returns:
            The averages, (B, h, 1, c).
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
        # In place: no gradient needs these tensors, and allocating new ones takes longer than the computation.
        weights, scale = logits.sub_(maximum).exp_(), (far - maximum).exp_()
        denominator = torch.addcmul(weights.sum(2, keepdim=True), self.denominator, scale)
        numerator = torch.addcmul((weights * values).sum(2, keepdim=True), self.numerator, scale)
        self._take_in(keys.narrow(2, 0, 1), values.narrow(2, 0, 1), far)
        self._store(keys=keys.narrow(2, 1, window), values=values.narrow(2, 1, window))
        return numerator / denominator

    def _take_in(self, key: torch.Tensor, value: torch.Tensor, far: torch.Tensor) -> None:
        """Add one position to the sums. `far` is their maximum as seen from the new token."""
        maximum = torch.maximum(far, key.detach())
        weight, scale = (key - maximum).exp_(), (far - maximum).exp_()
        numerator = torch.addcmul(weight * value, self.numerator, scale)
        denominator = torch.addcmul(weight, self.denominator, scale)
        self._store(numerator=numerator, denominator=denominator, maximum=maximum)

    def tokens_after(self, length: int, limit: int) -> int:
        """Number of tokens of the longest row after `length` more, to be compared with a `limit` of positions.

        Padding is subtracted only if the result would exceed `limit` with it, since that reads a tensor.
        """
        tokens = self.cumulative_length + length
        if tokens > limit and self.padded:
            tokens = int(self.seen.max()) + length  # padding takes no position
        return tokens

    def check_batch_size(self, batch_size: int) -> None:
        """Raise a ValueError if the state has another batch size."""
        if self.is_initialized and self.padding.shape[0] != batch_size:
            raise ValueError(
                f"the cache has a batch size of {self.padding.shape[0]}, but the input has {batch_size}: give a new "
                "cache"
            )

    def record(self, problem: Mixing) -> Mixing:
        """Add the keys of new tokens to the history, and return the problem of all tokens so far. Called before `mix`.

        Raises:
            ValueError: earlier tokens were added without a history.
        """
        if not self.is_empty and self.history is None:
            raise ValueError(
                "output_attentions needs all keys, but this cache holds only sums over them: set output_attentions "
                "from the first call on, or call with use_cache=False"
            )
        key, mask = problem.key, problem.padding_mask
        mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if mask is None else mask
        if self.history is not None and self.history_mask is not None:
            key, mask = torch.cat([self.history, key], 1), torch.cat([self.history_mask, mask], 1)
        self.history, self.history_mask = key, mask
        return replace(problem, key=key, padding_mask=mask, num_queries=key.shape[1])

    # The interface of `CacheLayerMixin`.

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
        raise ValueError("the cache of an AFT is a sum over the past: tokens cannot be removed from it")

    def nbytes(self) -> int:
        """Size of the state in bytes."""
        return sum(getattr(self, name).nbytes for name in self._state if getattr(self, name) is not None)


class AFTStaticLayerState(AFTLayerState):
    """A layer state for `torch.compile` and CUDA graphs: its tensors are updated in place, and its length is a tensor.

    It is for inference with types whose state has a constant size.

    Args:
        window: how many of the last keys and values to keep.
        max_length: maximum number of tokens of a row. It is not checked, since reading the length would synchronize
            with the device.
    """

    cumulative_length: torch.Tensor  # type: ignore[assignment]  # as in the static layers of transformers

    is_compileable = True

    def __init__(self, window: int, max_length: int):
        super().__init__(window)
        self.max_length = max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            self._allocate(key_states, value_states)
            return
        with torch.inference_mode(False):  # inference tensors could not be updated outside of inference mode
            self._allocate(key_states, value_states)
        for tensor in (*self._tensors().values(), self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)

    def _allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = torch.zeros((), dtype=torch.long, device=self.device)
        self.padded = True  # so that one compiled program serves rows with and without padding

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self._state if getattr(self, name) is not None}

    def _store(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def tokens_after(self, length: int, limit: int) -> int:
        """Only the new tokens: `AFTModel.new_cache` has compared `max_length` with the limit."""
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
    """The generation cache of a model, with one `AFTLayerState` for each layer.

    `AFTModel.new_cache` creates one, and models return one if `use_cache=True`. Pass it as `cache` to
    continue the sequences.

    Args:
        windows: for each layer, how many of the last keys and values it keeps; None for all.
        max_length: maximum number of tokens of a row in a static cache. Default: None, for a dynamic cache.

    Raises:
        ValueError: a static cache is requested, but a layer keeps all keys and values.
    """

    layers: list[AFTLayerState]  # type: ignore[assignment]  # transformers lists only its own classes here

    def __init__(self, windows: list[int | None], max_length: int | None = None):
        super().__init__(layers=[_new_state(window, max_length) for window in windows])

    def nbytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(layer.nbytes() for layer in self.layers)


def _new_state(window: int | None, max_length: int | None) -> AFTLayerState:
    """Create the state of one layer; the arguments are those of `AFTCache`."""
    if max_length is None:
        return AFTLayerState(window)
    if window is None:
        raise ValueError(
            'a static cache needs layers with a cache of constant size: aft_type "full" keeps all keys and values'
        )
    return AFTStaticLayerState(window, max_length)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather x[b, :, index[b, i]] from x (B, h, T, c) and index (B, W); negative indices give the first entry."""
    shape = (x.shape[0], x.shape[1], index.shape[1], x.shape[3])
    return x.gather(2, index.clamp_min(0)[:, None, :, None].expand(shape))


__all__ = ["AFTCache", "AFTLayerState", "AFTStaticLayerState"]
