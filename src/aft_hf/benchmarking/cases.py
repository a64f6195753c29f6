"""A case of the benchmark: candidates that take turns, and the requirements on ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Builder = Callable[[torch.device], Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Candidates that are compared at one task.

    Attributes:
        name: unique name of the case.
        suite: name of its suite in `SUITES`.
        task: "inference", "training" or "decode".
        dtype: "fp32" or "bf16" (autocast in training, weights in inference).
        items, unit: how many images or tokens one call processes.
        builders: the builder of each candidate by name. "ours" comes first and "peer" second, except in the suite
            `growth`, where the names are those of models. Consecutive cases with the same builder of the peer are
            measured together, and a candidate that they share is measured once.
        peer: name of the peer in tables.
        required: for "peer" and "floor", how many times faster than it ours has to be; empty without a requirement.
        required_memory: for "peer", the largest allowed ratio of our peak memory to its; empty without a requirement.
        peaks: the candidates whose peak memory is measured.
        package: the package that has to be installed for the peer, besides transformers.
        size: in the suite `growth`, the tokens or the pixels of a side.
    """

    name: str
    suite: str
    task: str
    dtype: str
    items: int
    unit: str
    builders: dict[str, Builder]
    peer: str = ""
    required: dict[str, float] = field(default_factory=dict)
    required_memory: dict[str, float] = field(default_factory=dict)
    peaks: tuple[str, ...] = ("ours", "peer")
    package: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases; the requirements are stated for the defaults."""

    vision_layers: int = 12
    largest_batch: int = 32
    text_layers: int = 24
    text_width: int = 256
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    contexts: tuple[int, ...] = (1024, 4096, 65536)
    mixer_length: int = 4096
    growth_lengths: tuple[int, ...] = tuple(1024 * 2**i for i in range(7))
    longest_gpt2: int = 16384
    growth_sides: tuple[int, ...] = (224, 384, 512, 768, 1024)


FULL = Sizes()
# Sizes at which every case runs within minutes, as a test; the numbers say nothing.
SMOKE = Sizes(1, 1, 2, 64, (64, 128, 256), (8, 16, 64), 64, (32, 64, 128, 256, 512), 256, (224, 256, 320))


def model_builder(
    make: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, torch.Tensor]],
    task: str,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Builder:
    """Return a builder that makes a model on a device and one call of it: a forward pass or a training step."""

    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make().to(device)
        batch = {name: x.to(device) for name, x in inputs().items()}
        if task == "inference":
            model = model.to(dtype)
            batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        run = torch.compile(model) if compiled else model
        if task == "inference":
            return _inference(model, lambda: run(**batch))
        return _training(model, lambda: run(**batch).loss, device, dtype)

    return build


def random_images(batch: int, side: int, task: str) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes the inputs of an image classifier, in training with labels of 1,000 classes."""

    def inputs() -> dict[str, torch.Tensor]:
        pixels = {"pixel_values": torch.randn(batch, 3, side, side)}
        return pixels | ({"labels": torch.randint(1000, (batch,))} if task == "training" else {})

    return inputs


def random_tokens(batch: int, length: int, task: str) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes the inputs of a language model of bytes, in training with labels."""

    def inputs() -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (batch, length))
        return {"input_ids": tokens} | ({"labels": tokens} if task == "training" else {})

    return inputs


def layer_builder(make: Callable[[], nn.Module], shape: tuple[int, ...], task: str) -> Builder:
    """Return a builder that makes a layer in fp32 and one call of it; training includes gradients of the inputs."""

    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        layer, x = make().to(device), torch.randn(shape, device=device)
        if task == "inference":
            return _inference(layer, lambda: layer(x))
        return _training(layer, lambda: layer(x.detach().requires_grad_()).mean(), device, torch.float32)

    return build


def _inference(model: nn.Module, forward: Callable[[], object]) -> Callable[[], object]:
    model.eval()

    def call() -> object:
        with torch.inference_mode():
            return forward()

    return call


def _training(
    model: nn.Module, loss: Callable[[], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """A training step: forward, backward and an AdamW step, fused as in Trainer."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
