"""How time and memory are measured: candidates in turns, and peaks in a process of their own."""

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


# Seconds of a call that is not worth a second one only to warm up: it was long because there is much to do, or because
# a model was compiled, and that is done.
LONG_CALL = 5.0

Name = TypeVar("Name", bound=Hashable)


def synchronize(device: torch.device) -> None:
    """Wait for what was given to an accelerator; on a CPU everything is done already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_freed_memory() -> None:
    """Have this process keep what it frees, where its allocator is glibc's; memory is not measured in such a process.

    Otherwise a large tensor gets new pages or old ones depending on what ran before it, and on a CPU that decides more
    than the arithmetic, for every candidate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)


def release_freed_memory() -> None:
    """Give back what `keep_freed_memory` has had this process keep, and what nothing refers to any more."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def seconds_in_turns(
    candidates: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warmup: int = 2
) -> dict[Name, list[float]]:
    """Seconds of each call, the candidates taking turns (A B A B ...), so that what else the machine does hits all.

    Args:
        candidates: what to call, by any key.
        device: what they run on.
        repeats: timed calls of each.
        warmup: calls of each before that, or one if that takes longer than `LONG_CALL`.
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
    """How many times faster `ours` is: the median over turns of the ratio within a turn, which noise moves least."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[peer]))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the peak of a call, beyond those before it. On a CPU this is about the whole process, so it has
    to be one that does nothing else, and Linux with glibc.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated
    ctypes.CDLL(None).malloc_trim(0)  # what building left free would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = dict(_process_status())
    call()
    after = dict(_process_status())
    libraries = after["RssFile"] - before["RssFile"]  # pages of code that the call was the first to need
    return after["VmHWM"] - before["VmRSS"] - libraries


def state_bytes(cache: object) -> int:
    """Bytes of all tensors that the cache of an AFT or of attention holds."""
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
