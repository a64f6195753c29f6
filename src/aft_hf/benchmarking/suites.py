"""The suites of the benchmark."""

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .cases import DTYPES, FULL, Builder, Case, Sizes, model_builder, random_images, random_tokens
from .layers import mixer_cases
from .models import TextRow, VisionRow, without_mixing


def vision_cases(sizes: Sizes = FULL) -> Iterator[Case]:
    """Inference and training of the models of Tables 7 and 8, compared with ViT."""
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
    for of_paper, required in rows.items():
        row = replace(of_paper, num_layers=sizes.vision_layers)
        batch = min(sizes.largest_batch, {224: 32, 384: 4, 1024: 1}[row.image_size])
        for task in ("inference", "training"):
            if task == "training" and row.image_size == 1024:
                continue
            inputs = random_images(batch, row.image_size, task)
            for (dtype_name, dtype), ratio in zip(DTYPES.items(), required):
                builders = {
                    "ours": model_builder(row.aft, inputs, task, dtype),
                    "peer": model_builder(row.vit, inputs, task, dtype),
                    "floor": model_builder(partial(_floor, row.aft), inputs, task, dtype),
                }
                yield Case(
                    f"{row.name} {task} {dtype_name}",
                    "vision",
                    task,
                    dtype_name,
                    batch,
                    "images",
                    builders,
                    peer="ViT",
                    required={"peer": ratio} if task == "inference" else {},
                    required_memory={"peer": 1.0},
                )
    row, batch = VisionRow("tiny", "conv", 11, 32, num_layers=sizes.vision_layers), min(sizes.largest_batch, 32)
    inputs = random_images(batch, row.image_size, "inference")
    builders = _compiled_builders(row.aft, row.vit, inputs, "inference")
    name = f"{row.name} inference fp32 compiled"
    yield Case(name, "vision", "inference", "fp32", batch, "images", builders, peer="ViT compiled", peaks=())


def _floor(make: Callable[..., PreTrainedModel], *arguments: int) -> PreTrainedModel:
    """The same model without mixing."""
    return without_mixing(make(*arguments))


def _compiled_builders(
    ours: Callable[[], PreTrainedModel],
    peer: Callable[[], PreTrainedModel],
    inputs: Callable[[], dict[str, torch.Tensor]],
    task: str,
) -> dict[str, Builder]:
    """Both models compiled, and ours not compiled."""
    return {
        "ours": model_builder(ours, inputs, task, torch.float32, compiled=True),
        "peer": model_builder(peer, inputs, task, torch.float32, compiled=True),
        "ours not compiled": model_builder(ours, inputs, task, torch.float32),
    }


# Required training speed relative to GPT-2, for each length.
CAUSAL_REQUIRED = {"local": (1.25, 2.0, 5.0), "simple": (1.3, 2.2, 6.0), "alibi": (1.3, 2.2, 6.0), "conv": ()}


def causal_cases(sizes: Sizes = FULL) -> Iterator[Case]:
    """Inference and training of language models, compared with GPT-2 and with the same model without mixing."""
    for i in range(len(sizes.lengths)):
        for task in ("inference", "training"):
            for dtype_name in DTYPES:
                yield from _causal_cases_of(sizes, i, task, dtype_name)
    yield from _other_causal_cases(sizes)


