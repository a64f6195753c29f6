"""Helpers for tests with several processes: gathered results, exact results, and counts of the bytes sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from aft_hf import context_parallel


def whole(x: torch.Tensor, group: Any, dim: int = 1) -> torch.Tensor:
    """Gather the shards of all processes and concatenate them."""
    shards = [None] * group.size()
    distributed.all_gather_object(shards, x, group)
    return torch.cat(shards, dim)


def averaged_gradients(model: torch.nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name, averaged over the processes."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if group is not None:
        for gradient in gradients.values():
            distributed.all_reduce(gradient, group=group)
            gradient /= group.size()
    return gradients


def exact_outcome(outcome: Callable[..., Any], model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, float]:
    """Return the outcome in float64, and the relative error to expect in float32.

    The relative error of exp(K) is the rounding error of K. In each layer K is rounded twice: when it is computed, and
    when w is added.
    """
    largest = []
    for layer in model.double().aft.layers:
        layer.mixer.k_proj.register_forward_hook(
            lambda module, given, key: largest.append(float(key.detach().abs().max()))
        )
    return outcome(model, inputs), sum(2 * key * 2**-24 for key in largest)


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that are passed to each collective within the context, by its name."""
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
    """Return the message of the ValueError that a call raises within `context_parallel`, "" if it raises none."""
    try:
        with context_parallel(group):
            call(group)
    except ValueError as error:
        return str(error)
    return ""
