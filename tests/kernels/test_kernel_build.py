"""The build of the CPU kernels: with sanitizers, and on machines without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aft_hf.kernels import build, library
from aft_hf.kernels.library import runnable_variants


HERE = Path(__file__).parent
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
WITHOUT_COMPILER = {**os.environ, "PATH": "/nowhere", "CXX": ""}
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def compile_program(program: Path, compiler: str, *options: str) -> None:
    """Compile the kernels and `sanitized.cpp` to a program."""
    sources = [*map(str, build.SOURCES.glob("*.cpp")), str(HERE / "sanitized.cpp")]
    flags = [x for x in build.OPTIONS if x not in ("-shared", "-O3")]
    command = [compiler, *flags, *options, f"-I{build.SOURCES}", *sources, "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in result.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert result.returncode == 0, result.stderr


def assert_runs(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_compiler
@pytest.mark.parametrize("variant", runnable_variants())
def test_the_kernels_run_under_sanitizers(variant, tmp_path):
    options = build.VARIANTS[build.platform.machine()][variant]
    sanitizers = ("-Og", "-g1", "-fno-sanitize-recover=all", "-fsanitize=address,undefined")
    compile_program(tmp_path / "sanitized", build.compiler(), *options, *sanitizers)
    assert_runs(tmp_path / "sanitized", "100")


@pytest.mark.slow
@pytest.mark.skipif(not (CROSS and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user (Debian packages)")
def test_the_kernels_for_neon_run_in_an_emulator(tmp_path):
    compile_program(tmp_path / "neon", CROSS, *build.VARIANTS["aarch64"]["neon"], "-O2", "-static")
    assert_runs(EMULATOR, tmp_path / "neon", "20")


@needs_compiler
def test_a_variant_that_cannot_be_compiled_does_not_stop_the_others(tmp_path, monkeypatch, capfd):
    variants = {"broken": ["-march=no-such-cpu"], "plain": []}
    (tmp_path / "empty.cpp").touch()
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setitem(build.VARIANTS, build.platform.machine(), variants)
    assert build.build(tmp_path) == ["plain"]
    assert "no CPU kernels for broken" in capfd.readouterr().err
    library_of_plain = build.library_path("plain", tmp_path)
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert library_of_plain.is_file() and build.build(tmp_path) == ["plain"]


def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path):
    command = [sys.executable, shutil.copy(build.__file__, tmp_path)]  # whose libraries are not there
    result = subprocess.run(command, capture_output=True, text=True, env=WITHOUT_COMPILER)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "the portable form is used" in result.stderr


@pytest.mark.parametrize(
    "environment", [WITHOUT_COMPILER, {**os.environ, "AFT_HF_COMPILE": "0"}], ids=["no compiler", "not asked"]
)
def test_files_of_an_earlier_build_do_not_reach_the_wheel(environment, tmp_path):
    folder = tmp_path / "aft_hf/kernels/cpu"
    folder.mkdir(parents=True)
    (folder / "earlier.h").touch()
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=HERE.parents[1], env=environment, check=True, capture_output=True)
    assert {path.name for path in folder.iterdir()} == {path.name for path in build.SOURCES.glob("*.[ch]*")}


def test_a_variable_switches_the_kernels_off(monkeypatch):
    code = (
        "import torch, aft_hf; from aft_hf.mixing_aft import provides; assert not provides('causal', 'cpu');"
        "aft_hf.AFTSimple(8, causal=True)(torch.randn(1, 9, 8)).sum().backward()"
    )
    environment = {**os.environ, "AFT_HF_KERNELS": "avx9"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and "AFT_HF_KERNELS=avx9 is not" in result.stderr, result.stderr
    warnings = []
    monkeypatch.setattr(library.logger, "warning_once", warnings.append)
    monkeypatch.setenv("AFT_HF_KERNELS", "none")
    assert library.load_library() is None and warnings == []


def test_a_library_of_other_sources_or_one_that_cannot_be_loaded_is_not_used(tmp_path):
    """The name of a library has a digest of its sources; a damaged library leaves the portable form."""
    path = build.library_path("avx2", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", tmp_path)
        (tmp_path / "causal.cpp").write_text("// other sources")
        assert build.library_path("avx2", tmp_path) != path
    path.write_bytes(b"no library")
    assert library.load_from(path) is None
