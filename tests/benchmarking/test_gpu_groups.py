"""Tests of the GPU benchmark at its smallest sizes on a CPU: every section runs and returns its rows."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from aft_hf.benchmarking.gpu_groups import SECTIONS, SMALLEST, GpuSizes
from aft_hf.benchmarking.gpu_measuring import count_kernels, measure


CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_a_group_of_each_section_is_measured(section, spend):
    group = next(x for x in SECTIONS[section](SMALLEST) if x.task != "training")  # kernels are interpreted here
    left_out = ("compiled", "alibi", "conv", "CUDA graph")
    builders = {name: build for name, build in group.builders.items() if not any(x in name for x in left_out)}
    rows = {row["candidate"]: row for row in measure(dataclasses.replace(group, builders=builders), CPU, 1, 1e9)}
    assert set(rows) == set(builders) - set(group.shortened.values())
    for name, row in rows.items():
        assert (row["section"], row["dtype"], row["task"]) == (section, group.dtype, group.task)
        assert ("of_bandwidth" in row) == (name in group.moved)


def test_what_a_prompt_takes_is_subtracted(spend):
    group = next(SECTIONS["decoding"](SMALLEST))
    builders = {
        "GPT-2": lambda device: lambda: spend(3.0),
        "GPT-2, first token": lambda device: lambda: spend(1.0),
    }
    asked = dataclasses.replace(group, builders=builders, shortened={"GPT-2": "GPT-2, first token"})
    (row,) = measure(asked, CPU, 1, 1e9)
    assert row["seconds"] == pytest.approx(2.0)
    assert row["tokens_per_second"] == pytest.approx(group.items / 2.0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("no room"), {"skipped": "out of memory"}),
        (RuntimeError("no\nkernel"), {"failed": "RuntimeError: no kernel"}),
    ],
)
def test_what_cannot_be_measured_is_said_and_the_others_are_measured(error, said, spend):
    def build(device):
        raise error

    group = next(SECTIONS["images"](SMALLEST))
    builders = {"triton": build, "ViT": lambda device: lambda: spend(0.5)}
    rows = {row["candidate"]: row for row in measure(dataclasses.replace(group, builders=builders), CPU, 1, 1e9)}
    assert said.items() <= rows["triton"].items()
    assert rows["ViT"]["images_per_second"] == pytest.approx(group.items / 0.5)


def test_what_fits_once_alone_is_said_to_be_too_large(spend):
    """Such as a training step, after whose first call the optimizer has allocated its state."""
    calls = iter([1])

    def step() -> None:
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("no room")

    group = next(SECTIONS["images"](SMALLEST))
    builders = {"triton": lambda device: step, "ViT": lambda device: lambda: spend(0.5)}
    rows = {row["candidate"]: row for row in measure(dataclasses.replace(group, builders=builders), CPU, 1, 1e9)}
    assert rows["triton"]["skipped"] == "out of memory"
    assert rows["ViT"]["images_per_second"] == pytest.approx(group.items / 0.5)


def test_nothing_is_said_where_the_time_to_be_subtracted_is_missing(spend):
    def build(device):
        raise torch.OutOfMemoryError("no room")

    group = next(SECTIONS["decoding"](SMALLEST))
    builders = {"GPT-2": lambda device: lambda: spend(3.0), "GPT-2, first token": build}
    asked = dataclasses.replace(group, builders=builders, shortened={"GPT-2": "GPT-2, first token"})
    (row,) = [row for row in measure(asked, CPU, 1, 1e9) if row["candidate"] == "GPT-2"]
    assert row["skipped"] == "out of memory" and "tokens_per_second" not in row


def test_what_the_host_calls_is_no_kernel(monkeypatch):
    def event(name, device_type, count, is_user_annotation=False):
        return SimpleNamespace(key=name, device_type=device_type, count=count, is_user_annotation=is_user_annotation)

    events = [event("cudaLaunchKernel", DeviceType.CPU, 5), event("forward_kernel", DeviceType.CUDA, 3)]
    events += [event("Memcpy DtoD", DeviceType.CUDA, 2), event("Optimizer.step", DeviceType.CUDA, 1, True)]
    profile = nullcontext(SimpleNamespace(key_averages=lambda: events))
    monkeypatch.setattr("torch.profiler.profile", lambda **_: profile)
    assert count_kernels(lambda: None, CPU) == 5


@pytest.mark.parametrize("section", SECTIONS)
def test_the_kernels_are_asked_for_at_all_sizes_of_the_page(section):
    groups = list(SECTIONS[section](GpuSizes()))
    assert all(any("triton" in name for name in group.builders) for group in groups)
    assert {group.dtype for group in groups} == {"bf16", "fp32"}
    if section == "text":
        assert {f"T={2**i}" for i in (10, 12, 14, 16, 18)} <= {group.name for group in groups}
