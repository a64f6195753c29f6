"""Device functions and constants that the causal Triton kernels share."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


EMPTY = tl.constexpr(-1e30)  # the maximum of an empty set: finite, so that the difference of two of them is 0, not NaN
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
