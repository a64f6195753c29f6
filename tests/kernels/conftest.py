"""The compiled variants of the CPU kernels, one after the other, and products of bfloat16 by Triton's interpreter."""

import importlib.util

import numpy as np
import pytest

from aft_hf.kernels import operators
from aft_hf.kernels.build import library_path
from aft_hf.kernels.library import load_from, runnable_variants


NONE = pytest.param("", marks=pytest.mark.skip(reason="no compiled kernels for this CPU"))


@pytest.fixture(params=runnable_variants() or [NONE])
def variant(request, monkeypatch) -> str:
    monkeypatch.setattr(operators, "KERNELS", load_from(library_path(request.param)))
    return request.param


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """The interpreter stores bfloat16 as integers, and would multiply these."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *others, compute=interpreter.InterpreterBuilder.create_dot):
        return compute(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
