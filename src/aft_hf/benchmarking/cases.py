"""A case of the benchmark: the candidates that take turns, and what is asked of ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Builder = Callable[[torch.device], Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Candidates to be compared at one task.

    Attributes:
        name: unique.
        suite: its name in `SUITES`.
        task: "inference", "training" or "decode".
        dtype: "fp32" or "bf16" (autocast in training, weights in inference).
        items, unit: how many images or tokens one call takes.
        builders: candidates by name, each makes what to call. "ours" comes first and "peer" second, except in a case
            of the suite `growth`, which has models by their names. Neighbours with the same builder of a peer are
            measured together, and what they share is measured once.
        peer: what the peer is, for people.
        required: for "peer" and "floor", how many times faster than that ours has to be; empty if nothing is asked.
        required_memory: for "peer", how many times its peak memory ours may take; likewise.
        peaks: the candidates whose peak memory is measured.
        package: what has to be installed for the peer, if transformers does not have it.
        size: tokens, or pixels of the side, that the case grows with.
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
    """How large the cases are; by default as the requirements are stated."""

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
# To see in minutes that every case runs; the numbers say nothing.
SMOKE = Sizes(1, 1, 2, 64, (64, 128, 256), (8, 16, 64), 64, (32, 64, 128, 256, 512), 256, (224, 256, 320))


def model_builder(
    make: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, torch.Tensor]],
    task: str,
    dtype: torch.dtype,
    compiled: bool = False,
) -> Builder:
    """Makes a model on a device, and what one call of it is: a forward pass or a training step."""

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
    """Makes the inputs of an image classifier; for training with labels of 1,000 classes."""

    def inputs() -> dict[str, torch.Tensor]:
        pixels = {"pixel_values": torch.randn(batch, 3, side, side)}
        return pixels | ({"labels": torch.randint(1000, (batch,))} if task == "training" else {})

    return inputs


def random_tokens(batch: int, length: int, task: str) -> Callable[[], dict[str, torch.Tensor]]:
    """Makes the inputs of a language model of bytes; for training with labels."""

    def inputs() -> dict[str, torch.Tensor]:
        tokens = torch.randint(256, (batch, length))
        return {"input_ids": tokens} | ({"labels": tokens} if task == "training" else {})

    return inputs


def layer_builder(make: Callable[[], nn.Module], shape: tuple[int, ...], task: str) -> Builder:
    """Makes a layer in fp32, and what one call of it is; a training step has gradients of the inputs, too."""

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
    """Forward, backward and an AdamW step, fused as Trainer has it."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
