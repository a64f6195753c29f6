"""AdamW with parameter groups for AFT models, and an exponential moving average (EMA) of the weights.

The average is kept in the state of the optimizer, so that it is saved, loaded and sharded like the moments of AdamW.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers.pytorch_utils import Conv1D

from ..mixers_aft import AFTMixer


def parameter_groups(
    model: nn.Module, learning_rate: float, *, weight_decay: float = 0.0, position_bias_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return parameter groups for any optimizer, with a separate learning rate for the position biases w.

    A new AFT-conv has w = 0 (Eq. 8: gamma = beta = 0), and Adam moves a parameter by about the learning rate in each
    step. In a short training, position biases grow to the order of 1 only with a larger learning rate than weights, by
    the factor `position_bias_scale`. A `position_bias_multiplier` in the config, as converted models have it, does
    the same. `weight_decay` is that of linear layers and convolutions, except weights shared with an embedding.
    """
    # The direct parameters of a mixer are those of w; its projections are submodules.
    mixers = (module for module in model.modules() if isinstance(module, AFTMixer))
    of_mixers = {id(parameter) for mixer in mixers for parameter in mixer.parameters(recurse=False)}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    linear -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "lr": learning_rate}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0, "lr": learning_rate}
    position_biases: dict[str, Any] = {"params": [], "weight_decay": 0.0, "lr": learning_rate * position_bias_scale}
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = position_biases if id(parameter) in of_mixers else decayed if id(parameter) in linear else plain
            group["params"].append(parameter)
    return [group for group in (decayed, plain, position_biases) if group["params"]]


def build_optimizer(
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    position_bias_scale: float = 1.0,
    **options: Any,
) -> torch.optim.AdamW:
    """Build AdamW with a separate learning rate for the position biases of AFT layers (see `parameter_groups`).

    Args:
        model: any model; a model without AFT mixers has no position biases.
        learning_rate: learning rate of all parameters except position biases.
        weight_decay: weight decay of the weights of linear layers and convolutions.
        position_bias_scale: factor on the learning rate of the position biases.
        **options: other arguments of AdamW.
    """
    scales = {"weight_decay": weight_decay, "position_bias_scale": position_bias_scale}
    return torch.optim.AdamW(parameter_groups(model, learning_rate, **scales), lr=learning_rate, **options)


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Register a hook that updates an average of the parameters, whose weight is `decay`, after every step."""
    update_averages = get_ema_multi_avg_fn(decay)

    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters, states = [parameter.detach() for parameter in optimizer.state], optimizer.state.values()
        for state, parameter in zip(states, parameters):
            if "average" not in state:
                state["average"] = parameter.clone()
        update_averages([state["average"] for state in states], parameters, None)

    optimizer.register_step_post_hook(update)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """Replace the parameters of the model that have an average by it within the context."""

    @torch.no_grad()
    def swap() -> None:
        for parameter, state in optimizer.state.items():
            if "average" in state:
                kept = parameter.detach().clone()
                parameter.copy_(state["average"])
                state["average"].copy_(kept)
        # FSDP keeps some gathered weights from one forward pass to the next: resharding makes it gather the new ones.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    swap()
    try:
        yield
    finally:
        swap()
