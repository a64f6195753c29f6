"""Measure the cost of context parallelism: a training step on one long row, or a forward pass of a large image.

    torchrun --nproc-per-node 4 scripts/measure_context_parallel.py --tokens 1048576
    torchrun --nproc-per-node 4 scripts/measure_context_parallel.py --image-side 4096

Each process has a shard of the row or image. Prints the loss and the norm of the gradient (for an image the logits,
without gradients), and for each process the bytes and calls of its collectives in all layers, the seconds, and its
peak memory. With `--nproc-per-node 1` everything is in one process.
"""

import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import distributed

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, context_parallel, local_shard


COLLECTIVES = ("all_gather", "all_to_all_single", "all_reduce")
PATCH = 16


class Record:
    """Context manager that records the calls of collectives and their bytes."""

    def __init__(self):
        self.bytes, self.calls = Counter(), Counter()
        self._collectives = {name: getattr(distributed, name) for name in COLLECTIVES}

    def __enter__(self) -> "Record":
        for name, collective in self._collectives.items():
            setattr(distributed, name, partial(self._call, name, collective))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, collective in self._collectives.items():
            setattr(distributed, name, collective)

    def _call(self, name: str, collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.bytes[name] += arguments[name != "all_reduce"].nbytes
        self.calls[name] += 1
        return collective(*arguments, **options)


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the row.")] = 65536,
    image_side: Annotated[int, typer.Option(help="Side in pixels of a square image, in place of the row.")] = 0,
    aft_type: Annotated[str, typer.Option(help="simple, alibi, conv or local; for images always conv.")] = "alibi",
    hidden_size: int = 16,
    layers: int = 2,
    window: Annotated[int, typer.Option(help="Window of local, kernel size of conv; for images always 11.")] = 32,
) -> None:
    distributed.init_process_group("gloo")
    group = distributed.group.WORLD
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "initializer_range": 0.3}
    if image_side:
        what, run = f"an image of {image_side} x {image_side} pixels", image_pass(image_side, sizes, group)
    else:
        what, run = f"{tokens:,} tokens of {aft_type}", text_step(tokens, aft_type, window, sizes, group)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Record() as record:
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    report = f"{sum(record.bytes.values()):,} bytes in {sum(record.calls.values())} calls {dict(record.bytes)}, "
    report += f"{seconds:.1f} s, peak memory {memory:,.0f} MiB"
    reports = [None] * group.size()
    distributed.all_gather_object(reports, report)
    measured = result()
    if distributed.get_rank() == 0:
        print(f"{group.size()} processes, {what}, {layers} layers with d = {hidden_size}: {measured}")
        for process, line in enumerate(reports):
            print(f"process {process}: {line}")
    distributed.barrier()  # no process exits while another still receives
    distributed.destroy_process_group()


def text_step(tokens: int, aft_type: str, window: int, sizes: dict[str, Any], group: Any) -> Callable[[], Any]:
    """Return a forward and backward pass, which returns a function that describes its results."""
    config = AFTConfig(
        aft_type=aft_type,
        position_bias_dim=8,
        window_size=window,
        kernel_size=window,
        max_position_embeddings=tokens if aft_type == "local" else 1024,
        use_position_embeddings=aft_type == "local",
        vocab_size=16,
        **sizes,
    )
    model = AFTForCausalLM(config)
    row = torch.randint(0, 16, (1, tokens), generator=torch.Generator().manual_seed(1))
    shard = local_shard(row, group)

    def run() -> Callable[[], str]:
        with context_parallel(model, group):
            loss = model(input_ids=shard, labels=shard, use_cache=False).loss
        loss.backward()
        return lambda: f"loss {float(loss.detach()):.7f}, norm of the gradient {size_of_gradient(model, group):.7f}"

    return run


def size_of_gradient(model: torch.nn.Module, group: Any) -> float:
    """The norm of the gradient over all shards."""
    total = 0.0
    for parameter in model.parameters():
        gradient = parameter.grad.clone()
        distributed.all_reduce(gradient, group=group)
        total += float((gradient / group.size()).square().sum())
    return total**0.5


def image_pass(side: int, sizes: dict[str, Any], group: Any) -> Callable[[], Any]:
    """As `text_step`, for a forward pass over an image. Each process makes its own rows of pixels."""
    config = AFTConfig(
        modality="image", aft_type="conv", num_heads=4, kernel_size=11, patch_size=PATCH, num_labels=3, **sizes
    )
    model = AFTForImageClassification(config).eval()
    for layer in model.aft.layers:
        torch.nn.init.ones_(layer.mixer.kernel_scale)
    rows = local_shard(torch.arange(side // PATCH), group, dim=0)
    makers = (torch.Generator().manual_seed(int(row)) for row in rows)
    pixels = torch.cat([torch.rand(1, 3, PATCH, side, generator=maker) for maker in makers], 2)

    @torch.no_grad()
    def run() -> Callable[[], str]:
        with context_parallel(model, group):
            logits = model(pixels).logits
        return lambda: "logits " + ", ".join(f"{x:.6f}" for x in logits[0].tolist())

    return run


if __name__ == "__main__":
    typer.run(main)
