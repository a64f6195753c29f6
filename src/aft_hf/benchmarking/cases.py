"""The cases of the benchmark: for each a name, the candidates that take turns, and what is asked of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from .models import TextRow, VisionRow, without_mixing


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Candidates to be compared at one task.

    Attributes:
        name: unique.
        suite: "vision", "causal" or "decode".
        task: "inference", "training" or "decode".
        dtype: "fp32" or "bf16" (autocast in training, weights in inference).
        items: images or tokens in one call.
        builders: candidates by name, "ours" first; each makes what to call.
        required: for "peer" and "floor", how many times faster than that ours has to be; empty if nothing is asked.
    """

    name: str
    suite: str
    task: str
    dtype: str
    items: int
    builders: dict[str, Callable[[torch.device], Callable[[], object]]]
    required: dict[str, float]


def _inference(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    model.eval()

    def call() -> object:
        with torch.inference_mode():
            return model(**inputs)

    return call


def _training(model: PreTrainedModel, inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> Callable[[], object]:
    """Forward, backward and an AdamW step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def call() -> None:
        with torch.autocast(inputs_device(inputs), dtype, enabled=dtype != torch.float32):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def inputs_device(inputs: dict[str, torch.Tensor]) -> str:
    """The type of device that the inputs are on."""
    return next(iter(inputs.values())).device.type


def _builder(
    make: Callable[[], PreTrainedModel], inputs: Callable[[], dict[str, torch.Tensor]], task: str, dtype: torch.dtype
) -> Callable[[torch.device], Callable[[], object]]:
    """Makes a model on a device and what one call of it is."""

    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make().to(device)
        batch = {name: x.to(device) for name, x in inputs().items()}
        if task == "training":
            return _training(model, batch, dtype)
        batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return _inference(model.to(dtype), batch)

    return build


def vision_cases() -> Iterator[Case]:
    """Inference and training of the rows of Tables 7 and 8 beside ViT."""
    rows = {
        VisionRow("tiny", "conv", 11, 32): (1.10, 1.03),
        VisionRow("small", "conv", 11, 16): (1.10, 1.03),
        VisionRow("small", "conv", 11, 384): (1.03, 0.95),
        VisionRow("small", "conv", 15, 384): (1.03, 0.95),
        VisionRow("tiny", "full"): (1.03, 0.95),
        VisionRow("small", "full"): (1.03, 0.95),
        VisionRow("base", "conv", 25, 32, 384): (1.20, 1.10),
        VisionRow("base", "conv", 25, 32, 1024): (1.8, 1.8),
    }
    for row, required in rows.items():
        batch = {224: 32, 384: 4, 1024: 1}[row.image_size]

        def inputs(batch: int = batch, side: int = row.image_size, task: str = "inference") -> dict:
            pixels = {"pixel_values": torch.randn(batch, 3, side, side)}
            return pixels | ({"labels": torch.randint(1000, (batch,))} if task == "training" else {})

        for task in ("inference", "training"):
            if task == "training" and row.image_size == 1024:
                continue
            for (dtype_name, dtype), ratio in zip(DTYPES.items(), required):
                make_inputs = lambda task=task, inputs=inputs: inputs(task=task)  # noqa: E731
                builders = {
                    "ours": _builder(row.aft, make_inputs, task, dtype),
                    "peer": _builder(row.vit, make_inputs, task, dtype),
                    "floor": _builder(lambda row=row: without_mixing(row.aft()), make_inputs, task, dtype),
                }
                asked = {"peer": ratio} if task == "inference" else {}
                yield Case(f"{row.name} {task} {dtype_name}", "vision", task, dtype_name, batch, builders, asked)


# Training tokens per second against GPT-2 at each length.
CAUSAL_REQUIRED = {"local": (1.25, 2.0, 5.0), "simple": (1.3, 2.2, 6.0), "alibi": (1.3, 2.2, 6.0), "conv": ()}
CAUSAL_LENGTHS = (1024, 4096, 16384)


def causal_cases() -> Iterator[Case]:
    """Forward and training step of language models beside GPT-2, and over the same model without mixing."""
    for aft_type, required in CAUSAL_REQUIRED.items():
        row = TextRow(aft_type)
        for i, length in enumerate(CAUSAL_LENGTHS):
            batch = max(1, 4096 // length)
            for task in ("inference", "training"):
                for dtype_name, dtype in DTYPES.items():

                    def inputs(batch: int = batch, length: int = length, task: str = task) -> dict:
                        tokens = {"input_ids": torch.randint(256, (batch, length))}
                        return tokens | ({"labels": tokens["input_ids"]} if task == "training" else {})

                    def aft(row: TextRow = row, length: int = length) -> PreTrainedModel:
                        model = row.aft(length)
                        model.config.use_cache = False
                        return model

                    def gpt2(row: TextRow = row, length: int = length) -> PreTrainedModel:
                        model = row.gpt2(length)
                        model.config.use_cache = False
                        return model

                    builders = {
                        "ours": _builder(aft, inputs, task, dtype),
                        "peer": _builder(gpt2, inputs, task, dtype),
                        "floor": _builder(lambda aft=aft: without_mixing(aft()), inputs, task, dtype),
                    }
                    # Over the floor: 1 / 1.15 forward, 1 / 1.20 for a training step.
                    asked = {"floor": 1 / 1.15 if task == "inference" else 1 / 1.20}
                    if task == "training" and required:
                        asked["peer"] = required[i]
                    name = f"{row.name} T={length} {task} {dtype_name}"
                    yield Case(name, "causal", task, dtype_name, batch * length, builders, asked)


def _fill(model: PreTrainedModel, context: int, batch: int) -> object:
    """A cache as after `context` tokens: what keeps all keys and values gets random ones, sums are what they are."""
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    cache = model(tokens, use_cache=True).past_key_values
    if not isinstance(cache, DynamicCache):
        for piece in torch.randint(256, (batch, context - 1), device=model.device).split(1024, 1):
            cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        return cache
    for layer in cache.layers:
        shape = (*layer.keys.shape[:2], context - 1, layer.keys.shape[-1])
        layer.update(*(torch.randn(shape, dtype=layer.keys.dtype, device=layer.keys.device) for _ in range(2)))
    return cache


def _decoding(
    make: Callable[[], PreTrainedModel], context: int, batch: int, dtype: torch.dtype
) -> Callable[[torch.device], Callable[[], object]]:
    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make().to(device, dtype).eval()
        with torch.inference_mode():
            cache = _fill(model, context, batch)
        token = torch.zeros(batch, 1, dtype=torch.long, device=device)

        def call() -> None:
            with torch.inference_mode():
                model(token, past_key_values=cache, use_cache=True)

        return call

    return build


DECODE_CONTEXTS = (1024, 4096, 65536)


def decode_cases() -> Iterator[Case]:
    """One more token after a long text, beside GPT-2 with its cache."""
    for aft_type in ("simple", "alibi", "local", "conv"):
        row = TextRow(aft_type)
        for batch in (1, 8):
            for context in DECODE_CONTEXTS[: 3 if batch == 1 else 2]:
                for dtype_name, dtype in DTYPES.items():
                    room = context + 100
                    builders = {
                        "ours": _decoding(lambda row=row, room=room: row.aft(room), context, batch, dtype),
                        "peer": _decoding(lambda row=row, room=room: row.gpt2(room), context, batch, dtype),
                    }
                    name = f"{row.name} after {context} batch {batch} decode {dtype_name}"
                    asked = {"peer": 3.0} if context == 4096 else {}
                    yield Case(name, "decode", "decode", dtype_name, batch, builders, asked)


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "vision": vision_cases,
    "causal": causal_cases,
    "decode": decode_cases,
}
