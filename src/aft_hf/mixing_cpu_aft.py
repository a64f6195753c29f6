"""The CPU backend: hand-written forward and backward passes for eager tensors on a CPU.

This module chooses between two algorithms. Causal problems whose position biases reach a fixed distance, or decay with
the distance, run chunk by chunk in linear time (`mixing_cpu_causal_aft.py`). Problems with a table of exp(w) that is
not too large run as products with it, or as a convolution (`mixing_cpu_table_aft.py`); this algorithm can also compute
the projections of a mixer. The portable backend computes all other problems.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .activations_aft import are_plain_tensors
from .mixing_backend_aft import Backend
from .mixing_cpu_bias_aft import (
    BandTables,
    ConvolutionTables,
    DenseTables,
    GridTables,
    Tables,
    choose_tables,
    is_moderate,
)
from .mixing_cpu_causal_aft import causal_mixing
from .mixing_cpu_table_aft import Differentiable, table_layer, table_mixing
from .mixing_portable_aft import (
    CHUNK_SIZE,
    chunk_size,
    chunked_mixing,
    chunked_window_mixing,
    count_chunks,
    halved_mixing,
    is_short,
)
from .position_biases_aft import Dense, GridKernel, LagKernel, PositionBias, SelectedPosition, Window, grid_table
from .projections_aft import Projections
from .scaled_sums_aft import block_sums, join_heads, split_heads, widen


if TYPE_CHECKING:
    from .mixing_aft import Mixing


# Position biases that vary within a window of a sequence.
WITHIN_A_WINDOW = (Window, LagKernel, SelectedPosition)


class CpuBackend(Backend):
    """The backend with hand-written forward and backward passes for plain tensors on a CPU."""

    name = "cpu"

    @staticmethod
    def supports(problem: "Mixing") -> bool:
        """Whether rows are unpadded sequences in order, tensors are plain, and one of the two algorithms applies."""
        if problem.is_pairwise or problem.documents is not None or problem.padding_mask is not None:
            return False
        if not _is_plain(problem.key, problem.value, *problem.biases.tensors()):
            return False
        if problem.causal and problem.biases.reach is not None:
            # Without tables, all features of a chunk are computed in one product, which needs a key for each feature.
            return isinstance(problem.biases, WITHIN_A_WINDOW) or problem.key.shape == problem.value.shape
        return _tables(problem.biases, problem.causal, problem.value.shape, problem.value.dtype) is not None

    @staticmethod
    def mix(problem: "Mixing") -> torch.Tensor:
        """Compute Eq. 2: (B, T, d) in the dtype of the values."""
        if problem.causal and problem.biases.reach is not None:
            return _mix_causal(problem)
        tables = _tables(problem.biases, problem.causal, problem.value.shape, problem.value.dtype)
        assert tables is not None  # `supports` has checked it
        bias, heads = _bias(problem.biases, tables, problem.length), problem.num_heads
        differentiable = _differentiable(tables, heads)
        return table_mixing(problem.key, problem.value, bias, tables, num_heads=heads, differentiable=differentiable)

    @staticmethod
    def layer(x: torch.Tensor, projections: Projections, biases: PositionBias, causal: bool) -> torch.Tensor | None:
        """Compute a mixer with its projections for x (B, T, d) by `table_layer`; None for any other mixer."""
        if causal and biases.reach is not None:
            return None
        if not (_is_plain(x, *biases.tensors()) and projections.can_be_replaced(x)):
            return None
        tables = _tables(biases, causal, x.shape, projections.dtype(x))
        if tables is None:
            return None
        x = x.to(projections.dtype(x))
        with torch.autocast("cpu", enabled=False):
            bias, heads = _bias(biases, tables, x.shape[1]), projections.num_heads
            differentiable = _differentiable(tables, heads)
            return table_layer(x, projections, bias, tables, num_heads=heads, differentiable=differentiable)


def _is_plain(*tensors: torch.Tensor) -> bool:
    return all(x.device.type == "cpu" and x.numel() > 0 for x in tensors) and are_plain_tensors(*tensors)


# ------------------------------------------------------------------------------------------------------ chunk by chunk


def _mix_causal(problem: "Mixing") -> torch.Tensor:
    """Compute a causal problem whose biases reach a fixed distance, or decay with the distance."""
    biases, length, heads = problem.biases, problem.length, problem.num_heads
    size, tables = CHUNK_SIZE, None
    if isinstance(biases, WITHIN_A_WINDOW):
        assert biases.reach is not None
        size = chunk_size(biases.reach, length)
        tables = biases.of_chunks(count_chunks(length, size), size)

    def differentiable(key: torch.Tensor, value: torch.Tensor, tables: torch.Tensor | None) -> torch.Tensor:
        if biases.hides_outside:
            return _by_head(chunked_window_mixing, heads, key, value, tables, chunk_size=size)
        return _by_head(chunked_mixing, heads, key, value, tables, biases.slopes, chunk_size=size)

    return causal_mixing(
        problem.key,
        problem.value,
        tables,
        biases.slopes,
        num_heads=heads,
        chunk_size=size,
        differentiable=differentiable,
        global_connectivity=not biases.hides_outside,
    )


# -------------------------------------------------------------------------------------------------------------- tables


def _tables(biases: PositionBias, causal: bool, shape: torch.Size, dtype: torch.dtype) -> Tables | None:
    """Choose the tables for these biases and for values of a shape (B, T, d) and dtype. None if no table fits, or if
    another algorithm computes these biases.
    """
    batch, length, width = shape
    if isinstance(biases, SelectedPosition):
        # A kernel that is 0 at all other positions usually takes less time than indexing, which the portable backend
        # does. In sequences, with gradients, or with a large w, it often takes more.
        on_grid = isinstance(biases.kernel, GridKernel)
        if not on_grid or torch.is_grad_enabled() or not is_moderate(biases.size):
            return None
        biases = biases.kernel
    if biases.hides_outside:  # values that are hidden from some queries only may be NaN
        return None
    if isinstance(biases, GridKernel):
        heads, window = len(biases.kernels), biases.kernels.shape[-1]
        with_gradients = torch.is_grad_enabled()
        return choose_tables(
            biases.grid_size,
            window,
            heads,
            batch * (width // heads + 1),
            with_gradients=with_gradients,
            convolution=not with_gradients and ConvolutionTables.can_convolve(biases.kernels, dtype),
        )
    if isinstance(biases, (Window, LagKernel)):
        return DenseTables() if is_short(biases.reach, length) else None
    return DenseTables(causal) if isinstance(biases, Dense) else None


def _bias(biases: PositionBias, tables: Tables, length: int) -> torch.Tensor:
    """Return the position biases in the form that `tables` requires."""
    if isinstance(biases, SelectedPosition):
        biases = biases.kernel
    if isinstance(biases, GridKernel):
        return biases.kernels if isinstance(tables, BandTables) else biases.by_offset()
    return biases.dense(length)


def _differentiable(tables: Tables, heads: int) -> Differentiable:
    """Return a function that computes Eq. 2, (B, T, d), from key, value and `_bias` by differentiable operations."""

    def mix(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if isinstance(tables, GridTables):
            bias = grid_table(bias, tables.grid_size)
        return _by_head(halved_mixing if tables.causal else _dense_mixing, heads, key, value, bias)

    return mix


def _dense_mixing(key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return block_sums(key, value, bias, masked=True).average()


def _by_head(
    mixing: Callable[..., torch.Tensor],
    heads: int,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: torch.Tensor | None,
    **options: int,
) -> torch.Tensor:
    """Apply a function of the portable backend, which takes (h, T, B, c), to key and value (B, T, d)."""
    by_head = (widen(split_heads(x, heads)).permute(1, 2, 0, 3) for x in (key, value))
    return join_heads(mixing(*by_head, *arguments, **options).permute(2, 0, 1, 3)).to(value.dtype)
