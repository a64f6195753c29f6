"""The operators of AFT: what a compiled kernel may provide, as custom operators of PyTorch on plain tensors.

An operator is registered for the devices that have a kernel for it; `aft_hf` uses it there, and its portable form
elsewhere. Operators have fake implementations, so `torch.compile` sees one node each, and all but `causal_state` have
gradients. The name of the namespace has a version, since the code that comes with a checkpoint finds the operators of
an installed package by their names.

All operators but `band` compute, element-wise in the features,

    Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')  (Eq. 2), times sigmoid(Q_t) if there is a query,

and 0 where a query sees no key. They all take

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
    numerator, denominator, maximum: (B, h, 1, c) and twice (B, h, 1, 1 or c): the sums of Eq. 2 over all tokens before
                   them, divided by exp(maximum). The sums are float64, so that rounding errors of many steps do not
                   add up; the maximum is float32.

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
ARGUMENTS = {
    "causal": f"{INPUTS}, Tensor? bias, Tensor? slopes, Tensor? first, bool hides_outside",
    "grid": f"{INPUTS}, Tensor kernels, SymInt rows, SymInt columns, bool hides_outside",
    "table": f"{INPUTS}, Tensor bias, bool causal",
    "band": "Tensor query, Tensor key, SymInt start, SymInt length, int window",
}
STATE = "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) numerator, Tensor(d!) denominator, Tensor(e!) maximum"
# Gradients are those of query, key, value and w, and empty for what is None or not needed.
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"
DTYPES = (torch.float32, torch.bfloat16)  # of the kernels; operators compute others by their portable forms

# ------------------------------------------------------------------------------------------------------ portable forms


def _causal_w(
    value: torch.Tensor,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    first: torch.Tensor | None,
    hides_outside: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    return w, seen.unsqueeze(1)


def _grid_w(
    value: torch.Tensor, kernels: torch.Tensor, rows: int, columns: int, hides_outside: bool
) -> tuple[torch.Tensor, None]:
    return GridKernel(kernels, (rows, columns), hides_outside).dense(rows * columns).unsqueeze(0), None


def _table_w(value: torch.Tensor, bias: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    visible = torch.ones(bias.shape[1:], dtype=torch.bool, device=bias.device).tril()[None, None] if causal else None
    return bias.unsqueeze(0), visible


# w of all pairs, (B or 1, h, T, T'), by the arguments of an operator from the value on, and which pairs are visible,
# (B or 1, 1, T, T'); None hides nothing.
ALL_PAIRS: dict[str, Callable[..., Any]] = {"causal": _causal_w, "grid": _grid_w, "table": _table_w}


def portable(name: str, query: Any, key: torch.Tensor, *others: Any) -> torch.Tensor:
    """Compute an operator, given its arguments, by differentiable operations: for other dtypes and double backward."""
    if name == "band":
        start, length, window = others
        return Window(query, key, size=window).by_lag(length, start)
    value, (w, visible) = others[0], ALL_PAIRS[name](*others)
    key, by_head = (widen(split_heads(x, w.shape[1])) for x in (key, value))
    context = join_heads(pairwise_mixing(key, by_head, w.to(key.dtype), visible))
    if query is not None:
        context = torch.sigmoid(widen(query)) * context
    return context.to(value.dtype)


def num_heads(bias: torch.Tensor | None, slopes: torch.Tensor | None) -> int:
    return bias.shape[2] if bias is not None else 1 if slopes is None else slopes.shape[0]


# ------------------------------------------------------------------------------------------------ shapes and gradients


def _new_output(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return memory for the output of an operator."""
    return value.new_empty(value.shape)


