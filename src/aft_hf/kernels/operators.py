"""The operators of AFT: what a compiled kernel may provide, as custom operators of PyTorch on plain tensors.

An operator is registered for the devices that have a kernel for it; `aft_hf` uses it there, and its portable form
elsewhere. Operators have fake implementations, so `torch.compile` and `torch.export` see one node each, and gradients.
The name of the namespace has a version, since the code that comes with a checkpoint finds the operators of an
installed package by their names.

All operators compute, element-wise in the features,

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')  (Eq. 2), times sigmoid(Q_t) if there is a query,

and 0 where a query sees no key. `causal` and `causal_state` take

    query:         (B, T, d), or None for the averages alone.
    key:           (B, T, d), or (B, T, h) for one key for all features of a head; -inf hides a token.
    value:         (B, T, d).
    bias:          (B or 1, P or 1, h, s) float32: w from a token at position t of its document to the s last keys, its
                   own last; None for w = 0. Positions after P - 1 have the biases of position P - 1.
    slopes:        (h,) float32, for w = -slope * distance; then there is no bias.
    first:         (B, T) int64: the first token that each token sees, the same for all tokens of a document, which
                   are contiguous; a number larger than t for padding, which sees nothing and is not seen. None if
                   every row is one document.
    hides_outside: whether keys before the s last ones are hidden. Otherwise they have w = 0.

`causal_state` continues a state and updates it in place, for a prompt or a single token. Each row has at most one
document, which follows the tokens that the state has seen:

    keys, values:  (B, h, s - 1, 1 or c) and (B, h, s - 1, c) float32: the last tokens; keys of -inf where there are
                   none.
    numerator, denominator, maximum: (B, h, 1, c) and twice (B, h, 1, 1 or c) float32: the sums of Eq. 2 over all
                   tokens before them, divided by exp(maximum).

`grid` is for positions on a grid in raster order, T = rows * columns, of which every query sees all (AFT-conv, Eq. 6):

    kernels:       (h, a, b) float32 with a and b odd: entry (i, j) is w for a key i - a // 2 rows below the query and
                   j - b // 2 columns to its right. Other keys have w = 0, or are hidden (hides_outside).
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from ..portable_aft import are_plain_tensors, differentiable_gradients, join_heads, pairwise_mixing, split_heads
from ..position_biases_aft import widen
from .library import load_library


NAMESPACE = "aft_hf_v1"
PROBLEM = "Tensor? query, Tensor key, Tensor value, Tensor? bias, Tensor? slopes, Tensor? first, bool hides_outside"
GRID = "Tensor? query, Tensor key, Tensor value, Tensor kernels, int rows, int columns, bool hides_outside"
SCHEMAS = (
    f"causal({PROBLEM}) -> Tensor",
    f"causal_backward(Tensor gradient, {PROBLEM}, bool bias_needed) -> (Tensor, Tensor, Tensor, Tensor)",
    f"causal_state({PROBLEM}, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) numerator, Tensor(d!) denominator, "
    "Tensor(e!) maximum) -> Tensor",
    f"grid({GRID}) -> Tensor",
    f"grid_backward(Tensor gradient, {GRID}, bool kernels_needed) -> (Tensor, Tensor, Tensor, Tensor)",
)
DTYPES = (torch.float32, torch.bfloat16)  # of the kernels; `causal` computes others by `portable_causal`

Problem = tuple[
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    bool,
]
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# A process may import the package twice, for example in two versions: the first one registers the operators.
REGISTERED = hasattr(getattr(torch.ops, NAMESPACE), "causal")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
for schema in () if REGISTERED else SCHEMAS:
    LIBRARY.define(schema)


def fake(name: str) -> Callable[[Any], Any]:
    """Register the decorated function as the fake implementation of an operator."""
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=LIBRARY) if not REGISTERED else lambda x: x


# ------------------------------------------------------------------------------------------------ shapes and gradients


@fake("causal")
def _(query, key, value, bias, slopes, first, hides_outside):  # type: ignore[no-untyped-def]
    return value.new_empty(value.shape)


@fake("causal_backward")
def _(gradient, query, key, value, bias, slopes, first, hides_outside, bias_needed):  # type: ignore[no-untyped-def]
    return empty_gradients(query, key, value, bias if bias_needed else None)


@fake("causal_state")
def _(query, key, value, bias, slopes, first, hides_outside, *state):  # type: ignore[no-untyped-def]
    return value.new_empty(value.shape)


@fake("grid")
def _(query, key, value, kernels, rows, columns, hides_outside):  # type: ignore[no-untyped-def]
    return value.new_empty(value.shape)


@fake("grid_backward")
def _(gradient, query, key, value, kernels, rows, columns, hides_outside, needed):  # type: ignore[no-untyped-def]
    return empty_gradients(query, key, value, kernels if needed else None)


def empty_gradients(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return an empty tensor for each input, without entries for None."""
    value = inputs[2]
    assert value is not None
    return tuple(value.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.inputs = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs))


