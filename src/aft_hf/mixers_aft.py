"""The five AFT mixers as ordinary modules, for use on their own or in the models of this package.

Each mixer maps (B, T, d) to (B, T, d) and can replace a self-attention layer. The types differ in the position biases
w of Eq. 2 that they compute from their parameters; AFT-conv also has one key per head instead of one per feature.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .mixer_aft import AFTMixer
from .position_biases_aft import (
    Dense,
    GridKernel,
    LagKernel,
    LinearDecay,
    NoBias,
    PositionBias,
    SelectedPosition,
    Window,
)
from .scaled_sums_aft import widen, working_dtype


class AFTSimple(AFTMixer):
    """AFT-simple (Eq. 5): w = 0, linear time, no learned parameters except the projections.

    Args:
        hidden_size: width d.
        causal: whether position t sees only t' <= t.
        **options: the other arguments of `AFTMixer`.
    """

    state_window = 0

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return NoBias(self.num_heads, like.device, working_dtype(like))


class AFTAlibi(AFTMixer):
    """AFT with ALiBi biases: w = -m_i (t - t'), m_i = 2^(-8 i / h) for head i = 1 .. h, causal.

    exp(w) decays with the distance, so the sums are a linear recurrence: linear time, no learned parameters except the
    projections, no limit on the length. The slopes are those of Press et al. (2022, arXiv 2108.12409).

    Args:
        hidden_size: width d.
        num_heads: position-bias heads h.
        causal: must be True.
        **options: the other arguments of `AFTMixer`.
    """

    state_window = 0

    def __init__(self, hidden_size: int, num_heads: int, *, causal: bool = True, **options: Any):
        if not causal:
            raise ValueError("AFTAlibi must be causal: its biases decay with distance into the past; got causal=False")
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, **options)

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        heads = self.num_heads
        slopes = torch.logspace(-8.0 / heads, -8.0, heads, 2.0, device=like.device, dtype=working_dtype(like))
        return LinearDecay(slopes)


class AFTFull(AFTMixer):
    """AFT-full (Eq. 2) with learned position biases, factorized as w_tt' = u_t . v_t' (Eq. 7).

    Args:
        hidden_size: width d.
        max_positions: the length of the longest sequence that the biases cover.
        position_bias_dim: rank d' of the factors; None for one table of max_positions x max_positions.
        num_heads: position-bias heads h.
        position_bias_init_std: standard deviation of newly initialized factors, or of a new table, including the
            multiplier.
        position_bias_multiplier: constant m by which w is multiplied, equivalent to sqrt(m) for u and v each.
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
        position_bias_multiplier: float = 1.0,
        **options: Any,
    ):
        if max_positions < 1 or (position_bias_dim is not None and position_bias_dim < 1):
            given = f"{max_positions} and {position_bias_dim}"
            raise ValueError(f"max_positions and position_bias_dim must be greater than 0, got {given}")
        super().__init__(hidden_size, num_heads=num_heads, **options)
        self.max_positions, self.position_bias_init_std = max_positions, position_bias_init_std
        self.position_bias_multiplier = _checked_multiplier(position_bias_multiplier)
        if position_bias_dim is None:
            self.position_bias_table = nn.Parameter(torch.empty(num_heads, max_positions, max_positions))
        else:
            self.position_bias_query = nn.Parameter(torch.empty(num_heads, max_positions, position_bias_dim))
            self.position_bias_key = nn.Parameter(torch.empty(num_heads, max_positions, position_bias_dim))
        self.factorized = position_bias_dim is not None
        self.reset_position_bias()

    @property
    def state_window(self) -> int | None:
        return None

    def reset_position_bias(self) -> None:
        # w of a new layer has the same distribution for every multiplier.
        share = 0.5 if self.factorized else 1.0
        std = self.position_bias_init_std / self.position_bias_multiplier**share
        for parameter in self._learned():
            if parameter is not None:
                init.normal_(parameter, mean=0.0, std=std)

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return Dense(*self._learned(), self.position_bias_multiplier)

    def _learned(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return u and v, or the table and None."""
        return (
            (self.position_bias_query, self.position_bias_key) if self.factorized else (self.position_bias_table, None)
        )

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, None]:
        assert self.max_positions is not None
        length = self.max_positions if length is None else length
        if length > self.max_positions:
            raise ValueError(
                f"a sequence of {length} positions is longer than the {self.max_positions} positions covered by the "
                f"biases of {type(self).__name__} (max_position_embeddings for text, image_size for images)"
            )
        return length, None

    def extra_repr(self) -> str:
        return f"max_positions={self.max_positions}, {super().extra_repr()}"


class AFTLocal(AFTFull):
    """AFT-local (Eq. 4): learned position biases within a window, |t - t'| < s; tokens outside it have w = 0.

    Args:
        hidden_size: width d.
        max_positions: the length of the longest sequence that the biases cover.
        window_size: window size s.
        **options: the other arguments of `AFTFull` and `AFTMixer`.
    """

    def __init__(self, hidden_size: int, max_positions: int, window_size: int, **options: Any):
        if window_size < 1:
            raise ValueError(f"window_size must be greater than 0, got {window_size}")
        super().__init__(hidden_size, max_positions, **options)
        self.window = window_size

    @property
    def state_window(self) -> int:
        return self.window - 1

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        return Window(*self._learned(), self.position_bias_multiplier, self.window, not self.global_connectivity)

    def extra_repr(self) -> str:
        return f"window_size={self.window}, {super().extra_repr()}"


class AFTConv(AFTMixer):
    """AFT-conv (Eq. 6): relative position biases, with one kernel and one key per head.

    The kernels are re-parameterized (Eq. 8): w = m (gamma (k - mean(k)) / std(k) + beta) for each head, with gamma =
    beta = 0 at the start, so a new layer begins as AFT-simple. m is 1 in the paper.

    Args:
        hidden_size: width d.
        num_heads: heads h; the key projection is d -> h.
        kernel_size: kernel size s, odd unless causal.
        spatial_dims: 2 for s x s kernels on a grid of rows and columns, 1 for a sequence.
        causal: whether position t sees only t' <= t, for `spatial_dims=1` only. The kernel then covers the lags
            0 .. s - 1.
        reparameterized: whether to apply Eq. 8; False to use the kernels themselves as w.
        selection: None, or "gumbel" for one position per head (Eq. 10): w is multiplied by a Gumbel-softmax sample
            of itself in training, and by the one-hot vector of its maximum at inference.
        gumbel_temperature: temperature of the Gumbel softmax.
        position_bias_init_std: standard deviation of newly initialized kernels, including the multiplier.
        position_bias_multiplier: constant m by which w is multiplied.
        **options: the other arguments of `AFTMixer`.
    """

    # Copies of the parameters at the last call without gradients, and the kernels computed from them.
    _last_kernels = None

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
        position_bias_multiplier: float = 1.0,
        **options: Any,
    ):
        if spatial_dims not in (1, 2) or (causal and spatial_dims != 1):
            raise ValueError(f"spatial_dims must be 1 or 2, and 1 if causal, got {spatial_dims} (causal={causal})")
        if kernel_size < 1 or (not causal and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be > 0, and odd unless causal, got {kernel_size} (causal={causal})")
        if selection not in (None, "gumbel"):
            raise ValueError(f'selection must be None or "gumbel", got {selection!r}')
        if gumbel_temperature <= 0:
            raise ValueError(f"gumbel_temperature must be greater than 0, got {gumbel_temperature}")
        super().__init__(hidden_size, num_heads=num_heads, causal=causal, key_per_head=True, **options)
        self.spatial_dims, self.window = spatial_dims, kernel_size
        self.selection, self.gumbel_temperature = selection, gumbel_temperature
        self.position_bias_init_std = position_bias_init_std
        self.position_bias_multiplier = _checked_multiplier(position_bias_multiplier)
        self.kernel = nn.Parameter(torch.empty(num_heads, *[kernel_size] * spatial_dims))
        self.kernel_scale = nn.Parameter(torch.empty(num_heads)) if reparameterized else None  # gamma
        self.kernel_shift = nn.Parameter(torch.empty(num_heads)) if reparameterized else None  # beta
        self.reset_position_bias()

    @property
    def state_window(self) -> int:
        return self.window - 1

    def reset_position_bias(self) -> None:
        # Divided by the multiplier m, so that Adam changes the standardized kernel m times as fast, like m gamma and
        # m beta.
        init.normal_(self.kernel, mean=0.0, std=self.position_bias_init_std / self.position_bias_multiplier)
        if self.kernel_scale is not None and self.kernel_shift is not None:
            init.zeros_(self.kernel_scale)
            init.zeros_(self.kernel_shift)

    def kernel_bias(self) -> torch.Tensor:
        """Return w as kernels, (h, s, s) or (h, s), in float32 at least: Eq. 8, then Eq. 10 with `selection`."""
        return self._kernel_bias().clone()

    def _kernel_bias(self) -> torch.Tensor:
        """Return `kernel_bias` without a copy; the result may be the tensor that is cached for the next call."""
        kernels = self._kernels()
        return kernels if self.selection is None else self._selected(kernels.flatten(1)).view_as(kernels)

    def _selected(self, kernels: torch.Tensor) -> torch.Tensor:
        """Return w after Eq. 10, for kernels (h, s^2) or (h, s) and in their shape."""
        if self.training:
            return kernels * nn.functional.gumbel_softmax(kernels, tau=self.gumbel_temperature)
        index = kernels.argmax(-1, keepdim=True)
        # A product with the one-hot vector would be NaN where an entry is infinite.
        return torch.zeros_like(kernels).scatter(-1, index, kernels.gather(-1, index))

    def _kernels(self) -> torch.Tensor:
        """Return the kernels times the multiplier, after Eq. 8 if they are re-parameterized."""
        multiplier = self.position_bias_multiplier
        kernel, scale, shift = self.kernel, self.kernel_scale, self.kernel_shift
        if scale is None or shift is None:
            return widen(kernel) if multiplier == 1.0 else widen(kernel) * multiplier
        parameters = kernel, scale, shift
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not kernel.is_cpu:
            return _reparameterized(*parameters, multiplier)
        # Comparing the parameters is faster than computing the same kernels for every generated token.
        if self._last_kernels is None or not all(map(_equal, parameters, self._last_kernels[0])):
            kernels = _reparameterized(*parameters, multiplier)
            if any(type(x) is not nn.Parameter for x in parameters):  # for example, tensors of torch.func
                return kernels
            self._last_kernels = [x.detach().clone() for x in parameters], kernels
        return self._last_kernels[1]

    def position_bias_entropy(self) -> torch.Tensor:
        """Return the entropy (nats) of softmax(w) over each head's kernel, summed over the heads (Eq. 9)."""
        log_p = torch.log_softmax(self._kernels().flatten(1), -1)
        return -(log_p.exp() * log_p).sum()

    def biases(self, like: torch.Tensor, grid_size: tuple[int, int] | None = None) -> PositionBias:
        kernels, hides_outside = self._kernel_bias(), not self.global_connectivity
        biases: GridKernel | LagKernel
        if self.spatial_dims == 2:
            if grid_size is None:
                raise ValueError("AFTConv on a grid needs grid_size=(rows, columns) to compute its biases, got None")
            biases = GridKernel(kernels, grid_size, hides_outside)
        else:
            biases = LagKernel(kernels, self.causal, hides_outside)
        if self.selection is None or self.training:
            return biases
        flat = self._kernels().flatten(1)
        index = flat.argmax(-1, keepdim=True)
        return SelectedPosition(biases, index.squeeze(1), flat.gather(1, index).squeeze(1))

    def _check_size(self, length: int | None, grid_size: tuple[int, int] | None) -> tuple[int, tuple[int, int] | None]:
        if self.spatial_dims == 1:
            return super()._check_size(length, None)
        if grid_size is None:
            if length is None:
                raise ValueError("AFTConv on a grid has no fixed size: position_bias needs grid_size=(rows, columns)")
            side = round(length**0.5)
            grid_size = (side, side)
        rows, columns = grid_size
        if length is not None and rows * columns != length:
            raise ValueError(f"{length} positions do not fill a grid of {rows} x {columns}: pass a matching grid_size")
        return rows * columns, grid_size

    def _check_positions(self, position_ids: torch.Tensor, batch: int, queries: int, keys: int) -> None:
        if self.spatial_dims == 2:
            raise ValueError("position_ids are for sequences; an AFTConv on a grid takes positions from grid_size")
        super()._check_positions(position_ids, batch, queries, keys)

    def extra_repr(self) -> str:
        return f"kernel_size={self.window}, spatial_dims={self.spatial_dims}, {super().extra_repr()}"


def _checked_multiplier(multiplier: float) -> float:
    if not 0 < multiplier < math.inf:
        raise ValueError(f"position_bias_multiplier must be greater than 0 and finite, got {multiplier}")
    return float(multiplier)


def _reparameterized(
    kernel: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, multiplier: float
) -> torch.Tensor:
    """Eq. 8 for each head, times the multiplier, in the working dtype."""
    flat = widen(kernel).flatten(1)
    variance, mean = torch.var_mean(flat, -1, correction=0, keepdim=True)
    # New kernels are smaller by the multiplier, so the constant that keeps the quotient finite is scaled with them.
    standard = (flat - mean) * torch.rsqrt(variance + 1e-12 / multiplier**2)
    scale, shift = (widen(x)[:, None] * multiplier for x in (scale, shift))
    return (scale * standard + shift).view_as(kernel)


def _equal(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a parameter has the type and the values of an earlier copy."""
    return type(parameter) is nn.Parameter and parameter.dtype == copy.dtype and torch.equal(parameter, copy)


__all__ = ["AFTAlibi", "AFTConv", "AFTFull", "AFTLocal", "AFTMixer", "AFTSimple"]
