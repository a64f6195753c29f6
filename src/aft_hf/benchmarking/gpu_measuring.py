"""How the groups of a GPU are measured: candidates in turns, what the device can move, and what a call launches."""

import statistics
from collections.abc import Callable, Hashable

import torch

from .gpu_groups import Group
from .measuring import peak_bytes, seconds_in_turns, synchronize


COPIED = 2**30  # bytes of a tensor that is copied, to know what the memory of a GPU can move


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(COPIED if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_in_turns({"copy": lambda: target.copy_(source)}, device, repeats=10)["copy"]
    return 2 * len(source) / statistics.median(seconds)


def count_launches(call: Callable[[], object], device: torch.device) -> int:
    """Kernels that one call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        synchronize(device)
    return sum(x.count for x in profile.key_averages())


def measure(group: Group, device: torch.device, repeats: int, copied_per_second: float) -> list[dict[str, object]]:
    """A row for each candidate: items per second, and on a GPU peak memory and launches; or why there is none."""
    calls: dict[Hashable, Callable[[], object]] = {}
    rows: dict[str, dict[str, object]] = {}
    for name, build in group.builders.items():
        try:
            calls[name] = build(device)
            calls[name]()
        except torch.OutOfMemoryError:
            calls.pop(name, None)
            rows[name] = {"skipped": "out of memory"}
            torch.cuda.empty_cache()
    seconds = {name: statistics.median(x) for name, x in seconds_in_turns(calls, device, repeats=repeats).items()}
    for name in [name for name in group.builders if name in calls and name not in group.shortened.values()]:
        took = seconds[name] - seconds.get(group.shortened.get(name, ""), 0.0)
        rows[name] = {"seconds": took}
        if took > 0:  # a difference of two times may be noise
            rows[name] |= {f"{group.unit}_per_second": group.items / took}
        if name in group.moved:
            rows[name]["of_bandwidth"] = group.moved[name] / took / copied_per_second
        if device.type == "cuda":
            rows[name] |= {"peak_bytes": peak_bytes(calls[name], device)}
            rows[name] |= {"launches": count_launches(calls[name], device)}
    of_group = {"section": group.section, "group": group.name, "task": group.task, "dtype": group.dtype}
    return [of_group | {"candidate": name} | row for name, row in rows.items()]
