"""Baselines: other attention-free layers that the paper compares AFT with, in the blocks of an AFT.

Importing this module registers `BaselineConfig` with the Auto classes, so that a recipe can have `architecture:
aft-baseline`. As a command it is `aft-hf` with these models:

    python -m scripts.reproduction.baselines train configs/enwik8/performer_l12_d512_h8.yaml data.train=enwik8

The models are for training and evaluation in comparisons with AFT: they do not generate and take no masks.
"""

import math
import os
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PreTrainedConfig,
    RwkvConfig,
)
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from aft_hf.configuration_aft import AFTConfig, raise_value_errors
from aft_hf.mixing_aft import Mixing, mix
from aft_hf.modeling_aft import AFTForCausalLM, AFTForImageClassification, AFTModel, AFTPreTrainedModel
from aft_hf.position_biases_aft import LagKernel


MIXERS = {"text": ("linear", "performer", "synthesizer", "rwkv"), "image": ("lambda",)}


@raise_value_errors
@strict
class BaselineConfig(AFTConfig):
    r"""
    Configuration of a baseline. Embeddings, norms, MLPs and heads are those of `AFTConfig`, whose fields on position
    biases, keys and queries have no effect here.

    Args:
        mixer (`str`, defaults to `"linear"`):
            For text `"linear"` (Linear Transformer, Katharopoulos et al. 2020), `"performer"` (Choromanski et al.
            2021), `"synthesizer"` (the dense one of Tay et al. 2021) or `"rwkv"` (time mixing of RWKV-4, Peng et al.
            2023); for images `"lambda"` (Bello 2021).
        num_heads (`int`, defaults to 1): Heads of the mixer.
        key_dim (`int`, defaults to 16): Width |k| of the queries and keys of a head of `"lambda"`.
        num_random_features (`int`, *optional*):
            Features of a head of `"performer"`; d_h log d_h by default, with d_h the width of a head.
    """

    model_type = "aft-baseline"

    mixer: str = "linear"
    aft_type: str | list[str] = "simple"
    key_dim: int = 16
    num_random_features: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.use_cls_token is None:
            self.use_cls_token = False
        super().__post_init__(**kwargs)

    def validate_mixer(self) -> None:
        allowed = MIXERS[self.modality]
        if self.mixer not in allowed:
            raise ValueError(
                f"mixer with modality={self.modality!r} must be one of {', '.join(allowed)}, got {self.mixer!r}"
            )
        if self.mixer == "lambda" and self.use_cls_token:
            raise ValueError("a lambda layer has no class token: set use_cls_token=False")
        for name in ("key_dim", "num_random_features"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 2**17:
                raise ValueError(f"{name} must be in 1 .. {2**17}, got {value}")

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save the config like any config of transformers, without code."""
        PreTrainedConfig.save_pretrained(self, save_directory, push_to_hub=push_to_hub, **kwargs)


BaselineConfig._auto_class = None  # AFTConfig sets it to save its code


CHUNK_SIZE = 64

# Added to the features of a Performer, relative to the largest one of the same query or key, so that no feature is 0
# and no average is 0 / 0.
EPSILON = 1e-6


def causal_linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exponent: torch.Tensor | None = None
) -> torch.Tensor:
    """Averages of values with weights phi(q_t) . phi(k_t') over t' <= t, in time linear in T.

    Args:
        query, key: non-negative features, (B, h, T, m).
        value: (B, h, T, v).
        exponent: logarithms of factors of the keys, (B, h, T), without gradients. Default: 0. Each sum is divided by
            the largest factor up to its position, so that no factor overflows and no later key changes a result.

    Returns:
        (B, h, T, v).
    """
    length = query.shape[2]
    # The denominator is the numerator of an additional value, which is 1.
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    exponent = key.new_zeros(key.shape[:3]) if exponent is None else exponent
    query, key, value, exponent = (
        nn.functional.pad(x, (0, 0, 0, -length % CHUNK_SIZE)).unflatten(2, (-1, CHUNK_SIZE))
        for x in (query, key, value, exponent.unsqueeze(-1))
    )
    largest = exponent.flatten(2, 3).cummax(2).values.view_as(exponent)  # (B, h, chunks, CHUNK_SIZE, 1)
    end = largest[..., -1, :]  # (B, h, chunks, 1)
    states = (key * (exponent - end.unsqueeze(-1)).exp()).mT @ value  # (B, h, chunks, m, v + 1)
    states = torch.einsum("bhij,bhjmv->bhimv", (end.mT - end).exp().tril(), states)
    before = nn.functional.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
    end_before = nn.functional.pad(end[:, :, :-1], (0, 0, 1, 0), value=-math.inf).unsqueeze(-1)
    sums = (query @ key.mT * (exponent.mT - largest).exp().tril()) @ value
    sums = sums + (query * (end_before - largest).exp()) @ before
    sums = sums.flatten(2, 3)[:, :, :length]
    # elu(x) + 1 rounds to 0 for x below -17. If all features of a query are 0, the output is 0 and not 0 / 0.
    return sums[..., :-1] / sums[..., -1:].clamp_min(EPSILON**2)


class LinearAttention(nn.Module):
    """Causal linear attention with phi(x) = elu(x) + 1 (Katharopoulos et al. 2020, Eq. 7).

    Args:
        hidden_size: width d.
        num_heads: h, which divides d.
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def context(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The averages of the values, (B, h, T, d_h)."""
        return causal_linear_attention(nn.functional.elu(query) + 1, nn.functional.elu(key) + 1, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d)."""
        projected = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        # Sums over the sequence lose precision in float16 and bfloat16.
        query, key, value = (y.float().unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected)
        with torch.autocast(x.device.type, enabled=False):
            context = self.context(query, key, value)
        return self.o_proj(context.transpose(1, 2).flatten(2).to(x.dtype))


class Performer(LinearAttention):
    """Causal attention with positive orthogonal random features, which approximate softmax attention: FAVOR+.

    phi(x) = exp(W x - |x|^2 / 2) / sqrt(m) of x / d_h^(1/4) (Choromanski et al. 2021, Lemma 1), W drawn once.

    Args:
        hidden_size, num_heads: as in `LinearAttention`.
        num_features: m. Default: d_h log d_h, as in Table 1 of the AFT paper.
    """

    directions: torch.Tensor  # W, (m, d_h)

    def __init__(self, hidden_size: int, num_heads: int, num_features: int | None = None):
        super().__init__(hidden_size, num_heads)
        size = hidden_size // num_heads
        self.num_features = max(int(size * math.log(size)), 1) if num_features is None else num_features
        self.register_buffer("directions", torch.empty(self.num_features, size))
        self.reset_directions()

    @torch.no_grad()
    def reset_directions(self) -> None:
        """Draw W: blocks of orthogonal rows with the lengths of normal vectors (section 2.4)."""
        count, size = self.directions.shape
        if self.directions.is_meta:
            return
        orthogonal, triangular = torch.linalg.qr(torch.randn(-(-count // size), size, size))
        # LAPACK chooses the signs of the triangle; without this correction the directions would not be uniform.
        orthogonal = orthogonal * triangular.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        lengths = torch.randn(count, size).norm(dim=1, keepdim=True)
        self.directions.copy_(orthogonal.mT.flatten(0, 1)[:count] * lengths)

    def context(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = (x * query.shape[-1] ** -0.25 for x in (query, key))
        of_query, of_key = (
            x @ self.directions.float().mT - x.square().sum(-1, keepdim=True) / 2 for x in (query, key)
        )
        # The factor of a query cancels in the quotient. That of a key does not.
        factor_of_query, factor_of_key = (x.detach().amax(-1, keepdim=True) for x in (of_query, of_key))
        query, key = torch.exp(of_query - factor_of_query) + EPSILON, torch.exp(of_key - factor_of_key) + EPSILON
        return causal_linear_attention(query, key, value, factor_of_key.squeeze(-1))


class DenseSynthesizer(nn.Module):
    """y_t = softmax over t' <= t of (W_2 relu(W_1 x_t))_t', times values (Tay et al. 2021, section 3.1).

    Args:
        hidden_size: width d.
        num_heads: h, which divides d. Each head has d / h hidden features and d / h values.
        max_positions: the longest sequence.
    """

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int):
        super().__init__()
        self.num_heads, self.max_positions = num_heads, max_positions
        self.hidden = nn.Linear(hidden_size, hidden_size)
        # W_2 of all heads: (h, d / h, T).
        self.scores = nn.ModuleList(nn.Linear(hidden_size // num_heads, max_positions) for _ in range(num_heads))
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d).

        Raises:
            ValueError: the sequence has more than `max_positions` tokens.
        """
        length = x.shape[1]
        if length > self.max_positions:
            raise ValueError(f"{length} tokens are more than the {self.max_positions} positions of the Synthesizer")
        hidden = nn.functional.relu(self.hidden(x)).unflatten(-1, (self.num_heads, -1))
        scores = [score(hidden[:, :, head])[..., :length] for head, score in enumerate(self.scores)]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.stack(scores, 1).float().masked_fill(later, -torch.inf).softmax(-1)
        value = self.v_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.o_proj((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))


class RwkvTimeMixing(RwkvSelfAttention):
    """The time mixing of RWKV-4 with the parameters of transformers, computed as an AFT.

    w is a learned decay per feature, w_tt' = -exp(time_decay) (t - 1 - t'), and a learned bonus, time_first, for the
    current token. Queries, keys and values also see the token before.
    """

    def __init__(self, config: RwkvConfig, layer_id: int):
        super().__init__(config, layer_id)
        self.reset_times()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """(B, T, d) to (B, T, d)."""
        receptance, key, value, _ = self.extract_key_value(hidden)
        return self.output(receptance * wkv(self.time_decay, self.time_first, key, value))

    @torch.no_grad()
    def reset_times(self) -> None:
        """Initialize decays, bonuses and shifts as RWKV-4 does, by layer and feature."""
        size, layers = self.config.hidden_size, self.config.num_hidden_layers
        along, depth = torch.arange(size) / size, self.layer_id / max(1, layers - 1)  # each from 0 to (almost) 1
        rest = 1 - self.layer_id / layers
        self.time_decay.copy_(-5 + 8 * (torch.arange(size) / max(1, size - 1)) ** (0.7 + 1.3 * depth))
        self.time_first.copy_(math.log(0.3) + 0.5 * ((torch.arange(size) + 1) % 3 - 1))
        self.time_mix_key.copy_(along**rest)
        self.time_mix_value.copy_(along**rest + 0.3 * depth)
        self.time_mix_receptance.copy_(along ** (0.5 * rest))


def wkv(decay: torch.Tensor, bonus: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Averages of values with weights exp(key), which decay with the distance, and a bonus for the current token.

    Args:
        decay, bonus: (d,).
        key, value: (B, T, d).
    """
    distances = torch.arange(key.shape[1] - 1, device=key.device)  # of the tokens before the current one
    by_lag = torch.cat([bonus[:, None], -decay.exp()[:, None] * distances], 1)
    return mix(Mixing(key, value, len(by_lag), LagKernel(by_lag, causal=True), causal=True))


class LambdaLayer(nn.Module):
    """y_n = (softmax(K)^T V + E_n^T V)^T q_n, where E_n embeds the offsets from patch n to all patches (Eq. 1 and 2).

    Queries and keys are batch-normalized, as the AFT paper says. An output projection follows, because the layer would
    otherwise have fewer parameters than in Table 7 of the AFT paper.

    Args:
        hidden_size: width d.
        num_heads: number of queries of a patch, which share one lambda; divides d.
        key_dim: width |k| of a query or key.
        grid_size: (rows, columns) of patches.
    """

    def __init__(self, hidden_size: int, num_heads: int, key_dim: int, grid_size: tuple[int, int]):
        super().__init__()
        self.num_heads, self.grid_size = num_heads, grid_size
        rows, columns = grid_size
        self.q_proj = nn.Linear(hidden_size, num_heads * key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.q_norm = nn.BatchNorm1d(num_heads * key_dim)
        self.k_norm = nn.BatchNorm1d(key_dim)
        self.offsets = nn.Parameter(torch.empty(2 * rows - 1, 2 * columns - 1, key_dim))
        self.reset_offsets()

    def reset_offsets(self) -> None:
        """Draw the embeddings of offsets from a standard normal distribution."""
        nn.init.normal_(self.offsets)

    def embeddings(self) -> torch.Tensor:
        """E, (T, T, |k|): row n has the embeddings of the offsets from patch n."""
        row, column = (torch.arange(size, device=self.offsets.device) for size in self.grid_size)
        row, column = (x - x[:, None] + len(x) - 1 for x in (row, column))
        return self.offsets[row[:, None, :, None], column[None, :, None, :]].flatten(2, 3).flatten(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, d) to (B, T, d).

        Raises:
            ValueError: the number of patches is not that of the grid.
        """
        if x.shape[1] != self.grid_size[0] * self.grid_size[1]:
            raise ValueError(f"{x.shape[1]} patches do not match the grid of {self.grid_size}")
        query = self.q_norm(self.q_proj(x).mT).mT.unflatten(-1, (self.num_heads, -1))  # (B, T, h, k)
        key = self.k_norm(self.k_proj(x).mT).softmax(-1)  # (B, k, T)
        value = self.v_proj(x)
        content = key @ value  # (B, k, v)
        position = torch.einsum("nmk,bmv->bnkv", self.embeddings().to(value.dtype), value)
        return self.o_proj((query @ (content.unsqueeze(1) + position)).flatten(2))


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


def build_layer(config: BaselineConfig, index: int) -> nn.Module:
    """Build the layer that replaces the AFT mixer of block `index`."""
    if config.mixer == "rwkv":
        return RwkvTimeMixing(
            RwkvConfig(hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers), index
        )
    sizes = config.hidden_size, cast(int, config.num_heads)
    if config.mixer == "linear":
        return LinearAttention(*sizes)
    if config.mixer == "performer":
        return Performer(*sizes, config.num_random_features)
    if config.mixer == "synthesizer":
        return DenseSynthesizer(*sizes, config.max_position_embeddings)
    return LambdaLayer(*sizes, config.key_dim, config.grid_size)


class _Baseline(AFTPreTrainedModel):
    """Base class of the models, which replaces the mixers. The layers initialize themselves."""

    config_class = BaselineConfig
    _auto_class = None  # no code is saved with the weights
    aft: AFTModel

    def __init__(self, config: BaselineConfig):
        super().__init__(config)
        for index, layer in enumerate(self.aft.layers):
            layer.mixer = _Mixer(build_layer(config, index))
        self.post_init()


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
        raise NotImplementedError("a baseline does not generate: it has no cache")


class BaselineForImageClassification(_Baseline, AFTForImageClassification):
    """An image classifier of lambda layers."""


AutoConfig.register(BaselineConfig.model_type, BaselineConfig, exist_ok=True)
AutoModelForCausalLM.register(BaselineConfig, BaselineForCausalLM, exist_ok=True)
AutoModelForImageClassification.register(BaselineConfig, BaselineForImageClassification, exist_ok=True)


if __name__ == "__main__":
    # The classes above belong to __main__ here; the registered ones are those of the importable module.
    from aft_hf.cli import main

    main()
