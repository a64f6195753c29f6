"""The generation cache: running sums over the past, and a window of recent keys and values.

A layer caches the two sums of Eq. 2, and the keys and values of the positions that have a position bias of their own:
none for `simple` and `alibi`, a window for `local` and `conv`, all for `full`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .mixing_aft import Mixing, gated, gather, has_state_operator, mix, window_and_slopes, without_padding
from .portable_aft import (
    EMPTY,
    Averages,
    block_sums,
    fold,
    join_heads,
    triangle_sums,
    unfold,
)
from .position_biases_aft import PositionBias, widen


# New tokens that continue a cache are processed in chunks of this size, each with its own table of position biases.
PIECE_SIZE = 128


class AFTLayerState(CacheLayerMixin):
    """The cached state of one layer. The batch is the first dimension of all tensors.

    Args:
        window: how many of the last keys and values to keep; None for all. The sums are over the tokens before.

    Attributes:
        keys, values: (B, h, W, k) and (B, h, W, c): the last real tokens of each row, right-aligned. Keys are -inf
            where a row has fewer than W tokens. These and the maximum are in float32, or float64 for float64 inputs.
        numerator, denominator, maximum: the sums of Eq. 2 over the tokens before the window, divided by exp(maximum),
            (B, h, 1, c) and twice (B, h, 1, k). The sums are in float64: rounding errors of many steps do not add up.
        padding: (B,), the number of padding tokens of each row.
        history: all keys (B, T, h k) in order, -inf for padding. None unless `output_attentions` is used.
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
    cumulative_length: int

    is_sliding = False
    _state = ("keys", "values", "numerator", "denominator", "maximum", "padding", "history")

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self.reset()

    def __copy__(self) -> "AFTLayerState":
        # With tensors of its own, since steps update them in place.
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._map(torch.clone)
        return other

    def reset(self) -> None:
        """Empty the state."""
        for name in self._state:
            setattr(self, name, None)
        self.cumulative_length = 0
        self.padded = self.is_initialized = False
        self.is_empty = True

    def store(self, **tensors: torch.Tensor) -> None:
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
        self.numerator = value_states.new_zeros((batch, heads, 1, width), dtype=torch.float64)
        self.denominator = key_states.new_zeros((batch, heads, 1, key_width), dtype=torch.float64)
        self.maximum = key_states.new_full((batch, heads, 1, key_width), EMPTY)
        self.padding = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.is_initialized = True

    @property
    def seen(self) -> torch.Tensor:
        """(B,), the number of real tokens of each row, which is also the position of its next token."""
        return self.cumulative_length - self.padding

    def sums(self) -> Averages:
        """Eq. 2 over the tokens before the window, with the batch folded into the heads."""
        return Averages.of(*(fold(x) for x in (self.numerator, self.denominator, self.maximum)))

    def _store_sums(self, sums: Averages) -> None:
        average, logsumexp = (unfold(x, self.keys.shape[1]) for x in sums)
        maximum = logsumexp.to(self.keys.dtype)
        denominator = (logsumexp - maximum).clamp(-1.0, 1.0).exp()  # that of an empty sum is not defined
        self.store(numerator=average * denominator, denominator=denominator, maximum=maximum)

    def mix(self, problem: Mixing, implementation: str = "auto") -> torch.Tensor:
        """Compute Eq. 2, (B, T, d), for new tokens after the cached ones, and add them to the state."""
        if problem.documents is not None:
            raise ValueError("a state holds one sequence per row, not packed documents")
        by_operator = self.window is not None and has_state_operator(problem, implementation)
        if self.is_initialized:
            by_operator &= self.keys.dtype == torch.float32 and not self.numerator.requires_grad
        biases = problem.biases
        one_token = problem.length == 1 and problem.padding_mask is None and self.is_initialized
        windowed = self.window is not None and not biases.hides_outside and implementation != "reference"
        if one_token and windowed and not by_operator:
            key, value = (widen(x) for x in problem.by_head())
            bias = biases.by_lag(1, self._position(biases))
            bias = None if bias is None else bias.squeeze(1).unsqueeze(-1)
            return gated(problem, join_heads(self.step(key, value, bias, biases.slopes)))
        counts = None if problem.padding_mask is None else problem.padding_mask.sum(-1)
        problem, order = without_padding(problem, moved=True)
        if by_operator:
            context = self._mix_by_operator(problem, counts)
        else:
            context = self._mix_prompt(problem, counts, implementation)
        return context if order is None else gather(context, order)

    def _mix_by_operator(self, problem: Mixing, counts: torch.Tensor | None) -> torch.Tensor:
        """Compute and add tokens by an operator. Of each row, `counts`, (B,), are real (None: all)."""
        biases, length, first = problem.biases, problem.length, None
        if not self.is_initialized:
            self.lazy_initialization(*(widen(x[:, :, :0]) for x in problem.by_head()))
        if counts is not None:
            tokens = torch.arange(length, device=counts.device)
            first = torch.where(tokens < counts[:, None], 0, length)  # padding sees nothing
        bias, slopes = window_and_slopes(problem, self._position(biases))
        state = self._sums_and_window()
        if not all(x.is_contiguous() for x in state):
            self._map(torch.Tensor.contiguous)
            state = self._sums_and_window()
        inputs = problem.query, problem.key, problem.value, bias, slopes, first, biases.hides_outside
        context = torch.ops.aft_hf_v1.causal_state(*inputs, *state)
        self.count(length, counts)
        return context

    def _sums_and_window(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.numerator, self.denominator, self.maximum

    def _mix_prompt(self, problem: Mixing, counts: torch.Tensor | None, implementation: str) -> torch.Tensor:
        """Compute and add tokens as `_mix_by_operator`, by PyTorch operations."""
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
        return gated(problem, join_heads(torch.cat(pieces, 2)))

    def _position(self, biases: PositionBias) -> int | torch.Tensor:
        """Return the position of the next token, one per row (B,) if they differ and w depends on the position."""
        return self.cumulative_length if biases.relative or not self.padded else self.seen

    def _continue(self, key: torch.Tensor, value: torch.Tensor, biases: PositionBias) -> torch.Tensor:
        """Eq. 2 for new tokens, (B, h, T, c), over their own keys and values and the cached ones."""
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
            return unfold(block_sums(fold(keys), fold(values), bias, masked=True).average, key.shape[1])
        sums = triangle_sums(fold(key), fold(value), own_bias)
        if kept:
            sums = sums.merge(block_sums(fold(self.keys), fold(self.values), past_bias))
        far = self.sums()
        if biases.slopes is not None:
            steps = torch.arange(1, length + 1, device=key.device, dtype=key.dtype)
            slopes = biases.slopes.to(key.dtype).repeat(batch)
            far = far.shifted(-(slopes[:, None] * steps)[..., None, None])
        return unfold(far.merge(sums.map(torch.Tensor.double)).average, key.shape[1]).to(value.dtype)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        counts: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add new tokens to the state, and return the keys and values of the window.

        Args:
            key_states, value_states: (B, h, T, k) and (B, h, T, c), in the dtype of the state. In each row, real
                tokens come first; keys of padding are -inf.
            counts: (B,), how many of the T tokens of each row are real; None if all are.
            slopes: (h,), for w = -slope * distance, which has no window; otherwise None.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        past = self.sums()
        if slopes is not None:
            new = self.padding.new_full((1,), length) if counts is None else counts
            heads, rows = slopes.to(key_states.dtype).view(-1, 1, 1), new.to(key_states.dtype).view(-1, 1, 1, 1)
            distance = rows - 1 - torch.arange(length, device=new.device)[:, None]  # (B, 1, T, 1) to the last token
            # Padding comes after the last real token, so its distance would be negative. Its weight is 0 anyway.
            key_states = key_states - heads * distance.clamp_min(0)
            past = past.shifted(fold((-heads * rows).expand(len(key_states), -1, -1, -1)))
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        kept = keys.shape[2] if self.window is None else self.window
        if counts is None:
            leaving = keys.shape[2] - kept
            leaving_keys, leaving_values = keys[:, :, :leaving], values[:, :, :leaving]
            # Copies, since views would keep the memory of all the given tokens allocated.
            self.store(keys=keys[:, :, leaving:].clone(), values=values[:, :, leaving:].clone())
        else:
            # The window of each row ends at its own last real token.
            start = (self.keys.shape[2] + counts - kept)[:, None]  # (B, 1), negative if a row has too few tokens
            index = (start + torch.arange(kept, device=start.device))[:, None, :, None]
            before = torch.arange(keys.shape[2], device=start.device) < start  # (B, T)
            leaving_keys, leaving_values = keys.masked_fill(~before[:, None, :, None], -torch.inf), values
            kept_keys, kept_values = (x.take_along_dim(index.clamp_min(0), 2) for x in (keys, values))
            self.store(keys=kept_keys.masked_fill(index < 0, -torch.inf), values=kept_values)
        if leaving_keys.shape[2] > 0:
            past = past.merge(block_sums(fold(leaving_keys), fold(leaving_values)).map(torch.Tensor.double))
        self._store_sums(past)
        self.count(length, counts)
        return self.keys, self.values

    def count(self, length: int, counts: torch.Tensor | None) -> None:
        """Count `length` new tokens of each row, of which `counts`, (B,), are real (None: all)."""
        self.is_empty = False
        if counts is not None:
            self.padded = True
            self.store(padding=self.padding + (length - counts))
        self.cumulative_length += length

    def step(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add one token to every row as `update`, and return its averages of Eq. 2, (B, h, 1, c).

        `bias`, (B or 1, h, W + 1, 1), is w from the token to the window and to itself.
        """
        batch, past = key.shape[0], self.sums()
        if slopes is not None:
            past = past.shifted(-slopes.to(key.dtype).repeat(batch).view(-1, 1, 1, 1))
        keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        row = None if bias is None else bias.expand(batch, -1, -1, -1).flatten(0, 1).mT  # (B h, 1, W + 1)
        average = past.merge(block_sums(fold(keys), fold(values), row).map(torch.Tensor.double)).average
        past = past.merge(block_sums(fold(keys[:, :, :1]), fold(values[:, :, :1])).map(torch.Tensor.double))
        self.store(keys=keys[:, :, 1:], values=values[:, :, 1:])
        self._store_sums(past)
        self.count(1, None)
        return unfold(average, key.shape[1]).to(value.dtype)

    def tokens_after(self, length: int, limit: int) -> int:
        """Number of tokens of the longest row after `length` more, to be compared with a `limit` of positions."""
        tokens = self.cumulative_length + length
        if tokens > limit and self.padded:  # padding takes no position; it is subtracted only here, since that waits
            tokens = int(self.seen.max()) + length
        return tokens

    def check_batch_size(self, batch_size: int) -> None:
        """Raise a ValueError if the state has another batch size."""
        if self.is_initialized and self.padding.shape[0] != batch_size:
            raise ValueError(f"the cache has a batch size of {self.padding.shape[0]}, but the input has {batch_size}")

    def record(self, problem: Mixing) -> Mixing:
        """Add the keys of new tokens to the history, and return the problem of all tokens so far, before `mix`."""
        if not self.is_empty and self.history is None:
            raise ValueError(
                "output_attentions needs all keys, but this cache holds only their sums: set output_attentions from "
                "the first call on"
            )
        key = problem.key
        if problem.padding_mask is not None:
            key = key.masked_fill(~problem.padding_mask.unsqueeze(-1), -torch.inf)
        self.history = key if self.history is None else torch.cat([self.history, key], 1)
        real = (self.history != -torch.inf).any(-1)
        return replace(problem, key=self.history, padding_mask=real, num_queries=self.history.shape[1])

    # The interface of `CacheLayerMixin`.

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self._state if getattr(self, name) is not None}

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name, tensor in self._tensors().items():
            setattr(self, name, function(tensor))

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
        return sum(tensor.nbytes for tensor in self._tensors().values())


class AFTStaticLayerState(AFTLayerState):
    """A layer state for `torch.compile` and CUDA graphs: its tensors are updated in place, and its length is a tensor.

    Args:
        window: how many of the last keys and values to keep, for inference.
        max_length: maximum number of tokens of a row, which is not checked.
    """

    cumulative_length: torch.Tensor  # type: ignore[assignment]  # as in the static layers of transformers

    is_compileable = True

    def __init__(self, window: int | None, max_length: int):
        if window is None:
            raise ValueError('a static cache needs layers with a cache of constant size, unlike aft_type "full"')
        super().__init__(window)
        self.max_length = max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        compiling = torch.compiler.is_compiling()
        # Inference tensors could not be updated outside of inference mode.
        with nullcontext() if compiling else torch.inference_mode(False):
            super().lazy_initialization(key_states, value_states)
            self.cumulative_length = torch.zeros((), dtype=torch.long, device=self.device)
        self.padded = True  # so that one compiled program serves rows with and without padding
        for tensor in () if compiling else (*self._tensors().values(), self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)

    def store(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            getattr(self, name).copy_(tensor)

    def tokens_after(self, length: int, limit: int) -> int:
        """Only the new tokens: `AFTModel.new_cache` has compared `max_length` with the limit."""
        return length

    def get_max_length(self) -> int:
        return self.max_length

    def reset(self) -> None:
        """Empty the state, in place once its tensors are allocated."""
        if not self.is_initialized:
            super().reset()
            return
        self.history, self.is_empty = None, True
        for tensor in (*self._tensors().values(), self.cumulative_length):
            tensor.zero_()
        self.keys.fill_(-torch.inf)
        self.maximum.fill_(EMPTY)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for tensor in self._tensors().values():
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class AFTCache(Cache):
    """The generation cache of a model, with one `AFTLayerState` for each layer. `AFTModel.new_cache` creates one.

    Args:
        windows: the window of each layer.
        max_length: maximum number of tokens of a row in a static cache; None for a dynamic cache.
    """

    layers: list[AFTLayerState]  # type: ignore[assignment]  # transformers lists only its own classes here

    def __init__(self, windows: list[int | None], max_length: int | None = None):
        if max_length is None:
            super().__init__(layers=[AFTLayerState(window) for window in windows])
        else:
            super().__init__(layers=[AFTStaticLayerState(window, max_length) for window in windows])

    def nbytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(layer.nbytes() for layer in self.layers)


__all__ = ["AFTCache", "AFTLayerState", "AFTStaticLayerState"]
