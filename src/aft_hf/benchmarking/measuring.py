"""Measure time with candidates in turns, and peak memory in a process that does nothing else."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from transformers import DynamicCache

from ..caching_aft import AFTCache


# A call that takes more seconds than this is not warmed up a second time: either it does much work, or it compiled the
# model, which later calls do not.
LONG_CALL = 5.0

Name = TypeVar("Name", bound=Hashable)


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on an accelerator; on a CPU there is none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_freed_memory() -> None:
    """Make the allocator of glibc keep freed memory. Peak memory cannot be measured in such a process.

    Otherwise a large tensor gets new or reused pages depending on the calls before it, and on a CPU that affects the
    time of every candidate more than the arithmetic does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)


def release_freed_memory() -> None:
    """Collect garbage, and return the memory that `keep_freed_memory` has kept to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def seconds_in_turns(
    candidates: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warmup: int = 2
) -> dict[Name, list[float]]:
    """Time candidates that take turns (A B A B ...), so that other load on the machine affects all of them.

    Args:
        candidates: the calls to time, by any key.
        device: the device that the calls run on.
        repeats: timed calls of each candidate.
        warmup: calls of each candidate before that; only one if it takes longer than `LONG_CALL`.

    Returns:
        The seconds of each timed call.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    warm = set()
    for turn in range(warmup + repeats):
        for name, call in candidates.items():
            if turn < warmup and name in warm:
                continue
            synchronize(device)
            started = time.perf_counter()
            call()
            synchronize(device)
            taken = time.perf_counter() - started
            if turn >= warmup:
                seconds[name].append(taken)
            elif taken > LONG_CALL:
                warm.add(name)
    return seconds


def ratio(seconds: dict[Name, list[float]], ours: Name, peer: Name) -> float:
    """How many times faster `ours` is: the median over turns of the ratio within a turn, as noise affects it least."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[peer]))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the peak of a call, beyond those in use before it.

    On a CPU this is the memory of the whole process, which must do nothing else and run on Linux with glibc.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated
    ctypes.CDLL(None).malloc_trim(0)  # free memory left by building would hide allocations of the call
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = dict(_process_status())
    call()
    after = dict(_process_status())
    libraries = after["RssFile"] - before["RssFile"]  # pages of code that the call loads first
    return after["VmHWM"] - before["VmRSS"] - libraries


def state_bytes(cache: object) -> int:
    """Bytes of all tensors in a cache of AFT or of attention."""
    if isinstance(cache, AFTCache):
        return cache.nbytes()
    assert isinstance(cache, DynamicCache)
    tensors = (x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None)))
    return sum(x.nbytes for x in tensors if x is not None)


def _process_status() -> Iterator[tuple[str, int]]:
    """The memory lines of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            yield name, 1024 * int(value.split()[0])
