"""Baseline models: the models of AFT with the mixers of `BaselineConfig`."""

from typing import Any, cast

import torch
from torch import nn

from ..modeling_aft import AFTForCausalLM, AFTForImageClassification, AFTModel, AFTPreTrainedModel
from .configuration import BaselineConfig
from .lambda_layer import LambdaLayer
from .linear_attention import LinearAttention, Performer
from .synthesizer import DenseSynthesizer


class _Mixer(nn.Module):
    """Wrapper of a layer as the mixer of an AFT block.

    Args:
        layer: a module from (B, T, d) to (B, T, d).
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.max_positions = layer, getattr(layer, "max_positions", None)

    def forward(self, x: torch.Tensor, *, grid_size: tuple[int, int] | None, **others: Any) -> torch.Tensor:
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f"a baseline takes no {name}: it takes whole sequences, without padding or cache")
        return self.layer(x)


def build_layer(config: BaselineConfig) -> nn.Module:
    """Build the layer that replaces the AFT mixer."""
    sizes = config.hidden_size, cast(int, config.num_heads)
    if config.mixer == "linear":
        return LinearAttention(*sizes)
    if config.mixer == "performer":
        return Performer(*sizes, config.num_random_features)
    if config.mixer == "synthesizer":
        return DenseSynthesizer(*sizes, config.max_position_embeddings)
    return LambdaLayer(*sizes, config.key_dim, config.grid_size)


class _Baseline(AFTPreTrainedModel):
    """Base class of the models, which replaces the mixers and initializes the layers."""

    config_class = BaselineConfig
    _auto_class = None  # no code is saved with the weights
    aft: AFTModel

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        for layer in self.aft.layers:
            layer.mixer = _Mixer(build_layer(config))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Performer):
            module.reset_directions()
        elif isinstance(module, LambdaLayer):
            module.reset_offsets()


class BaselineForCausalLM(_Baseline, AFTForCausalLM):
    """A language model of linear attention, Performer or Synthesizer layers."""

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        """The forward pass of `AFTForCausalLM`, without a cache and without padding."""
        if use_cache:
            raise ValueError("a baseline has no cache: call it with use_cache=False")
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Not supported, because a baseline has no cache."""
        raise NotImplementedError("a baseline does not generate: it has no cache")


class BaselineForImageClassification(_Baseline, AFTForImageClassification):
    """An image classifier of lambda layers."""
