"""Launches of the Triton kernels: sizes of blocks, memory for results, and the kernels of a pass in their order.

Tensors are those of a causal problem, as projections write them: query and value (B, T, d), key (B, T, d) or, for one
key per head, (B, T, h). Nothing here waits for the device.
"""

from typing import TYPE_CHECKING, Any

import torch

from .kernels_causal_aft import (
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    scan_kernel,
    table_gradient_kernel,
    totals_kernel,
)
from .kernels_decoding_aft import state_kernel, step_kernel
from .scaled_sums_aft import join_heads, power_of_two_from


if TYPE_CHECKING:
    from .mixing_triton_causal_aft import Geometry, Inputs


# The most sums and features that one program of a scan takes.
SCANNED, SCANNED_FEATURES = 64, 32

# Features that the gradient of a table takes at once.
TABLE_BLOCK = 32

# Programs below which the gradient of a table is also cut into rows of the batch.
ENOUGH_PROGRAMS = 1024

# Features, and keys of the window, that a decoding step takes at once.
STEP_FEATURES, STEP_KEYS = 32, 32

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Nothing = tuple[None, None, None]
NOTHING: Nothing = (None, None, None)

# What the backward pass needs of the forward pass.
Kept = tuple[torch.Tensor, ...] | Nothing

# What a kernel is launched with: what it gets, and what it is compiled for.
Arguments = tuple[torch.Tensor | int | None, ...]
Constants = dict[str, Any]


def block_of(features: int) -> int:
    """Features per program for heads of so many: a power of two, from the smallest that a product takes."""
    return min(64, max(16, power_of_two_from(features)))


