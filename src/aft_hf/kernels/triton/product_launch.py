"""Launches of the kernels for Eq. 2 as matrix products (`product_kernels.py`): the operators `grid` and `table`.

Tensors are on the current device. Nothing here waits for the device.
"""

from typing import Any, NamedTuple, cast

import torch

from ...portable_aft import power_of_two_from
from . import product_kernels as kernels
from .kept import kept_like
from .options import options


ROWS = kernels.ROWS.value
OPERAND_COLUMNS = 32  # columns per program that stores operands
ENOUGH_PROGRAMS = 1024  # the gradient of w is also divided over its terms if there are fewer programs than this
COUNTED = 64  # tokens at the start of a row that determine the center of its averages

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def grid(query, key, value, kernels, rows, columns, global_connectivity, keep) -> Results:  # type: ignore[no-untyped-def]
    """Compute `grid` of `kernels/operators.py`, and with `keep` what the backward pass needs."""
    return _forward(
        _Problem(
            query, key, value, kernels, Grid(rows, columns, kernels.shape[1], kernels.shape[2], global_connectivity)
        ),
        keep,
    )


def grid_backward(  # type: ignore[no-untyped-def]
    gradient, query, key, value, kernels, rows, columns, global_connectivity, average, logsumexp, center, bias_needed
) -> Gradients:
    problem = _Problem(
        query, key, value, kernels, Grid(rows, columns, kernels.shape[1], kernels.shape[2], global_connectivity)
    )
    return _backward(problem, gradient, average, logsumexp, center, bias_needed)


def table(query, key, value, bias, causal, keep) -> Results:  # type: ignore[no-untyped-def]
    """Compute `table` of `kernels/operators.py`, and with `keep` what the backward pass needs."""
    return _forward(_Problem(query, key, value, bias, causal=causal), keep)


def table_backward(  # type: ignore[no-untyped-def]
    gradient, query, key, value, bias, causal, average, logsumexp, center, bias_needed
) -> Gradients:
    problem = _Problem(query, key, value, bias, causal=causal)
    return _backward(problem, gradient, average, logsumexp, center, bias_needed)


class Grid(NamedTuple):
    """The grid of a problem, and the size of its kernels."""

    rows: int
    columns: int
    height: int
    width: int
    global_connectivity: bool

    @property
    def offsets(self) -> int:
        """The number of offsets from a query to a key."""
        return (2 * self.rows - 1) * (2 * self.columns - 1)

    @property
    def reach(self) -> int:
        """The largest distance in raster order between a query and a key within its kernel."""
        return self.height // 2 * self.columns + self.width // 2


