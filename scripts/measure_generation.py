"""Measure the bytes of the cache and the time per token after long contexts, compared with GPT-2.

    python scripts/measure_generation.py --out outputs/generation.json

All models have 24 layers of width 256 and random weights, which affect neither bytes nor time. Random tokens are read
in chunks until the cache holds the context. A cache that keeps every key and value is filled with random ones instead,
because reading 64k tokens into it would take hours. Then single tokens of all models are timed in turns, so that other
load on the machine affects all of them.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.benchmarking.measuring import state_bytes
from aft_hf.data.json_files import write_json


LAYERS, WIDTH, PIECE = 24, 256, 512
TYPES = ("simple", "alibi", "local", "conv", "full")


def build(name: str, longest: int) -> PreTrainedModel:
    """An untrained model of bytes for sequences of up to `longest` tokens."""
    torch.manual_seed(0)
    if name == "GPT-2":
        config = GPT2Config(vocab_size=256, n_positions=longest, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
        return GPT2LMHeadModel(config).eval()
    config = AFTConfig(
        aft_type=name.removeprefix("AFT-"),
        num_heads=8 if name in ("AFT-alibi", "AFT-conv") else 1,
        kernel_size=32,
        position_bias_dim=64,
        max_position_embeddings=longest,
    )
    return AFTForCausalLM(config).eval()


@torch.inference_mode()
def fill(model: PreTrainedModel, context: int):
    """The cache after `context` random tokens."""
    if isinstance(model, GPT2LMHeadModel) or model.config.aft_type == "full":
        cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).cache
        for layer in cache.layers:
            shape = (*layer.keys.shape[:2], context - 1, layer.keys.shape[-1])
            layer.update(torch.randn(shape), torch.randn(shape))
        return cache
    cache = None
    for piece in torch.randint(0, 256, (1, context)).split(PIECE, 1):
        cache = model(piece, cache=cache, use_cache=True, logits_to_keep=1).cache
    return cache


@torch.inference_mode()
def step(model: PreTrainedModel, cache) -> float:
    """Seconds for one more token."""
    token = torch.randint(0, 256, (1, 1))
    started = time.perf_counter()
    model(token, cache=cache, use_cache=True)
    return time.perf_counter() - started


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("outputs/generation.json"),
    contexts: Annotated[list[int], typer.Option(help="Tokens before the timed token.")] = [1024, 16384, 65536],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Timed tokens for each model and context.")] = 15,
) -> None:
    """Measure cache bytes per sequence and time per token."""
    names = [*(f"AFT-{aft_type}" for aft_type in TYPES), "GPT-2"]
    results: dict[str, dict[str, dict]] = {name: {} for name in names}
    for context in contexts:
        models = {name: build(name, context + 2 * repeats) for name in names}
        caches = {name: fill(models[name], context) for name in tqdm(names, desc=f"{context} tokens")}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        sizes = {name: state_bytes(cache) for name, cache in caches.items()}
        for _ in range(repeats):
            for name in names:
                seconds[name].append(step(models[name], caches[name]))
        for name in names:
            median = statistics.median(seconds[name][2:])
            results[name][str(context)] = {"bytes": sizes[name], "milliseconds": 1e3 * median}
        write_json(out, results)
    table = Table("model", *[f"state after {c}" for c in contexts], *[f"ms / token at {c}" for c in contexts])
    for name, result in results.items():
        sizes = [f"{result[str(c)]['bytes'] / 2**20:.2f} MiB" for c in contexts]
        table.add_row(name, *sizes, *[f"{result[str(c)]['milliseconds']:.1f}" for c in contexts])
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
