"""What the five AFT mixers share: the projections, the choice of the form of the operation, masks, and memory."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from transformers.activations import ACT2FN

from .activations_aft import gated_projection
from .caching_aft import AFTLayerState
from .causal_sums_aft import CausalSums
from .dense_sums_aft import DenseSums
from .direct_mixing_aft import DirectSums, TableSums, direct_mixing
from .feature_major_aft import Projections, feature_major_mixing, projected_dtype, runs_by_feature
from .mixing_aft import (
    CHUNK_SIZE,
    ScaledSums,
    block_sums,
    chunked_mixing,
    count_chunks,
    dense_mixing,
    fold,
    masked_mixing,
    mixing_weights,
    pad_to_power_of_two,
    power_of_two_from,
    reference_mixing,
    triangle_sums,
    unfold,
    widen,
    windowed_mixing,
    working_dtype,
)


# Tokens that continue a state are taken in pieces of this many, each with a table of its own.
STEP_SIZE = 128


class AFTMixer(nn.Module):
    """What the five types share: Y = act(Q) * average of V with weights exp(K + w) (Eq. 2), then a projection.

    Args:
        hidden_size: width d of input and output.
        num_heads: position-bias heads h; each owns d / h features.
        causal: whether position t sees only t' <= t.
        key_per_head: whether K is one number per head, as in AFT-conv, or one per feature.
        qkv_bias: whether query, key and value projections have biases.
        use_query: whether the output is gated by the query.
        query_activation: activation of the query, a name known to transformers.
        use_output_projection: whether to project the result.
        global_connectivity: whether positions outside the window of the type count with w = 0, or not at all.
        implementation: "auto", "reference", or one of `implementations`.

    Raises:
        ValueError: sizes that do not fit each other, or an implementation that the type does not have.
    """

    # Whether w depends on where a token stands in its row. If so, padding is moved out of the way first.
    ordered = True
    # Whether w depends on the distance of two positions alone.
    relative = False

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 1,
        causal: bool = False,
        key_per_head: bool = False,
        qkv_bias: bool = True,
        use_query: bool = True,
        query_activation: str = "sigmoid",
        use_output_projection: bool = True,
        global_connectivity: bool = True,
        implementation: str = "auto",
    ):
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}")
        if query_activation not in ACT2FN:
            raise ValueError(f"query_activation={query_activation!r} is not known; use one of {', '.join(ACT2FN)}")
        self.hidden_size, self.num_heads, self.causal = hidden_size, num_heads, causal
        self.global_connectivity = global_connectivity
        allowed = ("auto", "reference", *self.implementations)
        if implementation not in allowed:
            raise ValueError(
                f"mixing_implementation={implementation!r} does not exist for {type(self).__name__} "
                f"(causal={causal}); use one of {', '.join(map(repr, allowed))}"
            )
        self.implementation = implementation
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias) if use_query else None
        self.k_proj = nn.Linear(hidden_size, num_heads if key_per_head else hidden_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size) if use_output_projection else nn.Identity()
        self.query_activation = ACT2FN[query_activation]

    @property
    def implementations(self) -> tuple[str, ...]:
        """The fast forms of this type, the one that "auto" prefers first."""
        raise NotImplementedError

    def reset_position_bias(self) -> None:
        """Initialize the parameters of w; nothing to do where w has none."""

    # ---------------------------------------------------------------------------------------------- position biases

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        """The dense w of Eq. 2 before any causal mask: (h, T, T), w[i, t, t'] for head i, in float32
        (float64 where the parameters are).

        Args:
            seq_len: T; by default all positions that a learned table covers.
            grid_size: (rows, columns) with T = rows * columns, for mixers on a grid.
        """
        if seq_len is None:
            raise ValueError(f"{type(self).__name__} has no length of its own: position_bias needs seq_len")
        positions = torch.arange(seq_len, device=self.v_proj.weight.device)
        return self.position_bias_between(positions, positions)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """w between any positions: (..., T) and (..., T') give (..., h, T, T')."""
        raise NotImplementedError

    def slopes(self, device: torch.device | None = None) -> torch.Tensor | None:
        """(h,) where w falls linearly with any distance, else None: far away, w = 0."""
        return None

    def _outside(self) -> float:
        """w outside the window."""
        return 0.0 if self.global_connectivity else -torch.inf

    # -------------------------------------------------------------------------------------------------- the forward

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
        state: AFTLayerState | None = None,
        output_attentions: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Eq. 2 with the query's gate and the output projection.

        Args:
            query: (B, T, d).
            key, value: (B, T', d); `query` by default.
            attention_mask: (B, T') with 0 for padding, or boolean (B or 1, T, T') with False where a query must not
                look. The positions of keys count from the first real token of a row, those of queries too where
                there is one for each key: a padded row equals the row alone.
            position_ids: (B or 1, T), positions other than 0, 1, 2 ... of the real tokens. Each row then has a
                T x T table of its own.
            grid_size: (rows, columns) of a mixer on a grid; by default a square.
            state: what a causal mixer remembers of earlier calls, updated in place; `query` then continues them.
            output_attentions: also return the implicit attention (Eq. 3), (B, d, T, T').

        Returns:
            (B, T, d), and the attention if asked for. A query that sees nothing averages to 0.

        Raises:
            ValueError: shapes that do not fit each other, or a sequence longer than a learned table.
        """
        key = query if key is None else key
        value = query if value is None else value
        self._check_inputs(query, key, value, attention_mask, position_ids)
        plain = attention_mask is None and position_ids is None and state is None and not output_attentions
        if plain and key is query and value is query:
            output = self._mix_by_feature(query, grid_size)
            if output is not None:
                return output
        keys, values = self.k_proj(key), self.v_proj(value)
        gate = None if self.q_proj is None else self.query_activation(self.q_proj(query))
        attentions = None
        with full_precision(query.device.type):
            if state is not None:
                self._check_state(query, key, attention_mask, position_ids, state)
                if output_attentions:
                    attentions = self._attentions_with_state(gate, keys, attention_mask, state)
                context = self._mix_with_state(keys, values, attention_mask, state)
            elif output_attentions:
                # One table for both, so the attention is that of the output where kernels are sampled (Eq. 10) too.
                table = self._table(query.shape[1], keys, attention_mask, position_ids, grid_size)
                attentions = self._attentions(gate, keys, *table)
                # The output comes from the attention, gate and all, so that gradients reach it.
                context, gate = torch.einsum("bdts,bsd->btd", attentions, values.to(attentions.dtype)), None
            else:
                context = self._mix(keys, values, query.shape[1], attention_mask, position_ids, grid_size)
        if context.dtype != values.dtype:
            context = context.to(values.dtype)
        output = self.o_proj(context) if gate is None else gated_projection(gate, context, self.o_proj)
        return (output, attentions.to(values.dtype)) if output_attentions else output

    def _check_inputs(self, query, key, value, attention_mask, position_ids) -> None:
        inputs = {"query": query}
        alone = key is query and value is query
        if not alone:
            inputs |= {"key": key, "value": value}
        for name, x in inputs.items():
            if x.dim() != 3 or x.shape[-1] != self.hidden_size:
                raise ValueError(f"{name} must be (batch, length, {self.hidden_size}), got {tuple(x.shape)}")
        if not alone and (key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]):
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit: "
                "one batch size for all, one length for key and value"
            )
        if attention_mask is not None:
            batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
            if attention_mask.shape not in ((batch, keys), (batch, queries, keys), (1, queries, keys)):
                raise ValueError(
                    f"attention_mask must be ({batch}, {keys}) or ({batch} or 1, {queries}, {keys}), "
                    f"got {tuple(attention_mask.shape)}"
                )
            if attention_mask.is_floating_point() and attention_mask.dim() == 3:
                raise ValueError(
                    "attention_mask of pairs must be boolean, True where a query may look; "
                    f"got {attention_mask.dtype}, as of masks that are added to logits"
                )
        if position_ids is not None:
            length = key.shape[1]
            if query.shape[1] != length or position_ids.shape not in ((query.shape[0], length), (1, length)):
                raise ValueError(
                    f"position_ids {tuple(position_ids.shape)} do not fit {length} keys and {query.shape[1]} queries: "
                    f"they must be ({query.shape[0]} or 1, length), with one length for both"
                )
            if int(position_ids.min()) < 0:
                raise ValueError(f"position_ids must not be negative, got {int(position_ids.min())}")

    def _check_state(self, query, key, attention_mask, position_ids, state: AFTLayerState) -> None:
        if not self.causal or key is not query or position_ids is not None:
            raise ValueError("a state goes with a causal mixer, and with query, key and value from one input in order")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"with a state, attention_mask must be 2-D padding, got {tuple(attention_mask.shape)}")
        state.check_batch_size(query.shape[0])

    def _mix(self, keys, values, num_queries, attention_mask, position_ids, grid_size) -> torch.Tensor:
        """(B, T', k d) keys and (B, T', d) values to (B, T, d), by the form that fits mask and lengths."""
        length = keys.shape[1]
        self._check_length(max(length, num_queries))
        pairwise = attention_mask is not None and attention_mask.dim() == 3
        if pairwise or position_ids is not None or num_queries != length:
            table = self._table(num_queries, keys, attention_mask, position_ids, grid_size)
            return self._mix_under(keys, values, *table)
        order = None
        if attention_mask is not None:
            keys, values, order, _ = self._without_padding(keys, values, attention_mask, self.ordered)
        mix = getattr(self, f"_mix_{self._form(length)}")
        context = self._join_heads(mix(self._split_heads(keys), self._split_heads(values), grid_size))
        return context if order is None else _gather(context, order)

    def _mix_by_feature(self, x: torch.Tensor, grid_size: tuple[int, int] | None) -> torch.Tensor | None:
        """The output for one input (B, T, d), by `feature_major_mixing` where that is possible; None elsewhere."""
        projections = Projections(self.q_proj, self.query_activation, self.k_proj, self.v_proj, self.o_proj)
        if not runs_by_feature(x, projections, self.num_heads):
            return None
        (batch, length, _), dtype = x.shape, projected_dtype(x)
        keys = x.new_empty((), dtype=dtype).expand(batch, self.num_heads, length, 1)  # shape and type are what counts
        if self._form(length) != "direct" or not issubclass(self._sums_type(keys, grid_size), TableSums):
            return None
        with full_precision(x.device.type):
            return feature_major_mixing(x.to(dtype), projections, *self._direct_form(keys, grid_size))

    def _without_padding(self, keys, values, attention_mask, compact: bool):
        """Keys of padding hidden and, if `compact`, moved behind the real tokens of the row.

        Also returns where each token went, (B, T) or None, and how many are real, (B,).
        """
        mask = attention_mask.bool()
        order = None
        if compact:
            order = _real_tokens_first(mask)
            keys, values, mask = (_scatter(x, order) for x in (keys, values, mask.unsqueeze(-1)))
        keys = keys.masked_fill(~mask.view(*keys.shape[:2], 1), -torch.inf)
        return keys, values, order, attention_mask.bool().sum(-1)

    # --------------------------------------------------------------------------------------------- with a memory

    @property
    def state_window(self) -> int | None:
        """How many of the last keys and values a state has to keep; None for all."""
        raise NotImplementedError

    def _mix_with_state(self, keys, values, attention_mask, state: AFTLayerState) -> torch.Tensor:
        """As `_mix`, for the continuation of what `state` has seen; updates it."""
        self._check_room(keys.shape[1], state)
        if self._is_step(keys, attention_mask, state):
            batch, heads = keys.shape[0], self.num_heads
            key, value = (widen(x.reshape(batch, heads, 1, -1)) for x in (keys, values))
            return state.step(key, value, self._step_bias(state), self.slopes(keys.device)).reshape(batch, 1, -1)
        order = counts = None
        if attention_mask is not None:
            keys, values, order, counts = self._without_padding(keys, values, attention_mask, True)
        dtype = working_dtype(values)
        keys, values = self._split_heads(keys).to(dtype), self._split_heads(values).to(dtype)
        slopes = self.slopes(keys.device)
        if state.cumulative_length == 0:
            mix = getattr(self, f"_mix_{self._form(keys.shape[2])}")
            context = mix(keys, values, None)
            state.update(keys, values, counts, slopes)
        else:
            pieces, start = [], 0
            for key, value in zip(keys.split(STEP_SIZE, 2), values.split(STEP_SIZE, 2)):
                pieces.append(self._continue(key, value, state))
                here = None if counts is None else (counts - start).clamp(0, key.shape[2])
                state.update(key, value, here, slopes)
                start += key.shape[2]
            context = torch.cat(pieces, 2)
        context = self._join_heads(context)
        return context if order is None else _gather(context, order)

    def _is_step(self, keys: torch.Tensor, attention_mask: torch.Tensor | None, state: AFTLayerState) -> bool:
        """Whether this is the one next token of every row, at one position: then there is a short way."""
        alone = keys.shape[1] == 1 and attention_mask is None and state.cumulative_length > 0
        in_line = self.relative or not state.padded
        windowed = state.window is not None and self.global_connectivity and self.implementation != "reference"
        # A traced program must not depend on the number of tokens so far.
        return alone and in_line and windowed and not torch.compiler.is_compiling()

    def _step_bias(self, state: AFTLayerState) -> torch.Tensor | None:
        """w of the window and of the token itself, (h, W + 1, 1); None where that is 0 or falls with the distance."""
        return None

    def _continue(self, key: torch.Tensor, value: torch.Tensor, state: AFTLayerState) -> torch.Tensor:
        """The context of new tokens, (B, h, T, c), from their own keys and values and those that `state` holds."""
        batch, _, length, _ = key.shape
        kept = state.keys.shape[2]
        rows = state.seen if state.padded and not self.relative else state.seen[:1]
        queries = rows[:, None] + torch.arange(length, device=key.device)
        positions = rows[:, None] + torch.arange(-kept, length, device=key.device)
        bias = self.position_bias_between(queries, positions).to(key.dtype).expand(batch, -1, -1, -1)
        if not self.global_connectivity:
            later = torch.arange(length, device=key.device)[:, None] < torch.arange(-kept, length, device=key.device)
            keys, values = torch.cat([state.keys, key], 2), torch.cat([state.values, value], 2)
            return masked_mixing(keys, values, bias.masked_fill(later, -torch.inf))
        past_bias, own_bias = bias.flatten(0, 1).split([kept, length], -1)
        sums = triangle_sums(*pad_to_power_of_two(fold(key), fold(value), own_bias)).narrow(length)
        if kept:
            sums = sums.merge(block_sums(fold(state.keys), fold(state.values), past_bias))
        return unfold(sums.merge(self._distant(state, length)).average(), batch)

    def _distant(self, state: AFTLayerState, length: int) -> ScaledSums:
        """The sums over what lies before the window, as each of the next `length` positions sees them."""
        return state.sums()

    def _check_room(self, length: int, state: AFTLayerState) -> None:
        """Raise where `length` more tokens would not fit into a learned table."""

    # --------------------------------------------------------------------------------------------------- the forms

    def _check_length(self, length: int) -> None:
        """Raise where a learned table is shorter than `length`."""

    def _form(self, length: int) -> str:
        """The form of the operation for sequences of this length."""
        windows_alone = not self.global_connectivity
        if self.implementation == "reference":
            return "table"
        if torch.compiler.is_exporting() and "chunked" in self.implementations:
            return "chunked"  # the form that takes any length without a table as long
        if windows_alone:
            return "chunked" if self.causal and self.implementation in ("auto", "chunked") else "table"
        form = self._fast_form(length) if self.implementation == "auto" else self.implementation
        if form == "direct" and torch.compiler.is_compiling():  # a traced program must not depend on values
            form = next(name for name in self.implementations if name != "direct")
        return form

    def _fast_form(self, length: int) -> str:
        """The fast form that "auto" stands for."""
        return self.implementations[0]

    def _mix_table(self, keys, values, grid_size) -> torch.Tensor:
        length = keys.shape[-2]
        return self._average_under(keys, values, *self._table(length, self._join_heads(keys), None, None, grid_size))

    def _mix_dense(self, keys, values, grid_size) -> torch.Tensor:
        return dense_mixing(keys, values, self.position_bias(keys.shape[-2], grid_size), causal=self.causal)

    def _mix_direct(self, keys, values, grid_size) -> torch.Tensor:
        sums, bias, safe = self._direct_form(keys, grid_size)
        return direct_mixing(sums, keys, values, bias, safe)

    def _direct_form(self, keys: torch.Tensor, grid_size: tuple[int, int] | None):
        """What `direct_mixing` needs for keys like these, (B, h, T, k), whatever their values: how to sum, w as that
        takes it, and what to do instead.
        """
        length = keys.shape[-2]
        if self._sums_type(keys, grid_size) is DenseSums:
            return DenseSums(causal=self.causal), self.position_bias(length), partial(dense_mixing, causal=self.causal)
        size = self._chunk_size(length)
        return CausalSums(size), self._chunk_bias(length, size, keys.device), self._in_chunks

    def _sums_type(self, keys: torch.Tensor, grid_size: tuple[int, int] | None) -> type[DirectSums]:
        """How the direct form sums with keys like these, (B, h, T, k)."""
        return CausalSums if "chunked" in self.implementations else DenseSums

    def _mix_chunked(self, keys, values, grid_size) -> torch.Tensor:
        length = keys.shape[-2]
        return self._in_chunks(keys, values, self._chunk_bias(length, self._chunk_size(length), keys.device))

    def _in_chunks(self, keys, values, bias) -> torch.Tensor:
        """Causal Eq. 2 with the biases of `_chunk_bias`."""
        size = bias.shape[-2]
        if not self.global_connectivity:
            return windowed_mixing(keys, values, bias, chunk_size=size)
        previous_bias, own_bias = bias.split(size, -1)
        return chunked_mixing(keys, values, own_bias, previous_bias, chunk_size=size)

    def _chunk_size(self, length: int) -> int:
        """C: wide enough that what lies two chunks back is outside the window of every query."""
        size = power_of_two_from(max(self.window - 1, CHUNK_SIZE))
        # An exported program serves all lengths with one size.
        return size if torch.compiler.is_exporting() else min(size, power_of_two_from(length))

    def _chunk_bias(self, length: int, size: int, device: torch.device) -> torch.Tensor:
        """w from each chunk to the one before it and to itself: (h, n, C, 2 C), n = 1 where all chunks share it."""
        starts = torch.arange(1 if self.relative else count_chunks(length, size), device=device) * size
        queries = starts[:, None] + torch.arange(size, device=device)
        keys = starts[:, None] + torch.arange(-size, size, device=device)
        return self.position_bias_between(queries, keys).movedim(-3, 0)

    def _mix_under(self, keys, values, bias, mask) -> torch.Tensor:
        """Any mask, any positions: (B, T', k d) and (B, T', d) to (B, T, d) with the biases and mask of `_table`."""
        return self._join_heads(self._average_under(self._split_heads(keys), self._split_heads(values), bias, mask))

    def _average_under(self, keys, values, bias, mask) -> torch.Tensor:
        if self.implementation == "reference":
            return reference_mixing(keys, values, bias, mask)
        return masked_mixing(keys, values, bias if mask is None else bias.masked_fill(~mask, -torch.inf))

    def _table(self, num_queries, keys, attention_mask, position_ids, grid_size):
        """The dense position biases (B or 1, h, T, T') and the mask (B or 1, 1, T, T') of what each query sees.

        `keys`, (B, T', k d), give the length and the device.
        """
        length, device = keys.shape[1], keys.device
        self._check_length(max(length, num_queries))
        query_positions = torch.arange(num_queries, device=device).unsqueeze(0)
        key_positions = torch.arange(length, device=device).unsqueeze(0)
        mask = None
        if self.causal:
            mask = (query_positions.mT >= key_positions)[None, None]
        if attention_mask is not None:
            visible = attention_mask.bool()
            if visible.dim() == 2 and self.ordered:
                key_positions = _real_tokens_first(visible)
                query_positions = key_positions if num_queries == length else query_positions.expand(len(visible), -1)
            visible = visible.unsqueeze(1) if visible.dim() == 3 else visible[:, None, None]
            mask = visible if mask is None else mask & visible
        if position_ids is not None:
            self._check_length(int(position_ids.max()) + 1)
            query_positions = key_positions = position_ids
        return self._bias_table(query_positions, key_positions, grid_size), mask

    def _bias_table(self, query_positions, key_positions, grid_size) -> torch.Tensor:
        """w for positions (B or 1, T) and (B or 1, T'): (B or 1, h, T, T')."""
        return self.position_bias_between(query_positions, key_positions)

    def _attentions(self, gate, keys, bias, mask) -> torch.Tensor:
        """Eq. 3: (B, d, T, T'), the weight of each value in each output feature, the query's gate included."""
        weights = mixing_weights(self._split_heads(keys), bias, mask)  # (B, h, k, T, T')
        weights = weights.expand(-1, -1, self.hidden_size // self.num_heads, -1, -1).flatten(1, 2)
        return weights if gate is None else gate.transpose(1, 2).unsqueeze(-1) * weights

    def _attentions_with_state(self, gate, keys, attention_mask, state: AFTLayerState) -> torch.Tensor:
        """Eq. 3 over all positions since the state was empty: (B, d, T, past + T)."""
        mask = keys.new_ones(keys.shape[:2]) if attention_mask is None else attention_mask
        all_keys, all_mask = state.record(keys, mask.bool())
        bias, mask = self._table(all_keys.shape[1], all_keys, all_mask, None, None)
        here = slice(-keys.shape[1], None)  # the rows of the new tokens
        return self._attentions(gate, all_keys, bias[..., here, :], mask[..., here, :])

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, h c) -> (B, h, T, c)

    def _join_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(-2)  # (B, h, T, c) -> (B, T, h c)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, implementation={self.implementation!r}"


def full_precision(device_type: str) -> AbstractContextManager:
    """Without autocast. Where there is none, nothing is entered: a step of decoding is little more than its calls."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _real_tokens_first(mask: torch.Tensor) -> torch.Tensor:
    """Where each token of (B, T) goes when padding is moved behind the real tokens: for these, their position."""
    real = mask.cumsum(-1)
    return torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(-1) - 1)


def _scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Move x[b, t] to place order[b, t]."""
    return torch.zeros_like(x).scatter(1, order.unsqueeze(-1).expand_as(x), x)


def _gather(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo `_scatter`."""
    return x.gather(1, order.unsqueeze(-1).expand_as(x))


__all__ = ["AFTMixer"]
