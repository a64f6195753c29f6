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
    global_connectivity: whether keys before the s last ones are visible, with w = 0. Otherwise they are hidden.

`causal_state` continues a state and updates it in place, for a prompt or a single token. Each row has at most one
document, which follows the tokens that the state has seen, and then padding:

    keys, values:  (B, h, s - 1, 1 or c) and (B, h, s - 1, c) float32: the last tokens; keys of -inf where there are
                   none.
    numerator, denominator, maximum: (B, h, 1, c) and twice (B, h, 1, 1 or c): the sums of Eq. 2 over all tokens before
                   them, divided by exp(maximum). The sums are float64, so that rounding errors of many steps do not
                   add up; the maximum is float32.

`grid` is for positions on a grid in raster order, T = rows * columns, of which every query sees all (AFT-conv, Eq. 6);
a sequence is one row:

    kernels:       (h, a, b) with a and b odd: entry (i, j) is w for a key i - a // 2 rows below the query and
                   j - b // 2 columns to its right. Other keys have w = 0, or are hidden without global_connectivity.

`table` takes a table of all pairs, and computes both sums as matrix products:

    bias:          (h, T, T); -inf hides a key from a query.
    causal:        whether a query sees only t' <= t.

`band` makes the bias of `causal`, (1 or B, T, h, s), for tokens from position `start` on, from w = u v^T (Eq. 7):

    query, key:    u and v, (h, P, d'). Entries for positions below 0 or after P - 1 are not defined.
    starts:        (B,) int64, a position for each row in place of `start`, without gradients.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from .. import portable_aft
from ..portable_aft import num_heads
from ..position_biases_aft import Window, working_dtype
from .library import load_library
from .triton.kept import kept_like


NAMESPACE = "aft_hf_v4"
INPUTS = "Tensor? query, Tensor key, Tensor value"
ARGUMENTS = {
    "causal": f"{INPUTS}, Tensor? bias, Tensor? slopes, Tensor? first, bool global_connectivity",
    "grid": f"{INPUTS}, Tensor kernels, SymInt rows, SymInt columns, bool global_connectivity",
    "table": f"{INPUTS}, Tensor bias, bool causal",
    "band": "Tensor query, Tensor key, SymInt start, SymInt length, int window, Tensor? starts",
}
STATE = "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) numerator, Tensor(d!) denominator, Tensor(e!) maximum"
KEPT = "Tensor average, Tensor logsumexp, Tensor center"
# Gradients are those of query, key, value and w, and empty for what is None or not needed.
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"
DTYPES = frozenset((torch.float32, torch.bfloat16))  # of kernels; those for GPUs take float16, too
FEW_FEATURES = 16  # heads with fewer features do not fill a vector of the kernel for tables
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor, FunctionalTensor)  # what kernels, and the compiler, take
# The types of devices whose kernels keep intermediate results for the backward pass, by `NAME_keeping`.
KEEPING: set[str] = set()

# ------------------------------------------------------------------------------------------------ shapes and gradients


