"""The operators of AFT: what a compiled kernel may provide, as custom operators of PyTorch on plain tensors.

An operator is registered for the devices that have a kernel for it; `aft_hf` uses it there, and its portable form
elsewhere. Operators have fake implementations, so `torch.compile` and `torch.export` see one node each, and gradients.
The name of the namespace has a version, since the code that comes with a checkpoint finds the operators of an
installed package by their names.

All operators compute, element-wise in the features,

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')  (Eq. 2), times sigmoid(Q_t) if there is a query,

and 0 where a query sees no key. All take

    query:         (B, T, d), or None for the averages alone.
    key:           (B, T, d), or (B, T, h) for one key for all features of a head; -inf hides a token.
    value:         (B, T, d).

w is given by float32 tensors. `causal` and `causal_state` take

    bias:          (B or 1, P or 1, h, s): w from a token at position t of its document to the s last keys, its own
                   last; None for w = 0. Positions after P - 1 have the biases of position P - 1.
    slopes:        (h,), for w = -slope * distance; then there is no bias.
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

`grid` is for positions on a grid in raster order, T = rows * columns, of which every query sees all (AFT-conv, Eq. 6);
a sequence is one row:

    kernels:       (h, a, b) with a and b odd: entry (i, j) is w for a key i - a // 2 rows below the query and
                   j - b // 2 columns to its right. Other keys have w = 0, or are hidden (hides_outside).

`table` takes a table of all pairs, and computes both sums as matrix products:

    bias:          (h, T, T); -inf hides a key from a query.
    causal:        whether a query sees only t' <= t.

`band` makes the bias of `causal`, (1, T, h, s), for tokens from position `start` on, from w = u v^T (Eq. 7):

    query, key:    u and v, (h, P, d'). Entries for positions below 0 or after P - 1 are not defined.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..portable_aft import are_plain_tensors, join_heads, pairwise_mixing, split_heads
from ..position_biases_aft import GridKernel, Window, widen, working_dtype
from .library import load_library


NAMESPACE = "aft_hf_v1"
INPUTS = "Tensor? query, Tensor key, Tensor value"
CAUSAL = f"{INPUTS}, Tensor? bias, Tensor? slopes, Tensor? first, bool hides_outside"
GRID = f"{INPUTS}, Tensor kernels, SymInt rows, SymInt columns, bool hides_outside"
TABLE = f"{INPUTS}, Tensor bias, bool causal"
STATE = "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) numerator, Tensor(d!) denominator, Tensor(e!) maximum"
# Gradients are those of query, key, value and w, and empty for what is None or not needed.
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"
BAND = "Tensor query, Tensor key, SymInt start, SymInt length, int window"
SCHEMAS = {
    "causal": f"({CAUSAL}) -> Tensor",
    "causal_backward": f"(Tensor gradient, {CAUSAL}, bool bias_needed) -> {GRADIENTS}",
    "causal_state": f"({CAUSAL}, {STATE}) -> Tensor",
    "grid": f"({GRID}) -> Tensor",
    "grid_backward": f"(Tensor gradient, {GRID}, bool kernels_needed) -> {GRADIENTS}",
    "table": f"({TABLE}) -> Tensor",
    "table_backward": f"(Tensor gradient, {TABLE}, bool bias_needed) -> {GRADIENTS}",
    "band": f"({BAND}) -> Tensor",
    "band_backward": f"(Tensor gradient, {BAND}) -> (Tensor, Tensor)",
}
DTYPES = (torch.float32, torch.bfloat16)  # of the kernels; operators compute others by their portable forms

# ------------------------------------------------------------------------------------------------------ portable forms


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
    return _of_all_pairs(query, key, value, w, seen.unsqueeze(1))


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
    w = GridKernel(kernels, (rows, columns), hides_outside).dense(rows * columns)
    return _of_all_pairs(query, key, value, w.unsqueeze(0))


def portable_table(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, causal: bool
) -> torch.Tensor:
    """The operator `table` by differentiable operations."""
    visible = torch.ones(bias.shape[1:], dtype=torch.bool, device=bias.device).tril()[None, None] if causal else None
    return _of_all_pairs(query, key, value, bias.unsqueeze(0), visible)


def portable_band(query: torch.Tensor, key: torch.Tensor, start: int, length: int, window: int) -> torch.Tensor:
    """The operator `band` by differentiable operations."""
    return Window(query, key, size=window).by_lag(length, start)


def _of_all_pairs(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    w: torch.Tensor,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Eq. 2 with a table w of (B or 1, h, T, T'), times sigmoid(query)."""
    key, by_head = (widen(split_heads(x, w.shape[1])) for x in (key, value))
    context = join_heads(pairwise_mixing(key, by_head, w.to(key.dtype), visible))
    if query is not None:
        context = torch.sigmoid(widen(query)) * context
    return context.to(value.dtype)


