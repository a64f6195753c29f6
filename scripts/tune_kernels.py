"""Measure candidates for the options of the Triton kernels on this GPU, and print the best of each kernel and dtype.

The candidates of a kernel are compiled in parallel, by processes that share Triton's cache, and then timed alone. A
line is printed as soon as it is known; copy the best ones to `kernels/triton/options.py`.

    python scripts/tune_kernels.py --only sweep --tokens 32 2048 --width 768
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from aft_hf.kernels.triton import causal_launch
from aft_hf.kernels.triton.options import OPTIONS


WALKS = [{"BD": b, "num_warps": w, "maxnreg": r} for b, w, r in product((32, 64, 128), (1, 2), (96, 128, 168))]
PRODUCTS = [
    {"BD": b, "num_warps": w, "PRECISION": p}
    for b, w, p in product((16, 32, 64), (1, 2, 4), ("bf16", "tf32", "tf32x3"))
]
# The kernels that are tuned one after the other, with their candidates, and whether their problem has a window.
KERNELS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "walk_kernel": (WALKS, False),
    "walk_backward_kernel": (WALKS, False),
    "sweep_kernel": (PRODUCTS, True),
    "sweep_backward_kernel": (PRODUCTS, True),
    "window_gradient_kernel": (PRODUCTS, True),
}


def passes(batch: int, length: int, width: int, window: bool, dtype: torch.dtype, backward: bool) -> Any:
    """Return a function that runs one pass of a problem."""
    tensors = [torch.randn(batch, length, width, device="cuda", dtype=dtype) for _ in range(4)]
    bias = torch.randn(1, length, 1, 32, device="cuda") if window else None
    problem = (*tensors[:3], bias, None, None, False)
    _, *kept = causal_launch.causal(*problem, keep=True)
    if backward:
        return lambda: causal_launch.causal_backward(tensors[3], *problem, *kept, window)
    return lambda: causal_launch.causal(*problem, keep=True)


def milliseconds(
    kernel: str, dtype: str, candidate: dict[str, Any], sizes: tuple[int, int, int], repeats: int
) -> float:
    """Time the pass that a kernel belongs to; infinite if the candidate does not run on this GPU."""
    before = OPTIONS[kernel][dtype]
    OPTIONS[kernel][dtype] = candidate
    try:
        run = passes(*sizes, KERNELS[kernel][1], getattr(torch, dtype), "backward" in kernel or "gradient" in kernel)
        times = []
        for _ in range(repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times[2:])[repeats // 2] if repeats else 0.0
    except Exception as error:  # of any kind: a candidate may not compile
        print(f"  {candidate}: {type(error).__name__}", flush=True)
        return float("inf")
    finally:
        OPTIONS[kernel][dtype] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tune only kernels whose names contain this")
    parser.add_argument("--tokens", type=int, nargs=2, default=(32, 2048), help="rows and tokens per row")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes that compile")
    arguments = parser.parse_args()
    sizes = (*arguments.tokens, arguments.width)
    wanted = [(name, dtype) for name in KERNELS if arguments.only in name for dtype in ("bfloat16", "float32")]
    for kernel, dtype in wanted:
        candidates = [x for x in KERNELS[kernel][0] if dtype == "bfloat16" or x.get("PRECISION") in (None, "tf32x3")]
        few = 1, 256, arguments.width
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(milliseconds, *zip(*((kernel, dtype, x, few, 0) for x in candidates))))
        results = [(milliseconds(kernel, dtype, x, sizes, 9), x) for x in candidates]
        for time, candidate in sorted(results, key=lambda x: x[0])[:3]:
            print(f"{kernel} {dtype} {time:.3f} ms {candidate}", flush=True)


if __name__ == "__main__":
    main()
