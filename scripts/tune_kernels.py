"""Measure candidates for the options of the Triton kernels on this GPU, and print the best of each kernel and dtype.

The candidates are compiled in parallel, by processes that share Triton's cache, and then timed alone. A line is
printed as soon as it is known; copy the best ones to `kernels/triton/options.py`. Precisions are no candidates: they
follow from the errors that the contract of the forms allows.

    python scripts/tune_kernels.py --only sweep --tokens 32 2048 --width 768
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from aft_hf.kernels.triton import causal_launch, product_launch
from aft_hf.kernels.triton.options import OPTIONS, card


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS, PASSES = 9, 3  # timed runs, and passes of each, so that the host launches ahead of the device
Candidate = dict[str, Any]


def grid_of(**values: tuple[Any, ...]) -> list[Candidate]:
    """All combinations of the values of options."""
    return [dict(zip(values, chosen)) for chosen in product(*values.values())]


WALKS = grid_of(BD=(32, 64, 128), num_warps=(1, 2), maxnreg=(96, 128))
SWEEPS = grid_of(BD=(8, 16), num_warps=(1, 2), num_stages=(1,), maxnreg=(None, 128, 168))
TILES = grid_of(BM=(64, 128), BN=(64, 128), BK=(32,), num_warps=(4, 8), num_stages=(2, 3))
# The kernels, most important first, with their candidates and the problem that they belong to.
KERNELS: dict[str, tuple[list[Candidate], str]] = {
    "sweep_kernel": (SWEEPS, "window"),
    "sweep_backward_kernel": (SWEEPS, "window"),
    "window_gradient_kernel": (
        grid_of(BD=(16,), KEYS=(1, 2), num_warps=(1, 2), num_stages=(1,), maxnreg=(None, 128, 184)),
        "window",
    ),
    "product": (TILES, "grid"),
    "weight_gradient_kernel": (grid_of(BM=(32, 64), BK=(16, 32), num_warps=(4, 8), num_stages=(2, 3)), "grid"),
    "walk_kernel": (WALKS, "no window"),
    "walk_backward_kernel": (WALKS, "no window"),
}


def one_pass(
    problem: str, batch: int, length: int, width: int, dtype: torch.dtype, backward: bool
) -> Callable[[], Any]:
    """Return a function that runs a forward or a backward pass of a problem."""
    side = int(length**0.5) if problem == "grid" else 0
    tensors = [torch.randn(batch, side**2 or length, width, device=DEVICE, dtype=dtype) for _ in range(4)]
    if problem == "grid":  # as many tokens as a sequence, in squares
        heads = 16 if width % 16 == 0 else 1
        key, kernels = tensors[1][..., :heads].contiguous(), torch.randn(heads, 11, 11, device=DEVICE)
        given: tuple[Any, ...] = tensors[0], key, tensors[2], kernels, side, side, True
        forward, backwards = product_launch.grid, product_launch.grid_backward
    else:
        bias = torch.randn(1, length, 1, 32, device=DEVICE) if problem == "window" else None
        given = *tensors[:3], bias, None, None, True
        forward, backwards = causal_launch.causal, causal_launch.causal_backward
    if not backward:
        return lambda: forward(*given, keep=True)
    _, *kept = forward(*given, keep=True)
    return lambda: backwards(tensors[3], *given, *kept, given[3] is not None)


def entry_of(kernel: str, dtype: str) -> str:
    """The name of the options that this GPU uses."""
    of_card = f"{dtype} {card(torch.empty(0, device=DEVICE))}"
    return of_card if of_card in OPTIONS[kernel] else dtype


def milliseconds(kernel: str, dtype: str, candidate: Candidate, sizes: tuple[int, int, int], repeats: int) -> float:
    """Time the pass that a kernel belongs to, or only compile it without repeats; infinite if it does not run."""
    entry = entry_of(kernel, dtype)
    before = OPTIONS[kernel][entry]
    OPTIONS[kernel][entry] = before | candidate
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    try:
        run = one_pass(KERNELS[kernel][1], *sizes, getattr(torch, dtype), "backward" in kernel or "gradient" in kernel)
        run()
        times = []
        for _ in range(repeats):
            wait()
            start = time.perf_counter()
            for _ in range(PASSES):
                run()
            wait()
            times.append(1000 * (time.perf_counter() - start) / PASSES)
        return sorted(times)[repeats // 2] if repeats else 0.0
    except Exception as error:  # of any kind: a candidate may not compile
        print(f"  {candidate}: {type(error).__name__}", flush=True)
        return float("inf")
    finally:
        OPTIONS[kernel][entry] = before


def tune(
    only: str, sizes: tuple[int, int, int], jobs: int, seconds: float = float("inf")
) -> Iterator[tuple[str, str, Candidate, float, float]]:
    """Yield each kernel, the name of its entry, its best options, and their milliseconds and the present ones'."""
    end = time.monotonic() + seconds
    wanted = [(kernel, dtype) for dtype in ("bfloat16", "float32") for kernel in KERNELS if only in kernel]
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        # With these sizes, since segments of rows and grids with distant pairs have variants of their own
        compiled = {
            each: [pool.submit(milliseconds, *each, x, sizes, 0) for x in KERNELS[each[0]][0] if jobs]
            for each in wanted
        }
        for kernel, dtype in wanted:
            for x in compiled[kernel, dtype]:
                x.result()
            if time.monotonic() > end:
                break
            times = [milliseconds(kernel, dtype, x, sizes, REPEATS) for x in ({}, *KERNELS[kernel][0])]
            best = min(range(len(times)), key=times.__getitem__)
            entry = entry_of(kernel, dtype)
            yield kernel, entry, OPTIONS[kernel][entry] | ({}, *KERNELS[kernel][0])[best], times[best], times[0]
        pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tune only kernels whose names contain this")
    parser.add_argument("--tokens", type=int, nargs=2, default=(32, 2048), help="rows and tokens per row")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes that compile")
    arguments = parser.parse_args()
    sizes = (*arguments.tokens, arguments.width)
    for kernel, entry, best, time_of_best, now in tune(arguments.only, sizes, arguments.jobs):
        print(f"{kernel} {entry} {time_of_best:.3f} ms (now {now:.3f}) {best}", flush=True)


if __name__ == "__main__":
    main()
