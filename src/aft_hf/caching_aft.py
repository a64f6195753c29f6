"""The generation cache: running sums over the past, and a window of recent keys and values.

A layer caches the two sums of Eq. 2, and the keys and values of the positions that have a position bias of their own:
none for `simple` and `alibi`, a window for `local` and `conv`, all for `full`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .mixing_aft import Mixing, Visibility, causal_w, mix, mix_causal, uses_operator, without_padding
from .portable_aft import EMPTY, PIECE_SIZE, by_head, finish, pairwise
from .portable_aft import causal_state as portable_causal_state
from .position_biases_aft import working_dtype


SUMS_AND_WINDOW = ("keys", "values", "numerator", "denominator", "maximum")


@contextmanager
def _no_inference_tensors() -> Iterator[None]:
    """Leave inference mode, but not no_grad."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


class AFTLayerState(CacheLayerMixin):
    """The cached state of one layer. The batch is the first dimension of all tensors, which are updated in place.

    Args:
        window: how many of the last keys and values to keep; None for all. The sums are over the tokens before.
        max_length: maximum number of tokens of a row in a static cache, for `torch.compile` and CUDA graphs. It is
            not checked. None for a dynamic cache.

    Attributes:
        keys, values: (B, h, W, k) and (B, h, W, c): the last real tokens of each row, right-aligned. Keys are -inf
            where a row has fewer than W tokens. These and the maximum are in float32, or float64 for float64 inputs.
        numerator, denominator, maximum: the sums of Eq. 2 over the tokens before the window, divided by exp(maximum),
            (B, h, 1, c) and twice (B, h, 1, k). The sums are in float64: rounding errors of many steps do not add up.
        padding: (B,), the number of padding tokens of each row.
        history: all keys (B, T, h k) in order, -inf for padding. None unless `output_attentions` is used.
        cumulative_length: the number of tokens of each row, padding included.
        padded: whether rows may have different numbers of real tokens.
    """

    # All tensors are None until the state is initialized.
    keys: Tensor
    values: Tensor
    numerator: Tensor
    denominator: Tensor
    maximum: Tensor
    padding: Tensor
    history: Tensor | None
    cumulative_length: Any  # an integer, or a tensor in a static cache, as in transformers

    is_sliding = False
    _state = (*SUMS_AND_WINDOW, "padding", "history")

    def __init__(self, window: int | None, max_length: int | None = None):
        super().__init__()
        if max_length is not None and window is None:
            raise ValueError('a static cache needs layers with a cache of constant size, unlike aft_type "full"')
        self.window, self.max_length, self.is_compileable = window, max_length, max_length is not None
        self._clear()

    def _clear(self) -> None:
        for name in self._state:
            setattr(self, name, None)
        self.cumulative_length = 0
        self.padded = self.is_initialized = False
        self.is_empty = True

    def __copy__(self) -> "AFTLayerState":
        # With its own tensors: tokens update them in place.
        other = type(self).__new__(type(self))
        with _no_inference_tensors():
            vars(other).update({name: x.clone() if torch.is_tensor(x) else x for name, x in vars(self).items()})
        return other

    def __deepcopy__(self, memo: Any) -> "AFTLayerState":
        return self.__copy__()

    def reset(self) -> None:
        """Empty the state; a static one in place once its tensors are allocated."""
        if not self.is_compileable or not self.is_initialized:
            self._clear()
            return
        self.history, self.is_empty = None, True
        for tensor in (*self._tensors().values(), self.cumulative_length):
            tensor.detach_().zero_()  # without a graph
        self.keys.fill_(-torch.inf)
        self.maximum.fill_(EMPTY)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate an empty state for keys (B, h, T, k) and values (B, h, T, c)."""
        batch, heads, _, key_width = key_states.shape
        shape, width = (batch, heads, self.window or 0), value_states.shape[-1]
        dtype, self.device = working_dtype(value_states), value_states.device
        of_sums = dtype if self.device.type == "mps" else torch.float64  # which mps does not have
        with _no_inference_tensors():
            self.keys = key_states.new_full((*shape, key_width), -torch.inf, dtype=dtype)
            self.values = value_states.new_zeros((*shape, width), dtype=dtype)
            self.numerator = value_states.new_zeros((batch, heads, 1, width), dtype=of_sums)
            self.denominator = key_states.new_zeros((batch, heads, 1, key_width), dtype=of_sums)
            self.maximum = key_states.new_full((batch, heads, 1, key_width), EMPTY, dtype=dtype)
            self.padding = torch.zeros(batch, dtype=torch.long, device=self.device)
            if self.is_compileable:
                self.cumulative_length = torch.zeros((), dtype=torch.long, device=self.device)
        self.is_initialized = True
        self.padded = self.is_compileable  # one compiled program serves rows with and without padding
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in (*self._tensors().values(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    @property
    def seen(self) -> Tensor:
        """(B,), the number of real tokens of each row, which is also the position of its next token."""
        return self.cumulative_length - self.padding

    def store(self, **tensors: Tensor) -> None:
        """Set the named tensors of the state, in place if they have no gradients."""
        for name, tensor in tensors.items():
            if tensor.requires_grad or getattr(self, name).requires_grad:
                with _no_inference_tensors():
                    setattr(self, name, tensor.clone(memory_format=torch.contiguous_format))
            else:
                getattr(self, name).copy_(tensor)

    def mix(self, problem: Mixing, implementation: str = "auto") -> Tensor:
        """Compute Eq. 2, (B, T, d), for new tokens after the cached ones, and add them to the state."""
        seen, first, count = problem.visibility, None, None
        if seen is not None and seen.is_packed:
            raise ValueError("a cache holds one sequence per row, but position_ids or cu_seq_lens_q pack several")
        if not self.is_initialized:
            self.lazy_initialization(*problem.by_head())
        length, moved = problem.length, None
        if seen is not None:
            count, first, self.padded = seen.real.sum(1), seen.padding_last().first, True
            if seen.order is not None or self.window is None:
                problem, moved = without_padding(problem)
        if length == 0:
            context = problem.value.new_zeros(problem.value.shape)
        elif self.window is None:
            context = self._mix_full(problem, count, implementation)
        else:
            context = self._mix_constant(problem, first, implementation)
        self.count(length, count)
        return context if moved is None else moved.restored(context)

    def _mix_constant(self, problem: Mixing, first: Tensor | None, implementation: str) -> Tensor:
        """Compute and add tokens to a state of constant size."""
        by_operator = uses_operator("causal_state", implementation, self.device)
        w = causal_w(problem, by_operator, self._position(problem.biases))
        given: Any = problem.query, problem.key, problem.value, *w, first, problem.biases.global_connectivity
        state = tuple(getattr(self, name) for name in SUMS_AND_WINDOW)
        # The graph of an earlier step may need the tensors of the state.
        tensors = (*given, *state) if torch.is_grad_enabled() else state
        needs_gradients = any(x.requires_grad for x in tensors if isinstance(x, Tensor))
        if by_operator and not needs_gradients:
            return torch.ops.aft_hf_v4.causal_state(*given, *state)
        # The operator `causal` has gradients, unlike `causal_state`.
        context = mix_causal(problem, implementation, first) if by_operator and self.is_empty else None
        context, following = portable_causal_state(*given, *state, context=context)
        self.store(**dict(zip(SUMS_AND_WINDOW, following)))
        return context

    def _mix_full(self, problem: Mixing, count: Tensor | None, implementation: str) -> Tensor:
        """Compute and add tokens, where padding comes last in each row, to the keys and values of all tokens."""
        biases, past = problem.biases, self.keys.shape[2]
        key, value = by_head(problem.key, problem.value, problem.num_heads)
        keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        if past == 0:
            context = mix(problem, implementation)
        else:
            rows, pieces = (self.seen if self.padded else self.seen[:1])[:, None], []
            visible: Tensor | None = None  # a single token sees all
            for start in range(0, problem.length, PIECE_SIZE):
                end = past + min(start + PIECE_SIZE, problem.length)
                positions = torch.arange(-past, end - past, device=key.device)
                bias = biases.between(rows + positions[past + start :], rows + positions).to(key.dtype)
                if problem.length > 1:
                    visible = (positions[past + start :, None] >= positions)[None, None]
                pieces.append(pairwise(keys[:, :, :end], values[:, :, :end], bias, visible))
            context = finish(problem.query, torch.cat(pieces, 2), problem.value.dtype)
        if count is not None:  # the real tokens of each row move to its end
            places = torch.arange(keys.shape[2], device=key.device) - (problem.length - count)[:, None]
            index = places.clamp_min(0)[:, None, :, None]
            keys = keys.take_along_dim(index, 2).masked_fill((places < 0)[:, None, :, None], -torch.inf)
            values = values.take_along_dim(index, 2)
        self.keys, self.values = keys, values
        return context

    def _position(self, biases: Any) -> int | Tensor:
        """Return the position of the next token, one per row (B,) if they may differ and w depends on it."""
        if biases.relative or self.is_empty:
            return 0
        return self.seen if self.padded else self.cumulative_length

    def count(self, length: int, count: Tensor | None) -> None:
        """Count `length` new tokens of each row, of which `count`, (B,), are real; None if all are."""
        self.is_empty = False
        if count is not None:
            self.padding.add_(length - count)
        self.cumulative_length += length  # in place if it is a tensor

    def tokens_after(self, length: int, limit: int) -> int:
        """Return the tokens of the longest row after `length` more, for a `limit` of positions."""
        if self.is_compileable:  # `AFTModel.new_cache` has compared `max_length` with the limit
            return length
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
                "output_attentions needs all keys, but this cache holds only their sums: set it from the first call on"
            )
        key = problem.key
        if problem.visibility is not None:
            key = key.masked_fill(~problem.visibility.real.unsqueeze(-1), -torch.inf)
        self.history = key if self.history is None else torch.cat([self.history, key], 1)
        real = (self.history != -torch.inf).any(-1)
        seen = Visibility.of(real, may_wait=False)
        return replace(problem, key=self.history, visibility=seen, num_queries=self.history.shape[1])

    # The interface of `CacheLayerMixin`.

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not supported."""
        raise NotImplementedError("an AFTLayerState is updated by `mix`")

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._state if getattr(self, name) is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for name, tensor in self._tensors().items():
            with _no_inference_tensors():
                changed = function(tensor)
            in_place = self.is_compileable and not (tensor.is_inference() or tensor.requires_grad)
            if in_place and changed.shape == tensor.shape and changed.device == tensor.device:
                tensor.copy_(changed)
            else:
                setattr(self, name, changed)

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("the cache of an AFT is a sum over the past: tokens cannot be removed from it")


def longest_row(length: int, limit: int | None, visibility: Visibility | None, state: Any) -> int | None:
    """Return the length of the longest row or document after `length` new tokens; None if not known."""
    if visibility is not None and visibility.is_packed:
        return visibility.longest
    return length if state is None or limit is None else state.tokens_after(length, limit)


class AFTCache(Cache):
    """The generation cache of a model, with one `AFTLayerState` for each layer. `AFTModel.new_cache` creates one.

    Args:
        windows: the window of each layer.
        max_length: maximum number of tokens of a row in a static cache; None for a dynamic cache.
    """

    layers: list[AFTLayerState]  # type: ignore[assignment]  # transformers lists only its own classes here

    def __init__(self, windows: list[int | None], max_length: int | None = None):
        super().__init__(layers=[AFTLayerState(window, max_length) for window in windows])

    def __copy__(self) -> "AFTCache":
        other = type(self).__new__(type(self))
        vars(other).update(vars(self) | {"layers": [copy(layer) for layer in self.layers]})
        return other

    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for layer in self.layers for x in layer._tensors().values())


__all__ = ["AFTCache", "AFTLayerState"]
