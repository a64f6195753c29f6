"""Measure the cost of large keys: the time of a mixer with keys of size 30 and 90 over its time with keys of size 1.

    python scripts/measure_large_keys.py            # mixers alone
    python scripts/measure_large_keys.py --layers   # layers of a model: the mixer, the MLP and the norms

The size of keys is their standard deviation. Prints a Markdown table. The calls that are compared run in turns in one
process, which keeps freed memory; ratios are medians over the turns.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import nn

from aft_hf import AFTAlibi, AFTConfig, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.benchmarking.measuring import keep_freed_memory, ratio, seconds_in_turns
from aft_hf.modeling_aft import AFTLayer


SIZES = (1, 30, 90)

# Name: the mixer, and the shape of its input.
MIXERS = {
    "full, causal": (lambda: AFTFull(256, 512, causal=True), (8, 512, 256)),
    "full, 196 patches": (lambda: AFTFull(192, 196), (32, 196, 192)),
    "local, causal": (lambda: AFTLocal(256, 1024, 32, causal=True), (8, 1024, 256)),
    "local, causal, window alone": (
        lambda: AFTLocal(256, 1024, 32, causal=True, global_connectivity=False),
        (8, 1024, 256),
    ),
    "local, bidirectional": (lambda: AFTLocal(256, 1024, 32), (8, 1024, 256)),
    "simple, causal": (lambda: AFTSimple(256, causal=True), (8, 1024, 256)),
    "simple, bidirectional": (lambda: AFTSimple(256), (8, 1024, 256)),
    "alibi": (lambda: AFTAlibi(256, 8), (8, 1024, 256)),
    "conv, causal": (lambda: AFTConv(256, 8, 32, spatial_dims=1, causal=True), (8, 1024, 256)),
    "conv 11/16, 196 patches": (lambda: AFTConv(384, 16, 11), (32, 196, 384)),
    "conv 11/384, 196 patches": (lambda: AFTConv(384, 384, 11), (32, 196, 384)),
}


def calls(name: str, dtype: torch.dtype, training: bool, layers: bool) -> list[Callable[[], object]]:
    """Calls of a mixer, or of a layer with it, with keys of each size, without arguments."""
    build, shape = MIXERS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    modules = []
    for size in SIZES:
        torch.manual_seed(0)
        mixer = build().to(dtype)
        with torch.no_grad():
            keys = mixer.k_proj(x).float().std()
            mixer.k_proj.weight.mul_(size / keys)
            mixer.k_proj.bias.zero_()
        modules.append(layer_with(mixer, shape[-1]).to(dtype) if layers else mixer)

    def train(module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    @torch.no_grad()
    def infer(module: nn.Module) -> None:
        module(x)

    return [lambda module=module: (train if training else infer)(module) for module in modules]


def layer_with(mixer: nn.Module, hidden_size: int) -> nn.Module:
    """A layer of a model with this mixer. Its first norm leaves normal inputs as they are, and so the size of keys."""
    layer = AFTLayer(AFTConfig(hidden_size=hidden_size), 0)
    layer.mixer = mixer
    return layer


def measure(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """The time of each function over that of the first one."""
    seconds = seconds_in_turns(dict(enumerate(functions)), torch.device("cpu"), repeats=repeats)
    return [ratio(seconds, 0, name) for name in seconds]


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each row.")] = 9,
    only: Annotated[str, typer.Option(help="Measure only mixers whose name contains this.")] = "",
    layers: Annotated[bool, typer.Option("--layers", help="Measure layers of a model instead of mixers.")] = False,
) -> None:
    keep_freed_memory()
    print(
        f"| {'layer' if layers else 'mixer'} | | "
        + " | ".join(f"{dtype} x{size}" for dtype in ("float32", "bfloat16") for size in SIZES[1:])
        + " |"
    )
    print("|---|---|" + "---:|" * 4)
    for name in MIXERS:
        if only not in name:
            continue
        for training in (False, True):
            row = []
            for dtype in (torch.float32, torch.bfloat16):
                row += measure(calls(name, dtype, training, layers), repeats)[1:]
            task = "training" if training else "inference"
            print(f"| {name} | {task} | " + " | ".join(f"{ratio:.2f}" for ratio in row) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
