"""Measure the perplexity beyond the training length, for types of AFT and BLOOM's ALiBi attention.

    python scripts/measure_lengths.py TEXT_FILE --out outputs/lengths.json

Every model has the same depth and width, reads bytes, and sees the same batches in the same order. The last tenth of
the file is the held-out set; a perplexity at length T is over its windows of T bytes, which do not overlap. Results
are written after each model, and models that the file of results already has are not trained again.
"""

import json
import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel, get_cosine_schedule_with_warmup, set_seed

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.data.json_files import write_json
from aft_hf.training import build_optimizer


TRAINED, TESTED = 128, (128, 256, 512, 1024, 2048)
HEADS, BATCH_SIZE, LEARNING_RATE = 8, 32, 2e-3


def build(name: str, width: int, layers: int) -> PreTrainedModel:
    """An untrained model of bytes."""
    set_seed(0)
    if name == "BLOOM (ALiBi attention)":
        config = BloomConfig(vocab_size=256, hidden_size=width, n_layer=layers, n_head=HEADS, use_cache=False)
        return BloomForCausalLM(config)
    config = AFTConfig(
        aft_type=name.removeprefix("AFT-"),
        hidden_size=width,
        num_hidden_layers=layers,
        num_heads=1 if name == "AFT-local" else HEADS,  # even so, most of its parameters are position biases
        kernel_size=32,
        window_size=32,
        position_bias_dim=64,
        max_position_embeddings=max(TESTED),
    )
    return AFTForCausalLM(config)


def train(model: PreTrainedModel, tokens: torch.Tensor, steps: int) -> float:
    """Train on random windows, and return the seconds."""
    optimizer = build_optimizer(model, LEARNING_RATE, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    generator = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    model.train()
    for _ in tqdm(range(steps), desc=type(model).__name__):
        starts = torch.randint(len(tokens) - TRAINED, (BATCH_SIZE,), generator=generator)
        batch = torch.stack([tokens[s : s + TRAINED] for s in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    """exp of the mean loss of every byte but the first of each window."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    total = sum(
        model(input_ids=batch, labels=batch, use_cache=False).loss.item() * len(batch)
        for batch in windows.split(max(1, 8192 // length))
    )
    return math.exp(total / len(windows))


def main(
    text: Annotated[Path, typer.Argument(help="Plain text file.")],
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("outputs/lengths.json"),
    steps: Annotated[int, typer.Option(help="Training steps.")] = 400,
    width: Annotated[int, typer.Option(help="Width d.")] = 128,
    layers: Annotated[int, typer.Option(help="Depth L.")] = 4,
) -> None:
    """Train at T = 128 and evaluate at 128 to 2048."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    held_out = tokens[len(tokens) * 9 // 10 :]
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in ("AFT-alibi", "AFT-conv", "AFT-local", "BLOOM (ALiBi attention)"):
        if name in results:
            continue
        model = build(name, width, layers)
        seconds = train(model, tokens[: len(tokens) * 9 // 10], steps)
        results[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": seconds,
            "perplexity": {length: perplexity(model, held_out, length) for length in TESTED},
        }
        write_json(out, results)
    table = Table("model", "parameters", *[f"T = {length}" for length in TESTED])
    for name, result in results.items():
        cells = [f"{result['perplexity'][key]:.2f}" for key in result["perplexity"]]
        table.add_row(name, f"{result['parameters'] / 1e6:.2f} M", *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