def num_heads(bias: torch.Tensor | None, slopes: torch.Tensor | None) -> int:
    return bias.shape[2] if bias is not None else 1 if slopes is None else slopes.shape[0]


PORTABLE: dict[str, Callable[..., torch.Tensor]] = {
    "causal": portable_causal,
    "grid": portable_grid,
    "table": portable_table,
    "band": portable_band,
}

# ------------------------------------------------------------------------------------------------ shapes and gradients


def _new_output(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return memory for the output of an operator."""
    return value.new_empty(value.shape)


def empty_gradients(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return an empty tensor for each input, without entries for None."""
    value = inputs[2]
    assert value is not None
    return tuple(value.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _new_band(query: torch.Tensor, key: torch.Tensor, start: int, length: int, window: int) -> torch.Tensor:
    """Return memory for the output of `band`."""
    return query.new_empty(1, length, len(query), window, dtype=working_dtype(query))


def _new_factors(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the gradients of `band`."""
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _fake_backward(gradient, query, key, value, biases, *others):  # type: ignore[no-untyped-def]
    return empty_gradients(query, key, value, biases if others[-1] else None)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.inputs = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs))


def _gradients(name: str, ctx, gradient):  # type: ignore[no-untyped-def]
    """The gradients of query, key, value and biases, which are the first four arguments of an operator but `band`."""
    needed = ctx.needs_input_grad
    problem = [x if tensor is None else tensor for x, tensor in zip(ctx.inputs, ctx.saved_tensors)]
    if torch.is_grad_enabled() or problem[1].dtype not in DTYPES or _is_batched(gradient):
        with torch.enable_grad():
            wanted = [x for x, need in zip(problem, needed) if need]
            of_wanted = iter(torch.autograd.grad(PORTABLE[name](*problem), wanted, gradient, create_graph=True))
            return tuple(next(of_wanted) if need else None for need in needed)
    flags = () if name == "band" else (needed[3],)
    found = getattr(torch.ops.aft_hf_v1, f"{name}_backward").default(gradient, *problem, *flags)
    return *(x if need else None for x, need in zip(found, needed)), *(None for _ in needed[len(found) :])


def _is_batched(x: torch.Tensor) -> bool:
    """Whether a gradient is batched, by `is_grads_batched` or by torch.func."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not are_plain_tensors(x)


# ---------------------------------------------------------------------------------------------------- kernels for CPUs


def _forward(name: str, *problem: Any) -> torch.Tensor:
    if problem[2].dtype not in DTYPES:
        return PORTABLE[name](*problem)
    problem = _with_key_per_feature(name, problem)
    sizes, output = SIZES[name](*problem), _new_output(*problem)
    _call(name, sizes, problem, output)
    return output


def _backward(name: str, gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    given, needed = arguments[:-1], arguments[-1]
    problem = _with_key_per_feature(name, given)
    value, biases, sizes = problem[2], problem[3], SIZES[name](*problem)
    _check_gradient(gradient, value)
    # Kernels add to the gradient of w, and fill the others; without outputs, they return at once.
    new = torch.Tensor.new_empty if gradient.numel() else torch.Tensor.new_zeros
    found: list[Any] = [None if x is None else new(x, x.shape) for x in problem[:3]]
    found.append(biases.new_zeros(biases.shape) if needed else None)
    _call(f"{name}_backward", sizes, problem, None, (_dense_rows(gradient), *found))
    if problem[1] is not given[1]:
        found[1] = found[1].unflatten(2, (len(biases), -1)).sum(3)
    return tuple(value.new_empty(0) if x is None else x for x in found)


def _with_key_per_feature(name: str, problem: tuple[Any, ...]) -> tuple[Any, ...]:
    """Repeat the keys of a table that has one key per head, since its kernel takes one key per feature."""
    query, key, value, bias, *others = problem
    if name != "table" or key.shape[2] == value.shape[2] or key.shape[2] != len(bias):
        return problem
    return query, key.repeat_interleave(value.shape[2] // len(bias), 2), value, bias, *others


def _state(*arguments: Any) -> torch.Tensor:
    problem = arguments[:7]
    sizes, output = _sizes_of_causal(*arguments), _new_output(*problem)
    one_token = output.shape[1] == 1 and problem[5] is None
    _call("causal_step" if one_token else "causal", sizes, problem, output)
    return output


def _band(query: torch.Tensor, key: torch.Tensor, start: int, length: int, window: int) -> torch.Tensor:
    output = _new_band(query, key, start, length, window)
    if query.dtype not in DTYPES:
        return output.copy_(portable_band(query, key, start, length, window))
    _call_band("band", query, key, start, output)
    return output


def _band_backward(gradient, query, key, start, length, window):  # type: ignore[no-untyped-def]
    _check_gradient(gradient, _new_band(query, key, start, length, window))
    found = _new_factors(query, key)
    _call_band("band_backward", query, key, start, gradient.contiguous(), *found)
    return found


def _check_gradient(gradient: torch.Tensor, output: torch.Tensor) -> None:
    if gradient.shape != output.shape or gradient.dtype != output.dtype:
        raise ValueError(f"the gradient must be {tuple(output.shape)}, {output.dtype}, got {tuple(gradient.shape)}")


def _call_band(kernel, query, key, start, band, *gradients):  # type: ignore[no-untyped-def]
    (_, length, heads, window), (*_, positions, features) = band.shape, query.shape
    if query.shape != key.shape or query.dtype != key.dtype or window < 1 or positions < 1:
        raise ValueError(f"factors do not match: {tuple(query.shape)}, {query.dtype}, {tuple(key.shape)}, {key.dtype}")
    factors = [_dense_rows(query), _dense_rows(key)]
    sizes = query.dtype == torch.bfloat16, heads, positions, features, start, length, window
    _run(kernel, [*sizes, *factors, *_strides(factors), band, *(gradients or (None, None))])


# The fields of a problem, in the order of the structs in kernels/cpu: its sizes, and what only one operator has.
Fields = tuple[tuple[int, ...], list[Any]]


def _sizes_of_causal(query, key, value, bias, slopes, first, hides_outside, *state) -> Fields:  # type: ignore[no-untyped-def]
    batch, length, width = value.shape
    rows, positions, of_bias, size = (0, 0, 0, 1) if bias is None else bias.shape
    heads = state[0].shape[1] if state else num_heads(bias, slopes)
    fits = bias is None or (rows in (1, batch) and of_bias == heads and size > 0 and positions >= min(length, 1))
    if slopes is not None:
        fits = fits and bias is None and slopes.shape == (heads,) and slopes.dtype == torch.float32
    fits = fits and (first is None or (first.shape == (batch, length) and first.dtype == torch.int64))
    if state and fits:
        features, per_head = width // heads, key.shape[2] // heads
        of_sums, shared = (batch, heads, 1, features), (batch, heads, 1, per_head)
        last_keys, last_values = (batch, heads, size - 1, per_head), (batch, heads, size - 1, features)
        fits = [x.shape for x in state] == [last_keys, last_values, of_sums, shared, shared]
        fits = fits and all(x.is_contiguous() and x.dtype == torch.float32 for x in state)
    sizes = _checked_sizes((query, key, value, bias, slopes, first, *state), heads, fits)
    given = [x if x is None else x.contiguous() for x in (slopes, first)]
    return sizes, [size, rows, positions, hides_outside, *given, *(state or (None,) * 5)]


def _sizes_of_grid(query, key, value, kernels, rows, columns, hides_outside) -> Fields:  # type: ignore[no-untyped-def]
    length, (heads, *size) = value.shape[1], kernels.shape
    fits = min(rows, columns) >= 0 and length == rows * columns and len(size) == 2 and all(x % 2 for x in size)
    sizes = _checked_sizes((query, key, value, kernels, rows, columns), heads, fits)
    return sizes, [rows, columns, *size, hides_outside]


def _sizes_of_table(query, key, value, bias, causal) -> Fields:  # type: ignore[no-untyped-def]
    heads, length = len(bias), value.shape[1]
    fits = bias.shape == (heads, length, length) and key.shape == value.shape
    return _checked_sizes((query, key, value, bias, causal), heads, fits), [causal]


SIZES: dict[str, Callable[..., Fields]] = {
    "causal": _sizes_of_causal,
    "grid": _sizes_of_grid,
    "table": _sizes_of_table,
}


def _checked_sizes(arguments: Sequence[Any], heads: int, fits: bool) -> tuple[int, ...]:
    """Return the sizes of a problem, given whether its w fits the other arguments.

    Raises:
        TypeError, ValueError: the kernels would read or write other memory than that of the tensors.
    """
    query, key, value, biases = arguments[:4]
    dtype, (batch, length, width) = value.dtype, value.shape
    if dtype not in DTYPES or key.dtype != dtype or (query is not None and query.dtype != dtype):
        raise TypeError(f"query, key and value must all be float32 or all bfloat16, got {key.dtype} and {dtype}")
    fits = fits and width % heads == 0 and key.shape in (value.shape, (batch, length, heads))
    fits = fits and (query is None or query.shape == value.shape)
    if not fits or (biases is not None and biases.dtype != torch.float32):
        given = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments]
        raise ValueError(f"arguments of the operator do not match: {given}")
    return batch, length, width, heads, key.shape[2]


def _call(
    kernel: str,
    fields: Fields,
    problem: Sequence[Any],
    output: torch.Tensor | None,
    gradients: Sequence[torch.Tensor | None] = (None,) * 5,
) -> None:
    """Call a kernel for Eq. 2, given the gradients of the output, the query, the key, the value and w."""
    sizes, others = fields
    inputs, bias = [x if x is None else _dense_rows(x) for x in problem[:3]], problem[3]
    tensors = *inputs, *_strides(inputs), bias if bias is None else bias.contiguous(), output
    of_output, *found = gradients
    _run(
        kernel,
        [problem[2].dtype == torch.bfloat16, *sizes, *tensors, of_output, *_strides([of_output]), *found, *others],
    )


def _run(kernel: str, fields: Sequence[Any]) -> None:
    """Call a kernel with the fields of its problem: numbers, and tensors or None.

    Raises:
        RuntimeError: the kernel failed.
    """
    numbers = [0 if x is None else x.data_ptr() if isinstance(x, torch.Tensor) else x for x in fields]
    if getattr(KERNELS, f"aft_{kernel}")(struct.pack(f"{len(numbers)}q", *numbers)):
        raise RuntimeError(f"the kernel {kernel} failed, probably for lack of memory")


def _strides(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [stride for x in tensors for stride in ((0, 0) if x is None else x.stride()[:2])]


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous features."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


# -------------------------------------------------------------------------------------------------------- registration

KERNELS = load_library()
# A process may import the package twice, for example in two versions: the first one registers the operators.
REGISTERED = hasattr(getattr(torch.ops, NAMESPACE), "causal")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


if not REGISTERED:
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema)
    found: dict[str, Callable[..., Any]] = {"causal_state": _state, "band": _band, "band_backward": _band_backward}
    fakes: dict[str, Callable[..., Any]] = {"causal_state": _new_output, "band": _new_band}
    fakes["band_backward"] = lambda gradient, *factors: _new_factors(*factors[:2])
    for name in SIZES:
        found |= {name: partial(_forward, name), f"{name}_backward": partial(_backward, name)}
        fakes |= {name: _new_output, f"{name}_backward": _fake_backward}
    for name in PORTABLE:
        gradients = partial(_gradients, name)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", gradients, setup_context=_save, lib=LIBRARY)
    for name in SCHEMAS:
        torch.library.register_fake(f"{NAMESPACE}::{name}", fakes[name], lib=LIBRARY)
        if KERNELS is not None:
            LIBRARY.impl(name, found[name], "CPU")
