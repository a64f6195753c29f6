"""Measure the speed and memory of a `Speed` arm: the models take turns; peak memory in new processes."""

import statistics
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from aft_hf.benchmarking import ON_GPU, Call, keep_freed_memory, model_call, seconds_in_turns
from aft_hf.mixing_aft import Mixing, mix
from aft_hf.position_biases_aft import NoBias

from ..benchmark.memory import in_new_process, peak_bytes
from .arms import SPEEDS, Speed, Widths
from .baselines import causal_linear_attention


TURNS = 9


def measure_speed(name: str, smoke: bool) -> dict[str, Any]:
    """Measure a `Speed` arm.

    Returns:
        "speed_ratio", how many times faster ours is (the median over turns), and "speed_turns", that of each turn;
        "memory_ratio", our peak memory over that of the peer, without weights; and the median seconds and peak bytes
        of both.
    """
    seconds = in_new_process(_seconds, name, smoke)
    turns = [peer / ours for ours, peer in zip(seconds["ours"], seconds["peer"])]
    record: dict[str, Any] = {"speed_ratio": statistics.median(turns), "speed_turns": [round(x, 4) for x in turns]}
    for candidate in ("ours", "peer"):
        record[f"seconds_{candidate}"] = statistics.median(seconds[candidate])
        record[f"bytes_{candidate}"] = in_new_process(_peak, name, candidate, smoke)
    return record | {"memory_ratio": record["bytes_ours"] / record["bytes_peer"]}


def _seconds(name: str, smoke: bool) -> dict[str, list[float]]:
    keep_freed_memory()
    return seconds_in_turns({x: _call(SPEEDS[name], x, smoke) for x in ("ours", "peer")}, 1 if smoke else TURNS)


def _peak(name: str, candidate: str, smoke: bool) -> int:
    return peak_bytes(_call(SPEEDS[name], candidate, smoke))


def _call(arm: Speed, candidate: str, smoke: bool) -> Call:
    """Build a model of an arm, and a call of it on random tokens or images."""
    torch.manual_seed(0)
    fields: dict[str, Any] = dict(arm.ours if candidate == "ours" else arm.peer)
    if smoke:
        fields["num_hidden_layers"] = 1
    side, length = fields.get("image_size", 224), (arm.length or 0) // (16 if smoke else 1)
    kind = AutoModelForCausalLM if arm.length else AutoModelForImageClassification
    model = kind.from_config(AutoConfig.for_model(fields.pop("architecture"), **fields))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    batch = 1 if smoke else arm.batch
    inputs = {"input_ids": torch.randint(256, (batch, length))} if length else {}
    inputs = inputs or {"pixel_values": torch.randn(batch, 3, side, side)}
    inputs = {key: x.to(model.device) for key, x in inputs.items()}
    return model_call(model, inputs, arm.task == "training", bf16=False)


OPERATIONS = ("AFT-simple", "linear attention, one head", "linear attention, heads of 64", "projections of either")


@torch.inference_mode()
def measure_widths(arm: Widths, smoke: bool) -> dict[str, Any]:
    """Seconds (of the fastest turn) of each of `OPERATIONS`, by width; the projections are four linear layers."""
    seconds_of: dict[str, Any] = {name: [] for name in OPERATIONS}
    for width in arm.widths[: 2 if smoke else None]:
        shape = (1, arm.length, width)
        query, key, value = torch.rand(3, *shape, device="cuda" if ON_GPU else "cpu")
        weight = torch.randn(width, width, device=key.device)
        bias = NoBias(1, key)

        def attention(heads: int, *tensors: torch.Tensor) -> torch.Tensor:
            return causal_linear_attention(*(x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in tensors))

        tensors, heads = (query, key, value), max(1, width // 64)
        calls: list[Call] = [
            partial(mix, Mixing(key, value, 1, bias, causal=True, query=query)),
            partial(attention, 1, *tensors),
            partial(attention, heads, *tensors),
            lambda x=query, w=weight: [x @ w for _ in range(4)],  # type: ignore[misc]
        ]
        taken = seconds_in_turns(dict(zip(OPERATIONS, calls)), 1 if smoke else TURNS)
        for name, seconds in taken.items():
            seconds_of[name].append(float(f"{min(seconds):.4g}"))
    return seconds_of
