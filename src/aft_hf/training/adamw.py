"""The optimizer of a recipe: AdamW with decay on linear weights, which can keep an average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .optimization import parameter_groups
from .recipe import Optimizer


class AveragedAdamW(torch.optim.AdamW):
    """AdamW that keeps an exponential moving average of the parameters in its own state.

    There it is saved, loaded and cut into shards with the moments, by every strategy that can do so for AdamW.

    Args:
        groups: parameter groups.
        decay: the weight of the average so far in each update; None: no average.
        **options: of AdamW.
    """

    def __init__(self, groups: list[dict], *, decay: float | None = None, **options):
        super().__init__(groups, **options)
        self.decay = decay

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        if self.decay is not None:
            for parameter in self._parameters():
                state = self.state[parameter]
                if "average" not in state:
                    state["average"] = parameter.detach().clone()
                state["average"].lerp_(parameter.detach(), 1 - self.decay)
        return loss

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the parameters are their averages; the same without an average, or before the first step."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter in self._parameters():
            average = self.state[parameter].get("average")
            if average is not None:
                kept = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(kept)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"] if parameter in self.state)


def build_adamw(model: nn.Module, settings: Optimizer, ema_decay: float | None = None) -> AveragedAdamW:
    """The optimizer with the groups of `parameter_groups`, of which decay only what `linear_weights` gives."""
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
    return AveragedAdamW(
        split, lr=settings.learning_rate, betas=tuple(settings.betas), eps=settings.eps, decay=ema_decay
    )


def linear_weights(model: nn.Module) -> set[int]:
    """The ids of the weights of linear layers and convolutions; one that is an embedding, too, is not among them."""
    linear = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)
    weights = {id(module.weight) for module in model.modules() if isinstance(module, linear)}
    return weights - {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
