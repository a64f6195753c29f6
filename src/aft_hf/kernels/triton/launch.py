"""Launches of the Triton kernels for causal problems and generation: block sizes, memory for the results, and the
sequence of kernels of each pass.

The tensors have the shapes that the projections return: query and value (B, T, d), key (B, T, d) or, for one key per
head, (B, T, h). Nothing here waits for the device.
"""

from typing import Any, NamedTuple

import torch

from ...portable_aft import join_heads, power_of_two_from
from .causal_kernels import (
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    scan_kernel,
    table_gradient_kernel,
    totals_kernel,
)
from .decoding_kernels import state_kernel, step_kernel


# The largest numbers of sums and of features that one program of a scan processes.
SCANNED, SCANNED_FEATURES = 64, 32

# The number of features per block in the gradient of a table.
TABLE_BLOCK = 32

# The gradient of a table is also divided over the rows of the batch if there are fewer programs than this.
ENOUGH_PROGRAMS = 1024

# The numbers of features, and of keys of the window, per block in a decoding step.
STEP_FEATURES, STEP_KEYS = 32, 32

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Nothing = tuple[None, None, None]
NOTHING: Nothing = (None, None, None)

# The tensors that the forward pass keeps for the backward pass.
Kept = tuple[torch.Tensor, ...] | Nothing

# The runtime arguments of a kernel launch, and its compile-time constants.
Arguments = tuple[torch.Tensor | int | None, ...]
Constants = dict[str, Any]


class Geometry(NamedTuple):
    """The structure of a problem as integers, which custom operators can take.

    Attributes:
        mode: the structure of w: w = 0, a linear decay, a window, or all pairs (the constants of `tiles.py`).
        num_heads: h; 1 if all features have the same structure.
        chunk_size: C.
        near: how many chunks before a query's own one have position biases. Not used for all pairs, where it follows
            from the length.
        reach: the largest distance within the window.
        alone: whether positions beyond the window are hidden.
    """

    mode: int
    num_heads: int
    chunk_size: int
    near: int = 0
    reach: int = 0
    alone: int = 0

    @property
    def is_full(self) -> bool:
        return self.mode == 3


class Inputs(NamedTuple):
    """The tensors of a causal problem.

    Attributes:
        query: (B, T, d), or None for no gate.
        key: (B, T, d), or (B, T, h) for one key per head.
        value: (B, T, d).
        table: w of all pairs, (h, P, P), or w from each chunk of C positions to the near chunks and itself,
            (h, n, C, (near + 1) C), with n = 1 if all chunks have the same biases. None if w is 0 or a linear decay.
        slopes: (h,), the slopes of a linear decay; otherwise None.
        first: (B, T), for packed documents: the index in its row of the first token of each token's document. None
            if each row is one sequence.
    """

    query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    first: torch.Tensor | None = None


def block_of(features: int) -> int:
    """The number of features per program for heads of `features` features: a power of two from 16, the smallest size
    of a matrix product, to 64.
    """
    return min(64, max(16, power_of_two_from(features)))


class Launch:
    """Sizes, constants and memory that all kernels of one problem share."""

    def __init__(self, inputs: Inputs, geometry: Geometry):
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
        # tf32 has 11 significant bits: more than bfloat16 (8), but no more than float16.
        self.precision = "tf32" if value.dtype == torch.bfloat16 else "tf32x3"
        # With a table of biases, or products in three parts (tf32x3), 4 warps would spill registers.
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
        """The number of near chunks, the reach of the window, the number of positions in the table of position biases,
        and the number of its columns.
        """
        geometry, table = self.geometry, self.table
        if table is None:
            return 0, geometry.reach, self.length, 1
        near = self.chunks - 1 if geometry.is_full else geometry.near
        if geometry.is_full:
            return near, self.length, table.shape[1], table.shape[2]
        shared = table.shape[1] == 1
        return near, geometry.reach, self.length if shared else table.shape[1] * table.shape[2], table.shape[3]

    def table_strides(self, table: torch.Tensor | None) -> tuple[int, int]:
        """Strides of a table between heads and between chunks; 0 between chunks if all share one."""
        if table is None:
            return 0, 0
        if self.geometry.is_full:
            return table.stride(0), self.geometry.chunk_size * table.stride(1)
        return table.stride(0), table.stride(1) if table.shape[1] > 1 else 0

    def sums(self) -> Sums:
        """Allocate memory for the sums of all chunks, and for those before (or after) all of them."""
        return self._three(self.chunks + 1)

    def _three(self, count: int) -> Sums:
        shape = (self.batch, count, self.width)
        first, second, third = (torch.empty(shape, dtype=torch.float32, device=self.device) for _ in range(3))
        return first, second, third

    def scan(self, sums: Sums, *, reverse: bool) -> None:
        """Replace the sums of chunks by their running sums (prefix sums), in place."""
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
            # Blocks are already numbered in the order of the scan, so this level is never reversed
            self._scan(carry, ages, False, False)
        arguments = (*sums, age, *(carry or NOTHING), *sums, None, *biases, *numbers)
        scan_kernel[programs](*arguments, CARRY=blocks > 1, REDUCE=False, **options)


