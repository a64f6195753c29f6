"""Dry run of `make gpu` on a CPU: tiny problems by interpreted kernels."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch


pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources

import aft_hf
from aft_hf import mixing_aft
from aft_hf.kernels import operators as schema
from aft_hf.kernels.triton import operators
from aft_hf.kernels.triton.options import OPTIONS
from scripts import gpu, tune_kernels
from scripts.benchmark import cases
from scripts.benchmark.cases import ON_GPUS, Case
from scripts.benchmark.models import Images, Text
from scripts.gpu import in_process


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the command itself runs on a GPU")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Stands in for a GPU: kernels are interpreted, every problem is tiny, and nothing is compiled or tested."""
    library = operators.register("CPU")
    monkeypatch.setattr(mixing_aft, "_provided", {})
    chosen = [("simple", "training"), ("local", "decoding")]
    rows = [Case("gpu", Text(name, 16, 1, 64), task, True, 2) for name, task in chosen]
    monkeypatch.setattr(gpu, "all_cases", lambda: iter(rows))
    monkeypatch.setattr(gpu, "SIZES", (1, 16, 8))
    monkeypatch.setattr(cases, "DECODED", 1)
    monkeypatch.setattr(cases, "in_new_process", lambda *_: 2**20)
    monkeypatch.setattr(cases, "keep_freed_memory", lambda: None)
    kernels = tune_kernels.KERNELS
    few = {name: (kernels[name][0][:1], kernels[name][1]) for name in ("sweep_backward_kernel", "product")}
    monkeypatch.setattr(tune_kernels, "KERNELS", few)
    monkeypatch.setattr(tune_kernels, "REPEATS", 1)
    monkeypatch.setattr(tune_kernels, "PASSES", 1)
    for kernel, entries in OPTIONS.items():
        monkeypatch.setitem(OPTIONS, kernel, dict(entries))
    test = tmp_path / "test_nothing.py"
    test.write_text("def test_nothing():\n    pass\n")
    monkeypatch.setattr(gpu, "TESTS", [str(test), "--rootdir", str(tmp_path), "-c", "/dev/null"])
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "in_process", lambda function, *arguments, **_: function(*arguments) is None)
    yield rows
    library._destroy()
    schema.KEEPING.discard("cpu")
    assert not operators.FAILED


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["gpu", "--jobs", "0", "--turns", "1", *map(str, arguments)])
    return gpu.main()


