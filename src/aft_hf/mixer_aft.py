"""The base class of the five AFT mixers: projections, input checks, the query's gate, and the call of a backend."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils import logging

from .activations_aft import full_precision, gated_projection, has_no_hooks
from .caching_aft import AFTLayerState
from .configuration_aft import MIXING_IMPLEMENTATIONS
from .documents_aft import Documents
from .mixing_aft import Mixing, fuses_gate, mix, mix_layer, mixing_weights
from .mixing_triton_aft import triton_is_installed
from .position_biases_aft import PositionBias
from .projections_aft import Projections
from .scaled_sums_aft import can_read_values, widen
from .sequence_shards_aft import SequenceShard


logger = logging.get_logger(__name__)


class AFTMixer(nn.Module):
    """Base class of the AFT mixers: Y = act(Q) * average of V with weights exp(K + w) (Eq. 2), then a projection.

    Args:
        hidden_size: width d of input and output.
        num_heads: position-bias heads h; each owns d / h features.
        causal: whether position t sees only t' <= t.
        key_per_head: whether K is one number per head, as in AFT-conv; otherwise K is one number per feature.
        qkv_bias: whether query, key and value projections have biases.
        use_query: whether the output is gated by the query.
        query_activation: name of the activation of the query in `transformers.activations.ACT2FN`.
        use_output_projection: whether to project the result.
        global_connectivity: whether positions outside the window of the type are visible with w = 0; otherwise they
            are hidden.
        implementation: "auto", "reference", or the name of the backend that is tried first.

    Raises:
        ValueError: `num_heads` does not divide `hidden_size`, or `query_activation` or `implementation` is unknown.
    """

    # The length of the longest sequence that learned tables cover; None without learned tables.
    max_positions: int | None = None

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
        if implementation not in MIXING_IMPLEMENTATIONS:
            allowed = ", ".join(map(repr, MIXING_IMPLEMENTATIONS))
            raise ValueError(f"mixing_implementation={implementation!r} is not known; use one of {allowed}")
        if implementation == "triton" and not triton_is_installed():
            logger.warning_once(
                "mixing_implementation='triton' needs the package triton, which is not installed (install the extra "
                "`kernels`); the portable backend, or on a CPU the cpu backend, is used instead"
            )
        self.hidden_size, self.num_heads, self.causal = hidden_size, num_heads, causal
        self.global_connectivity = global_connectivity
        self.implementation = implementation
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias) if use_query else None
        self.k_proj = nn.Linear(hidden_size, num_heads if key_per_head else hidden_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size) if use_output_projection else nn.Identity()
        self.query_activation = ACT2FN[query_activation]

    def reset_position_bias(self) -> None:
        """Initialize the parameters of w, if there are any."""

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        """Compute the position biases w from the parameters.

        Args:
            like: a tensor whose device and working dtype are used for w without parameters.
            grid_size: (rows, columns), for mixers on a grid.
        """
        raise NotImplementedError

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        """Return the dense w of Eq. 2 before any causal mask: (h, T, T), w[i, t, t'] for head i, in float32
        (float64 if the parameters are float64).

        Args:
            seq_len: T. Default: all positions that a learned table covers.
            grid_size: (rows, columns) with T = rows * columns, for mixers on a grid.

        Example: the biases between the patches of an image, and those of head 2 for the query in row 3, column 4:

        ```python
        >>> from aft_hf import AFTConv

        >>> mixer = AFTConv(64, num_heads=4, kernel_size=5)
        >>> w = mixer.position_bias(grid_size=(8, 10))
        >>> w.shape
        torch.Size([4, 80, 80])
        >>> w[2, 3 * 10 + 4].view(8, 10).shape
        torch.Size([8, 10])
        ```
        """
        seq_len, grid_size = self._check_size(seq_len, grid_size)
        parameter = next(self.parameters(), torch.empty(0))  # modules of quantized layers have none
        with full_precision(parameter.device.type):
            return self.biases(parameter, grid_size).dense(seq_len)

    @property
    def state_window(self) -> int | None:
        """The number of most recent keys and values that the generation cache keeps; None for all."""
        raise NotImplementedError

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, tuple[int, int] | None]:
        """Return the length and the grid size for which w is computed.

        Raises:
            ValueError: the length is missing, exceeds a learned table, or does not match the grid.
        """
        if length is None:
            raise ValueError(f"{type(self).__name__} has no fixed length: position_bias needs seq_len")
        return length, None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        documents: Documents | None = None,
        shard: SequenceShard | None = None,
        grid_size: tuple[int, int] | None = None,
        state: AFTLayerState | None = None,
        output_attentions: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute Eq. 2 with the query's gate and the output projection.

        Args:
            query: (B, T, d).
            key, value: (B, T', d). Default: `query`.
            attention_mask: (B, T') with 0 for padding, or boolean (B or 1, T, T') with False where a key is hidden
                from a query. With a padding mask, positions of keys count from the first real token of a row, and so
                do positions of queries if T = T': a padded row gives the same result as the row alone.
            position_ids: (B or 1, T), positions other than 0, 1, 2, ... of the real tokens. Each row then has a
                T x T table of its own.
            documents: the documents that are packed into the rows; a document sees no other document.
            shard: which part of longer rows the input holds, if the rows are split over several processes. `query`,
                `key` and `value` are then one input, and the padding and documents of the shard replace
                `attention_mask` and `documents`.
            grid_size: (rows, columns) of the input, for a mixer on a grid. Default: a square.
            state: the cache of a causal mixer, updated in place; `query` then continues the cached tokens.
            output_attentions: whether to also return the implicit attention (Eq. 3), (B, d, T, T').

        Returns:
            (B, T, d), and the attention if requested. The average of a query that sees no key, or that is padding of a
            causal mixer, is 0.

        Raises:
            ValueError: shapes do not match, or a sequence is longer than a learned table.
            NotImplementedError: the mixer is called under `torch.jit.trace`.
        """
        if torch.jit.is_tracing():
            raise NotImplementedError("torch.jit.trace is not supported: use torch.compile or torch.export for an AFT")
        key = query if key is None else key
        value = query if value is None else value
        self._check_inputs(query, key, value, attention_mask, position_ids, documents)
        if shard is not None:
            self._check_shard(shard, query, key, value, (attention_mask, position_ids, documents), output_attentions)
            if state is not None and (state.is_initialized or shard.documents is not None):
                raise ValueError("shards can start a state, with one document per row, but do not continue one")
            attention_mask = shard.padding_mask
            _, grid_size = self._check_size(shard.longest if self.causal else query.shape[1], grid_size)
        elif state is None:
            length = max(key.shape[1], query.shape[1])
            longest = length if documents is None else documents.longest()
            _, grid_size = self._check_size(1 if longest is None else longest, grid_size)
        else:
            self._check_state(query, key, attention_mask, position_ids, documents, state)
            if self.max_positions is not None:
                self._check_size(state.tokens_after(query.shape[1], self.max_positions), None)
        biases = self.biases(query, grid_size)
        one_input = state is None and key is query and value is query and not output_attentions
        unmasked = attention_mask is None and position_ids is None and documents is None and shard is None
        if one_input and unmasked:
            options: dict[str, Any] = {"causal": self.causal, "implementation": self.implementation}
            output = mix_layer(query, self._projections(), biases, **options)
            if output is not None:
                return output
        problem = Mixing(
            self.k_proj(key),
            self.v_proj(value),
            self.num_heads,
            biases,
            self.causal,
            query.shape[1],
            *_masks(attention_mask),
            position_ids,
            documents,
            shard,
        )
        gate, attentions = None if self.q_proj is None else self.q_proj(query), None
        if gate is not None and self._gate_is_fused(problem, output_attentions):
            problem, gate = replace(problem, query=gate), None
        elif gate is not None:
            gate = self.query_activation(gate)
        with full_precision(query.device.type):
            if output_attentions:
                seen = problem if state is None else state.record(problem)
                attentions = _attentions(seen, gate, query.shape[1])
            if state is not None:
                context = state.mix(problem, self.implementation)
            elif output_attentions:
                # The output is computed from the attention, gate included, so that gradients reach the attention.
                context, gate = torch.einsum("bdts,bsd->btd", attentions, widen(problem.visible_values())), None
            else:
                context = mix(problem, self.implementation)
        if context.dtype != problem.value.dtype:
            context = context.to(problem.value.dtype)
        if self.causal and problem.padding_mask is not None and context.shape[:2] == problem.padding_mask.shape:
            # A padding query has no position in the order of the tokens, and must not see later tokens of the row.
            context = context.masked_fill(~problem.padding_mask.unsqueeze(-1), 0.0)
        if gate is not None:
            output = gated_projection(gate, context, self.o_proj)
        elif type(self.o_proj) is nn.Identity and context.requires_grad:
            output = self.o_proj(context.clone())  # the output may be modified; the backward pass needs the context
        else:
            output = self.o_proj(context)
        return output if attentions is None else (output, attentions.to(problem.value.dtype))

    def _gate_is_fused(self, problem: Mixing, output_attentions: bool) -> bool:
        """Whether the backend that computes a problem also applies the gate."""
        if output_attentions or type(self.query_activation) is not nn.Sigmoid:
            return False
        return fuses_gate(problem, self.implementation) and has_no_hooks(self.query_activation)

    def _projections(self) -> Projections:
        return Projections(self.q_proj, self.query_activation, self.k_proj, self.v_proj, self.o_proj, self.num_heads)

    def _check_inputs(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        documents: Documents | None,
    ) -> None:
        inputs = {"query": query}
        alone = key is query and value is query
        if not alone:
            inputs |= {"key": key, "value": value}
        for name, x in inputs.items():
            if x.dim() != 3 or x.shape[-1] != self.hidden_size:
                raise ValueError(f"{name} must be (batch, length, {self.hidden_size}), got {tuple(x.shape)}")
        if not alone and (key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]):
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not match: "
                "all must have one batch size, and key and value one length"
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
                    "a 3-D attention_mask must be boolean, True where a query sees a key; additive masks are not "
                    f"supported, got {attention_mask.dtype}"
                )
        if documents is not None and (position_ids is not None or query.shape[1] != key.shape[1]):
            raise ValueError("packed documents need inputs without position_ids, and one length for queries and keys")
        if position_ids is not None:
            self._check_positions(position_ids, query.shape[0], query.shape[1], key.shape[1])

    def _check_positions(self, position_ids: torch.Tensor, batch: int, queries: int, keys: int) -> None:
        if queries != keys or position_ids.shape not in ((batch, keys), (1, keys)):
            raise ValueError(
                f"position_ids {tuple(position_ids.shape)} do not match {keys} keys and {queries} queries: "
                f"they must be ({batch} or 1, length), with one length for queries and keys"
            )
        # Not on an accelerator, where the host would have to wait for the values.
        if can_read_values(position_ids) and position_ids.numel() > 0:
            if int(position_ids.min()) < 0:
                raise ValueError(f"position_ids must not be negative, got {int(position_ids.min())}")
            self._check_size(int(position_ids.max()) + 1, None)

    def _check_shard(
        self,
        shard: SequenceShard,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        others: Iterable[object],
        output_attentions: bool,
    ) -> None:
        if self.state_window is None or not (self.causal or self.max_positions is None):
            kind = "causal" if self.causal else "bidirectional"
            raise ValueError(
                f"a {kind} {type(self).__name__} cannot take a shard of a sequence (context parallelism): use a "
                "causal AFTSimple, AFTAlibi, AFTLocal or AFTConv, or a bidirectional AFTSimple or AFTConv"
            )
        if not self.causal and (shard.padding_mask is not None or shard.documents is not None):
            raise ValueError(f"a shard for a bidirectional {type(self).__name__} has no padding and no documents")
        if key is not query or value is not query or output_attentions or any(x is not None for x in others):
            raise ValueError(
                "a shard needs one input for query, key and value, without attention_mask, position_ids, documents "
                "and output_attentions: pass padding and documents in the SequenceShard"
            )

    def _check_state(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        documents: Documents | None,
        state: AFTLayerState,
    ) -> None:
        if not self.causal or key is not query or position_ids is not None or documents is not None:
            raise ValueError(
                "a state needs a causal mixer, and one input for query, key and value without position_ids and "
                "documents"
            )
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"a state needs a 2-D attention_mask (padding), got {tuple(attention_mask.shape)}")
        state.check_batch_size(query.shape[0])

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, implementation={self.implementation!r}"


def _masks(attention_mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split an attention mask into the padding mask, None without padding, and the pair mask."""
    if attention_mask is None:
        return None, None
    mask = attention_mask.bool()
    if mask.dim() == 3:
        return None, mask
    return (None if can_read_values(mask) and mask.all() else mask), None


def _attentions(problem: Mixing, gate: torch.Tensor | None, queries: int) -> torch.Tensor:
    """Eq. 3 for the last queries, (B, d, T, T'): the weight of each value in each feature, including the gate."""
    bias, visible = (x if x is None else x[..., -queries:, :] for x in problem.table())
    weights = mixing_weights(problem.by_head()[0], bias, visible)  # (B, h, k, T, T')
    weights = weights.expand(-1, -1, problem.value.shape[-1] // problem.num_heads, -1, -1).flatten(1, 2)
    return weights if gate is None else gate.transpose(1, 2).unsqueeze(-1) * weights


__all__ = ["AFTMixer"]