def kept_tensors(value: torch.Tensor, geometry: Geometry) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of the tensors kept for the backward pass: averages, log-denominators, and three numbers per
    chunk and feature (maximum, and offset and scale of the averages).
    """
    batch, length, width = value.shape
    of_chunks = (batch, -(-length // geometry.chunk_size), 3, width)
    averages = torch.float16 if value.dtype == torch.bfloat16 else torch.float32
    return [(averages, value.shape), (torch.float32, value.shape), (torch.float32, of_chunks)]


def forward(
    inputs: Inputs,
    geometry: Geometry,
    *,
    keep: bool,
    initial: Sums | None = None,
) -> tuple[torch.Tensor, Kept, Sums | None]:
    """Compute Eq. 2 times the gate.

    Args:
        inputs: the tensors of the problem.
        geometry: its structure.
        keep: whether to keep the tensors that the backward pass needs.
        initial: maximum, numerator and denominator of the sums before the sequence, (B, d) each, as seen from the
            position before its first token.

    Returns:
        The result, (B, T, d); the tensors for the backward pass; and the running sums up to the end of each chunk,
        None if no query uses them.
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
    inputs: Inputs,
    kept: Kept,
    geometry: Geometry,
    *,
    of_table: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of query, key, value and, with `of_table`, of the table of position biases."""
    gradient, inputs = _side_by_side(gradient), _by_rows(inputs)
    query, key, value, table, slopes, first = inputs
    with torch.cuda.device_of(value):
        at = Launch(inputs, geometry)
        gated, strides = query is not None, _strides(gradient, query)
        options: Constants = {"GATED": gated, "COMPACT": at.compact, **at.common}
        of_query = None if query is None else torch.empty(query.shape, dtype=query.dtype, device=at.device)
        sums = at.sums() if at.has_far_sums else None
        # The gradient of a window reads all tensors that the gradients of queries need, so one kernel computes both
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
    """Compute the gradient of the position biases in the shape of their table, and the gradient of the query if
    `of_queries` has memory for it.
    """
    assert at.table is not None
    block, together = min(TABLE_BLOCK, at.block), any(x is not None for x in of_queries)
    options = options | {"BD": block, "BLOCKS": -(-at.head // block)}
    options |= {"QUERIES": together, "TOTALS": together and at.has_far_sums}
    near, tables = at.near(), at.heads * at.chunks
    tiles = tables * (near[0] + 1)
    parts = at.batch if at.first is not None else min(at.batch, max(1, ENOUGH_PROGRAMS // tiles))
    rows_each = -(-at.batch // parts)
    parts = -(-at.batch // rows_each)
    if at.first is not None:  # packed documents: the kernel adds to it by atomics
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
    """Strides of the gradient of a table between heads and between chunks."""
    return found.stride(1), at.geometry.chunk_size * found.stride(2) if at.geometry.is_full else found.stride(2)


def _by_rows(inputs: Inputs) -> Inputs:
    """Make the features of query, key and value contiguous."""
    query = None if inputs.query is None else _side_by_side(inputs.query)
    return inputs._replace(query=query, key=_side_by_side(inputs.key), value=_side_by_side(inputs.value))


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous features."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of each tensor between rows and between positions."""
    return tuple(s for x in tensors for s in ((0, 0) if x is None else x.stride()[:2]))


# --------------------------------------------------------------------------------------------------------- generation


def prefill(
    inputs: Inputs, counts: torch.Tensor | None, state: tuple[torch.Tensor, ...], geometry: Geometry
) -> torch.Tensor:
    """Compute Eq. 2 times the gate for new tokens, (B, T, d), and add them to the state of a layer.

    The tokens are computed together with the window of the state, whose results are dropped.

    Args:
        inputs: the tensors of the problem; the table is for the positions of the window, too.
        counts: (B,), how many of the new tokens of each row are real; None if all are.
        state: keys, values, numerator, denominator and maximum.
        geometry: the structure of the problem.
    """
    keys, values, numerator, denominator, maximum = state
    query, key, value, _, slopes, _ = inputs
    past = keys.shape[2]
    key, value = (torch.cat([join_heads(x).to(y), y], 1) for x, y in ((keys, key), (values, value)))
    query = query if query is None else torch.nn.functional.pad(query, (0, 0, past, 0))
    flat = (x.expand_as(numerator).reshape(value.shape[0], -1) for x in (maximum, numerator, denominator))
    shift, sum_of_values, sum_of_weights = (x.float().contiguous() for x in flat)
    inputs = _by_rows(inputs._replace(query=query, key=key, value=value))
    output, _, sums = forward(inputs, geometry, keep=False, initial=(shift, sum_of_values, sum_of_weights))
    with torch.cuda.device_of(value):
        at, key, value = Launch(inputs, geometry), inputs.key, inputs.value
        options = {name: at.common[name] for name in ("HEADS", "BLOCKS", "HEAD", "MODE", "C", "BD")}
        options |= {"KEY_PER_HEAD": at.key_per_head, "ALONE": geometry.alone, "COUNTED": counts is not None}
        arguments: Arguments = (key, value, slopes, counts, *(sums or NOTHING), *state)
        sizes = (*at.sizes, past, past, *_strides(key, value))
        state_kernel[(at.batch * at.heads * at.blocks,)](*arguments, *sizes, **options)
    return output[:, past:].contiguous()


def decode(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    state: tuple[torch.Tensor, ...],
    heads: int,
    *,
    alone: bool,
) -> torch.Tensor:
    """Compute Eq. 2 of one new token times the gate, (B, 1, d), and add it to the state of a layer.

    Args:
        query, key, value: (B, 1, d), the key possibly (B, 1, h).
        bias: (B or 1, h, W + 1, 1), w from the token to the window and to itself; None if there is no window.
        slopes: (h,), for w = -slope * distance; otherwise None.
        state: keys, values, numerator, denominator and maximum.
        heads: h.
        alone: whether positions beyond the window are hidden.
    """
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
    options |= {"GATED": query is not None}
    options |= {"BW": min(STEP_KEYS, power_of_two_from(max(window, 1))), "BD": features}
    with torch.cuda.device_of(value):
        programs = batch * heads * (1 if key_per_head else blocks)
        arguments = (query, key, value, bias, slopes, *state, output)
        step_kernel[(programs,)](*arguments, window, width, *strides, **options)
    return output
