"""Where the Triton kernels are used: on NVIDIA GPUs unless they are turned off. These tests need neither."""

import os
import subprocess
import sys

import pytest
import torch

from aft_hf import kernels, mixing_aft


@pytest.mark.parametrize(
    ("cuda", "hip", "asked", "installed", "expected"),
    [
        ("13.0", None, None, True, True),
        ("13.0", None, "", True, True),
        ("13.0", None, "1", True, True),
        ("13.0", None, "0", True, False),
        ("13.0", None, None, False, False),
        (None, None, None, True, False),
        (None, None, "1", True, False),
        (None, "7.0", None, True, False),
        (None, "7.0", "1", True, True),
    ],
)
def test_nvidia_gpus_use_triton_by_default_and_amd_gpus_on_demand(cuda, hip, asked, installed, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if installed else None)
    monkeypatch.delenv("AFT_HF_TRITON", raising=False)
    if asked is not None:
        monkeypatch.setenv("AFT_HF_TRITON", asked)
    assert kernels.uses_triton() == expected


@pytest.mark.parametrize(("asked", "message"), (("1", "pip install triton"), ("yes", "use 0 or 1")))
def test_a_variable_that_has_no_effect_says_so(asked, message, monkeypatch):
    told = []
    monkeypatch.setattr(kernels.logger, "warning_once", told.append)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setenv("AFT_HF_TRITON", asked)
    assert not kernels.uses_triton()
    assert len(told) == 1 and message in told[0]


# As on a GPU, where Triton is installed but cannot be imported. The kernels are registered for the CPU.
PROGRAM = """
import sys, torch
torch.version.cuda = "13.0"
import aft_hf
from aft_hf.kernels.triton import operators
from aft_hf.mixing_aft import provides
assert provides("causal", "cuda")
assert "aft_hf.kernels.triton.causal_launch" not in sys.modules, "imported with the package"
library = operators.register("CPU")
mixer, x = aft_hf.AFTLocal(8, 20, 3, causal=True), torch.randn(1, 9, 8)
found = [mixer(x), mixer(x)]
mixer.mixing_implementation = "portable"
torch.testing.assert_close(found, [mixer(x)] * 2)
"""


def test_triton_is_imported_at_the_first_call_and_the_portable_form_computes_where_it_does_not_work(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('made for another PyTorch')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "AFT_HF_TRITON": ""}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    for operator in ("band", "causal"):
        message = f"the Triton kernels for {operator} in torch.float32 do not work on cpu"
        assert result.stderr.count(message) == 1 and "made for another PyTorch" in result.stderr


def test_a_checkpoint_without_the_package_says_once_that_kernels_for_a_gpu_exist(monkeypatch):
    told = []
    monkeypatch.setattr(mixing_aft.logger, "warning_once", told.append)
    monkeypatch.setattr(mixing_aft, "OPERATORS", "no_such_package")
    monkeypatch.setattr(mixing_aft, "_provided", {})
    assert not mixing_aft.provides("causal", "cuda")
    assert len(told) == 1 and "cuda" in told[0] and "install" in told[0]
