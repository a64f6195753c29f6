"""Measure the cache and the weights of models that generate, and write the table of docs/generation.md.

    python -m scripts.measure_generation

The models have 24 layers of width 256 and random weights, in float32. The records are in docs/generation.json.
"""

from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.atomic_files import write_atomic
from scripts.benchmark.cases import fill_cache, versions
from scripts.benchmark.page import write_records


PAGE = Path(__file__).parents[1] / "docs" / "generation.md"
BEGIN, END = "<!-- table: written by scripts/measure_generation.py -->", "<!-- end of the table -->"
CONTEXTS = (512, 1024)
TYPES = ("simple", "alibi", "local", "conv", "full")
SIZES = {"layers": 24, "width": 256}
MIB = 2**20


def build(name: str, context: int) -> PreTrainedModel:
    """A model whose position tables, if it has any, are as long as the context."""
    if name == "GPT-2":
        sizes = {"n_embd": SIZES["width"], "n_layer": SIZES["layers"], "n_head": 4, "n_positions": context}
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=256, bos_token_id=None, eos_token_id=None)).eval()
    fields: dict[str, Any] = {"num_heads": 8} if name in ("alibi", "conv") else {}
    fields |= {"aft_type": name, "kernel_size": 32, "hidden_size": SIZES["width"]}
    fields |= {"num_hidden_layers": SIZES["layers"]}
    return AFTForCausalLM(AFTConfig(max_position_embeddings=context, **fields)).eval()


def measure(name: str, context: int) -> dict[str, Any]:
    """The record of a model after a context."""
    model = build(name, context)
    sizes = {"weights": 4 * model.num_parameters(), "cache": cache_bytes(fill_cache(model, context))}
    return {"model": name, "context": context, "bytes": sizes, "versions": versions()}


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache of an AFT or of attention."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def table(records: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    bytes_of = {(x["model"], x["context"]): x["bytes"] for x in records}
    columns = [f"{what}, MiB, {n:,} tokens" for what in ("cache", "weights") for n in CONTEXTS]
    lines = [f"| model | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name in dict.fromkeys(x["model"] for x in records):
        cells = [f"{bytes_of[name, n]['cache'] / MIB:.2f}" for n in CONTEXTS]
        cells += [f"{bytes_of[name, n]['weights'] / MIB:.0f}" for n in CONTEXTS]
        lines.append(f"| {'' if name == 'GPT-2' else 'AFT-'}{name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    records = [measure(name, context) for name in (*TYPES, "GPT-2") for context in CONTEXTS]
    write_records(PAGE.with_suffix(".json"), records)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    with write_atomic(PAGE) as file:
        file.write(f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{rest.partition(END)[2]}".encode())


if __name__ == "__main__":
    main()
