"""The build of the CPU kernels: with sanitizers, and on machines without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aft_hf.kernels import build, library
from aft_hf.kernels.library import runnable_variants


HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("variant", runnable_variants())
def test_the_kernels_run_under_sanitizers(variant, tmp_path):
    options = build.VARIANTS[build.platform.machine()][variant]
    program = tmp_path / "sanitized"
    sources = [*map(str, build.SOURCES.glob("*.cpp")), str(HERE / "sanitized.cpp")]
    flags = [x for x in build.OPTIONS if x not in ("-shared", "-O3")] + ["-O1", "-g", "-fno-sanitize-recover=all"]
    command = [build.compiler(), *flags, *options, "-fsanitize=address,undefined", f"-I{build.SOURCES}", *sources]
    result = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    if "cannot find" in result.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert result.returncode == 0, result.stderr
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_a_compiler_the_build_says_so_in_one_line():
    script, environment = build.__file__, {**os.environ, "PATH": "/nowhere", "CXX": ""}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "the portable form is used" in result.stderr


@pytest.mark.parametrize("asked", ("none", "avx9"))
def test_a_variable_switches_the_kernels_off(asked):
    code = (
        "import torch, aft_hf; from aft_hf.mixing_aft import has_operators; assert not has_operators('cpu');"
        "aft_hf.AFTSimple(8, causal=True)(torch.randn(1, 9, 8)).sum().backward()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "AFT_HF_KERNELS": asked}
    )
    assert result.returncode == 0, result.stderr
    assert ("AFT_HF_KERNELS=avx9 is not" in result.stderr) == (asked == "avx9")


def test_a_library_of_other_sources_or_one_that_cannot_be_loaded_is_not_used(tmp_path):
    """The name of a library has a digest of its sources; a damaged library leaves the portable form."""
    path = build.library_path("avx2", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", tmp_path)
        (tmp_path / "causal.cpp").write_text("// other sources")
        assert build.library_path("avx2", tmp_path) != path
    path.write_bytes(b"no library")
    assert library.load_from(path) is None
