"""The five AFT mixers, for use on their own or in the models of this package.

Each mixer maps (B, T, d) to (B, T, d) and can replace a self-attention layer. The types differ in the position biases
w that they compute from their parameters; AFT-conv also has one key per head instead of one per feature.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils import logging

from .caching_aft import AFTLayerState, longest_row
from .configuration_aft import MIXING_IMPLEMENTATIONS
from .mixing_aft import Mixing, Visibility, mix, mixing_weights, uses_operator
from .portable_aft import LARGEST_SPAN, read
from .position_biases_aft import Dense, GridKernel, LagKernel, LinearDecay, NoBias, PositionBias, Window, widen


logger = logging.get_logger(__name__)
NO_CONTEXT = nullcontext()


class AFTMixer(nn.Module):
    """Base class of the AFT mixers: Y = act(Q) * average of V with weights exp(K + w) (Eq. 2), then a projection.

    Args:
        hidden_size: width d of input and output.
        num_heads: position-bias heads h; each owns d / h features.
        causal: whether position t sees only t' <= t.
        key_per_head: whether K is one number per head, as in AFT-conv, or per feature.
        qkv_bias, use_query, query_activation, use_output_projection, global_connectivity: as in `AFTConfig`.
        position_bias_init_std, position_bias_multiplier, mixing_implementation: as in `AFTConfig`.
    """

    # The length of the longest sequence that learned tables cover; None without learned tables.
    max_positions: int | None = None
    # The number of most recent keys and values that the generation cache keeps; None for all.
    state_window: int | None = None
    spatial_dims = 1  # 2 on a grid

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
        position_bias_init_std: float = 0.1,
        position_bias_multiplier: float = 1.0,
        mixing_implementation: str = "auto",
    ):
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"{num_heads=} does not divide {hidden_size=}")
        if query_activation not in ACT2FN:
            raise ValueError(f"{query_activation=} is not known; use one of {', '.join(ACT2FN)}")
        if mixing_implementation not in MIXING_IMPLEMENTATIONS:
            allowed = ", ".join(map(repr, MIXING_IMPLEMENTATIONS))
            raise ValueError(f"{mixing_implementation=} is not known; use one of {allowed}")
        if not 0 < position_bias_multiplier < math.inf:
            raise ValueError(f"position_bias_multiplier must be positive and finite, got {position_bias_multiplier}")
        self.hidden_size, self.num_heads, self.causal = hidden_size, num_heads, causal
        self.global_connectivity, self.mixing_implementation = global_connectivity, mixing_implementation
        self.position_bias_init_std = position_bias_init_std
        self.position_bias_multiplier = float(position_bias_multiplier)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias) if use_query else None
        self.k_proj = nn.Linear(hidden_size, num_heads if key_per_head else hidden_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size) if use_output_projection else nn.Identity()
        self.query_activation = ACT2FN[query_activation]
        self.is_wide = False  # whether learned biases span more than `LARGEST_SPAN`; `train` decides it

    def reset_position_bias(self) -> None:
        """Initialize the parameters of w, if there are any."""

    def train(self, mode: bool = True) -> "AFTMixer":
        super().train(mode)
        # Called when a model is loaded, while values can be read.
        parameter = next(self.parameters(recurse=False), None)
        plain = type(parameter) is nn.Parameter and parameter.device.type != "meta"
        self.is_wide = not mode and plain and self.spans(LARGEST_SPAN)
        return self

    def spans(self, limit: float) -> bool:
        """Whether two learned position biases differ by more than `limit`."""
        return False

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        """Compute w from the parameters, on the device of `like` and in its working dtype."""
        raise NotImplementedError

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Return the dense w of Eq. 2 before any causal mask: (h, T, T), w[i, t, t'] for head i, in float32
        (float64 if the parameters are float64).

        Args:
            seq_len: T. Default: all positions that a learned table covers.
            grid_size: (rows, columns) with T = rows * columns, for mixers on a grid.
        """
        seq_len, grid_size = self._check_size(seq_len, grid_size)
        parameter = next(self.parameters(), torch.empty(0))  # quantized layers have none
        device_type = parameter.device.type
        with torch.autocast("cpu" if device_type == "meta" else device_type, enabled=False):
            return self.biases(parameter, grid_size).dense(seq_len)

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, tuple[int, int] | None]:
        """Return the length and the grid size to compute w for; raise a ValueError if w is undefined there."""
        if length is None:
            raise ValueError(f"{type(self).__name__} has no fixed length: position_bias needs seq_len")
        return length, None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        visibility: Visibility | None = None,
        grid_size: tuple[int, int] | None = None,
        state: AFTLayerState | None = None,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute Eq. 2 with the query's gate and the output projection.

        Args:
            query: (B, T, d). None for the entropy of `AFTConv.position_bias_entropy`.
            key, value: (B, T', d). Default: `query`.
            attention_mask: (B, T'), 0 for padding, which has no position, or boolean (B or 1, T, T'), False where a
                key is hidden from a query.
            position_ids: (B or 1, T), positions other than 0, 1, 2, ... of the real tokens.
            visibility: in place of a (B, T) mask, the padding and the packed documents of the rows; a document sees
                no other document.
            grid_size: (rows, columns) of the input, for a mixer on a grid. Default: a square.
            state: the cache of a causal mixer, updated in place; `query` then continues the cached tokens.
            output_attentions: whether to also return the implicit attention (Eq. 3), (B, d, T, T').

        Returns:
            (B, T, d), and the attention if requested. The average of a query that sees no key, or that is padding, is
            0.
        """
        if query is None:
            return self.position_bias_entropy()
        if torch.jit.is_tracing():
            raise NotImplementedError("torch.jit.trace is not supported: use torch.compile or torch.export")
        if self.is_wide:
            _warn_of_wide_biases(self.mixing_implementation, query.device)
        key = query if key is None else key
        value = query if value is None else value
        self._check_inputs(query, key, value, attention_mask, position_ids, visibility, state)
        pair_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 3 else None
        if attention_mask is not pair_mask:
            visibility = Visibility.of(attention_mask, may_wait=False)
        longest = longest_row(max(key.shape[1], query.shape[1]), self.max_positions, visibility, state)
        _, grid_size = self._check_size(1 if longest is None else longest, grid_size)
        project, activation = self.q_proj, self.query_activation
        gate = None if project is None else project(query)
        # The operators apply the sigmoid. Hooks of the module need a call of their own.
        fused = type(activation) is nn.Sigmoid and not (output_attentions or hooks_of(activation))
        gate = gate if gate is None or fused else activation(gate)
        key, value, queries = self.k_proj(key), self.v_proj(value), query.shape[1]
        attentions = context = None
        device_type = query.device.type
        autocasts = device_type != "meta" and torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False) if autocasts else NO_CONTEXT:
            # Positional: a decoding step is mostly calls.
            given = key, value, self.num_heads, self.biases(query, grid_size), self.causal, queries, visibility
            problem = Mixing(*given, pair_mask, position_ids, gate if fused else None)
            if output_attentions:
                attentions, context = _attentions(problem if state is None else state.record(problem), gate, queries)
            elif state is not None:
                state.history = None  # it would lack these keys
            if context is None or state is not None:
                mixed = self.mix(problem, state)
                if context is None:  # else gradients reach the attention
                    context = mixed if gate is None or fused else gate * mixed
            context = context.to(value.dtype)
        output = self.o_proj(context)
        if output is context and context.requires_grad:
            output = context.clone()  # the output may be modified; the backward pass needs the context
        return output if attentions is None else (output, attentions.to(value.dtype))

    def mix(self, problem: Mixing, state: AFTLayerState | None = None) -> Tensor:
        """Compute Eq. 2 for a problem of this mixer, after the tokens of the state if there is one: (B, T, d)."""
        seen: Any = problem.visibility
        if seen is not None and seen.is_shard:
            return seen.mix(self, problem, state)
        return (mix if state is None else state.mix)(problem, self.mixing_implementation)

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        visibility: Visibility | None,
        state: AFTLayerState | None,
    ) -> None:
        alone = key is query and value is query
        for name, x in (("query", query), ("key", key), ("value", value))[: 1 if alone else 3]:
            if x.dim() != 3 or x.shape[-1] != self.hidden_size:
                raise ValueError(f"{name} must be (batch, length, {self.hidden_size}), got {tuple(x.shape)}")
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        if not alone and (key.shape[:2] != value.shape[:2] or key.shape[0] != batch):
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not match"
            )
        if attention_mask is not None:
            if attention_mask.shape not in ((batch, keys), (batch, queries, keys), (1, queries, keys)):
                raise ValueError(
                    f"attention_mask must be ({batch}, {keys}) or ({batch} or 1, {queries}, {keys}), "
                    f"got {tuple(attention_mask.shape)}"
                )
            if attention_mask.dim() == 3 and attention_mask.dtype != torch.bool:
                kind = attention_mask.dtype
                raise ValueError(f"a 3-D attention_mask must be boolean, True where a query sees a key, got {kind}")
            if visibility is not None:
                raise ValueError("give either attention_mask or visibility, which describes padding as well")
        if self.spatial_dims == 2 and visibility is not None and visibility.is_packed and not visibility.is_shard:
            raise ValueError("packed documents are sequences, and this AFTConv mixes the positions of a grid")
        if visibility is not None and (position_ids is not None or queries != keys):
            raise ValueError("a visibility needs inputs without position_ids, and one length for queries and keys")
        if position_ids is not None:
            if self.spatial_dims == 2:
                raise ValueError("position_ids are for sequences; an AFTConv on a grid takes positions from grid_size")
            fits = position_ids.shape == (batch, keys) or position_ids.shape == (1, keys)
            if not fits or queries != keys or position_ids.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"position_ids must be int64 or int32, ({batch} or 1, T) for {queries} queries and {keys} keys, "
                    f"got {tuple(position_ids.shape)} of {position_ids.dtype}"
                )
            # Not on an accelerator, where reading would wait.
            if position_ids.device.type == "cpu" and position_ids.numel() > 0:
                lowest, highest = (read(x) for x in position_ids.aminmax())
                if lowest is not None and lowest < 0:
                    raise ValueError(f"position_ids must not be negative, got {lowest}")
                self._check_size(1 if highest is None else highest + 1, None)
        if state is not None:
            of_pairs = attention_mask is not None and attention_mask.dim() == 3
            if not self.causal or key is not query or position_ids is not None or of_pairs:
                raise ValueError("a state needs causal=True, and one input without position_ids or 3-D mask")
            if state.window != self.state_window:
                raise ValueError("the state is of another layer")
            state.check_batch_size(batch)

    def extra_repr(self) -> str:
        names = ("window", "spatial_dims", "max_positions", "num_heads", "causal", "mixing_implementation")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name, None) is not None)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module's calls."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return [hook for each in kinds for hook in each.values()]


def _warn_of_wide_biases(implementation: str, device: torch.device) -> None:
    """Warn if a call cannot read position biases that differ by more than `LARGEST_SPAN`."""
    if (device.type != "cpu" or torch.compiler.is_compiling()) and not uses_operator("table", implementation, device):
        _warn_once(
            f"learned position biases differ by more than {LARGEST_SPAN:.0f}: compiled, exported, or on an accelerator"
            f" without kernels, each counts as at least the largest of its query or kernel minus {LARGEST_SPAN:.0f}"
        )


@torch.compiler.assume_constant_result
def _warn_once(message: str) -> bool:
    logger.warning_once(message)
    return True


def _attentions(problem: Mixing, gate: Tensor | None, queries: int) -> tuple[Tensor, Tensor | None]:
    """Eq. 3 for the last queries, (B, d, T, T'), with the gate, and its output; None after tokens in a cache."""
    bias, visible = (x if x is None else x[..., -queries:, :] for x in problem.table())
    weights = mixing_weights(problem.by_head()[0], bias, visible)  # (B, h, k, T, T')
    weights = weights.expand(-1, -1, problem.value.shape[-1] // problem.num_heads, -1, -1).flatten(1, 2)
    weights = weights if gate is None else gate.transpose(1, 2).unsqueeze(-1) * weights
    values = widen(problem.value).mT.unsqueeze(-2)
    if values.shape[-1] != weights.shape[-1]:
        return weights, None
    values = values if visible is None else values.masked_fill(~visible, 0.0)  # hidden ones may be NaN
    return weights, (weights * values).sum(-1).mT


class AFTSimple(AFTMixer):
    """AFT-simple (Eq. 5): w = 0, linear time. It has the arguments of `AFTMixer`."""

    state_window = 0

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return NoBias(self.num_heads, like)


class AFTAlibi(AFTMixer):
    """AFT with ALiBi biases: w = -m_i (t - t'), m_i = 2^(-8 i / h) for head i = 1 .. h, causal.

    Linear time, any length. It has the arguments of `AFTMixer`; `causal` must be True.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool = True, **options: Any):
        if not causal:
            raise ValueError("AFTAlibi must be causal: its biases decay with distance into the past; got causal=False")
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, **options)
        self.state_window = 0

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return LinearDecay.of(self.num_heads, like)


class AFTFull(AFTMixer):
    """AFT-full (Eq. 2) with learned position biases, factorized as w_tt' = m u_t . v_t' (Eq. 7).

    Args:
        hidden_size: width d.
        max_positions: the length of the longest sequence that the biases cover.
        position_bias_dim: rank d' of the factors; None for one table of max_positions x max_positions.
        **options: the other arguments of `AFTMixer`.
    """

    max_positions: int
    learned: tuple[str, ...] = "position_bias_query", "position_bias_key"

    def __init__(self, hidden_size: int, max_positions: int, *, position_bias_dim: int | None = 128, **options: Any):
        for name, size in (("max_positions", max_positions), ("position_bias_dim", position_bias_dim)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be greater than 0, got {size}")
        super().__init__(hidden_size, **options)
        self.max_positions = max_positions
        if position_bias_dim is None:
            self.learned, position_bias_dim = ("position_bias_table",), max_positions
        for name in self.learned:
            setattr(self, name, nn.Parameter(torch.empty(self.num_heads, max_positions, position_bias_dim)))
        self.reset_position_bias()

    def reset_position_bias(self) -> None:
        # w of a new layer has the same distribution for every multiplier.
        std = self.position_bias_init_std / self.position_bias_multiplier ** (1.0 / len(self.learned))
        for name in self.learned:
            init.normal_(getattr(self, name), mean=0.0, std=std)

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return Dense(*self._learned(), self.position_bias_multiplier)

    @torch.no_grad()
    def spans(self, limit: float) -> bool:
        learned = self._learned()
        return learned[0].dim() == 3 and Dense(*learned, self.position_bias_multiplier).spans(limit)

    def _learned(self) -> tuple[Tensor, Tensor | None]:
        """Return u and v, or the table and None."""
        query, *key = [getattr(self, name) for name in self.learned]
        return query, key[0] if key else None

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, None]:
        length = self.max_positions if length is None else length
        if length > self.max_positions:
            raise ValueError(f"{length} positions are more than the {self.max_positions} of {type(self).__name__}")
        return length, None


class AFTLocal(AFTFull):
    """AFT-local (Eq. 4): learned position biases within a window, |t - t'| < s; tokens outside it have w = 0.

    Args:
        hidden_size, max_positions: as for `AFTFull`.
        window_size: window size s.
        **options: the other arguments of `AFTFull` and `AFTMixer`.
    """

    def __init__(self, hidden_size: int, max_positions: int, window_size: int, **options: Any):
        if window_size < 1:
            raise ValueError(f"window_size must be greater than 0, got {window_size}")
        super().__init__(hidden_size, max_positions, **options)
        self.window = min(window_size, max_positions)
        self.state_window = self.window - 1

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return Window(*self._learned(), self.position_bias_multiplier, self.window, self.global_connectivity)


class AFTConv(AFTMixer):
    """AFT-conv (Eq. 6): relative position biases, with one kernel and one key per head.

    The kernels are re-parameterized (Eq. 8): w = m (gamma (k - mean(k)) / std(k) + beta) for each head. gamma and beta
    are 0 at the start, so a new layer begins as AFT-simple.

    Args:
        hidden_size: width d.
        num_heads: heads h; the key projection is d -> h.
        kernel_size: kernel size s, odd unless causal.
        spatial_dims: 2 for s x s kernels on a grid of rows and columns, 1 for a sequence.
        causal: whether position t sees only t' <= t, for `spatial_dims=1` only. The kernel then covers the lags
            0 .. s - 1.
        position_bias_reparameterized, position_bias_selection, gumbel_temperature: as in `AFTConfig`.
        **options: the other arguments of `AFTMixer`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int,
        *,
        spatial_dims: int = 2,
        causal: bool = False,
        position_bias_reparameterized: bool = True,
        position_bias_selection: str | None = None,
        gumbel_temperature: float = 0.5,
        **options: Any,
    ):
        if spatial_dims not in (1, 2) or (causal and spatial_dims != 1):
            raise ValueError(f"spatial_dims must be 1 or 2, and 1 if causal, got {spatial_dims} ({causal=})")
        if kernel_size < 1 or (not causal and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be > 0, and odd unless causal, got {kernel_size} ({causal=})")
        if position_bias_selection not in (None, "gumbel"):
            raise ValueError(f'position_bias_selection must be None or "gumbel", got {position_bias_selection!r}')
        if gumbel_temperature <= 0:
            raise ValueError(f"gumbel_temperature must be greater than 0, got {gumbel_temperature}")
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, key_per_head=True, **options)
        self.spatial_dims, self.window, self.state_window = spatial_dims, kernel_size, kernel_size - 1
        self.position_bias_selection, self.gumbel_temperature = position_bias_selection, gumbel_temperature
        self.kernel = nn.Parameter(torch.empty(num_heads, *[kernel_size] * spatial_dims))
        self.kernel_scale = nn.Parameter(torch.empty(num_heads)) if position_bias_reparameterized else None  # gamma
        self.kernel_shift = nn.Parameter(torch.empty(num_heads)) if position_bias_reparameterized else None  # beta
        self.reset_position_bias()

    def reset_position_bias(self) -> None:
        # Divided by m, so that Adam changes the standardized kernel m times as fast, like m gamma and m beta.
        init.normal_(self.kernel, mean=0.0, std=self.position_bias_init_std / self.position_bias_multiplier)
        if self.kernel_scale is not None and self.kernel_shift is not None:
            init.zeros_(self.kernel_scale)
            init.zeros_(self.kernel_shift)

    def kernel_bias(self) -> Tensor:
        """Return w as kernels, (h, s, s) or (h, s), in float32 at least: Eq. 8, then Eq. 10 with a selection."""
        kernels = self._kernels()
        if self.position_bias_selection is None:
            return kernels
        flat = kernels.flatten(1)
        if self.training:
            return (flat * nn.functional.gumbel_softmax(flat, tau=self.gumbel_temperature)).view_as(kernels)
        index = flat.argmax(-1, keepdim=True)
        # A product with the one-hot vector would be NaN where an entry is infinite.
        return torch.zeros_like(flat).scatter(-1, index, flat.gather(-1, index)).view_as(kernels)

    def _kernels(self) -> Tensor:
        """Return the kernels times the multiplier, after Eq. 8 if they are re-parameterized."""
        multiplier, kernels = self.position_bias_multiplier, widen(self.kernel)
        if self.kernel_scale is not None and self.kernel_shift is not None:
            # `group_norm` alone would not give 0 for a constant kernel. eps is scaled as new kernels are.
            kernels = kernels - kernels.mean(list(range(1, kernels.dim())), keepdim=True)
            given = self.num_heads, widen(self.kernel_scale), widen(self.kernel_shift), 1e-12 / multiplier**2
            kernels = torch.group_norm(kernels.unsqueeze(0), *given).squeeze(0)
        return kernels if multiplier == 1.0 else multiplier * kernels

    @torch.no_grad()
    def spans(self, limit: float) -> bool:
        kernels = self._kernels() if self.kernel.dim() > 1 else self.kernel.new_zeros(1)
        return bool(kernels.amax().clamp_min(0.0) - kernels.amin().clamp_max(0.0) > limit)

    def position_bias_entropy(self) -> Tensor:
        """Return the entropy (nats) of softmax(w) over each head's kernel, summed over the heads (Eq. 9)."""
        log_p = torch.log_softmax(self._kernels().flatten(1), -1)
        return -(log_p.exp() * log_p).sum()

    def biases(self, like: Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        kernels = self.kernel_bias()
        if self.spatial_dims == 1:
            return LagKernel(kernels, self.causal, self.global_connectivity)
        if grid_size is None:
            raise ValueError("AFTConv on a grid needs grid_size=(rows, columns)")
        return GridKernel(kernels, grid_size, self.global_connectivity)

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, tuple[int, int] | None]:
        if self.spatial_dims == 1:
            return super()._check_size(length, None)
        if grid_size is None:
            if length is None:
                return 0, None  # `biases` raises a ValueError
            side = round(length**0.5)
            grid_size = (side, side)
        rows, columns = grid_size
        if min(rows, columns) < 0 or length not in (None, rows * columns):
            raise ValueError(f"{length} positions do not fill a grid of {rows} x {columns}: pass a matching grid_size")
        return rows * columns, grid_size


__all__ = ["AFTAlibi", "AFTConv", "AFTFull", "AFTLocal", "AFTMixer", "AFTSimple"]