def _backward(ctx, gradient, operator, portable):  # type: ignore[no-untyped-def]
    """The gradients of query, key, value and biases, which are the first four arguments of an operator."""
    needed = ctx.needs_input_grad
    problem = [x if tensor is None else tensor for x, tensor in zip(ctx.inputs, ctx.saved_tensors)]
    others = [None] * (len(problem) - 4)
    if torch.is_grad_enabled() or gradient.dtype not in DTYPES or is_batched(gradient):
        with torch.enable_grad():
            inputs = tuple(problem[:4])
            return *differentiable_gradients(portable(*problem), inputs, needed[:4], gradient), *others
    found = operator(gradient, *problem, needed[3])
    return *(x if need else None for x, need in zip(found, needed)), *others


def _causal_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    return _backward(ctx, gradient, torch.ops.aft_hf_v1.causal_backward.default, portable_causal)


def _grid_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    return _backward(ctx, gradient, torch.ops.aft_hf_v1.grid_backward.default, portable_grid)


def is_batched(x: torch.Tensor) -> bool:
    """Whether a gradient is batched, by `is_grads_batched` or by torch.func."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not are_plain_tensors(x)


if not REGISTERED:
    torch.library.register_autograd(f"{NAMESPACE}::causal", _causal_gradients, setup_context=_save, lib=LIBRARY)
    torch.library.register_autograd(f"{NAMESPACE}::grid", _grid_gradients, setup_context=_save, lib=LIBRARY)


def portable_causal(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    hides_outside: bool,
) -> torch.Tensor:
    """The operator `causal` by differentiable operations, with a table of all pairs, for gradients of gradients."""
    heads, length = num_heads(bias, slopes), value.shape[1]
    tokens = torch.arange(length, device=value.device)
    lags = tokens[:, None] - tokens
    start = tokens.new_zeros(1, length) if first is None else first
    seen = (lags >= 0) & (tokens >= start[..., None]) & (start <= tokens)[:, None]  # (B or 1, T, T')
    w = widen(value).new_zeros(1, heads, length, length)
    if slopes is not None:
        w = (-slopes[:, None, None] * lags).unsqueeze(0)
    elif bias is not None:
        rows, size = bias.shape[1], bias.shape[-1]
        inside = lags < size
        position = (tokens - start).clamp(0, rows - 1)  # (B or 1, T)
        batches = torch.arange(len(bias), device=value.device)[:, None]
        of_queries = bias[batches, position].transpose(1, 2)  # (B or 1, h, T, s)
        index = (size - 1 - lags).clamp(0, size - 1).expand(*of_queries.shape[:2], -1, -1)
        w = of_queries.gather(3, index).masked_fill(~inside, 0.0)
        seen = seen & inside if hides_outside else seen
    return of_all_pairs(query, key, value, w, seen.unsqueeze(1))


def portable_grid(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    kernels: torch.Tensor,
    rows: int,
    columns: int,
    hides_outside: bool,
) -> torch.Tensor:
    """The operator `grid` by differentiable operations, with a table of all pairs."""
    places = torch.arange(rows * columns, device=value.device)
    row, column = places // columns, places % columns
    tap_row, tap_column = (
        x - x[:, None] + size // 2 for x, size in zip((row, column), kernels.shape[1:])
    )  # (T, T') from queries to keys
    inside = (tap_row >= 0) & (tap_row < kernels.shape[1]) & (tap_column >= 0) & (tap_column < kernels.shape[2])
    w = kernels[:, tap_row.clamp(0, kernels.shape[1] - 1), tap_column.clamp(0, kernels.shape[2] - 1)]
    w = w.masked_fill(~inside, 0.0).unsqueeze(0)
    return of_all_pairs(query, key, value, w, inside[None, None] if hides_outside else None)


def of_all_pairs(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, w: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    """Eq. 2 with a table w of (B or 1, h, T, T'), times sigmoid(query)."""
    key, value_by_head = (widen(split_heads(x, w.shape[1])) for x in (key, value))
    context = join_heads(pairwise_mixing(key, value_by_head, w.to(key.dtype), seen))
    if query is not None:
        context = torch.sigmoid(widen(query)) * context
    return context.to(value.dtype)


def num_heads(bias: torch.Tensor | None, slopes: torch.Tensor | None) -> int:
    return bias.shape[2] if bias is not None else 1 if slopes is None else slopes.shape[0]


# ---------------------------------------------------------------------------------------------------- kernels for CPUs


def _causal(*problem) -> torch.Tensor:  # type: ignore[no-untyped-def]
    value = problem[2]
    if value.dtype not in DTYPES:
        return portable_causal(*problem)
    problem = _checked(problem)  # copies must live until the kernel returns
    output = _empty(value)
    _kernels().aft_causal(_packed(problem, output))
    return output


def _causal_backward(gradient, *arguments) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
    problem, bias_needed = _checked(arguments[:-1]), arguments[-1]
    bias, value = problem[3], problem[2]
    gradient = _checked_gradient(gradient, value)
    gradients = [None if x is None else _empty(x) for x in problem[:3]]
    gradients.append(torch.zeros_like(bias) if bias is not None and bias_needed else None)
    _kernels().aft_causal_backward(_packed(problem, None, (), (gradient, *gradients)))
    return tuple(value.new_empty(0) if x is None else x for x in gradients)


def _causal_state(*arguments) -> torch.Tensor:  # type: ignore[no-untyped-def]
    state = arguments[7:]
    problem = _checked(arguments[:7], state)
    value = problem[2]
    output = _empty(value)
    one_token = value.shape[1] == 1 and problem[5] is None
    call = _kernels().aft_causal_step if one_token else _kernels().aft_causal
    call(_packed(problem, output, state))
    return output


def _checked(problem: Problem, state: tuple[torch.Tensor, ...] = ()) -> Problem:
    """Return the problem with the layouts that the kernels read, without copies if they have them.

    Raises:
        TypeError, ValueError: the kernels would read or write other memory than that of the tensors.
    """
    query, key, value, bias, slopes, first, hides_outside = problem
    _check_dtypes(query, key, value)
    batch, length, width = value.shape
    heads = state[0].shape[1] if state else num_heads(bias, slopes)
    matches = width % heads == 0 and key.shape in (value.shape, (batch, length, heads))
    matches = matches and (query is None or query.shape == value.shape)
    if bias is not None:
        matches = matches and bias.shape[0] in (1, batch) and bias.shape[2] == heads
        matches = matches and bias.shape[1] >= min(length, 1)
        matches = matches and bias.shape[3] > 0 and bias.dtype == torch.float32 and slopes is None
    if slopes is not None:
        matches = matches and slopes.shape == (heads,) and slopes.dtype == torch.float32
    if first is not None:
        matches = matches and first.shape == (batch, length) and first.dtype == torch.int64
    if state:
        kept, features = 0 if bias is None else bias.shape[3] - 1, width // heads
        of_keys, of_values = (batch, heads, kept, key.shape[2] // heads), (batch, heads, kept, features)
        of_sums, shared = (batch, heads, 1, features), (batch, heads, 1, of_keys[3])
        matches = matches and [x.shape for x in state] == [of_keys, of_values, of_sums, shared, shared]
        matches = matches and all(x.is_contiguous() and x.dtype == torch.float32 for x in state)
    if not matches:
        given = [None if x is None else (tuple(x.shape), x.dtype) for x in (*problem[:6], *state)]
        raise ValueError(f"arguments of the operator do not match: {given}")
    query = None if query is None else dense_rows(query)
    bias, slopes, first = (x if x is None else x.contiguous() for x in (bias, slopes, first))
    return query, dense_rows(key), dense_rows(value), bias, slopes, first, hides_outside


def _check_dtypes(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> None:
    dtype = value.dtype
    if dtype not in DTYPES or key.dtype != dtype or not (query is None or query.dtype == dtype):
        raise TypeError(f"query, key and value must all be float32 or all bfloat16, got {key.dtype} and {dtype}")


def _checked_gradient(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if gradient.shape != value.shape or gradient.dtype != value.dtype:
        raise ValueError(f"the gradient must be {tuple(value.shape)}, {value.dtype}, got {tuple(gradient.shape)}")
    return dense_rows(gradient)


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous features."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


_PACK = struct.Struct("35q").pack


def _packed(
    problem: Problem,
    output: torch.Tensor | None,
    state: tuple[torch.Tensor, ...] = (),
    gradients: tuple[torch.Tensor | None, ...] = (),
) -> bytes:
    """Return the fields of `CausalProblem` in kernels/cpu/causal.h."""
    query, key, value, bias, slopes, first, hides_outside = problem
    batch, length, width = value.shape
    q, k, v = (0, 0, 0) if query is None else query.stride(), key.stride(), value.stride()
    biases = (0, 0, 1) if bias is None else (bias.shape[0], bias.shape[1], bias.shape[3])
    heads = state[0].shape[1] if state else num_heads(bias, slopes)
    pointers = [0 if x is None else x.data_ptr() for x in (bias, slopes, first, output)]
    pointers += [x.data_ptr() for x in state] if state else [0] * 5
    if gradients:
        g = gradients[0].stride()  # type: ignore[union-attr]  # the gradient of the output is a tensor
        addresses = [0 if x is None else x.data_ptr() for x in gradients]
        pointers += [addresses[0], g[0], g[1], *addresses[1:]]
    else:
        pointers += [0] * 7
    return _PACK(
        value.dtype == torch.bfloat16,
        batch,
        length,
        width,
        heads,
        key.shape[2],
        biases[2],
        *biases[:2],
        hides_outside,
        0 if query is None else query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        *q[:2],
        *k[:2],
        *v[:2],
        *pointers,
    )


def _grid(*problem) -> torch.Tensor:  # type: ignore[no-untyped-def]
    value = problem[2]
    if value.dtype not in DTYPES:
        return portable_grid(*problem)
    problem = _checked_grid(*problem)
    output = _empty(value)
    _kernels().aft_grid(_packed_grid(problem, output))
    return output


def _grid_backward(gradient, *arguments) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
    problem, needed = _checked_grid(*arguments[:-1]), arguments[-1]
    gradients = [None if x is None else _empty(x) for x in problem[:3]]
    gradients.append(torch.zeros_like(problem[3]) if needed else None)
    gradient = _checked_gradient(gradient, problem[2])
    _kernels().aft_grid_backward(_packed_grid(problem, None, (gradient, *gradients)))
    return tuple(gradient.new_empty(0) if x is None else x for x in gradients)


def _checked_grid(query, key, value, kernels, rows, columns, hides_outside):  # type: ignore[no-untyped-def]
    """As `_checked`, for the operators of a grid."""
    _check_dtypes(query, key, value)
    (batch, length, width), (heads, *size) = value.shape, kernels.shape
    matches = length == rows * columns and width % heads == 0 and key.shape in (value.shape, (batch, length, heads))
    matches = matches and (query is None or query.shape == value.shape) and kernels.dtype == torch.float32
    if not matches or len(size) != 2 or any(x % 2 == 0 for x in size):
        given = [None if x is None else (tuple(x.shape), x.dtype) for x in (query, key, value, kernels)]
        raise ValueError(f"arguments of the operator do not match: {given}, {rows} x {columns}")
    query = None if query is None else dense_rows(query)
    return (
        query,
        dense_rows(key),
        dense_rows(value),
        kernels.contiguous(),
        rows,
        columns,
        hides_outside,
    )


_PACK_GRID = struct.Struct("28q").pack


def _packed_grid(problem, output, gradients=(None,) * 5) -> bytes:  # type: ignore[no-untyped-def]
    """Return the fields of `GridProblem` in kernels/cpu/grid.h."""
    query, key, value, kernels, rows, columns, hides_outside = problem
    batch, _, width = value.shape
    q, k, v, g = ((0, 0) if x is None else x.stride()[:2] for x in (query, key, value, gradients[0]))
    pointers = [0 if x is None else x.data_ptr() for x in (query, key, value, kernels, output, *gradients)]
    return _PACK_GRID(
        value.dtype == torch.bfloat16,
        batch,
        rows,
        columns,
        width,
        kernels.shape[0],
        key.shape[2],
        *kernels.shape[1:],
        hides_outside,
        *pointers[:3],
        *q,
        *k,
        *v,
        *pointers[3:6],
        *g,
        *pointers[6:],
    )


def _kernels() -> ctypes.CDLL:
    assert KERNELS is not None  # otherwise nothing is registered
    return KERNELS


KERNELS = load_library()
if KERNELS is not None and not REGISTERED:
    LIBRARY.impl("causal", _causal, "CPU")
    LIBRARY.impl("causal_backward", _causal_backward, "CPU")
    LIBRARY.impl("causal_state", _causal_state, "CPU")
    LIBRARY.impl("grid", _grid, "CPU")
    LIBRARY.impl("grid_backward", _grid_backward, "CPU")
