"""Device functions and constants that the causal Triton kernels share."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


EMPTY = tl.constexpr(-1e30)  # the maximum of an empty set: finite, so that the difference of two of them is 0, not NaN
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ON_NVIDIA = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# Arguments that follow from lengths and batch sizes. By default, Triton compiles one variant of a kernel for 1, one
# for multiples of 16, and one for other values. They have as many instructions, and take minutes to compile.
COUNTS = ("B", "T", "P", "N", "NT", "S", "L", "each", "shift", "past", "positions", "w_row", "dw_part")
kernel = triton.jit(do_not_specialize=(*COUNTS, "start", "length"))  # decorator


@triton.jit
def _divide(x, y):
    """Divide in two instructions, to 2 units in the last place; |y| is between 2**-126 and 2**126."""
    if INTERPRETED:
        return x / y
    return libdevice.fast_dividef(x, y)


@triton.jit
def _log2(x):
    """The logarithm to the base of 2, in one instruction."""
    if INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """The maximum of each column, NaN if it has one."""
    if INTERPRETED:
        return tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), tl.max(x, 0))
    return tl.reduce(x, 0, _larger)


@triton.jit
def _once(x):
    """Return x such that the compiler does not compute it again in every layout in which it is used."""
    if ON_NVIDIA:
        if x.dtype == tl.float32 or x.dtype == tl.int32:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=1)
        else:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)
    else:
        return x
