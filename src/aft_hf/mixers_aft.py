"""The five AFT mixers as ordinary modules: projections, position biases, and the form of the operation that fits.

Each takes (B, T, d) and gives (B, T, d), and can stand wherever a self-attention layer stands. What differs between
the types is `position_bias`, the w of Eq. 2; what a mixer computes is Eq. 2 with exactly that w.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast

from .mixing_aft import (
    CHUNK_SIZE,
    chunked_mixing,
    convolution_mixing,
    dense_mixing,
    indexed_mixing,
    masked_mixing,
    mixing_weights,
    power_of_two_from,
    reference_mixing,
    windowed_mixing,
)


# Above this many entries, the table exp(w) of an AFT-conv costs more than convolving with its kernels.
LARGEST_CONV_TABLE = 2**24


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
        if hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}")
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
        """The dense w of Eq. 2 before any causal mask: (h, T, T) in float32, w[i, t, t'] for head i.

        Args:
            seq_len: T; by default all positions that a learned table covers.
            grid_size: (rows, columns) with T = rows * columns, for mixers on a grid.
        """
        if seq_len is None:
            raise ValueError(f"{type(self).__name__} has no length of its own: position_bias needs seq_len")
        positions = torch.arange(seq_len, device=self.v_proj.weight.device)
        return self.position_bias_between(positions, positions)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """w between any positions: (..., T) and (..., T') give (..., h, T, T') in float32."""
        raise NotImplementedError

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
        output_attentions: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Eq. 2 with the query's gate and the output projection.

        Args:
            query: (B, T, d).
            key, value: (B, T', d); `query` by default.
            attention_mask: (B, T') with 0 for padding, or boolean (B or 1, T, T') with False where a query must not
                look. Positions count from the first real token of a row, so a padded row equals the row alone.
            position_ids: (B or 1, T), positions other than 0, 1, 2 ... of the real tokens. Each row then has a
                T x T table of its own.
            grid_size: (rows, columns) of a mixer on a grid; by default a square.
            output_attentions: also return the implicit attention (Eq. 3), (B, d, T, T').

        Returns:
            (B, T, d), and the attention if asked for. A query that sees nothing averages to 0.

        Raises:
            ValueError: shapes that do not fit each other, or a sequence longer than a learned table.
        """
        key = query if key is None else key
        value = query if value is None else value
        self._check_inputs(query, key, value, attention_mask, position_ids)
        keys, values = self.k_proj(key), self.v_proj(value)
        with maybe_autocast(query.device.type, enabled=False):
            context = self._mix(keys, values, query.shape[1], attention_mask, position_ids, grid_size)
        gate = None if self.q_proj is None else self.query_activation(self.q_proj(query))
        context = context.to(values.dtype)
        output = self.o_proj(context if gate is None else gate * context)
        if not output_attentions:
            return output
        return output, self._attentions(gate, keys, query.shape[1], attention_mask, position_ids, grid_size)

    def _check_inputs(self, query, key, value, attention_mask, position_ids) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.hidden_size:
                raise ValueError(f"{name} must be (batch, length, {self.hidden_size}), got {tuple(x.shape)}")
        if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
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
        if position_ids is not None and (query.shape[1] != key.shape[1] or position_ids.shape[-1] != key.shape[1]):
            raise ValueError(
                f"position_ids {tuple(position_ids.shape)} need one length, got {query.shape[1]} queries "
                f"and {key.shape[1]} keys"
            )

    def _mix(self, keys, values, num_queries, attention_mask, position_ids, grid_size) -> torch.Tensor:
        """Dispatch once on what the inputs need: (B, T', k d) keys and (B, T', d) values to (B, T, d)."""
        length = keys.shape[1]
        self._check_length(max(length, num_queries))
        needs_table = (
            self.implementation == "reference"
            or position_ids is not None
            or (attention_mask is not None and attention_mask.dim() == 3)
            or (self.causal and num_queries != length)
            or (not self.global_connectivity and (not self.causal or self.implementation == "dense"))
        )
        if needs_table or (num_queries != length and attention_mask is not None):
            bias, mask = self._table(num_queries, length, attention_mask, position_ids, grid_size, keys.device)
            keys, values = self._split_heads(keys), self._split_heads(values)
            if self.implementation == "reference":
                return self._join_heads(reference_mixing(keys, values, bias, mask))
            if mask is not None:
                bias = bias.masked_fill(~mask, -torch.inf)
            return self._join_heads(masked_mixing(keys, values, bias))

        order = None
        if attention_mask is not None:
            mask = attention_mask.bool()
            if self.ordered:
                order = _real_tokens_first(mask)
                keys, values, mask = (_scatter(x, order) for x in (keys, values, mask.unsqueeze(-1)))
            keys = keys.masked_fill(~mask.view(*keys.shape[:2], 1), -torch.inf)
        form = self._form(length, grid_size) if self.implementation == "auto" else self.implementation
        mix = getattr(self, f"_mix_{form}")
        context = self._join_heads(mix(self._split_heads(keys), self._split_heads(values), num_queries, grid_size))
        return context if order is None else context.gather(1, order.unsqueeze(-1).expand_as(context))

    def _check_length(self, length: int) -> None:
        """Raise where a learned table is shorter than `length`."""

    def _form(self, length: int, grid_size: tuple[int, int] | None) -> str:
        """The fast form for this length."""
        return self.implementations[0]

    def _mix_dense(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        length = keys.shape[-2]
        bias = self.position_bias(max(length, num_queries), grid_size)[:, :num_queries, :length]
        return dense_mixing(keys, values, bias, causal=self.causal)

    def _mix_chunked(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        length = keys.shape[-2]
        # Wide enough that what lies two chunks back is outside the window of every query.
        size = power_of_two_from(max(self.window - 1, CHUNK_SIZE))
        size = min(size, power_of_two_from(length))
        bias = self._chunk_bias(-(-length // size), size, keys.device)
        if not self.global_connectivity:
            return windowed_mixing(keys, values, bias, chunk_size=size)
        previous_bias, own_bias = bias.split(size, -1)
        return chunked_mixing(keys, values, own_bias, previous_bias, chunk_size=size)

    def _chunk_bias(self, chunks: int, size: int, device: torch.device) -> torch.Tensor:
        """w from each chunk to the one before it and to itself: (h, n, C, 2 C), n = 1 where all chunks share it."""
        starts = torch.arange(1 if self.relative else chunks, device=device) * size
        queries = starts[:, None] + torch.arange(size, device=device)
        keys = starts[:, None] + torch.arange(-size, size, device=device)
        return self.position_bias_between(queries, keys).movedim(-3, 0)

    def _table(self, num_queries, length, attention_mask, position_ids, grid_size, device):
        """The dense position biases (B or 1, h, T, T') and the mask (B or 1, 1, T, T') of what each query sees."""
        masks = []
        if attention_mask is not None:
            mask = attention_mask.bool()
            masks.append(mask[:, None] if mask.dim() == 3 else mask[:, None, None])
            if self.ordered and mask.dim() == 2 and position_ids is None and num_queries == length:
                position_ids = _real_tokens_first(mask)
        query_index, key_index = torch.arange(num_queries, device=device), torch.arange(length, device=device)
        if self.causal:
            masks.append((query_index[:, None] >= key_index)[None, None])
        if position_ids is None or not self.ordered:
            bias = self.position_bias(max(length, num_queries), grid_size)[None, :, :num_queries, :length]
        else:
            self._check_length(int(position_ids.max()) + 1)
            position_ids = position_ids.view(-1, length)
            bias = self.position_bias_between(position_ids, position_ids)
        mask = masks[0] if masks else None
        for other in masks[1:]:
            mask = mask & other
        return bias, mask

    def _attentions(self, gate, keys, num_queries, attention_mask, position_ids, grid_size) -> torch.Tensor:
        """Eq. 3: (B, d, T, T'), the weight of each value in each output feature, the query's gate included."""
        bias, mask = self._table(num_queries, keys.shape[1], attention_mask, position_ids, grid_size, keys.device)
        weights = mixing_weights(self._split_heads(keys), bias, mask)  # (B, h, k, T, T')
        weights = weights.expand(-1, -1, self.hidden_size // self.num_heads, -1, -1).flatten(1, 2)
        weights = weights.to(keys.dtype)
        return weights if gate is None else gate.transpose(1, 2).unsqueeze(-1) * weights

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, h c) -> (B, h, T, c)

    def _join_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(-2)  # (B, h, T, c) -> (B, T, h c)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, implementation={self.implementation!r}"


class AFTSimple(AFTMixer):
    """AFT-simple (Eq. 5): w = 0, linear time, nothing learned but the projections.

    Args:
        hidden_size: width d.
        causal: whether position t sees only t' <= t.
        **options: the other arguments of `AFTMixer`.
    """

    ordered = False
    relative = True

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("chunked",) if self.causal else ("dense",)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        lags = query_positions[..., :, None] - key_positions[..., None, :]
        return lags.new_zeros(lags.shape, dtype=torch.float32).unsqueeze(-3).repeat_interleave(self.num_heads, -3)

    def _mix_dense(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        return dense_mixing(keys, values).narrow(-2, 0, 1).expand(-1, -1, num_queries, -1)

    def _mix_chunked(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        return chunked_mixing(keys, values)


class AFTAlibi(AFTMixer):
    """AFT with ALiBi biases: w = -m_i (t - t'), m_i = 2^(-8 i / h) for head i = 1 .. h, causal.

    exp(w) decays with the distance, so the sums are a linear recurrence: linear time, nothing learned but the
    projections, no limit on the length. The slopes are those of Press et al. (2022, arXiv 2108.12409).

    Args:
        hidden_size: width d.
        num_heads: position-bias heads h.
        causal: must be True.
        **options: the other arguments of `AFTMixer`.
    """

    relative = True

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool = True, **options):
        if not causal:
            raise ValueError("AFTAlibi is causal: its biases fall with the distance into the past; got causal=False")
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, **options)

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("chunked",)

    def slopes(self, device: torch.device | None = None) -> torch.Tensor:
        """m_i for each head, (h,) in float32."""
        head = torch.arange(1, self.num_heads + 1, device=device, dtype=torch.float32)
        return torch.exp2(-8.0 * head / self.num_heads)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        lags = query_positions[..., :, None] - key_positions[..., None, :]
        return -self.slopes(lags.device)[:, None, None] * lags.unsqueeze(-3)

    def _mix_chunked(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        own_bias = self.position_bias(CHUNK_SIZE).unsqueeze(1)
        return chunked_mixing(keys, values, own_bias, slopes=self.slopes(keys.device))


class AFTFull(AFTMixer):
    """AFT-full (Eq. 2) with learned position biases, factorized as w_tt' = u_t . v_t' (Eq. 7).

    Args:
        hidden_size: width d.
        max_positions: the longest sequence that the biases cover.
        position_bias_dim: rank d' of the factors; None for one table of max_positions x max_positions.
        num_heads: position-bias heads h.
        position_bias_init_std: standard deviation of new factors, or of a new table.
        **options: the other arguments of `AFTMixer`.
    """

    def __init__(
        self,
        hidden_size: int,
        max_positions: int,
        *,
        position_bias_dim: int | None = 128,
        num_heads: int = 1,
        position_bias_init_std: float = 0.1,
        **options,
    ):
        super().__init__(hidden_size, num_heads=num_heads, **options)
        self.max_positions, self.position_bias_init_std = max_positions, position_bias_init_std
        if position_bias_dim is None:
            self.position_bias_table = nn.Parameter(torch.empty(num_heads, max_positions, max_positions))
        else:
            self.position_bias_query = nn.Parameter(torch.empty(num_heads, max_positions, position_bias_dim))
            self.position_bias_key = nn.Parameter(torch.empty(num_heads, max_positions, position_bias_dim))
        self.factorized = position_bias_dim is not None
        self.reset_position_bias()

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("dense",)

    def reset_position_bias(self) -> None:
        names = ("position_bias_query", "position_bias_key") if self.factorized else ("position_bias_table",)
        for name in names:
            init.normal_(getattr(self, name), mean=0.0, std=self.position_bias_init_std)

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        seq_len = self.max_positions if seq_len is None else seq_len
        self._check_length(seq_len)
        if self.factorized:
            u, v = self.position_bias_query[:, :seq_len].float(), self.position_bias_key[:, :seq_len].float()
            return u @ v.mT
        return self.position_bias_table[:, :seq_len, :seq_len].float()

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        # Positions beyond the table are those of padding: what they get is not used.
        queries, keys = (p.clamp(0, self.max_positions - 1) for p in (query_positions, key_positions))
        if self.factorized:
            u, v = self.position_bias_query[:, queries].float(), self.position_bias_key[:, keys].float()
            return (u @ v.mT).movedim(0, -3)
        return self.position_bias_table[:, queries[..., :, None], keys[..., None, :]].float().movedim(0, -3)

    def _check_length(self, length: int) -> None:
        if length > self.max_positions:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {self.max_positions} that the position biases "
                f"of {type(self).__name__} cover (max_position_embeddings for text, image_size for images)"
            )

    def extra_repr(self) -> str:
        return f"max_positions={self.max_positions}, {super().extra_repr()}"


class AFTLocal(AFTFull):
    """AFT-local (Eq. 4): learned position biases within a window, |t - t'| < s; beyond it tokens count with w = 0.

    Args:
        hidden_size: width d.
        max_positions: the longest sequence that the biases cover.
        window_size: s.
        **options: the other arguments of `AFTFull` and `AFTMixer`.
    """

    def __init__(self, hidden_size: int, max_positions: int, window_size: int, **options):
        super().__init__(hidden_size, max_positions, **options)
        self.window = window_size

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("chunked", "dense") if self.causal else ("dense",)

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        bias = super().position_bias(seq_len)
        positions = torch.arange(bias.shape[-1], device=bias.device)
        return self._windowed(bias, positions, positions)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        bias = super().position_bias_between(query_positions, key_positions)
        return self._windowed(bias, query_positions, key_positions)

    def _windowed(
        self, bias: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        distance = (query_positions[..., :, None] - key_positions[..., None, :]).abs().unsqueeze(-3)
        return bias.masked_fill(distance >= self.window, self._outside())

    def extra_repr(self) -> str:
        return f"window_size={self.window}, {super().extra_repr()}"


class AFTConv(AFTMixer):
    """AFT-conv (Eq. 6): relative position biases, a kernel for each head, and one key per head.

    The kernels are re-parameterized (Eq. 8): w = gamma (k - mean(k)) / std(k) + beta for each head, with gamma =
    beta = 0 at the start, so a new layer begins as AFT-simple.

    Args:
        hidden_size: width d.
        num_heads: heads h; the key projection is d -> h.
        kernel_size: s, odd unless causal.
        spatial_dims: 2 for s x s kernels on a grid of rows and columns, 1 for a sequence.
        causal: one dimension only: the kernel then covers the lags 0 .. s - 1.
        reparameterized: False for the kernels themselves as w.
        selection: None, or "gumbel" for one position per head (Eq. 10): w is then a sample of the Gumbel softmax
            over the kernel in training, and 1 at the kernel's maximum (0 elsewhere) at inference.
        gumbel_temperature: temperature of the Gumbel softmax.
        position_bias_init_std: standard deviation of new kernels.
        **options: the other arguments of `AFTMixer`.
    """

    relative = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int,
        *,
        spatial_dims: int = 2,
        causal: bool = False,
        reparameterized: bool = True,
        selection: str | None = None,
        gumbel_temperature: float = 0.5,
        position_bias_init_std: float = 0.1,
        **options,
    ):
        if spatial_dims not in (1, 2) or (causal and spatial_dims != 1):
            raise ValueError(f"spatial_dims must be 1 or 2, and 1 if causal, got {spatial_dims} (causal={causal})")
        if kernel_size < 1 or (not causal and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be > 0, and odd unless causal, got {kernel_size} (causal={causal})")
        self.spatial_dims = spatial_dims  # read by `implementations`
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, key_per_head=True, **options)
        self.window, self.selection, self.gumbel_temperature = kernel_size, selection, gumbel_temperature
        self.position_bias_init_std = position_bias_init_std
        self.ordered = spatial_dims == 1
        self.kernel = nn.Parameter(torch.empty(num_heads, *[kernel_size] * spatial_dims))
        self.kernel_scale = nn.Parameter(torch.empty(num_heads)) if reparameterized else None  # gamma
        self.kernel_shift = nn.Parameter(torch.empty(num_heads)) if reparameterized else None  # beta
        self.reset_position_bias()

    @property
    def implementations(self) -> tuple[str, ...]:
        if self.spatial_dims == 2:
            return ("dense", "convolution")
        return ("chunked", "dense") if self.causal else ("dense",)

    def reset_position_bias(self) -> None:
        init.normal_(self.kernel, mean=0.0, std=self.position_bias_init_std)
        if self.kernel_scale is not None:
            init.zeros_(self.kernel_scale)
            init.zeros_(self.kernel_shift)

    def kernel_bias(self) -> torch.Tensor:
        """w as kernels, (h, s, s) or (h, s) in float32: Eq. 8, then Eq. 10 where a position is selected."""
        bias = self._reparameterized_kernel()
        if self.selection is None:
            return bias
        flat = bias.flatten(1)
        if self.training:
            return nn.functional.gumbel_softmax(flat, tau=self.gumbel_temperature).view_as(bias)
        return nn.functional.one_hot(flat.argmax(-1), flat.shape[-1]).to(bias.dtype).view_as(bias)

    def _reparameterized_kernel(self) -> torch.Tensor:
        kernel = self.kernel.float()
        if self.kernel_scale is None:
            return kernel
        flat = kernel.flatten(1)
        variance, mean = torch.var_mean(flat, -1, correction=0, keepdim=True)
        standard = (flat - mean) * torch.rsqrt(variance + 1e-12)
        flat = self.kernel_scale.float()[:, None] * standard + self.kernel_shift.float()[:, None]
        return flat.view_as(kernel)

    def position_bias_entropy(self) -> torch.Tensor:
        """Eq. 9: the entropy (nats) of softmax(w) over each head's kernel, summed over the heads."""
        log_p = torch.log_softmax(self._reparameterized_kernel().flatten(1), -1)
        return -(log_p.exp() * log_p).sum()

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        if self.spatial_dims == 1:
            return super().position_bias(seq_len)
        rows, columns = self._grid(seq_len, grid_size)
        # Every offset between two patches of the grid, then a window of that for each patch.
        reach = (rows - 1, columns - 1)
        kernel = self.kernel_bias()
        crop = [max(self.window // 2 - r, 0) for r in reach]  # offsets that this grid does not have
        kernel = kernel[:, crop[0] : self.window - crop[0], crop[1] : self.window - crop[1]]
        margins = [r - (k // 2) for r, k in zip(reach, kernel.shape[1:])]
        padding = (margins[1], margins[1], margins[0], margins[0])
        offsets = nn.functional.pad(kernel, padding, value=self._outside())  # (h, 2 rows - 1, 2 columns - 1)
        windows = offsets.unfold(1, rows, 1).unfold(2, columns, 1)  # (h, rows, columns, rows, columns)
        return windows.flip(1, 2).reshape(self.num_heads, rows * columns, rows * columns)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        if self.spatial_dims == 2:
            raise ValueError("position_ids are for sequences; an AFTConv on a grid takes its places from grid_size")
        lags = query_positions[..., :, None] - key_positions[..., None, :]
        index = lags if self.causal else self.window // 2 - lags
        inside = (index >= 0) & (index < self.window)
        bias = self.kernel_bias()[:, index.clamp(0, self.window - 1)]
        return bias.masked_fill(~inside, self._outside()).movedim(0, -3)

    def _grid(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, int]:
        if grid_size is None:
            if length is None:
                raise ValueError("AFTConv on a grid has no size of its own: position_bias needs grid_size")
            side = round(length**0.5)
            grid_size = (side, side)
        if length is not None and grid_size[0] * grid_size[1] != length:
            raise ValueError(
                f"{length} positions do not fill a grid of {grid_size[0]} x {grid_size[1]}: give grid_size"
            )
        return grid_size

    def _form(self, length: int, grid_size: tuple[int, int] | None) -> str:
        if self.selection is not None and not self.training and self.global_connectivity:
            return "indexed"
        if self.spatial_dims == 2 and self.num_heads * length * length > LARGEST_CONV_TABLE:
            return "convolution"
        return super()._form(length, grid_size)

    def _mix_convolution(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        return convolution_mixing(keys, values, self.kernel_bias(), self._grid(keys.shape[-2], grid_size))

    def _mix_indexed(self, keys, values, num_queries, grid_size) -> torch.Tensor:
        index, inside = self._selected_positions(num_queries, grid_size)
        return indexed_mixing(keys, values, index, inside, 1.0, causal=self.causal)

    def _selected_positions(self, length: int, grid_size: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The position that each query of each head selects, (h, T), and whether it exists."""
        selected = self._reparameterized_kernel().flatten(1).argmax(-1, keepdim=True)  # (h, 1)
        positions = torch.arange(length, device=selected.device)
        if self.spatial_dims == 1:
            index = positions - selected if self.causal else positions + selected - self.window // 2
            inside = (index >= 0) & (index < length)
            return index.clamp(0, length - 1), inside
        rows, columns = self._grid(length, grid_size)
        row = positions // columns + selected // self.window - self.window // 2
        column = positions % columns + selected % self.window - self.window // 2
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return (row * columns + column).clamp(0, length - 1), inside

    def extra_repr(self) -> str:
        return f"kernel_size={self.window}, spatial_dims={self.spatial_dims}, {super().extra_repr()}"


def _real_tokens_first(mask: torch.Tensor) -> torch.Tensor:
    """Where each token of (B, T) goes when padding is moved behind the real tokens: for these, their position."""
    real = mask.cumsum(-1)
    return torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(-1) - 1)


def _scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Move x[b, t] to place order[b, t]."""
    return torch.zeros_like(x).scatter(1, order.unsqueeze(-1).expand_as(x), x)


__all__ = ["AFTAlibi", "AFTConv", "AFTFull", "AFTLocal", "AFTMixer", "AFTSimple"]
