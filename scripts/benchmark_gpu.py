"""Test the Triton kernels on a GPU and measure their time and memory, in a few minutes, with results as JSON.

First the contract tests of the kernels run on the device, and some of them also under compute-sanitizer if it is
installed. Then the groups of `aft_hf.benchmarking.gpu_groups` are measured, whose candidates take turns: the operation
alone, compared with the memory bandwidth of the device; language models, compared with GPT-2; image classifiers,
compared with ViT; and decoding with and without a CUDA graph. The file is written after each group.

    python scripts/benchmark_gpu.py --out gpu.json
    python scripts/benchmark_gpu.py --only mixing text
    python scripts/benchmark_gpu.py --device cpu --smallest   # tests the script itself without a GPU
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from aft_hf.benchmarking.gpu_groups import SECTIONS, SMALLEST, GpuSizes
from aft_hf.benchmarking.gpu_measuring import bandwidth, measure


TESTS = "tests/kernels/test_triton.py"


def run_tests(device: torch.device) -> dict[str, int | None]:
    """Exit codes of the contract tests, and of some of them under compute-sanitizer; None if they did not run."""
    if device.type != "cuda":
        return {"contract": None, "sanitizer": None}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = [sys.executable, "-m", "pytest", "-q", TESTS]
    found = {"contract": subprocess.run(tests, env=environment).returncode, "sanitizer": None}
    tool = shutil.which("compute-sanitizer")
    if tool is not None:
        checked = [tool, "--tool", "memcheck", "--error-exitcode", "1", *tests, "-k", "read_and_write_nothing"]
        found["sanitizer"] = subprocess.run(checked, env=environment).returncode
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=("tests", *SECTIONS), default=("tests", *SECTIONS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each candidate")
    parser.add_argument("--minutes", type=float, default=8.0, help="minutes after which no further group begins")
    parser.add_argument("--smallest", action="store_true", help="small models and short texts, to test the script")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmark_gpu: there is no CUDA device; --device cpu --smallest tests the script", file=sys.stderr)
        return 1
    device, end = torch.device(given.device), time.perf_counter() + 60 * given.minutes
    report = {"device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu", "torch": torch.__version__}
    report |= {"tests": run_tests(device) if "tests" in given.only else {}, "bytes_per_second": bandwidth(device)}
    report |= {"rows": [], "left_out": []}
    sections = [name for name in SECTIONS if name in given.only]
    for i, section in enumerate(sections):
        now = time.perf_counter()
        end_of_section = now + (end - now) / (len(sections) - i)  # the sections share the remaining time equally
        for group in SECTIONS[section](SMALLEST if given.smallest else GpuSizes()):
            if time.perf_counter() > end_of_section:
                report["left_out"].append(f"{section}: {group.name} {group.task} {group.dtype}")
                continue
            for row in measure(group, device, given.repeats, report["bytes_per_second"]):
                print(json.dumps(row), flush=True)
                report["rows"].append(row)
            torch.compiler.reset()  # frees the compiled programs, which the next group does not use
            gc.collect()
            if given.out is not None:
                given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"left out for lack of time: {len(report['left_out'])} groups", *report["left_out"], sep="\n  ")
    return int(any(report["tests"].values()) or any("failed" in row for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
