"""What context parallelism costs: one training step on one long row, a piece of it in each process.

    torchrun --nproc-per-node 4 scripts/measure_context_parallel.py --tokens 1048576

Prints the loss, the size of the gradient, what each process gives to collectives in the forward and backward pass of
all layers, and the most memory that it took for them. With `--nproc-per-node 1` the same row is in one process.
"""

import resource
from collections import Counter
from typing import Annotated

import torch
import typer
from torch import distributed

from aft_hf import AFTConfig, AFTForCausalLM, context_parallel, local_piece


COLLECTIVES = ("all_gather", "all_to_all_single", "all_reduce")
sent: Counter[str] = Counter()


def count_bytes() -> None:
    """From now on, count what is given to collectives in `sent`."""
    for name in COLLECTIVES:
        setattr(distributed, name, counted(name, getattr(distributed, name)))


def counted(name: str, collective):
    def call(first, *arguments, **options):
        sent[name] += (first if name == "all_reduce" else arguments[0]).nbytes
        return collective(first, *arguments, **options)

    return call


def main(
    tokens: Annotated[int, typer.Option(help="tokens of the row")] = 65536,
    aft_type: Annotated[str, typer.Option(help="simple, alibi, conv or local")] = "alibi",
    hidden_size: int = 16,
    layers: int = 2,
    window: Annotated[int, typer.Option(help="of local and conv")] = 32,
) -> None:
    distributed.init_process_group("gloo")
    group, rank = distributed.group.WORLD, distributed.get_rank()
    torch.manual_seed(0)
    config = AFTConfig(
        aft_type=aft_type,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        position_bias_dim=8,
        local_window_size=window,
        conv_kernel_size=window,
        max_position_embeddings=tokens if aft_type == "local" else 1024,
        use_position_embeddings=aft_type == "local",
        vocab_size=16,
        initializer_range=0.3,
    )
    model = AFTForCausalLM(config)
    row = torch.randint(0, 16, (1, tokens), generator=torch.Generator().manual_seed(1))
    piece = local_piece(row, group)
    count_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with context_parallel(group):
        loss = model(input_ids=piece, labels=piece, use_cache=False).loss
    loss.backward()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    counts = dict(sent)
    size = sum(averaged(p, group).square().sum() for p in model.parameters()).sqrt()
    reports = [None] * group.size()
    distributed.all_gather_object(reports, (counts, taken))
    if rank == 0:
        print(f"{group.size()} processes, {tokens:,} tokens of {layers} {aft_type} layers with d = {hidden_size}")
        print(f"loss {float(loss.detach()):.7f}, size of the gradient {float(size):.7f}")
        for process, (counts, taken) in enumerate(reports):
            print(f"process {process}: sends {sum(counts.values()):,} bytes {counts}, takes {taken / 2**10:,.0f} MiB")
    distributed.barrier()  # none leaves while another still receives
    distributed.destroy_process_group()


def averaged(parameter: torch.nn.Parameter, group: distributed.ProcessGroup) -> torch.Tensor:
    """The gradient over all pieces."""
    gradient = parameter.grad.clone()
    distributed.all_reduce(gradient, group=group)
    return gradient / group.size()


if __name__ == "__main__":
    typer.run(main)
