"""The parameter groups of an optimizer, and the optimizer."""

from typing import Any

import torch
from torch import nn

from ..mixer_aft import AFTMixer


def parameter_groups(
    model: nn.Module, learning_rate: float, *, weight_decay: float = 0.0, position_bias_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for any optimizer: weight decay on what has two dimensions or more, a rate of its own for w.

    A new AFT-conv has w = 0 (Eq. 8: gamma = beta = 0), and Adam moves a parameter by about the learning rate in each
    step. In a training of few steps the position biases, which have to grow to the order of 1, get there only with a
    larger rate than the weights, or with a `position_bias_multiplier` in the config, which does the same for any
    optimizer of Adam's kind: converted models have one, and need no rate of their own.

    Args:
        model: any model; one without AFT mixers has no position biases.
        learning_rate: of the weights.
        weight_decay: of parameters with two dimensions or more that are no position biases.
        position_bias_scale: factor on the learning rate of the position biases, for models without a multiplier.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    position_biases: list[nn.Parameter] = []
    # A mixer's own parameters are those of w; its projections are modules of their own.
    mixers = (module for module in model.modules() if isinstance(module, AFTMixer))
    of_mixers = {id(parameter) for mixer in mixers for parameter in mixer.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = decayed if parameter.dim() > 1 else plain
            (position_biases if id(parameter) in of_mixers else kind).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "lr": learning_rate},
        {"params": plain, "weight_decay": 0.0, "lr": learning_rate},
        {"params": position_biases, "weight_decay": 0.0, "lr": learning_rate * position_bias_scale},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, learning_rate: float, **options: float) -> torch.optim.AdamW:
    """AdamW with the groups of `parameter_groups`, which takes the same arguments."""
    return torch.optim.AdamW(parameter_groups(model, learning_rate, **options), lr=learning_rate)
