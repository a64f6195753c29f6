"""The operator `table`: Eq. 2 with a table of all pairs, as one fused matrix product.

`table` and `table_backward` compute, element-wise in the features,

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')  (Eq. 2), times sigmoid(Q_t) if there is a query,

and 0 where a query sees no key. They take

    query:   (B, T, d), or None for the averages alone.
    key:     (B, T', d), or (B, T', h) for one key for all features of a head; -inf hides a token.
    value:   (B, T', d).
    bias:    w in float32, (h, T, T'); -inf hides a key from a query. On a grid, where tokens are in raster order, w by
             the offset from query to key: (h, 2 rows - 1, 2 columns - 1), offset 0 in the middle.
    columns: of the grid; 0 if `bias` is a table.
    causal:  whether a query sees only t' <= t; then T = T'.

The kernel computes both sums of Eq. 2 as products W X of W = exp(w) and X = (exp(K) V, exp(K)), for so few rows and
features at a time that X stays in the cache; it never writes the sums to memory (see cpu/table.cpp).
"""

import struct
from collections.abc import Iterator, Sequence

import torch

from ..position_biases_aft import grid_table
from .library import load_library
from .operators import (
    DTYPES,
    LIBRARY,
    NAMESPACE,
    REGISTERED,
    dense_rows,
    empty_gradients,
    fake,
    is_batched,
    of_all_pairs,
)


PROBLEM = "Tensor? query, Tensor key, Tensor value, Tensor bias, int columns, bool causal"

Problem = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, int, bool]

SCHEMAS = (
    f"table({PROBLEM}) -> Tensor",
    f"table_backward(Tensor gradient, {PROBLEM}, bool bias_needed) -> (Tensor, Tensor, Tensor, Tensor)",
)
for schema in () if REGISTERED else SCHEMAS:
    LIBRARY.define(schema)

# ------------------------------------------------------------------------------------------------ shapes and gradients


@fake("table")
def _(query, key, value, bias, columns, causal):  # type: ignore[no-untyped-def]
    return value.new_empty(value.shape[0], _count_queries(value, bias, columns), value.shape[2])


@fake("table_backward")
def _(gradient, query, key, value, bias, columns, causal, bias_needed):  # type: ignore[no-untyped-def]
    return empty_gradients(query, key, value, bias if bias_needed else None)


def _count_queries(value: torch.Tensor, bias: torch.Tensor, columns: int) -> int:
    return value.shape[1] if columns else bias.shape[1]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.columns, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    problem, needed = (*ctx.saved_tensors, ctx.columns, ctx.causal), ctx.needs_input_grad[:4]
    if torch.is_grad_enabled() or is_batched(gradient):
        found = _portable_gradients(gradient, problem, needed)
    else:
        found = torch.ops.aft_hf_v1.table_backward(gradient, *problem, needed[3])
    return *(x if need else None for x, need in zip(found, needed)), None, None


if not REGISTERED:
    torch.library.register_autograd(f"{NAMESPACE}::table", _backward, setup_context=_save, lib=LIBRARY)


