"""Peak memory of a call: on a GPU as PyTorch counts it, on a CPU that of a new process."""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from aft_hf.benchmarking import ON_GPU, Call, gpu_peak_bytes


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a new process, which Ctrl-C ends without a traceback of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        before = {*multiprocessing.active_children()}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the new process inherits
        try:
            result = process.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return result.result()
        except KeyboardInterrupt:
            for child in {*multiprocessing.active_children()} - before:
                child.kill()
            raise


def peak_bytes(call: Call) -> int:
    """Bytes in use at the peak of a call, beyond those in use before it; 0 where they cannot be measured.

    On a CPU this is the memory of the whole process, which must do nothing else and run on Linux with glibc.
    """
    if ON_GPU:
        return gpu_peak_bytes(call)
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: freed tensors return to the system at once
    libc.malloc_trim(0)  # free memory left by building would hide allocations of the call
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    at_start = _process_status()
    call()
    at_end = _process_status()
    libraries = at_end["RssFile"] - at_start["RssFile"]  # pages of code that the call loads first
    return at_end["VmHWM"] - at_start["VmRSS"] - libraries


def _process_status() -> dict[str, int]:
    """The memory lines of /proc/self/status in bytes."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(value.split()[0]) for name, _, value in lines if value.strip().endswith("kB")}
