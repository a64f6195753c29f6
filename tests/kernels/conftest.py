"""The compiled variants of the CPU kernels, one after the other, and the arithmetic of Triton's interpreter."""

import importlib.util
from functools import partialmethod

import numpy as np
import pytest
import torch

from aft_hf.kernels import operators
from aft_hf.kernels.build import library_path
from aft_hf.kernels.library import load_from, runnable_variants


NONE = pytest.param("", marks=pytest.mark.skip(reason="no compiled kernels for this CPU"))


@pytest.fixture(params=runnable_variants() or [NONE])
def variant(request, monkeypatch) -> str:
    monkeypatch.setattr(operators, "KERNELS", load_from(library_path(request.param)))
    return request.param


@pytest.fixture(autouse=True)
def arithmetic_of_a_gpu(monkeypatch):
    """Round as a GPU does: the interpreter of Triton truncates to bfloat16, which it stores as integers and multiplies
    as such, does not round the factors of products in tf32, which tensor cores truncate, does not flush subnormal
    exponentials to 0, and returns NaN for the larger of a number and NaN. That of Triton 3.9 refuses the integers in
    which it stores masks of scalars.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cast(self, x, to, cast=InterpreterBuilder.cast_impl):
        if x.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, x, to)
        nearest = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
        return TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)

    def factor(x, precision):
        if x.dtype.scalar == tl.bfloat16:
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
            return TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), tl.float32)
        return x

    def dot(self, a, b, d, precision, *others, dot=InterpreterBuilder.create_dot):
        return dot(self, factor(a, precision), factor(b, precision), d, precision, *others)

    def exp2(self, x, exp2=InterpreterBuilder.create_exp2):
        actual = exp2(self, x)
        return TensorHandle(
            np.where(actual.data < np.finfo(np.float32).tiny, np.float32(0), actual.data), actual.dtype
        )

    def with_boolean_mask(access, place):
        def masked(self, *arguments):
            mask = TensorHandle(arguments[place].data.astype(bool), tl.int1)
            return access(self, *arguments[:place], mask, *arguments[place + 1 :])

        return masked

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        monkeypatch.setattr(InterpreterBuilder, name, with_boolean_mask(getattr(InterpreterBuilder, name), place))
    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(InterpreterBuilder, name, partialmethod(InterpreterBuilder.binary_op, op=function))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "create_exp2", exp2)
    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(InterpreterBuilder, name, cast)
