"""Launches of the Triton kernels for bidirectional Eq. 2: block sizes, and memory for the results.

Query, key and value have the shapes of the operators; the table is w of all pairs, (h, T, T). Nothing here waits for
the device.
"""

from typing import Any

import torch

from ...portable_aft import power_of_two_from
from .bidirectional_kernels import (
    bidirectional_kernel,
    bidirectional_key_gradient_kernel,
    bidirectional_table_gradient_kernel,
)


# The number of queries, and of keys, in a tile.
CHUNK_SIZE = 32

# The number of columns per program, and per block in the gradient of a table.
BLOCK, TABLE_BLOCK = 64, 32

# The gradient of a table is also divided over the columns if there are fewer programs than this.
ENOUGH_PROGRAMS = 1024


Kept = tuple[torch.Tensor, ...]


def forward(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    num_heads: int,
    *,
    keep: bool,
) -> tuple[torch.Tensor, Kept]:
    """Compute Eq. 2 times the gate, (B, T, d), and the tensors for the backward pass (empty without `keep`)."""
    key, value, table = (x.contiguous() for x in (key, value, table))
    query = None if query is None else query.contiguous()
    kept = [torch.empty(shape, dtype=torch.float32, device=value.device) for shape in kept_shapes(value, keep)]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    sizes, options, columns = _launch(query, key, value, num_heads, BLOCK)
    with torch.cuda.device_of(value):
        programs = (num_heads * sizes[2] * columns,)
        bidirectional_kernel[programs](query, key, value, table, output, *kept, *sizes, columns, KEEP=keep, **options)
    return output, tuple(kept)


def kept_shapes(value: torch.Tensor, keep: bool) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors kept for the backward pass: averages, log-denominators, and maxima of chunks."""
    batch, length, width = value.shape
    return (*(value.shape,) * 2, (batch, -(-length // CHUNK_SIZE), width)) if keep else ((0,),) * 3


def _launch(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, heads: int, largest_block: int
) -> tuple[tuple[int, ...], dict[str, Any], int]:
    """The sizes and constants that all kernels take, and the number of blocks of columns."""
    batch, length, width = value.shape
    columns = batch * width // heads
    block = min(largest_block, max(16, power_of_two_from(columns)))
    per_head = key.shape[-1] != width
    options: dict[str, Any] = {"HEADS": heads, "HEAD": width // heads, "KEY_PER_HEAD": per_head, "C": CHUNK_SIZE}
    options |= {"BD": block, "GATED": query is not None, "num_warps": 8}
    options |= {"PRECISION": "tf32" if value.dtype == torch.bfloat16 else "tf32x3"}
    return (batch, length, -(-length // CHUNK_SIZE), width, key.shape[-1]), options, -(-columns // block)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    kept: Kept,
    num_heads: int,
    *,
    of_table: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of query, key, value and, with `of_table`, of the table."""
    gradient, key, value, table = (x.contiguous() for x in (gradient, key, value, table))
    query = None if query is None else query.contiguous()
    of_query, found, per_head = None, None, key.shape[-1] != value.shape[-1]
    inputs = (gradient, query, key, value, *kept, table)
    sizes, options, columns = _launch(query, key, value, num_heads, BLOCK)
    chunks = sizes[2]
    with torch.cuda.device_of(value):
        if query is not None:
            gate = torch.sigmoid(query.float())
            of_query = (gradient * kept[0] * gate * (1 - gate)).to(query.dtype)
        of_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        of_key = torch.empty(value.shape, dtype=torch.float32 if per_head else key.dtype, device=value.device)
        programs = (num_heads * chunks * columns,)
        bidirectional_key_gradient_kernel[programs](*inputs, of_key, of_value, *sizes, columns, **options)
        if of_table:
            sizes, options, columns = _launch(query, key, value, num_heads, TABLE_BLOCK)
            tiles = num_heads * chunks**2
            each = -(-columns // min(columns, max(1, ENOUGH_PROGRAMS // tiles)))
            parts = -(-columns // each)
            found = torch.empty((parts, *table.shape), dtype=torch.float32, device=value.device)
            bidirectional_table_gradient_kernel[(tiles * parts,)](*inputs, found, *sizes, columns, each, **options)
            found = found.sum(0)
    if per_head:
        of_key = of_key.unflatten(-1, (num_heads, -1)).sum(-1).to(key.dtype)
    return of_query, of_key, of_value, found