def _causal_cases_of(sizes: Sizes, i: int, task: str, dtype_name: str) -> Iterator[Case]:
    """All types of AFT at the i-th length, which share one GPT-2."""
    length = sizes.lengths[i]
    batch = max(1, sizes.lengths[1] // length)
    inputs = random_tokens(batch, length, task)

    def builder(make: Callable[[], PreTrainedModel]) -> Builder:
        return model_builder(make, inputs, task, DTYPES[dtype_name])

    rows = {name: TextRow(name, sizes.text_layers, sizes.text_width) for name in CAUSAL_REQUIRED}
    peer = builder(lambda: rows["simple"].gpt2(length))
    for aft_type, row in rows.items():
        # Required speed relative to the floor: 1 / 1.15 in inference, 1 / 1.20 in training.
        asked = {"floor": 1 / 1.15 if task == "inference" else 1 / 1.20}
        if task == "training" and CAUSAL_REQUIRED[aft_type]:
            asked["peer"] = CAUSAL_REQUIRED[aft_type][i]
        ours, floor = builder(partial(row.aft, length)), builder(partial(_floor, row.aft, length))
        yield Case(
            f"{row.name} T={length} {task} {dtype_name}",
            "causal",
            task,
            dtype_name,
            batch * length,
            "tokens",
            {"ours": ours, "peer": peer, "floor": floor},
            peer="GPT-2",
            required=asked,
            required_memory={"peer": 1.0} if (aft_type, task) == ("local", "training") else {},
        )


def _other_causal_cases(sizes: Sizes) -> Iterator[Case]:
    """AFT-local at the first length: compiled, and compared with other models of linear time."""
    row, length = TextRow("local", sizes.text_layers, sizes.text_width), sizes.lengths[0]
    batch, aft = sizes.lengths[1] // length, lambda: row.aft(length)
    builders = _compiled_builders(aft, lambda: row.gpt2(length), random_tokens(batch, length, "training"), "training")
    name, tokens = f"{row.name} T={length} training fp32 compiled", batch * length
    yield Case(name, "causal", "training", "fp32", tokens, "tokens", builders, peer="GPT-2 compiled", peaks=())
    inputs = random_tokens(1, length, "inference")
    for peer, make in {"Reformer": row.reformer, "RWKV": row.rwkv}.items():
        builders = {
            "ours": model_builder(aft, inputs, "inference", torch.float32),
            "peer": model_builder(partial(make, length), inputs, "inference", torch.float32),
        }
        name = f"{row.name} T={length} batch 1 inference fp32 beside {peer}"
        yield Case(name, "causal", "inference", "fp32", length, "tokens", builders, peer=peer)


def decode_cases(sizes: Sizes = FULL) -> Iterator[Case]:
    """One more token after a long text, compared with GPT-2 with its cache and with our model after a short text."""
    rows = [TextRow(name, sizes.text_layers, sizes.text_width) for name in ("simple", "alibi", "local", "conv")]
    longest, shortest = sizes.contexts[-1], sizes.contexts[0]
    for dtype_name in DTYPES:
        for batch in (1, 8):
            for context in sizes.contexts[: 3 if batch == 1 else 2]:
                peer = _decoding(rows[0].gpt2, context, batch, DTYPES[dtype_name])
                for row in rows:
                    yield _decode_case(
                        f"{row.name} after {context} batch {batch}",
                        dtype_name,
                        batch,
                        {"ours": _decoding(row.aft, context, batch, DTYPES[dtype_name]), "peer": peer},
                        peer="GPT-2",
                        required={"peer": 3.0} if context == sizes.contexts[1] else {},
                    )
        for row in rows:
            ours, short = (_decoding(row.aft, context, 1, DTYPES[dtype_name]) for context in (longest, shortest))
            yield _decode_case(
                f"{row.name} after {longest} against {shortest}",
                dtype_name,
                1,
                {"ours": ours, "peer": short},
                peer=f"itself after {shortest}",
                required={"peer": 1 / 1.05},
            )


def _decode_case(name: str, dtype_name: str, batch: int, builders: dict[str, Builder], **options: Any) -> Case:
    # No peak memory: the cache is what differs, and a row has its bytes.
    return Case(
        f"{name} decode {dtype_name}", "decode", "decode", dtype_name, batch, "tokens", builders, peaks=(), **options
    )


def _decoding(make: Callable[[int], PreTrainedModel], context: int, batch: int, dtype: torch.dtype) -> Builder:
    """Return a builder of a call that reads one more token after `context` tokens and returns the cache."""

    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make(context + 100).eval().to(device, dtype)  # with positions for the tokens of the calls
        with torch.inference_mode():
            cache = _fill(model, context, batch)
        token = torch.zeros(batch, 1, dtype=torch.long, device=device)

        def call() -> object:
            with torch.inference_mode():
                return model(token, cache=cache, use_cache=True).cache

        return call

    return build


def _fill(model: PreTrainedModel, context: int, batch: int) -> object:
    """A cache with `context` tokens: attention gets random keys and values, and AFT reads random tokens."""
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    cache = model(tokens, use_cache=True).cache
    if not isinstance(cache, DynamicCache):
        for piece in torch.randint(256, (batch, context - 1), device=model.device).split(1024, 1):
            cache = model(piece, cache=cache, use_cache=True, logits_to_keep=1).cache
        return cache
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None
        shape = (*layer.keys.shape[:2], context - 1, layer.keys.shape[-1])
        keys, values = (torch.randn(shape, dtype=layer.keys.dtype, device=layer.keys.device) for _ in range(2))
        layer.update(keys, values)
    return cache


def growth_cases(sizes: Sizes = FULL) -> Iterator[Case]:
    """Growth of time and memory: two blocks of each model at increasing lengths and image sizes."""
    for length in sizes.growth_lengths:
        for task in ("inference", "training"):
            types = ("local", "simple", "alibi")
            makes: dict[str, Callable[[int], PreTrainedModel]] = {
                f"AFT-{name}": TextRow(name, 2, sizes.text_width).aft for name in types
            }
            if length <= sizes.longest_gpt2:
                makes["GPT-2"] = TextRow("local", 2, sizes.text_width).gpt2
            builders = {
                name: model_builder(partial(make, length), random_tokens(1, length, task), task, torch.float32)
                for name, make in makes.items()
            }
            yield _growth_case(f"T={length}", task, length, "tokens", length, builders)
    for side in sizes.growth_sides:
        row, inputs = VisionRow("base", "conv", 25, 32, side, num_layers=2), random_images(1, side, "inference")
        builders = {
            name: model_builder(make, inputs, "inference", torch.float32)
            for name, make in {"AFT-conv base 25/32": row.aft, "ViT base": row.vit}.items()
        }
        yield _growth_case(f"{side} px", "inference", 1, "images", side, builders)


def _growth_case(what: str, task: str, items: int, unit: str, size: int, builders: dict[str, Builder]) -> Case:
    name = f"growth {what} {task}"
    return Case(name, "growth", task, "fp32", items, unit, builders, peaks=tuple(builders), size=size)


SUITES: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "vision": vision_cases,
    "causal": causal_cases,
    "decode": decode_cases,
    "mixer": mixer_cases,
    "growth": growth_cases,
}


def select_cases(suites: list[str], only: str | None, sizes: Sizes = FULL) -> list[Case]:
    """The cases of the suites ("all" for every one) whose names match a pattern.

    Raises:
        ValueError: a suite does not exist, or no case matches.
    """
    for name in suites:
        if name not in ("all", *SUITES):
            raise ValueError(f"unknown suite {name!r}: use {', '.join(SUITES)} or all")
    names = [name for name in SUITES if name in suites or "all" in suites]
    cases = [case for name in names for case in SUITES[name](sizes)]
    cases = [case for case in cases if only is None or fnmatch.fnmatchcase(case.name, only)]
    if not cases:
        raise ValueError(f"no case matches {only!r}")
    if sizes == FULL:
        return cases
    return [replace(case, required={}, required_memory={}) for case in cases]  # requirements are for full sizes only
