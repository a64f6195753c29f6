"""An exponential moving average (EMA) of the weights, kept in the state of their optimizer.

Every strategy that saves, loads and shards the moments of AdamW therefore does the same with the average. (The
`AveragedModel` of `torch.optim.swa_utils` is a second model, which checkpoints of Trainer and Accelerate leave out.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Register a hook that updates an average of the parameters after every step of an optimizer.

    Args:
        optimizer: an optimizer with a state for each parameter, such as AdamW.
        decay: the weight of the previous average in each update, in (0, 1).

    Raises:
        ValueError: `decay` is out of range.
    """
    if not 0 < decay < 1:
        raise ValueError(f"the decay of an average of weights must be in (0, 1), got {decay}")

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in _parameters(optimizer):
            state = optimizer.state[parameter]
            if "average" not in state:
                state["average"] = parameter.detach().clone()
            state["average"].lerp_(parameter.detach(), 1 - decay)

    optimizer.register_step_post_hook(update)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """Replace the parameters of the model by their averages within the context.

    Parameters without an average, such as all of them before the first step, stay unchanged.
    """
    swap_average(optimizer, model)
    try:
        yield
    finally:
        swap_average(optimizer, model)


@torch.no_grad()
def swap_average(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Exchange the parameters with their averages; parameters without an average stay unchanged."""
    for parameter in _parameters(optimizer):
        average = optimizer.state[parameter].get("average")
        if average is not None:
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
    # FSDP keeps some gathered weights from one forward pass to the next: resharding makes it gather the new ones.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in optimizer.state
    )
