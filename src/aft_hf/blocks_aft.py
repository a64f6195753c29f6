"""The layers of the models: a pre-norm mixer and a pre-norm MLP, each with a residual connection."""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .activations_aft import has_no_hooks, perceptron
from .caching_aft import AFTCache
from .configuration_aft import AFTConfig
from .documents_aft import Documents
from .mixers_aft import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTMixer, AFTSimple
from .sequence_shards_aft import SequenceShard


def build_mixer(config: AFTConfig, layer_idx: int) -> AFTMixer:
    """Build the mixer of a layer from the config."""
    aft_type = config.layer_aft_types[layer_idx]
    options: dict[str, Any] = {
        "causal": config.modality == "text",
        "qkv_bias": config.qkv_bias,
        "use_query": config.use_query,
        "query_activation": config.query_activation,
        "use_output_projection": config.use_output_projection,
        "global_connectivity": config.global_connectivity,
        "implementation": config.mixing_implementation,
        "num_heads": config.num_heads,
    }
    table: dict[str, Any] = {
        "max_positions": config.max_positions,
        "position_bias_dim": config.position_bias_dim,
        "position_bias_init_std": config.position_bias_init_std,
        "position_bias_multiplier": config.position_bias_multiplier,
    }
    if aft_type == "full":
        return AFTFull(config.hidden_size, **table, **options)
    if aft_type == "local":
        return AFTLocal(config.hidden_size, window_size=config.window_size, **table, **options)
    if aft_type == "conv":
        return AFTConv(
            config.hidden_size,
            kernel_size=config.kernel_size,
            spatial_dims=2 if config.modality == "image" else 1,
            reparameterized=config.position_bias_reparameterized,
            selection=config.position_bias_selection,
            gumbel_temperature=config.gumbel_temperature,
            position_bias_init_std=config.position_bias_init_std,
            position_bias_multiplier=config.position_bias_multiplier,
            **options,
        )
    return {"simple": AFTSimple, "alibi": AFTAlibi}[aft_type](config.hidden_size, **options)


class AFTMLP(nn.Module):
    """MLP of two linear layers with an activation function between them."""

    def __init__(self, config: AFTConfig):
        super().__init__()
        assert config.intermediate_size is not None  # the config has filled it in
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return perceptron(self.fc1, self.activation, self.fc2, hidden_states)


class AFTDropPath(nn.Module):
    """Stochastic depth: drops the residual branch of random samples, and scales up the remaining ones."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * keep.to(branch.dtype) / (1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class AFTLayer(GradientCheckpointingLayer):
    """One layer, a pre-norm Transformer block: x + mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: AFTConfig, layer_idx: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layer_idx = layer_idx
        self.mixer = build_mixer(config, layer_idx)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = AFTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = AFTDropPath(config.drop_path_rate * layer_idx / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        grid_size: tuple[int, int] | None = None,
        cache: AFTCache | None = None,
        documents: Documents | None = None,
        shard: SequenceShard | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        branch = self.mixer(
            self.layernorm_before(hidden_states),
            attention_mask=attention_mask,
            documents=documents,
            shard=shard,
            grid_size=grid_size,
            state=None if cache is None else cache.layers[self.layer_idx],
            output_attentions=output_attentions,
        )
        branch = branch[0] if output_attentions else branch
        regularizers = self._regularizers()
        hidden_states = _add(hidden_states, branch, regularizers)
        del branch  # frees its memory before the MLP, where memory use peaks
        return _add(hidden_states, self.mlp(self.layernorm_after(hidden_states)), regularizers)

    def _regularizers(self) -> list[nn.Module]:
        """Return dropout and stochastic depth if they have an effect.

        Modules without effect are not called, because the time of a decoding step is mostly the overhead of calls.
        """
        modules = (self.dropout, nn.Dropout), (self.drop_path, AFTDropPath)
        return [x for x, kind in modules if x.training or type(x) is not kind or not has_no_hooks(x)]


def _add(hidden_states: torch.Tensor, branch: torch.Tensor, regularizers: list[nn.Module]) -> torch.Tensor:
    """Add a branch to the residual stream, after its regularizers."""
    for module in regularizers:
        branch = module(branch)
    return hidden_states + branch