def portable_table(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, columns: int, causal: bool
) -> torch.Tensor:
    """The operator `table` by differentiable operations."""
    visible = None
    if columns:
        bias = grid_table(bias, ((bias.shape[1] + 1) // 2, columns))
    if causal:
        visible = torch.ones(bias.shape[1:], dtype=torch.bool, device=bias.device).tril()[None, None]
    return of_all_pairs(query, key, value, bias.unsqueeze(0), visible)


def _portable_gradients(
    gradient: torch.Tensor, problem: Problem, needed: tuple[bool, ...]
) -> Iterator[torch.Tensor | None]:
    """Return differentiable gradients of the tensors that are needed, and None for the others."""
    with torch.enable_grad():
        inputs = [x for x, need in zip(problem[:4], needed) if need and x is not None]
        found = iter(torch.autograd.grad(portable_table(*problem), inputs, gradient, create_graph=True))
    return (next(found) if need else None for need in needed)


# ---------------------------------------------------------------------------------------------------- kernels for CPUs


_PACK = struct.Struct("27q").pack


def _table(*problem) -> torch.Tensor:  # type: ignore[no-untyped-def]
    value, bias, columns = problem[2:5]
    if value.dtype not in DTYPES:
        return portable_table(*problem)
    output = value.new_empty(len(value), _count_queries(value, bias, columns), value.shape[2])
    if output.numel() == 0 or value.shape[1] == 0:
        return output.zero_()
    checked = _checked(*problem)  # may be copies, which have to live until the kernel returns
    KERNELS.aft_table(_packed(checked, output))  # type: ignore[union-attr]  # registered only if there are kernels
    return output


def _table_backward(gradient, *inputs) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
    *problem, bias_needed = inputs
    query, key, value, bias, columns, causal = problem
    if value.dtype not in DTYPES:
        needed = (query is not None, True, True, bias_needed)
        leaves = [x if x is None else x.detach().requires_grad_() for x in problem[:4]]
        found = list(_portable_gradients(gradient, (*leaves, columns, causal), needed))
        return tuple(value.new_empty(0) if x is None else x.detach() for x in found)
    is_empty = gradient.numel() == 0 or value.shape[1] == 0
    fill = torch.zeros if is_empty else torch.empty
    gradients = [None if x is None else fill(x.shape, dtype=value.dtype) for x in (query, key, value)]
    gradients.append(torch.zeros(bias.shape, dtype=torch.float32) if bias_needed else None)
    if not is_empty:
        gradient, checked = dense_rows(gradient.to(value.dtype)), _checked(*problem)
        KERNELS.aft_table_backward(_packed(checked, None, gradient, gradients))  # type: ignore[union-attr]
    return tuple(value.new_empty(0) if x is None else x.to(of.dtype) for x, of in zip(gradients, problem))


def _checked(query, key, value, bias, columns, causal) -> Problem:  # type: ignore[no-untyped-def]
    """Return the problem with the dtypes and layouts that the kernels read, without copies if it has them.

    Raises:
        ValueError: shapes do not match.
    """
    batch, keys, width = value.shape
    heads, queries = len(bias), _count_queries(value, bias, columns)
    rows = keys // columns if columns else 0
    of_bias = (heads, 2 * rows - 1, 2 * columns - 1) if columns else (heads, queries, keys)
    fits = key.shape in ((batch, keys, width), (batch, keys, heads)) and width % heads == 0
    fits &= query is None or query.shape == (batch, queries, width)
    if not fits or bias.shape != of_bias or (causal and (queries != keys or columns)):
        shapes = [x if x is None else tuple(x.shape) for x in (query, key, value, bias)]
        raise ValueError(f"query, key, value and bias do not match: {shapes}, columns={columns}, causal={causal}")
    query, key, value = (x if x is None else dense_rows(x.to(value.dtype)) for x in (query, key, value))
    return query, key, value, bias.float().contiguous(), columns, causal


def _packed(
    problem: Problem,
    output: torch.Tensor | None,
    gradient: torch.Tensor | None = None,
    gradients: Sequence[torch.Tensor | None] = (None,) * 4,
) -> bytes:
    """Return the fields of `TableProblem` in cpu/table.h."""
    query, key, value, bias, columns, causal = problem
    inputs = (query, key, value)
    return _PACK(
        value.dtype == torch.bfloat16,
        len(value),
        _count_queries(value, bias, columns),
        value.shape[1],
        len(bias),
        value.shape[2],
        key.shape[2],
        columns,
        causal,
        *map(_address, inputs),
        *(n for x in inputs for n in ((0, 0) if x is None else x.stride()[:2])),
        bias.data_ptr(),
        _address(output),
        _address(gradient),
        *((0, 0) if gradient is None else gradient.stride()[:2]),
        *map(_address, gradients),
    )


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


KERNELS = load_library()
if KERNELS is not None and not REGISTERED:
    LIBRARY.impl("table", _table, "CPU")
    LIBRARY.impl("table_backward", _table_backward, "CPU")


__all__ = ["portable_table"]