def _new_output(query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return memory for the output of an operator."""
    return value.new_empty(value.shape)


def new_gradients(gradient, query, key, value, biases, *others):  # type: ignore[no-untyped-def]
    """Return memory for the gradients of an operator but `band`: empty for what is None or not needed."""
    wanted = query, key, value, biases if others[-1] else None
    return tuple(value.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _new_kept(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return memory for the output of an operator and for what it keeps for the backward pass."""
    return _new_output(*arguments), *kept_like(name, *arguments[1:4])


def _new_gradients_of_kept(gradient, *arguments):  # type: ignore[no-untyped-def]
    """Return memory for the gradients of an operator that are computed from what it has kept."""
    *problem, _, _, _, bias_needed = arguments
    return new_gradients(gradient, *problem, bias_needed)


def _new_band(
    query: torch.Tensor, key: torch.Tensor, start: int, length: int, window: int, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return memory for the output of `band`."""
    rows = 1 if starts is None else len(starts)
    return query.new_empty(rows, length, query.shape[0], window, dtype=working_dtype(query))


def _new_factors(gradient: torch.Tensor, *factors: Any) -> tuple[torch.Tensor, ...]:
    """Return memory for the gradients of `band`."""
    return tuple(x.new_empty(x.shape) for x in factors[:2])


# ------------------------------------------------------------------------------------- portable forms and autograd


def portable(name: str, *arguments: Any) -> Any:
    """Compute an operator by PyTorch operations, for what no kernel takes: contiguous, as compiled programs expect."""
    if name == "band":
        query, key, start, length, window, starts = arguments
        return Window(query, key, size=window).by_lag(length, start if starts is None else starts).contiguous()
    return getattr(portable_aft, name)(*arguments).contiguous()


def portable_state(*arguments: Any) -> torch.Tensor:
    """Compute `causal_state` by PyTorch operations."""
    output, state = portable_aft.causal_state(*arguments)
    for x, following in zip(arguments[7:], state):
        x.copy_(following)
    return output.contiguous()


def _is_for_kernels(tensors: Sequence[Any]) -> bool:
    """Whether operations on tensors run eagerly or compiled, and only reverse-mode gradients are computed.

    False in transforms of torch.func and forward-mode differentiation, for batched gradients and tensor subclasses.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    dual = forward_ad._current_level >= 0
    for x in tensors:  # loops, since calls of generators take as long as a small kernel
        if isinstance(x, torch.Tensor) and (
            type(x) not in PLAIN
            or torch._C._functorch.is_legacy_batchedtensor(x)
            or (dual and forward_ad.unpack_dual(x).tangent is not None)
        ):
            return False
    return True


def _vmap(name: str, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Compute an operator for each entry of a dimension: the rule for torch.vmap."""
    operator, rows = OPERATORS[name], []
    for i in range(info.batch_size):
        rows.append(operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims))))
    return torch.stack(rows), 0


def _autograd(name: str, keys: Any, *arguments: Any) -> Any:
    """Compute an operator with gradients: what is registered for autograd."""
    if not _is_for_kernels(arguments):
        return portable(name, *arguments)
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                of_rows = name == "band" and arguments[5] is not None
                run = portable if of_rows or not _takes(name, arguments) else _Function.apply
                return run(name, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATORS[name](*arguments)


def _autograd_of_state(*arguments: Any) -> torch.Tensor:
    """Compute `causal_state`, in transforms and forward-mode differentiation by the portable form."""
    if not _is_for_kernels(arguments):
        return portable_state(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aft_hf_v4.causal_state.default(*arguments)


def _takes(name: str, arguments: Sequence[Any]) -> bool:
    """Whether kernels take the dtypes and the gate of a problem."""
    query, key, third, *others = arguments
    of_gpus = key.dtype == torch.float16 and key.device.type in KEEPING
    if not (key.dtype in DTYPES or of_gpus) or (query is not None and query.dtype != key.dtype):
        return False
    if name == "band":
        return True
    for w in others[:2]:  # the position biases
        if isinstance(w, torch.Tensor) and w.dtype == torch.float64:
            return False
    return third.dtype == key.dtype and (query is None or query.shape[-1] > 1 or third.shape[-1] == 1)


class _Function(torch.autograd.Function):
    """An operator with the gradients of query, key, value and biases, the first four arguments, or of u and v."""

    @staticmethod
    def forward(ctx: Any, name: str, *arguments: Any) -> torch.Tensor:
        ctx.name, ctx.others = name, [None if isinstance(x, torch.Tensor) else x for x in arguments]
        kept: tuple[torch.Tensor, ...] = ()
        with torch._C._AutoDispatchBelowAutograd():
            if KEEPING and name != "band" and arguments[2].device.type in KEEPING:
                output, *kept = getattr(torch.ops.aft_hf_v4, f"{name}_keeping").default(*arguments)
            else:
                output = OPERATORS[name](*arguments)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in arguments), *kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, count, needed = ctx.name, len(ctx.others), ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors  # once: a checkpoint computes them anew each time
        arguments = [x if tensor is None else tensor for x, tensor in zip(ctx.others, saved)]
        if torch.is_grad_enabled() or not _is_for_kernels([gradient]):
            with torch.enable_grad():
                wanted = [x for x, need in zip(arguments, needed) if need]
                options = {"create_graph": True, "materialize_grads": True}  # a key alone does not matter
                gradients = iter(torch.autograd.grad(portable(name, *arguments), wanted, gradient, **options))
            return None, *(next(gradients) if need else None for need in needed)
        kept = saved[count:]
        operator = getattr(torch.ops.aft_hf_v4, f"{name}_backward_keeping" if kept else f"{name}_backward").default
        flags = () if name == "band" else (needed[3],)
        gradients = operator(gradient, *arguments, *kept, *flags)
        given = (x if need else None for x, need in zip(gradients, needed))
        return None, *given, *(None for _ in needed[len(gradients) :])


# ---------------------------------------------------------------------------------------------------- kernels for CPUs


def _forward(name: str, *arguments: Any) -> torch.Tensor:
    if not _takes(name, arguments):
        return portable(name, *arguments)
    problem, folded = _laid_out(*arguments) if name == "table" else (arguments, False)
    output = problem[2].new_empty(problem[2].shape)
    _call(name, FIELDS[name](*problem), problem, output)
    return _unfolded(output, len(arguments[2]), len(problem[3])) if folded else output


def _backward(name: str, gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    _check_gradient(gradient, arguments[2])
    problem, folded = _laid_out(*arguments) if name == "table" else (arguments, False)
    gradient = _folded(gradient, len(problem[3])) if folded else gradient
    gradients = list(new_gradients(gradient, *problem))
    # Kernels add to the gradient of w, and fill the others; without outputs, they return at once.
    for x in gradients[3 if gradient.numel() else 0 :]:
        x.zero_()
    _call(f"{name}_backward", FIELDS[name](*problem[:-1]), problem, None, (gradient, *gradients))
    if folded:
        gradients[:3] = [
            x if x.numel() == 0 else _unfolded(x, len(arguments[2]), len(problem[3])) for x in gradients[:3]
        ]
    if gradients[1].shape != arguments[1].shape:
        gradients[1] = gradients[1].unflatten(2, (len(problem[3]), -1)).sum(3)
    return tuple(gradients)


def _laid_out(query, key, value, bias, causal, *flag):  # type: ignore[no-untyped-def]
    """Return the problem of a table as its kernel takes it, and whether its rows are folded: it needs one key per
    feature, and heads whose features fill a vector.
    """
    heads, width, folds = len(bias), value.shape[2], False
    if heads and width % heads == 0 and key.shape[2] in (heads, width):
        features = width // heads
        key = key if key.shape[2] == width else key.repeat_interleave(features, 2)
        folds = len(value) > 1 and 0 < features < FEW_FEATURES and key.shape == value.shape
        folds = folds and (query is None or query.shape == value.shape)
    if folds:
        query, key, value = (x if x is None else _folded(x, heads) for x in (query, key, value))
    return (query, key, value, bias, causal, *flag), folds


def _folded(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, T, h c) as one row whose heads have the features of all rows, which share w: (1, T, h B c)."""
    return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3).flatten(1).unsqueeze(0)


def _unfolded(x: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """(1, T, h B c) as (B, T, h c)."""
    return x.view(x.shape[1], heads, rows, x.shape[2] // (heads * rows)).permute(2, 0, 1, 3).contiguous().flatten(2)


def _state(*arguments: Any) -> torch.Tensor:
    if not _takes("causal", arguments[:7]):
        return portable_state(*arguments)
    output, first = _new_output(*arguments), arguments[5]
    kernel = "causal_step" if output.shape[1] == 1 and first is None else "causal"
    _call(kernel, _causal_fields(*arguments), arguments, output)
    return output


def _band(*problem: Any) -> torch.Tensor:
    output = _new_band(*problem)
    if not _takes("band", problem):
        return output.copy_(portable("band", *problem))
    query, key, start, _, _, starts = problem
    if starts is None:
        _call_band("band", query, key, start, output)
        return output
    for row, begin in zip(output.split(1), starts.tolist()):
        _call_band("band", query, key, begin, row)
    return output


def _band_backward(gradient: torch.Tensor, *problem: Any) -> tuple[torch.Tensor, ...]:
    _check_gradient(gradient, _new_band(*problem))
    gradients = _new_factors(gradient, *problem)
    _call_band("band_backward", *problem[:3], gradient.contiguous(), *gradients)
    return gradients


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


def _causal_fields(query, key, value, bias, slopes, first, global_connectivity, *state) -> Fields:  # type: ignore[no-untyped-def]
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
    return heads, fits, [size, rows, positions, global_connectivity, *given, *(state or (None,) * 5)]


def _grid_fields(query, key, value, kernels, rows, columns, global_connectivity) -> Fields:  # type: ignore[no-untyped-def]
    heads, *size = kernels.shape
    fits = len(size) == 2 and all(x % 2 for x in size) and min(rows, columns) >= 0
    return heads, fits and value.shape[1] == rows * columns, [rows, columns, *size, global_connectivity]


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
    grad_output, *grad_inputs = gradients
    _run(kernel, [*sizes, *tensors, *_with_strides(grad_output), *grad_inputs, *others])


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
    fields: list[Any] = []
    for x in tensors:  # a loop, as in `_is_for_kernels`
        if x is None:
            fields += 0, 0, 0
        else:
            x = x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
            fields += x, *x.stride()[:2]
    return fields


# -------------------------------------------------------------------------------------------------------- registration

KERNELS = load_library()
# A process may import the package twice, for example in two versions: the first one registers the operators.
REGISTERED = hasattr(getattr(torch.ops, NAMESPACE), "causal")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _provides(name: str, device_type: str) -> bool:
    """Whether an operator has a kernel for a type of device, e.g. "cpu"."""
    if device_type not in ("cpu", "cuda"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device_type.upper())


def _register(
    name: str, arguments: str, result: str, function: Callable[..., Any] | None, fake: Callable[..., Any]
) -> None:
    LIBRARY.define(f"{name}({arguments}) -> {result}")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    if KERNELS is not None and function is not None:
        LIBRARY.impl(name, function, "CPU")


def _register_all() -> None:
    for name, given in ARGUMENTS.items():
        backward, of_backward = f"{name}_backward", f"Tensor gradient, {given}"
        if name == "band":
            _register(name, given, "Tensor", _band, _new_band)
            _register(backward, of_backward, "(Tensor, Tensor)", _band_backward, _new_factors)
        else:
            _register(name, given, "Tensor", partial(_forward, name), _new_output)
            of_backward += ", bool bias_needed"
            _register(backward, of_backward, GRADIENTS, partial(_backward, name), new_gradients)
            # Only for the devices in KEEPING
            _register(f"{name}_keeping", given, GRADIENTS, None, partial(_new_kept, name))
            of_backward = f"Tensor gradient, {given}, {KEPT}, bool bias_needed"
            _register(f"{backward}_keeping", of_backward, GRADIENTS, None, _new_gradients_of_kept)
        LIBRARY.impl(name, partial(_autograd, name), "Autograd", with_keyset=True)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", partial(_vmap, name), lib=LIBRARY)
    _register("causal_state", f"{ARGUMENTS['causal']}, {STATE}", "Tensor", _state, _new_output)
    LIBRARY.impl("causal_state", _autograd_of_state, "Autograd")
    LIBRARY.impl("causal_state", portable_state, "FuncTorchBatched")
    LIBRARY.define("provides(str name, str device_type) -> bool")
    LIBRARY.impl("provides", _provides, "CompositeExplicitAutograd")


if not REGISTERED:
    _register_all()
# The overloads, which are looked up once.
OPERATORS: dict[str, Any] = {name: getattr(torch.ops.aft_hf_v4, name).default for name in ARGUMENTS}
