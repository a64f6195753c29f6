"""The optimizer of a recipe: AdamW with weight decay on linear layers and convolutions, and an optional EMA."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .averaging import keep_average
from .optimization import parameter_groups
from .recipe import Optimizer


def build_adamw(model: nn.Module, settings: Optimizer, ema_decay: float | None = None) -> torch.optim.AdamW:
    """Build AdamW with the groups of `parameter_groups`; weight decay acts on the weights of `linear_weights` only.

    With `ema_decay`, the optimizer also keeps an average of the weights (`keep_average`).
    """
    groups = parameter_groups(
        model,
        settings.learning_rate,
        weight_decay=settings.weight_decay,
        position_bias_scale=settings.position_bias_scale,
    )
    linear, split = linear_weights(model), []
    for group in groups:
        if group["weight_decay"] == 0:
            split.append(group)
            continue
        for decays in (True, False):
            parameters = [parameter for parameter in group["params"] if (id(parameter) in linear) == decays]
            if parameters:
                split.append(group | {"params": parameters} | ({} if decays else {"weight_decay": 0.0}))
    first, second = settings.betas
    optimizer = torch.optim.AdamW(split, lr=settings.learning_rate, betas=(first, second), eps=settings.eps)
    if ema_decay is not None:
        keep_average(optimizer, ema_decay)
    return optimizer


def linear_weights(model: nn.Module) -> set[int]:
    """Return the ids of the weights of linear layers and convolutions, except weights shared with an embedding."""
    linear = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)
    weights = {id(module.weight) for module in model.modules() if isinstance(module, linear)}
    return weights - {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
