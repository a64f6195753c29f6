"""Measure speed and peak memory of the models of a `Speed` arm in new processes."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from ..benchmarking.cases import Builder, model_builder
from ..benchmarking.measuring import keep_freed_memory, ratio, seconds_in_turns
from ..benchmarking.peak import peak_of_process
from .arms import ARMS, Speed


REPEATS = 5


def measure_speed(name: str, smoke: bool) -> dict[str, float]:
    """Measure a `Speed` arm.

    Returns:
        "speed_ratio", how many times faster ours is; "memory_ratio", our peak memory over that of the peer; and the
        seconds of the fastest call and the peak bytes of both.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds = _in_new_process(_seconds, name, smoke, device)
    peaks = {candidate: _in_new_process(_peak, name, smoke, device, candidate) for candidate in ("ours", "peer")}
    return {
        "speed_ratio": seconds["ratio"],
        "memory_ratio": peaks["ours"] / peaks["peer"],
        "seconds_ours": seconds["ours"],
        "seconds_peer": seconds["peer"],
        "bytes_ours": peaks["ours"],
        "bytes_peer": peaks["peer"],
    }


def _in_new_process(measure: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()


def _seconds(name: str, smoke: bool, device: str) -> dict[str, float]:
    """Seconds of the fastest call of each model, and "ratio", how many times faster ours is."""
    keep_freed_memory()
    place = torch.device(device)
    calls = {candidate: build(place) for candidate, build in builders(name, smoke).items()}
    seconds = seconds_in_turns(calls, place, repeats=1 if smoke else REPEATS)
    return {candidate: min(taken) for candidate, taken in seconds.items()} | {"ratio": ratio(seconds, "ours", "peer")}


def _peak(name: str, smoke: bool, device: str, candidate: str) -> int:
    return peak_of_process(builders(name, smoke)[candidate], torch.device(device))


def builders(name: str, smoke: bool) -> dict[str, Builder]:
    """The builders of both models of an arm."""
    found = ARMS[name]
    assert isinstance(found, Speed)
    arm: Speed = found
    kind: type[Any]
    kind = AutoModelForImageClassification if arm.length is None else AutoModelForCausalLM
    if smoke:
        tiny = {"num_hidden_layers": 1}
        length = None if arm.length is None else arm.length // 16
        arm = replace(arm, ours={**arm.ours, **tiny}, peer={**arm.peer, **tiny}, batch=1, length=length)

    def builder(fields: Mapping[str, Any]) -> Builder:
        return model_builder(lambda: _model(kind, fields), lambda: _inputs(arm), arm.task, torch.float32)

    return {"ours": builder(arm.ours), "peer": builder(arm.peer)}


def _model(kind: type[Any], fields: Mapping[str, Any]) -> PreTrainedModel:
    """An untrained model from the fields of its config."""
    fields = dict(fields)
    return kind.from_config(AutoConfig.for_model(fields.pop("architecture"), **fields))


def _inputs(arm: Speed) -> dict[str, torch.Tensor]:
    """Random tokens or pixels, with labels for a training step."""
    if arm.length is None:
        side = arm.ours.get("image_size", 224)
        return {"pixel_values": torch.randn(arm.batch, 3, side, side)}
    tokens = torch.randint(256, (arm.batch, arm.length))
    return {"input_ids": tokens, "labels": tokens}