class Launch:
    """What all kernels of one problem have in common."""

    def __init__(self, inputs: "Inputs", geometry: "Geometry"):
        _, key, value, table, slopes, first = inputs
        self.geometry, self.table, self.slopes, self.first = geometry, table, slopes, first
        self.batch, self.length, self.width = value.shape
        self.chunks = -(-self.length // geometry.chunk_size)
        self.heads = geometry.num_heads
        self.head = self.width // self.heads
        self.block = block_of(self.head)
        self.blocks = -(-self.head // self.block)
        self.programs = (self.heads * self.blocks * self.chunks * self.batch,)
        self.device, self.key_per_head = value.device, key.shape[-1] != self.width
        # Half the digits of bfloat16 are lost anyway; float16 has as many as tf32.
        self.precision = "tf32" if value.dtype == torch.bfloat16 else "tf32x3"
        # A table of biases, or products of three parts each, take more registers than 4 warps have without spills.
        self.warps = 4 if self.precision == "tf32" and table is None else 8
        self.compact = value.dtype == torch.bfloat16
        self.sizes = (self.length, self.chunks, self.width)
        self.has_far_sums = not (geometry.is_full or geometry.alone)
        self.common: Constants = {
            "MODE": geometry.mode,
            "HEADS": self.heads,
            "BLOCKS": self.blocks,
            "HEAD": self.head,
            "C": geometry.chunk_size,
            "BD": self.block,
            "DOCUMENTS": first is not None,
        }

    def near(self) -> tuple[int, int, int, int]:
        """Chunks before a query's own that have biases, their reach, and the size of the table of biases."""
        geometry, table = self.geometry, self.table
        if table is None:
            return 0, geometry.reach, self.length, 1
        near = self.chunks - 1 if geometry.is_full else geometry.near
        if geometry.is_full:
            return near, self.length, table.shape[1], table.shape[2]
        shared = table.shape[1] == 1
        return near, geometry.reach, self.length if shared else table.shape[1] * table.shape[2], table.shape[3]

    def table_strides(self, table: torch.Tensor | None) -> tuple[int, int]:
        """From one head, and from one chunk, to the next; a table of one chunk serves all."""
        if table is None:
            return 0, 0
        if self.geometry.is_full:
            return table.stride(0), self.geometry.chunk_size * table.stride(1)
        return table.stride(0), table.stride(1) if table.shape[1] > 1 else 0

    def sums(self) -> Sums:
        """Memory for the sums of all chunks, and for what lies before or after them."""
        return self._three(self.chunks + 1)

    def _three(self, count: int) -> Sums:
        shape = (self.batch, count, self.width)
        first, second, third = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(3))
        return first, second, third

    def scan(self, sums: Sums, *, reverse: bool) -> None:
        """From sums of chunks to the sums over all up to each of them, in place."""
        self._scan(sums, None, reverse, True)

    def _scan(self, sums: Sums, age: torch.Tensor | None, reverse: bool, of_chunks: bool) -> None:
        count = sums[0].shape[1]
        size = min(SCANNED, max(4, power_of_two_from(count)))
        features = min(SCANNED_FEATURES, power_of_two_from(self.width))
        blocks = -(-count // size)
        programs = (-(-self.width // features) * blocks * self.batch,)
        numbers = (count, self.length, self.width, blocks)
        options = {
            "MODE": self.geometry.mode,
            "HEAD": self.head,
            "C": self.geometry.chunk_size,
            "NB": size,
            "BD": features,
            "DOCUMENTS": self.first is not None,
            "REVERSE": reverse,
            "OF_CHUNKS": of_chunks,
        }
        biases, carry = (self.slopes, self.first), None
        if blocks > 1:
            carry = self._three(blocks)
            ages = torch.empty_like(carry[0])
            arguments: Arguments = (*sums, age, *NOTHING, *carry, ages, *biases, *numbers)
            scan_kernel[programs](*arguments, CARRY=False, REDUCE=True, **options)
            # Blocks are numbered in the order of the scan already
            self._scan(carry, ages, False, False)
        arguments = (*sums, age, *(carry or NOTHING), *sums, None, *biases, *numbers)
        scan_kernel[programs](*arguments, CARRY=blocks > 1, REDUCE=False, **options)


def kept_tensors(value: torch.Tensor, geometry: "Geometry") -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of what the forward pass keeps: averages, logarithms of denominators, numbers of chunks."""
    batch, length, width = value.shape
    of_chunks = (batch, -(-length // geometry.chunk_size), 3, width)
    averages = torch.float16 if value.dtype == torch.bfloat16 else torch.float32
    return [(averages, value.shape), (torch.float32, value.shape), (torch.float32, of_chunks)]


def forward(
    inputs: "Inputs",
    geometry: "Geometry",
    *,
    keep: bool,
    initial: Sums | None = None,
) -> tuple[torch.Tensor, Kept, Sums | None]:
    """Eq. 2 times the gate: (B, T, d).

    Args:
        keep: whether what the backward pass needs is kept.
        initial: the sums over what lies before the sequence, (B, d) each, as its last position sees them.

    Returns:
        The result, what the backward pass needs, and the sums over all up to the end of each chunk.
    """
    inputs = _by_rows(inputs)
    query, key, value, table, slopes, first = inputs
    with torch.cuda.device_of(value):
        at = Launch(inputs, geometry)
        sums = None
        if at.has_far_sums:
            sums = at.sums()
            options: Constants = {"KEY_PER_HEAD": at.key_per_head, "INITIAL": initial is not None, **at.common}
            arguments: Arguments = (key, value, slopes, first, *(initial or NOTHING), *sums, *at.sizes)
            totals_kernel[at.programs](*arguments, *_strides(key, value), **options)
            at.scan(sums, reverse=False)
        output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        kept: Kept = NOTHING
        if keep:
            of_problem = kept_tensors(value, geometry)
            kept = tuple(torch.empty(shape, dtype=dtype, device=at.device) for dtype, shape in of_problem)
        options = {"KEY_PER_HEAD": at.key_per_head, "ALONE": geometry.alone, "GATED": query is not None}
        options |= {"KEEP": keep, "COMPACT": at.compact, "PRECISION": at.precision, "num_warps": at.warps, **at.common}
        arguments = (query, key, value, table, slopes, first, *(sums or NOTHING), output, *kept)
        strides = (*_strides(query, key, value), *at.table_strides(table))
        forward_kernel[at.programs](*arguments, *at.sizes, *at.near(), *strides, **options)
    return output, kept, sums


def backward(
    gradient: torch.Tensor,
    inputs: "Inputs",
    kept: tuple[torch.Tensor, ...],
    geometry: "Geometry",
    *,
    of_table: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of query, key, value and, if asked for, of the table of position biases."""
    gradient, inputs = _side_by_side(gradient), _by_rows(inputs)
    query, key, value, table, slopes, first = inputs
    with torch.cuda.device_of(value):
        at = Launch(inputs, geometry)
        gated, strides = query is not None, _strides(gradient, query)
        options: Constants = {"GATED": gated, "COMPACT": at.compact, **at.common}
        of_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=at.device)
        sums = at.sums() if at.has_far_sums else None
        # The gradient of a window reads all that those of queries read: one kernel for both
        together = of_table and not geometry.is_full
        of_queries: Arguments = (of_query, *(sums or NOTHING))
        if not together and (gated or at.has_far_sums):
            arguments: Arguments = (gradient, query, *kept, slopes, first, *of_queries, *at.sizes, *strides)
            query_gradient_kernel[at.programs](*arguments, TOTALS=at.has_far_sums, **options)
        options |= {"KEY_PER_HEAD": at.key_per_head, "ALONE": geometry.alone}
        options |= {"PRECISION": at.precision, "num_warps": at.warps}
        strides = (*strides, *_strides(key, value), *at.table_strides(table))
        tensors, found = (gradient, query, key, value, *kept), None
        if of_table:
            found = _table_gradient(at, tensors, of_queries if together else (None,) * 4, strides, options)
        if sums is not None:
            at.scan(sums, reverse=True)
        of_value = torch.empty(value.shape, dtype=value.dtype, device=at.device)
        if at.key_per_head:
            shape = (at.batch, at.length, at.heads, at.blocks)
            of_key = torch.empty(shape, dtype=torch.float32, device=at.device)
        else:
            of_key = torch.empty(key.shape, dtype=key.dtype, device=at.device)
        arguments = (*tensors, table, slopes, first, *(sums or NOTHING), of_key, of_value)
        key_gradient_kernel[at.programs](*arguments, *at.sizes, *at.near(), *strides, **options)
        if at.key_per_head:
            of_key = of_key.sum(-1).to(key.dtype)
        return of_query, of_key, of_value, found


def _table_gradient(
    at: Launch, tensors: Arguments, of_queries: Arguments, strides: tuple[int, ...], options: Constants
) -> torch.Tensor:
    """The gradient of the position biases, in the shape of their table; that of the query where it is to be stored."""
    assert at.table is not None
    block, together = min(TABLE_BLOCK, at.block), any(x is not None for x in of_queries)
    options = options | {"BD": block, "BLOCKS": -(-at.head // block)}
    options |= {"QUERIES": together, "TOTALS": together and at.has_far_sums}
    near, tables = at.near(), at.heads * at.chunks
    tiles = tables * (near[0] + 1)
    parts = at.batch if at.first is not None else min(at.batch, max(1, ENOUGH_PROGRAMS // tiles))
    rows_each = -(-at.batch // parts)
    parts = -(-at.batch // rows_each)
    if at.first is not None:  # added up by the kernel
        found = torch.zeros(at.table.shape, dtype=torch.float32, device=at.device)[None]
    elif at.geometry.is_full:
        found = torch.zeros(parts, *at.table.shape, dtype=torch.float32, device=at.device)
    else:
        shape = (parts, at.heads, at.chunks, *at.table.shape[2:])
        found = torch.empty(shape, dtype=torch.float32, device=at.device)
    arguments = (*tensors, at.table, at.first, found, *of_queries, at.batch, *at.sizes, *near, *strides)
    to = found.stride(0), *_gradient_strides(at, found)
    table_gradient_kernel[(tiles * parts,)](*arguments, *to, rows_each, **options)
    found = found.sum(0)
    return found if found.shape == at.table.shape else found.sum(1, keepdim=True)


def _gradient_strides(at: Launch, found: torch.Tensor) -> tuple[int, int]:
    """From one head, and from one chunk, of a table's gradient to the next."""
    return found.stride(1), at.geometry.chunk_size * found.stride(2) if at.geometry.is_full else found.stride(2)


def _by_rows(inputs: "Inputs") -> "Inputs":
    """Query, key and value with their features side by side."""
    query = None if inputs.query is None else _side_by_side(inputs.query)
    return inputs._replace(query=query, key=_side_by_side(inputs.key), value=_side_by_side(inputs.value))


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x with its features side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """From one row, and from one position, to the next."""
    return tuple(s for x in tensors for s in ((0, 0) if x is None else x.stride()[:2]))


# --------------------------------------------------------------------------------------------------------- generation


def prefill(
    inputs: "Inputs",
    before: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: tuple[torch.Tensor, ...],
    geometry: "Geometry",
    *,
    continued: bool,
) -> torch.Tensor:
    """Eq. 2 times the gate, (B, T, d); the state becomes that after these tokens. Arguments as of `causal_prefill`.

    Tokens that continue a state are computed behind its window, whose own averages are dropped.
    """
    keys, values, numerator, denominator, maximum = state
    query, key, value, _, slopes, _ = inputs
    past, initial, first = 0, None, None
    if continued:
        past = keys.shape[2]
        key, value = (torch.cat([join_heads(x).to(y), y], 1) for x, y in ((keys, key), (values, value)))
        query = query if query is None else torch.nn.functional.pad(query, (0, 0, past, 0))
        flat = (x.expand_as(numerator).reshape(value.shape[0], -1) for x in (maximum, numerator, denominator))
        shift, sum_of_values, sum_of_weights = (x.contiguous() for x in flat)
        initial = shift, sum_of_values, sum_of_weights
        if before is not None:
            first = before[:, None].expand(-1, value.shape[1]).contiguous()
    inputs = _by_rows(inputs._replace(query=query, key=key, value=value, first=first))
    output, _, sums = forward(inputs, geometry, keep=False, initial=initial)
    with torch.cuda.device_of(value):
        at, key, value = Launch(inputs, geometry), inputs.key, inputs.value
        options = {name: at.common[name] for name in ("HEADS", "BLOCKS", "HEAD", "MODE", "C", "BD")}
        options |= {"KEY_PER_HEAD": at.key_per_head, "ALONE": geometry.alone, "COUNTED": counts is not None}
        arguments: Arguments = (key, value, slopes, counts, *(sums or NOTHING), *state)
        sizes = (*at.sizes, keys.shape[2], past, *_strides(key, value))
        state_kernel[(at.batch * at.heads * at.blocks,)](*arguments, *sizes, **options)
    return output if past == 0 else output[:, past:].contiguous()


def decode(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    state: tuple[torch.Tensor, ...],
    length: torch.Tensor | None,
    heads: int,
    *,
    alone: bool,
) -> torch.Tensor:
    """Eq. 2 of one new token times the gate, (B, 1, d); the state takes it in. Arguments as of `decode_step`."""
    query = None if query is None else _side_by_side(query)
    key, value = _side_by_side(key), _side_by_side(value)
    batch, _, width = value.shape
    window, head, key_per_head = state[0].shape[2], width // heads, key.shape[-1] != width
    features = min(STEP_FEATURES, power_of_two_from(head))
    blocks = -(-head // features)
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    strides = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (query, key, value, bias)]
    options = {"HEADS": heads, "BLOCKS": blocks, "HEAD": head, "KEY_PER_HEAD": key_per_head}
    options |= {"MODE": 0 if slopes is None else 1, "BIASED": bias is not None, "ALONE": alone}
    options |= {"GATED": query is not None, "COUNTED": length is not None}
    options |= {"BW": min(STEP_KEYS, power_of_two_from(max(window, 1))), "BD": features}
    with torch.cuda.device_of(value):
        programs = batch * heads * (1 if key_per_head else blocks)
        arguments = (query, key, value, bias, slopes, *state, length, output)
        step_kernel[(programs,)](*arguments, window, width, *strides, **options)
    return output
