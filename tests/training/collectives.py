"""What tests of several processes share: whole results from pieces, exact ones, and counts of what is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from aft_hf import context_parallel


def whole(x: torch.Tensor, group: Any, dim: int = 1) -> torch.Tensor:
    """The pieces of all processes in one."""
    pieces = [None] * group.size()
    distributed.all_gather_object(pieces, x, group)
    return torch.cat(pieces, dim)


def averaged_gradients(model: torch.nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """By the names of the parameters, averages over the processes."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if group is not None:
        for gradient in gradients.values():
            distributed.all_reduce(gradient, group=group)
            gradient /= group.size()
    return gradients


def exact_outcome(outcome: Callable[..., Any], model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, float]:
    """The outcome in float64, and how exactly float32 knows it: exp(K) as exactly as K is rounded, when it is computed
    and when w is added, in each layer.
    """
    largest = []
    for layer in model.double().aft.layers:
        layer.mixer.k_proj.register_forward_hook(
            lambda module, given, key: largest.append(float(key.detach().abs().max()))
        )
    return outcome(model, inputs), sum(2 * key * 2**-24 for key in largest)


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Of all that is given to collectives within, the bytes by the name of the collective."""
    counts: dict[str, int] = {}
    originals = {name: getattr(distributed, name) for name in ("all_gather", "all_to_all_single", "all_reduce")}

    def counting(name: str) -> Any:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            given = first if name == "all_reduce" else arguments[0]
            counts[name] = counts.get(name, 0) + given.nbytes
            return originals[name](first, *arguments, **options)

        return call

    for name in originals:
        setattr(distributed, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)


def error_of(call: Callable[[Any], Any], group: Any) -> str:
    """The message of the ValueError of a call within `context_parallel`."""
    try:
        with context_parallel(group):
            call(group)
    except ValueError as error:
        return str(error)
    return ""
