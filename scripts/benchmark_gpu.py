"""Check and measure the Triton kernels on a GPU, in a few minutes: tests, then times and memory, as JSON.

First the contract tests of the kernels run on the device, some of them under compute-sanitizer where that is there.
Then language models of 24 layers and 256 features are measured, in training and in inference: AFT with the kernels,
with the portable backend, with that one compiled, and a GPT-2 of the same size with the attention of PyTorch.

    python scripts/benchmark_gpu.py --out gpu.json
    python scripts/benchmark_gpu.py --device cpu --smallest   # that the script itself works, where there is no GPU
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from aft_hf import AFTConfig, AFTForCausalLM


TOKENS = 65_536  # of a step: the batch has as many rows as that takes
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TYPES = ("local", "simple", "alibi", "conv")
TESTS = "tests/test_mixing_triton_aft.py"


def models(length: int, layers: int) -> dict[str, Callable[[], torch.nn.Module]]:
    """Builders by name. Tables of positions are as long as the sequence."""
    made = {}
    for kind in TYPES:
        for backend in ("triton", "portable"):
            config = AFTConfig(
                aft_type=kind,
                num_hidden_layers=layers,
                num_heads=1 if kind == "local" else 4,
                max_position_embeddings=length,
                mixing_implementation=backend,
            )
            made[f"{kind}, {backend}"] = lambda config=config: AFTForCausalLM(config)
        made[f"{kind}, portable, compiled"] = lambda config=config: torch.compile(AFTForCausalLM(config))
    sizes = {"vocab_size": 256, "n_positions": length, "n_embd": 256, "n_layer": layers, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    return made | {"GPT-2": lambda: GPT2LMHeadModel(config)}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], device: str, limit: float) -> float:
    """The median time of a step, of at least 3 and of about `limit` seconds of them."""
    step()
    step()
    synchronize(device)
    times, end = [], time.perf_counter() + limit
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(build: Callable, device: str, dtype: torch.dtype, batch: int, length: int, limit: float) -> dict:
    """Tokens per second, peak memory, and of a training step also the number of kernels that are launched."""
    torch.manual_seed(0)
    model = build().to(device, dtype)
    ids = torch.randint(0, 256, (batch, length), device=device)

    def infer() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    def train() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    found = {}
    for name, step in (("inference", infer), ("training", train)):
        model.train(name == "training")
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = seconds(step, device, limit)
        found[name] = {"tokens_per_second": batch * length / took}
        if device == "cuda":
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step()
                synchronize(device)
            found[name]["launches"] = sum(x.count for x in profile.key_averages())
    return found


def run_tests(device: str) -> dict[str, int | None]:
    """Exit codes of the contract tests, and of some of them under compute-sanitizer; None where that is not there."""
    if device != "cuda":
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 65_536])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no measurement begins")
    parser.add_argument("--smallest", action="store_true", help="a short sequence and one layer, to try the script")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmark_gpu: there is no CUDA device; --device cpu --smallest tries the script", file=sys.stderr)
        return 1
    device, end = arguments.device, time.perf_counter() + 60 * arguments.minutes
    tokens, layers, lengths = TOKENS, 24, arguments.lengths
    if arguments.smallest:
        tokens, layers, lengths = 64, 1, [64]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report = {"device": name, "torch": torch.__version__, "tests": run_tests(device), "rows": []}
    for length in lengths:
        for model, build in models(length, layers).items():
            for precision, dtype in DTYPES.items():
                row = {"model": model, "length": length, "batch": max(1, tokens // length), "dtype": precision}
                if time.perf_counter() > end:
                    row["skipped"] = "out of time"
                else:
                    try:
                        row |= measure(build, device, dtype, row["batch"], length, arguments.seconds)
                    except torch.OutOfMemoryError:
                        row["skipped"] = "out of memory"
                    torch._dynamo.reset()  # programs of one row are none of the next
                    gc.collect()
                print(json.dumps(row), flush=True)
                report["rows"].append(row)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(report["tests"].values()))


if __name__ == "__main__":
    sys.exit(main())
