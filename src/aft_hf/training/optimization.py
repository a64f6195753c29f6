"""Parameter groups for AFT models, and AdamW with these groups."""

from typing import Any

import torch
from torch import nn

from ..mixers_aft import AFTMixer


def parameter_groups(
    model: nn.Module, learning_rate: float, *, weight_decay: float = 0.0, position_bias_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return parameter groups for any optimizer, with a separate learning rate for the position biases w.

    A new AFT-conv has w = 0 (Eq. 8: gamma = beta = 0), and Adam moves a parameter by about the learning rate in each
    step. Position biases have to grow to the order of 1, and in a short training they do so only with a larger
    learning rate than the weights. A `position_bias_multiplier` in the config has the same effect with Adam and its
    variants; converted models have a multiplier and need no `position_bias_scale`.

    Args:
        model: any model; a model without AFT mixers has no position biases.
        learning_rate: learning rate of all other parameters.
        weight_decay: weight decay of parameters with two or more dimensions, except position biases.
        position_bias_scale: factor on the learning rate of the position biases, for models without a multiplier.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    position_biases: list[nn.Parameter] = []
    # The direct parameters of a mixer are those of w; its projections are submodules.
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
    """Build AdamW with a separate learning rate for the position biases of AFT layers.

    Args:
        model: any model; a model without AFT mixers has no position biases.
        learning_rate: learning rate of all parameters except position biases.
        **options: `weight_decay` of parameters with two or more dimensions, except position biases (default 0), and
            `position_bias_scale`, a factor on the learning rate of the position biases (default 1).
    """
    return torch.optim.AdamW(parameter_groups(model, learning_rate, **options), lr=learning_rate)