def new_gradients(gradient, query, key, value, biases, *others):  # type: ignore[no-untyped-def]
    """Return memory for the gradients of an operator but `band`: empty for what is None or not needed."""
    wanted = query, key, value, biases if others[-1] else None
    return tuple(value.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _new_band(query: torch.Tensor, key: torch.Tensor, start: int, length: int, window: int) -> torch.Tensor:
    """Return memory for the output of `band`."""
    return query.new_empty(1, length, len(query), window, dtype=working_dtype(query))


def _new_factors(gradient: torch.Tensor, *factors: Any) -> tuple[torch.Tensor, ...]:
    """Return memory for the gradients of `band`."""
    return tuple(x.new_empty(x.shape) for x in factors[:2])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.inputs = [None if isinstance(x, torch.Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in inputs))


def _gradients(name: str, ctx, gradient):  # type: ignore[no-untyped-def]
    """The gradients of query, key, value and biases, which are the first four arguments of an operator but `band`."""
    needed = ctx.needs_input_grad
    problem = [x if tensor is None else tensor for x, tensor in zip(ctx.inputs, ctx.saved_tensors)]
    # A gradient is batched by `is_grads_batched` or by torch.func.
    batched = not torch.compiler.is_compiling() and type(gradient) is torch.Tensor and not are_plain_tensors(gradient)
    if torch.is_grad_enabled() or batched or problem[1].dtype not in DTYPES:
        with torch.enable_grad():
            wanted = [x for x, need in zip(problem, needed) if need]
            of_wanted = iter(torch.autograd.grad(portable(name, *problem), wanted, gradient, create_graph=True))
            return tuple(next(of_wanted) if need else None for need in needed)
    flags = () if name == "band" else (needed[3],)
    found = getattr(torch.ops.aft_hf_v1, f"{name}_backward").default(gradient, *problem, *flags)
    return *(x if need else None for x, need in zip(found, needed)), *(None for _ in needed[len(found) :])


# ---------------------------------------------------------------------------------------------------- kernels for CPUs


def _forward(name: str, *arguments: Any) -> torch.Tensor:
    if arguments[2].dtype not in DTYPES:
        return portable(name, *arguments)
    problem = _with_key_per_feature(name, arguments)
    output = _new_output(*problem)
    _call(name, FIELDS[name](*problem), problem, output)
    return output


def _backward(name: str, gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = _with_key_per_feature(name, arguments)
    _check_gradient(gradient, problem[2])
    found = list(new_gradients(gradient, *problem))
    # Kernels add to the gradient of w, and fill the others; without outputs, they return at once.
    for x in found[3 if gradient.numel() else 0 :]:
        x.zero_()
    _call(f"{name}_backward", FIELDS[name](*problem[:-1]), problem, None, (gradient, *found))
    if problem[1] is not arguments[1]:
        found[1] = found[1].unflatten(2, (len(problem[3]), -1)).sum(3)
    return tuple(found)


def _with_key_per_feature(name: str, problem: tuple[Any, ...]) -> tuple[Any, ...]:
    """Repeat the keys of a table that has one key per head, since its kernel takes one key per feature."""
    query, key, value, bias, *others = problem
    if name != "table" or key.shape[2] == value.shape[2] or key.shape[2] != len(bias):
        return problem
    return query, key.repeat_interleave(value.shape[2] // len(bias), 2), value, bias, *others


def _state(*arguments: Any) -> torch.Tensor:
    output, first = _new_output(*arguments), arguments[5]
    kernel = "causal_step" if output.shape[1] == 1 and first is None else "causal"
    _call(kernel, _causal_fields(*arguments), arguments, output)
    return output


def _band(*problem: Any) -> torch.Tensor:
    output = _new_band(*problem)
    if problem[0].dtype not in DTYPES:
        return output.copy_(portable("band", *problem))
    _call_band("band", *problem[:3], output)
    return output


def _band_backward(gradient: torch.Tensor, *problem: Any) -> tuple[torch.Tensor, ...]:
    _check_gradient(gradient, _new_band(*problem))
    found = _new_factors(gradient, *problem)
    _call_band("band_backward", *problem[:3], gradient.contiguous(), *found)
    return found


def _check_gradient(gradient: torch.Tensor, output: torch.Tensor) -> None:
    if gradient.shape != output.shape or gradient.dtype != output.dtype:
        raise ValueError(f"the gradient must be {tuple(output.shape)}, {output.dtype}, got {tuple(gradient.shape)}")


def _call_band(kernel, query, key, start, band, *gradients):  # type: ignore[no-untyped-def]
    (_, length, heads, window), (*_, positions, features) = band.shape, query.shape
    if query.shape != key.shape or query.dtype != key.dtype or window < 1 or positions < 1:
        raise ValueError(f"factors do not match: {tuple(query.shape)}, {query.dtype}, {tuple(key.shape)}, {key.dtype}")
    factors = _with_strides(query, key)
    sizes = query.dtype == torch.bfloat16, heads, positions, features, start, length, window
    _run(kernel, [*sizes, *factors, band, *(gradients or (None, None))])


# Of a problem: its number of heads, whether its w fits the other arguments, and the fields that only its operator has,
# in the order of the structs in kernels/cpu.
Fields = tuple[int, bool, list[Any]]


def _causal_fields(query, key, value, bias, slopes, first, hides_outside, *state) -> Fields:  # type: ignore[no-untyped-def]
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
        dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, torch.float32]
        fits = fits and all(x.is_contiguous() for x in state) and [x.dtype for x in state] == dtypes
    given = [x if x is None else x.contiguous() for x in (slopes, first)]
    return heads, fits, [size, rows, positions, hides_outside, *given, *(state or (None,) * 5)]


def _grid_fields(query, key, value, kernels, rows, columns, hides_outside) -> Fields:  # type: ignore[no-untyped-def]
    heads, *size = kernels.shape
    fits = len(size) == 2 and all(x % 2 for x in size) and min(rows, columns) >= 0
    return heads, fits and value.shape[1] == rows * columns, [rows, columns, *size, hides_outside]


def _table_fields(query, key, value, bias, causal) -> Fields:  # type: ignore[no-untyped-def]
    heads, length = len(bias), value.shape[1]
    return heads, bias.shape == (heads, length, length) and key.shape == value.shape, [causal]


FIELDS: dict[str, Callable[..., Fields]] = {"causal": _causal_fields, "grid": _grid_fields, "table": _table_fields}


def _call(
    kernel: str,
    fields: Fields,
    arguments: Sequence[Any],
    output: torch.Tensor | None,
    gradients: Sequence[torch.Tensor | None] = (None,) * 5,
) -> None:
    """Call a kernel for Eq. 2, given the gradients of the output, the query, the key, the value and w.

    Raises:
        TypeError, ValueError: the kernel would read or write other memory than that of the tensors.
    """
    (query, key, value, bias), (heads, fits, others) = arguments[:4], fields
    dtype, (batch, length, width) = value.dtype, value.shape
    if dtype not in DTYPES or key.dtype != dtype or (query is not None and query.dtype != dtype):
        raise TypeError(f"query, key and value must all be float32 or all bfloat16, got {key.dtype} and {dtype}")
    fits = fits and width % heads == 0 and key.shape in (value.shape, (batch, length, heads))
    fits = fits and (query is None or query.shape == value.shape)
    if not fits or (bias is not None and bias.dtype != torch.float32):
        given = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments]
        raise ValueError(f"arguments of the operator do not match: {given}")
    sizes = dtype == torch.bfloat16, batch, length, width, heads, key.shape[2]
    tensors = *_with_strides(query, key, value), bias if bias is None else bias.contiguous(), output
    of_output, *found = gradients
    _run(kernel, [*sizes, *tensors, *_with_strides(of_output), *found, *others])


def _run(kernel: str, fields: Sequence[Any]) -> None:
    """Call a kernel with the fields of its problem: numbers, and tensors or None.

    Raises:
        RuntimeError: the kernel failed.
    """
    numbers = [0 if x is None else x.data_ptr() if isinstance(x, torch.Tensor) else x for x in fields]
    if getattr(KERNELS, f"aft_{kernel}")(struct.pack(f"{len(numbers)}q", *numbers)):
        raise RuntimeError(f"the kernel {kernel} failed, probably for lack of memory")


def _with_strides(*tensors: torch.Tensor | None) -> list[Any]:
    """Return tensors with contiguous features, each followed by its other two strides."""
    dense = (x if x is None or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous() for x in tensors)
    return [field for x in dense for field in ((0, 0, 0) if x is None else (x, *x.stride()[:2]))]


# -------------------------------------------------------------------------------------------------------- registration

KERNELS = load_library()
# A process may import the package twice, for example in two versions: the first one registers the operators.
REGISTERED = hasattr(getattr(torch.ops, NAMESPACE), "causal")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register(name: str, arguments: str, result: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    LIBRARY.define(f"{name}({arguments}) -> {result}")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if KERNELS is not None:
        LIBRARY.impl(name, function, "CPU")


if not REGISTERED:
    for name, given in ARGUMENTS.items():
        backward, of_backward = f"{name}_backward", f"Tensor gradient, {given}"
        if name == "band":
            _register(name, given, "Tensor", _band, _new_band)
            _register(backward, of_backward, "(Tensor, Tensor)", _band_backward, _new_factors)
        else:
            _register(name, given, "Tensor", partial(_forward, name), _new_output)
            of_backward += ", bool bias_needed"
            _register(backward, of_backward, GRADIENTS, partial(_backward, name), new_gradients)
        gradients = partial(_gradients, name)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", gradients, setup_context=_save, lib=LIBRARY)
    _register("causal_state", f"{ARGUMENTS['causal']}, {STATE}", "Tensor", _state, _new_output)
