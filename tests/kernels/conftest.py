"""The compiled variants of the CPU kernels, one after the other."""

import pytest

from aft_hf.kernels import operators
from aft_hf.kernels.build import library_path
from aft_hf.kernels.library import load_from, runnable_variants


NONE = pytest.param("", marks=pytest.mark.skip(reason="no compiled kernels for this CPU"))


@pytest.fixture(params=runnable_variants() or [NONE])
def variant(request, monkeypatch) -> str:
    monkeypatch.setattr(operators, "KERNELS", load_from(library_path(request.param)))
    return request.param