class _Problem:
    """The tensors, sizes and constants of a call, and its weights, which all rows of the batch share."""

    def __init__(self, query, key, value, w, grid: Grid | None = None, causal: bool = False):  # type: ignore[no-untyped-def]
        self.inputs = tuple(None if x is None else x.contiguous() for x in (query, key, value))
        self.w, self.grid, self.heads, self.device = w.contiguous(), grid, len(w), value.device
        (self.batch, self.length, self.width), key_width = value.shape, key.shape[-1]
        features, chosen = self.width // self.heads, options("product", value)
        self.options = dict(chosen)
        self.weight_options = options("weight_gradient_kernel", value) | {"PRECISION": chosen["PRECISION"]}
        per_head = key_width == self.heads and features > 1
        self.parts = _parts(features, self.options["BN"]) if per_head else features
        part = -(-features // self.parts)
        unit = power_of_two_from(part + 1)
        block = max(16, power_of_two_from(self.batch * self.parts * unit))
        block = self.options["BN"] = min(block, self.options["BN"])
        self.weight_options["BK"] = min(block, self.weight_options["BK"])
        self.tiles = -(-self.batch * self.parts * unit // block)
        depth = max(ROWS, self.options["BM"], self.weight_options["BM"])
        self.padded = -(-self.length // depth) * depth
        far = grid is not None and grid.global_connectivity and 2 * grid.reach + 3 * ROWS <= self.length
        self.columns = {"HEAD": features, "PARTS": self.parts, "PART": part, "KEY_PER_HEAD": per_head, "WIDTH": unit}
        self.columns["LARGE"] = value.numel() >= 2**31
        self.structure = {"GRID": grid is not None, "CAUSAL": causal}
        self.far, self.offsets = {"FAR": far}, 1 if grid is None else grid.offsets
        self.key_width, self.count = key_width, self.tiles * block
        # Rows of the batch are the only features of the product of a head of one feature, so they are made contiguous
        self.transposed = features == 1
        strides = [(self.length * x, x, 1) for x in (self.width, key_width)]
        if self.transposed:
            strides = [(1, self.batch, self.length * self.batch)] * 2
        sizes = self.batch, self.length, self.padded, self.width, key_width, self.count
        self.sizes = (*sizes, *strides[0], *strides[1])
        self._make_weights(causal)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _make_weights(self, causal: bool) -> None:
        """Compute A = exp(w - largest w) of all pairs, or, on a grid, by offset."""
        self.flags = self.new(self.heads, self.tiles, dtype=torch.int32)
        given: tuple[Any, ...]
        self.weights: tuple[Any, ...]
        heads, length, grid = self.heads, self.length, self.grid
        if grid is None:
            exponentials = self.new(heads, self.padded, self.padded)
            self.weights = exponentials, self.w, self.new(heads, length), None
            given = self.w, exponentials, self.weights[2], self.flags, length, self.padded, self.tiles
            kernels.table_weights_kernel[(heads, self.padded // 16)](*given, CAUSAL=causal, BM=16, BLOCK=128)
            return
        exponentials = self.new(heads, grid.offsets)
        w, largest, codes = self.new(heads, grid.offsets), self.new(heads), self.new(length, dtype=torch.int32)
        self.weights = exponentials, w, largest, codes
        block = min(1024, power_of_two_from(grid.offsets))
        given = self.w, exponentials, w, largest, codes, self.flags, *grid[:4], grid.offsets, length, self.tiles
        outside = 0.0 if grid.global_connectivity else -float("inf")
        programs = (heads, -(-grid.offsets // block))
        kernels.grid_weights_kernel[programs](*given, OUTSIDE=outside, BLOCK=block)

    def store_operand(self, kernel: Any, *tensors: Any, **constants: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store a factor of the products, (h, padded T, columns), and its sums over ROWS positions if used."""
        operand = self.new(self.heads, self.padded, self.count)
        sums = self.new(self.heads, self.padded // ROWS, self.count) if self.far["FAR"] else None
        units = max(1, min(OPERAND_COLUMNS, self.options["BN"]) // self.columns["WIDTH"])
        programs = (self.padded // ROWS * (self.count // (units * self.columns["WIDTH"])), self.heads)
        constants |= self.columns | self.far | {"UNITS": units}
        kernel[programs](operand, sums, *tensors, *self.sizes, **constants)
        return operand, sums

    def multiply(self, kernel: Any, *tensors: Any, **constants: Any) -> None:
        """Launch a kernel for each block of positions, tile of columns and head."""
        programs = (-(-self.length // self.options["BM"]) * self.tiles, self.heads)
        reach = 0 if self.grid is None else self.grid.reach
        constants |= self.columns | self.structure | self.far | self.options
        constants["GLOBAL"] = self.grid is None or self.grid.global_connectivity
        constants["UNITS"] = self.options["BN"] // self.columns["WIDTH"]
        kernel[programs](*tensors, *self.sizes, self.offsets, reach, **constants)

    def transpose(self, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        """Convert tensors (B, T, d) to (d, T, B), or back, where heads have one feature; otherwise return them."""
        if not self.transposed:
            return tensors
        given = next(x for x in tensors if x is not None)
        (first, length, last), block = given.shape, 64
        results = tuple(None if x is None else self.new(last, length, first, dtype=x.dtype) for x in tensors)
        empty = (None,) * (4 - len(tensors))
        programs = (-(-first // block) * -(-last // block) * length,)
        kernels.transpose_kernel[programs](*tensors, *empty, *results, *empty, first, length, last, BLOCK=block)
        return results

    def references(self, center: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of `center` (see `kept_like`): the largest keys, and the centers of the averages."""
        value_centers, key_centers = center.split([self.batch * self.width, self.batch * self.key_width])
        return key_centers, value_centers


def _parts(features: int, block: int) -> int:
    """In how many parts the features of a head are divided: each has a power of two of columns, one of them for p."""
    widths = {parts: power_of_two_from(-(-features // parts) + 1) for parts in range(1, 2 + features // 4)}
    # A part also costs a sum over its columns
    return min((x for x in widths if widths[x] <= block), key=lambda parts: parts * (widths[parts] + 4))


def _forward(problem: _Problem, keep: bool) -> Results:
    key, value = cast(tuple[torch.Tensor, torch.Tensor], problem.inputs[1:])
    kept = kept_like("table", key, value, problem.w) if keep else (problem.new(0),) * 3
    references = problem.references(
        kept[2] if keep else problem.new(problem.batch * (problem.width + problem.key_width))
    )
    programs = (-(-problem.width // 32) * problem.batch,)
    kernels.reference_kernel[programs](
        key, value, *references, problem.length, problem.width, problem.key_width,
        HEAD=problem.columns["HEAD"], KEY_PER_HEAD=problem.columns["KEY_PER_HEAD"],
        COUNT=1 if problem.structure["CAUSAL"] else COUNTED, BT=COUNTED, BF=32,
    )  # fmt: skip
    query, key, value = problem.transpose(*problem.inputs)
    output = problem.new(*value.shape, dtype=value.dtype)
    factor = problem.store_operand(kernels.key_operand_kernel, key, value, *references)
    averages = kept[:2] if keep else (None, None)
    given = query, key, value, *references, *problem.weights, *factor, output, *averages
    problem.multiply(kernels.average_kernel, *given, GATED=query is not None, KEEP=keep)
    return *problem.transpose(output), *kept


def _backward(
    problem: _Problem,
    gradient: torch.Tensor,
    average: torch.Tensor,
    logsumexp: torch.Tensor,
    center: torch.Tensor,
    bias_needed: bool,
) -> Gradients:
    references = problem.references(center)
    gradient, query, key, value = problem.transpose(gradient.contiguous(), *problem.inputs)
    grad_query = None if query is None else problem.new(*query.shape, dtype=query.dtype)
    grad_value = problem.new(*value.shape, dtype=value.dtype)
    units, gated = problem.heads * problem.parts, {"GATED": query is not None}
    summed = units != problem.key_width  # over the parts of a head
    grad_key = problem.new(*key.shape, dtype=key.dtype)
    if summed:
        grad_key = problem.new(problem.batch, problem.length, units)
    x, _ = problem.store_operand(kernels.key_operand_kernel, key, value, *references)
    tensors = gradient, query, average, logsumexp, references[1], problem.flags, grad_query
    constants = gated | {"BN": problem.options["BN"]}
    z, sums = problem.store_operand(kernels.query_operand_kernel, *tensors, **constants)
    given = gradient, query, key, value, average, logsumexp, *references, *problem.weights, x, z
    outputs = sums, problem.flags, grad_key, grad_value
    problem.multiply(kernels.key_gradient_kernel, *given, *outputs, **gated)
    grad_bias = _weight_gradient(problem, (*given, problem.flags), gated) if bias_needed else problem.new(0)
    if summed:
        grad_key = grad_key.unflatten(-1, (problem.heads, -1)).sum(-1).to(key.dtype)
    grad_query, grad_key, grad_value = problem.transpose(grad_query, grad_key, grad_value)
    return problem.new(0) if grad_query is None else grad_query, grad_key, grad_value, grad_bias


def _weight_gradient(problem: _Problem, tensors: tuple[Any, ...], gated: dict[str, bool]) -> torch.Tensor:
    grid, chosen, heads, length = problem.grid, problem.weight_options, problem.heads, problem.length
    block = chosen["BM"]
    columns = problem.options["BN"]
    constants = problem.columns | problem.structure | gated | chosen | {"BN": columns}
    constants["UNITS"] = columns // problem.columns["WIDTH"]
    if grid is None:
        tiles = (-(-length // block)) ** 2
        parts = _share(heads * tiles, problem.count // chosen["BK"])
        grad_table = problem.new(parts, heads, length, length)
        numbers = (*problem.sizes, 1, 1, 1, 0, 0, parts)
        kernels.weight_gradient_kernel[(tiles, parts, heads)](*tensors, grad_table, *numbers, GC=1, **constants)
        return grad_table.sum(0)
    # Blocks of a grid, of `block` positions; those of the fewest blocks
    sizes = [(block // 2**i, 2**i) for i in range(block.bit_length())]
    count = {size: (-(-grid.rows // size[0]), -(-grid.columns // size[1])) for size in sizes}
    size = min(sizes, key=lambda x: (count[x][0] * count[x][1], abs(x[0] - x[1])))
    reach = grid.height // 2, grid.width // 2
    spans = tuple(min(count[size][i] - 1, -(-reach[i] // size[i])) for i in (0, 1))
    places = (2 * spans[0] + 1) * (2 * spans[1] + 1)
    parts = _share(heads * places, problem.count // chosen["BK"])
    blocks, grad_kernels = problem.new(parts, heads, places, block, block), problem.new(*problem.w.shape)
    numbers = (grid.rows, grid.columns, *spans, parts)
    sizes_of_grid = (*problem.sizes, problem.offsets, *numbers)
    kernels.weight_gradient_kernel[(places, parts, heads)](*tensors, blocks, *sizes_of_grid, GC=size[1], **constants)
    entries = grid.height * grid.width
    kernels.kernel_gradient_kernel[(-(-entries // 16), heads)](
        blocks, grad_kernels, *grid[:4], *spans, parts, GC=size[1], BM=block, BLOCK=16
    )
    return grad_kernels


def _share(programs: int, steps: int) -> int:
    """In how many parts the terms of a sum are divided, so that there are enough programs."""
    return max(1, min(steps, ENOUGH_PROGRAMS // programs))
