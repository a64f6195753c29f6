"""The optimizer and its parameter groups."""

import torch
from torch import nn

from ..mixer_aft import AFTMixer


def build_optimizer(
    model: nn.Module, learning_rate: float, *, weight_decay: float = 0.0, position_bias_scale: float = 1.0
) -> torch.optim.AdamW:
    """AdamW with weight decay on what has two dimensions or more, and a rate of their own for position biases.

    A new AFT-conv has w = 0 (Eq. 8: gamma = beta = 0), and Adam moves a parameter by about the learning rate in each
    step. In a training of few steps the position biases, which have to grow to the order of 1, get there only with a
    larger rate than the weights.

    Args:
        model: any model with AFT mixers.
        learning_rate: of the weights.
        weight_decay: of parameters with two dimensions or more that are no position biases.
        position_bias_scale: factor on the learning rate of the position biases.
    """
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "plain": [], "position biases": []}
    # A mixer's own parameters are those of w; its projections are modules of their own.
    mixers = (module for module in model.modules() if isinstance(module, AFTMixer))
    position_biases = {id(parameter) for mixer in mixers for parameter in mixer.parameters(recurse=False)}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in position_biases:
            groups["position biases"].append(parameter)
        else:
            groups["decayed" if parameter.dim() > 1 else "plain"].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups["decayed"], "weight_decay": weight_decay},
            {"params": groups["plain"], "weight_decay": 0.0},
            {"params": groups["position biases"], "weight_decay": 0.0, "lr": learning_rate * position_bias_scale},
        ],
        lr=learning_rate,
    )
