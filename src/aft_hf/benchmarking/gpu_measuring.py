"""Measure the groups of a GPU: candidates in turns, the bandwidth of a copy, and the kernels of a call."""

import statistics
from collections.abc import Callable, Hashable

import torch
from torch.autograd import DeviceType

from ..reading import described
from .gpu_groups import Group
from .measuring import peak_bytes, seconds_in_turns, synchronize


COPIED = 2**30  # bytes of the tensor whose copy gives the memory bandwidth of a GPU


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(COPIED if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_in_turns({"copy": lambda: target.copy_(source)}, device, repeats=10)["copy"]
    return 2 * len(source) / statistics.median(seconds)


def count_kernels(call: Callable[[], object], device: torch.device) -> int:
    """Number of kernels and copies that run on the device in one call, including each kernel of a CUDA graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        synchronize(device)
    # The profile also has the host's calls, such as the cudaLaunchKernel of each kernel.
    on_device = (x for x in profile.key_averages() if x.device_type == DeviceType.CUDA and not x.is_user_annotation)
    return sum(x.count for x in on_device)


def measure(group: Group, device: torch.device, repeats: int, copied_per_second: float) -> list[dict[str, object]]:
    """Measure the candidates of a group.

    Returns:
        A row for each candidate: items per second and, on a GPU, peak memory and number of kernels; or the reason why
        it was not measured.
    """
    calls: dict[Hashable, Callable[[], object]] = {}
    rows: dict[str, dict[str, object]] = {}
    for name, build in group.builders.items():
        try:
            calls[name] = build(device)
            for _ in range(2):  # the optimizer allocates its state at the end of the first training step
                calls[name]()
        except Exception as error:  # the other candidates are still measured
            calls.pop(name, None)
            is_too_large = isinstance(error, torch.OutOfMemoryError)
            rows[name] = {"skipped": "out of memory"} if is_too_large else {"failed": described(error)}
            torch.cuda.empty_cache()
    turns = seconds_in_turns(calls, device, repeats=repeats, warmup=0)
    seconds = {name: statistics.median(x) for name, x in turns.items()}
    for name in [name for name in group.builders if name in calls and name not in group.shortened.values()]:
        shorter = group.shortened.get(name)
        if shorter in rows:  # the time to be subtracted is missing
            rows[name] = rows[shorter]
            continue
        took = seconds[name] - (seconds[shorter] if shorter else 0.0)
        rows[name] = {"seconds": took}
        if took > 0:  # noise can make a difference of two times negative
            rows[name] |= {f"{group.unit}_per_second": group.items / took}
        if name in group.moved:
            rows[name]["of_bandwidth"] = group.moved[name] / took / copied_per_second
        if device.type == "cuda":
            rows[name] |= {"peak_bytes": peak_bytes(calls[name], device)}
            rows[name] |= {"kernels": count_kernels(calls[name], device)}
    of_group = {"section": group.section, "group": group.name, "task": group.task, "dtype": group.dtype}
    return [of_group | {"candidate": name} | row for name, row in rows.items()]