@pytest.mark.slow
def test_all_parts_save_and_print_what_they_find(tiny, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(monkeypatch, "--out", out, "--tests", 1000, "--tuning", 1000, "--rows", 1000) == 0
    printed = capsys.readouterr().out
    assert "1 passed" in (out / "tests.log").read_text() and "1 passed" in printed
    assert all(f"{kernel} {dtype} " in printed for kernel in tune_kernels.KERNELS for dtype in ("bfloat16", "float32"))
    records = json.loads((out / "benchmark.json").read_text())
    assert [record["case"] for record in records] == [case.name for case in tiny]
    assert set(records[0]["ratio"]) == {"peer", "limit"} and set(records[1]["ratio"]) == {"peer"}
    assert run(monkeypatch, "--out", out, "--tests", 0, "--tuning", 0) == 0
    assert "times the speed" not in capsys.readouterr().out  # nothing is measured twice


def test_limits_of_time_end_each_part(tiny, monkeypatch, tmp_path, capsys):
    arguments = "--out", tmp_path, "--tests", 0.01, "--tuning", 1e-9, "--rows", 1e-9
    assert run(monkeypatch, *arguments) == 1  # the tests did not end
    printed = capsys.readouterr().out
    assert "did not end" in printed and "no time for" in printed and " ms (now" not in printed


def test_a_row_that_fails_or_does_not_end_is_left_out(tiny, monkeypatch, tmp_path, capsys):
    tried = []
    monkeypatch.setattr(gpu, "in_process", lambda function, *arguments, **_: tried.append(arguments[1]))
    gpu.measure_all(tmp_path / "benchmark.json", tiny, None, 60, 1)
    assert tried == [tiny, tiny[1:]]
    assert capsys.readouterr().out.splitlines() == [f"{case.name}: failed" for case in tiny]


@pytest.mark.slow
def test_a_process_that_fails_or_does_not_end_is_killed(forks_for_spawned_processes, monkeypatch):
    monkeypatch.setattr(gpu, "get_context", multiprocessing.get_context)
    assert in_process(os.getpid, seconds=200)
    assert not in_process(os._exit, 3, seconds=200)
    started = time.monotonic()
    assert not in_process(time.sleep, 600, seconds=1)
    monkeypatch.setattr(gpu, "STALLED", 1)
    assert not in_process(time.sleep, 600, seconds=200, changes=lambda: "nothing changes")
    assert time.monotonic() - started < 60


def test_a_row_that_the_portable_form_computed_is_not_saved(tiny, monkeypatch, tmp_path, capsys):
    failing = Mock(side_effect=OutOfResources(2, 1, "shared memory"))
    monkeypatch.setattr(operators.launches("causal"), "causal", failing)
    with pytest.raises(RuntimeError, match="is not saved: PyTorch operations computed it, since causal in torch"):
        gpu.measure(tmp_path / "benchmark.json", tiny, None, 60, 1)
    operators.FAILED.clear()
    assert not (tmp_path / "benchmark.json").exists()
    monkeypatch.setattr(gpu, "provides", lambda *_: False)
    assert run(monkeypatch, "--out", tmp_path, "--tests", 0) == 1
    assert "the Triton kernels are off: unset AFT_HF_TRITON" in capsys.readouterr().err


def test_versions_are_known_where_the_package_is_not_installed(monkeypatch):
    def version(name):
        if name == "aft-hf":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(cases, "version", version)
    assert cases.versions()["aft-hf"] == aft_hf.__version__


def test_without_a_gpu_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert run(monkeypatch, "--out", tmp_path / "out") == 1
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_layer_launches_few_kernels_for_a_token():
    program = """
from scripts.count_launches import Text, of_layer
for name in ("local", "alibi"):
    print(of_layer(Text(name, 64, width=32), "auto", "decoding")["triton"])
"""
    actual = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert actual.stdout.split() == ["2", "1"], actual.stderr  # of `local`, one makes w


@pytest.mark.slow
def test_texts_of_many_lengths_need_the_same_variants_of_the_kernels():
    program = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from scripts import compile_kernels
def variants(length):
    compile_kernels.LENGTH = length
    texts = [x for name, x in compile_kernels.problems() if x.causal and x.biases.reach is not None]
    return {variant for text in texts for variant in compile_kernels.launched(text)}
assert variants(4096) == variants(4004)
"""
    actual = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert actual.returncode == 0, actual.stderr


def test_instructions_are_counted_in_the_inner_loop_and_those_with_matrix_products():
    program = """
from scripts.compile_kernels import _longest_loop
def loop(*code):
    lines = [(f"{16 * i:04x}", text) for i, text in enumerate(code)]
    return len(_longest_loop(lines))
body = ["FADD"] * 20
assert loop("MOV", *body, "@P0 BRA 0x0010") == 21
assert loop("MOV", "LDG", *body, "@P0 BRA 0x0020", "STG", "@P1 BRA 0x0010") == 21  # tokens within chunks
assert loop(*body, "BRA 0x0000", "HFMA2.MMA", "BRA 0x0150") == 21
assert loop(*body, "BRA 0x0000", "HMMA.1688.F32.TF32", "BRA 0x0150") == 2
assert loop("HMMA.1688.F32.TF32", *body, "FADD", "@P0 BRA 0x0150", *body, "BRA 0x0000") == 44
"""
    actual = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert actual.returncode == 0, actual.stderr


def test_rows_have_names_of_their_own_and_the_first_ones_are_of_every_kind():
    named = [Case("gpu", model, task, True, batch) for model, task, batch in ON_GPUS]
    assert len({case.name for case in named}) == len(named)
    first = named[:5]
    assert {case.task for case in first} == {"training", "inference", "decoding"}
    assert {type(case.model) for case in first} == {Text, Images}
