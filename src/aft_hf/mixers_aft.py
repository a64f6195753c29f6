"""The five AFT mixers as ordinary modules, to use alone or in the models of this package.

Each takes (B, T, d) and gives (B, T, d), and can stand wherever a self-attention layer stands. What differs between
the types is `position_bias`, the w of Eq. 2; what a mixer computes is Eq. 2 with exactly that w.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .activations_aft import runs_as_written
from .banded_sums_aft import QUERY_ROWS, BandSums
from .caching_aft import AFTLayerState
from .causal_sums_aft import CausalSums
from .convolution_sums_aft import ConvolutionSums
from .dense_sums_aft import DenseSums
from .direct_mixing_aft import DirectSums, direct_mixing
from .mixer_aft import AFTMixer, full_precision
from .mixing_aft import (
    CHUNK_SIZE,
    ScaledSums,
    chunked_mixing,
    convolution_mixing,
    count_chunks,
    dense_mixing,
    grid_table,
    indexed_mixing,
    widen,
)


# More entries than this the table exp(w) of an AFT-conv shall not have; its kernels are convolved instead.
LARGEST_CONV_TABLE = 2**24

# What making one entry of such a table takes, in multiplications of the product with it.
TABLE_COST = 200

# What copying a number for another product with a band takes.
COPY_COST = 600

# How much longer a multiplication takes in a depth-wise convolution than in a product: by the type of the numbers, and
# with its gradients.
SLOWER = {torch.float32: 3.3, torch.bfloat16: 30}
SLOWER_WITH_GRADIENTS = 20

GRID_HAS_NO_POSITION_IDS = "position_ids are for sequences; an AFTConv on a grid takes its places from grid_size"


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
        return ("direct", "chunked") if self.causal else ("dense",)

    @property
    def state_window(self) -> int:
        return 0

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        lags = query_positions[..., :, None] - key_positions[..., None, :]
        return lags.new_zeros(lags.shape, dtype=torch.float32).unsqueeze(-3).repeat_interleave(self.num_heads, -3)

    def _mix_dense(self, keys, values, grid_size) -> torch.Tensor:
        return dense_mixing(keys, values)

    def _direct_form(self, keys, grid_size):
        return CausalSums(CHUNK_SIZE), None, self._in_chunks

    def _mix_chunked(self, keys, values, grid_size) -> torch.Tensor:
        return self._in_chunks(keys, values)

    def _in_chunks(self, keys, values, bias=None) -> torch.Tensor:
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
        return ("direct", "chunked")

    @property
    def state_window(self) -> int:
        return 0

    def _distant(self, state: AFTLayerState, length: int) -> ScaledSums:
        steps = torch.arange(1, length + 1, device=state.maximum.device, dtype=state.maximum.dtype)
        slopes = self.slopes(state.maximum.device).to(steps.dtype).repeat(state.maximum.shape[0])
        return state.sums().shifted(-(slopes[:, None] * steps)[..., None, None])

    def slopes(self, device: torch.device | None = None) -> torch.Tensor:
        """m_i for each head, (h,) in float32."""
        heads = self.num_heads
        return torch.logspace(-8.0 / heads, -8.0, heads, base=2.0, device=device, dtype=torch.float32)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        lags = query_positions[..., :, None] - key_positions[..., None, :]
        return -self.slopes(lags.device)[:, None, None] * lags.unsqueeze(-3)

    def _direct_form(self, keys, grid_size):
        return CausalSums(CHUNK_SIZE, self.slopes(keys.device)), None, self._in_chunks

    def _mix_chunked(self, keys, values, grid_size) -> torch.Tensor:
        return self._in_chunks(keys, values)

    def _in_chunks(self, keys, values, bias=None) -> torch.Tensor:
        positions = torch.arange(CHUNK_SIZE, device=keys.device)
        own_bias = self.position_bias_between(positions, positions).unsqueeze(1)
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
        if max_positions < 1 or (position_bias_dim is not None and position_bias_dim < 1):
            given = f"{max_positions} and {position_bias_dim}"
            raise ValueError(f"max_positions and position_bias_dim must be greater than 0, got {given}")
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
        return ("direct", "dense")

    @property
    def state_window(self) -> int | None:
        return None

    def reset_position_bias(self) -> None:
        names = ("position_bias_query", "position_bias_key") if self.factorized else ("position_bias_table",)
        for name in names:
            init.normal_(getattr(self, name), mean=0.0, std=self.position_bias_init_std)

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        seq_len = self.max_positions if seq_len is None else seq_len
        self._check_length(seq_len)
        if self.factorized:
            u, v = widen(self.position_bias_query[:, :seq_len]), widen(self.position_bias_key[:, :seq_len])
            return u @ v.mT
        return widen(self.position_bias_table[:, :seq_len, :seq_len])

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        # Positions beyond the table are those of padding: what they get is not used.
        queries, keys = (p.clamp(0, self.max_positions - 1) for p in (query_positions, key_positions))
        if self.factorized:
            u, v = widen(self.position_bias_query[:, queries]), widen(self.position_bias_key[:, keys])
            return (u @ v.mT).movedim(0, -3)
        return widen(self.position_bias_table[:, queries[..., :, None], keys[..., None, :]]).movedim(0, -3)

    def _mix_dense(self, keys, values, grid_size) -> torch.Tensor:
        if not (self.causal and torch.compiler.is_exporting()):
            return super()._mix_dense(keys, values, grid_size)
        # Causal sums are joined from halves of halves: an exported program does so at the one length of the table.
        padding = self.max_positions - keys.shape[-2]
        keys = nn.functional.pad(keys, (0, 0, 0, padding), value=-torch.inf)
        values = nn.functional.pad(values, (0, 0, 0, padding))
        context = super()._mix_dense(keys, values, grid_size)
        return nn.functional.pad(context, (0, 0, 0, -padding))

    def _check_room(self, length: int, state: AFTLayerState) -> None:
        self._check_length(state.tokens_after(length, self.max_positions))

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
        if window_size < 1:
            raise ValueError(f"window_size must be greater than 0, got {window_size}")
        super().__init__(hidden_size, max_positions, **options)
        self.window = window_size

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("direct", "chunked", "dense") if self.causal else ("direct", "dense")

    @property
    def state_window(self) -> int:
        return self.window - 1

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        bias = super().position_bias(seq_len)
        positions = torch.arange(bias.shape[-1], device=bias.device)
        return self._windowed(bias, positions, positions)

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        bias = super().position_bias_between(query_positions, key_positions)
        return self._windowed(bias, query_positions, key_positions)

    def _chunk_bias(self, length: int, size: int, device: torch.device) -> torch.Tensor:
        if not self.factorized or torch.compiler.is_exporting():
            return super()._chunk_bias(length, size, device)
        # The factors of a chunk lie side by side: nothing has to be gathered, or scattered in the backward pass.
        chunks = count_chunks(length, size)
        padding = chunks * size - length
        queries, keys = widen(self.position_bias_query[:, :length]), widen(self.position_bias_key[:, :length])
        if padding > 0:
            queries, keys = (nn.functional.pad(x, (0, 0, 0, padding)) for x in (queries, keys))
        queries, keys = queries.unflatten(1, (chunks, size)), keys.unflatten(1, (chunks, size))
        if runs_as_written(queries, keys):
            bias = _ProductsOfNeighbours.apply(queries, keys)
        else:
            before = nn.functional.pad(keys[:, :-1], (0, 0, 0, 0, 1, 0))
            bias = queries @ torch.cat([before, keys], 2).mT  # (h, n, C, 2 C)
        positions = torch.arange(size, 3 * size, device=device)
        return self._windowed(bias, positions[size:], positions)

    def _step_bias(self, state: AFTLayerState) -> torch.Tensor | None:
        position = state.cumulative_length
        first = position - state.window
        seen = max(first, 0)
        count = position + 1 - seen
        if self.factorized:
            u, v = self.position_bias_query.narrow(1, position, 1), self.position_bias_key.narrow(1, seen, count)
            bias = torch.bmm(widen(u), widen(v).mT).mT
        else:
            bias = widen(self.position_bias_table[:, position].narrow(1, seen, count).unsqueeze(-1))
        return bias if first >= 0 else nn.functional.pad(bias, (0, 0, -first, 0))

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
    # Copies of the parameters at the last step without gradients, and what `_step_bias` made of them.
    _last_step = None

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
        if selection not in (None, "gumbel"):
            raise ValueError(f'selection must be None or "gumbel", got {selection!r}')
        if gumbel_temperature <= 0:
            raise ValueError(f"gumbel_temperature must be greater than 0, got {gumbel_temperature}")
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
            return ("direct", "dense", "convolution")
        return ("direct", "chunked", "dense") if self.causal else ("direct", "dense")

    def reset_position_bias(self) -> None:
        init.normal_(self.kernel, mean=0.0, std=self.position_bias_init_std)
        if self.kernel_scale is not None:
            init.zeros_(self.kernel_scale)
            init.zeros_(self.kernel_shift)

    def _check_inputs(self, query, key, value, attention_mask, position_ids) -> None:
        super()._check_inputs(query, key, value, attention_mask, position_ids)
        if position_ids is not None and self.spatial_dims == 2:
            raise ValueError(GRID_HAS_NO_POSITION_IDS)

    def kernel_bias(self) -> torch.Tensor:
        """w as kernels, (h, s, s) or (h, s) in float32 at least: Eq. 8, then Eq. 10 where a position is selected."""
        bias = self._reparameterized_kernel()
        if self.selection is None:
            return bias
        flat = bias.flatten(1)
        if self.training:
            return nn.functional.gumbel_softmax(flat, tau=self.gumbel_temperature).view_as(bias)
        return nn.functional.one_hot(flat.argmax(-1), flat.shape[-1]).to(bias.dtype).view_as(bias)

    def _reparameterized_kernel(self) -> torch.Tensor:
        kernel = widen(self.kernel)
        if self.kernel_scale is None:
            return kernel
        flat = kernel.flatten(1)
        variance, mean = torch.var_mean(flat, -1, correction=0, keepdim=True)
        standard = (flat - mean) * torch.rsqrt(variance + 1e-12)
        flat = widen(self.kernel_scale)[:, None] * standard + widen(self.kernel_shift)[:, None]
        return flat.view_as(kernel)

    def position_bias_entropy(self) -> torch.Tensor:
        """Eq. 9: the entropy (nats) of softmax(w) over each head's kernel, summed over the heads."""
        log_p = torch.log_softmax(self._reparameterized_kernel().flatten(1), -1)
        return -(log_p.exp() * log_p).sum()

    def position_bias(self, seq_len: int | None = None, grid_size: tuple[int, int] | None = None) -> torch.Tensor:
        if self.spatial_dims == 1:
            return super().position_bias(seq_len)
        grid_size = self._grid(seq_len, grid_size)
        return grid_table(self._offset_bias(self.kernel_bias(), grid_size), grid_size)

    def _offset_bias(self, kernels: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """w of kernels (h, s, s) by the offset from query to key on a grid: (h, 2 rows - 1, 2 columns - 1), no offset
        in the middle.
        """
        rows, columns = grid_size
        padding = (columns - 1, columns - 1, rows - 1, rows - 1)
        offsets = nn.functional.pad(kernels, padding, value=self._outside())
        centre = self.window // 2
        return offsets[:, centre : centre + 2 * rows - 1, centre : centre + 2 * columns - 1]

    def position_bias_between(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        if self.spatial_dims == 2:
            raise ValueError(GRID_HAS_NO_POSITION_IDS)
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

    def _bias_table(self, query_positions, key_positions, grid_size) -> torch.Tensor:
        if self.spatial_dims == 1:
            return super()._bias_table(query_positions, key_positions, grid_size)
        queries, keys = query_positions.shape[-1], key_positions.shape[-1]
        return self.position_bias(max(queries, keys), grid_size)[None, :, :queries, :keys]

    def _fast_form(self, length: int) -> str:
        if self.selection is not None and not self.training:
            return "indexed"
        # An exported program serves all sizes, of which some have no room for a table.
        no_table = torch.compiler.is_exporting() or (torch.compiler.is_compiling() and self._table_too_large(length))
        if self.spatial_dims == 2 and no_table:
            return "convolution"
        return super()._fast_form(length)

    @property
    def state_window(self) -> int:
        return self.window - 1

    def _direct_form(self, keys, grid_size):
        if self.spatial_dims == 1:
            return super()._direct_form(keys, grid_size)
        grid_size = self._grid(keys.shape[-2], grid_size)
        kernels = self.kernel_bias()
        chosen = self._sums_type(keys, grid_size)
        if chosen is DenseSums:
            bias = self._offset_bias(kernels, grid_size)
            return DenseSums(grid_size), bias, partial(_mix_with_grid_table, grid_size=grid_size)
        instead = partial(
            convolution_mixing if self._table_too_large(keys.shape[-2]) else self._mix_with_table, grid_size=grid_size
        )
        sums = BandSums(grid_size, self.window) if chosen is BandSums else ConvolutionSums(grid_size)
        return sums, kernels, instead

    def _sums_type(self, keys: torch.Tensor, grid_size: tuple[int, int] | None) -> type[DirectSums]:
        """On a grid, what takes the least time, in multiplications of a product for each query and head. The factors
        were measured on CPUs.
        """
        if self.spatial_dims == 1:
            return super()._sums_type(keys, grid_size)
        batch, _, length, _ = keys.shape
        rows, columns = self._grid(length, grid_size)
        features = batch * (self.hidden_size // self.num_heads + 1)
        with_gradients = torch.is_grad_enabled()
        slower = SLOWER_WITH_GRADIENTS if with_gradients else SLOWER.get(keys.dtype, SLOWER[torch.float32])
        times = {ConvolutionSums: slower * self.window**2 * features}
        if not self._table_too_large(length):
            times[DenseSums] = length * (features + TABLE_COST)
        if not with_gradients:
            band, copies = QUERY_ROWS + self.window - 1, (self.window - 1) / QUERY_ROWS
            products = band * columns * (features + TABLE_COST * QUERY_ROWS / max(rows, 1))
            times[BandSums] = products + copies * COPY_COST * features
        return min(times, key=times.get)

    def _mix_with_table(self, keys, values, kernels, grid_size) -> torch.Tensor:
        """In place of a convolution that would not be precise."""
        bias, safe = self._offset_bias(kernels, grid_size), partial(_mix_with_grid_table, grid_size=grid_size)
        return direct_mixing(DenseSums(grid_size), keys, values, bias, safe)

    def _table_too_large(self, length: int) -> bool:
        return self.num_heads * length * length > LARGEST_CONV_TABLE

    def _step_bias(self, state: AFTLayerState) -> torch.Tensor | None:
        made_of = kernel, _, _ = self.kernel, self.kernel_scale, self.kernel_shift
        sampled = self.selection is not None and self.training
        if torch.is_grad_enabled() or sampled or not kernel.is_cpu:
            return self._new_step_bias()
        # To look at the parameters takes less than to make the same of them in every step.
        if self._last_step is not None and all(map(_equal, made_of, self._last_step[0])):
            return self._last_step[1]
        bias = self._new_step_bias()
        if all(x is None or type(x) is nn.Parameter for x in made_of):  # and not, say, tensors of torch.func
            self._last_step = [None if x is None else x.detach().clone() for x in made_of], bias
        return bias

    def _new_step_bias(self) -> torch.Tensor:
        return self.kernel_bias().flip(-1).unsqueeze(-1)

    def _mix_convolution(self, keys, values, grid_size) -> torch.Tensor:
        return convolution_mixing(keys, values, self.kernel_bias(), self._grid(keys.shape[-2], grid_size))

    def _mix_indexed(self, keys, values, grid_size) -> torch.Tensor:
        index, inside = self._selected_positions(keys.shape[-2], grid_size)
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


def _equal(parameter: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
    """Whether a parameter has the type and the values of an earlier copy."""
    if parameter is None or copy is None:
        return parameter is copy
    return type(parameter) is nn.Parameter and parameter.dtype == copy.dtype and torch.equal(parameter, copy)


def _mix_with_grid_table(keys, values, offset_bias, grid_size) -> torch.Tensor:
    return dense_mixing(keys, values, grid_table(offset_bias, grid_size))


class _ProductsOfNeighbours(torch.autograd.Function):
    """Queries (h, n, C, c) of each chunk times keys (h, n, C, c) of the chunk before it, 0 for the first one, and of
    itself: (h, n, C, 2 C). By hand, the gradients need no copies of keys.
    """

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(queries, keys)
        before = nn.functional.pad(queries[:, 1:] @ keys[:, :-1].mT, (0, 0, 0, 0, 1, 0))
        return torch.cat([before, queries @ keys.mT], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = ctx.saved_tensors
        before, own = gradient.tensor_split(2, -1)
        before = before[:, 1:]
        with full_precision(gradient.device.type):
            of_queries, of_keys = own @ keys, own.mT @ queries
            of_queries[:, 1:] += before @ keys[:, :-1]
            of_keys[:, :-1] += before.mT @ queries[:, 1:]
        return of_queries, of_keys


__all__ = ["AFTAlibi", "AFTConv", "AFTFull", "AFTLocal", "AFTMixer", "AFTSimple"]
