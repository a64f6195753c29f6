"""Models of the benchmark: AFT models by their names in the paper, and their peers."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ReformerConfig,
    ReformerModelWithLMHead,
    RwkvConfig,
    RwkvForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from ..configuration_aft import AFTConfig
from ..mixers_aft import AFTMixer
from ..modeling_aft import AFTForCausalLM, AFTForImageClassification, AFTLayer


WIDTHS = {"tiny": 192, "small": 384, "base": 768}  # of DeiT, with a head for each 64 features


@dataclass(frozen=True)
class VisionRow:
    """A row of the paper's Tables 7 and 8: a size, a type with kernel and heads, and an image size in pixels."""

    size: str
    aft_type: str
    kernel_size: int = 0
    num_heads: int = 1
    image_size: int = 224
    num_layers: int = 12

    @property
    def name(self) -> str:
        """The name in the form of the paper."""
        kernel = f" {self.kernel_size}/{self.num_heads}" if self.aft_type == "conv" else ""
        return f"AFT-{self.aft_type} {self.size}{kernel} at {self.image_size}"

    def aft(self, mixing_implementation: str = "auto") -> PreTrainedModel:
        """The AFT."""
        sizes: dict[str, Any] = {"hidden_size": WIDTHS[self.size], "num_hidden_layers": self.num_layers}
        sizes |= {"image_size": self.image_size, "num_labels": 1000}
        sizes["position_bias_dim"] = 128  # of the paper's AFT-full
        if self.aft_type == "conv":
            sizes |= {"kernel_size": self.kernel_size, "num_heads": self.num_heads}
        config = AFTConfig(
            modality="image", aft_type=self.aft_type, mixing_implementation=mixing_implementation, **sizes
        )
        return AFTForImageClassification(config)

    def vit(self) -> PreTrainedModel:
        """The ViT (a DeiT without distillation token) of the same depth and width, a head for each 64 features."""
        width = WIDTHS[self.size]
        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            image_size=self.image_size,
        )
        config.num_labels, config._attn_implementation = 1000, "sdpa"
        return ViTForImageClassification(config)


@dataclass(frozen=True)
class TextRow:
    """A language model of bytes; by default with L = 24 and d = 256, like the paper's best model."""

    aft_type: str
    num_layers: int = 24
    width: int = 256

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"AFT-{self.aft_type}{'-32' if self.aft_type == 'local' else ''} L{self.num_layers} d{self.width}"

    def aft(self, length: int, mixing_implementation: str = "auto") -> PreTrainedModel:
        """The AFT for texts of `length` tokens."""
        config = AFTConfig(
            aft_type=self.aft_type,
            hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            num_heads=8 if self.aft_type in ("alibi", "conv") else 1,
            kernel_size=32,
            max_position_embeddings=length,
            mixing_implementation=mixing_implementation,
            use_cache=False,
        )
        return AFTForCausalLM(config)

    def gpt2(self, length: int) -> PreTrainedModel:
        """The GPT-2 of the same depth and width, a head for each 64 features: four at d = 256, as in the paper."""
        config = GPT2Config(
            vocab_size=256,
            n_positions=length,
            n_embd=self.width,
            n_layer=self.num_layers,
            n_head=self.width // 64,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            resid_pdrop=0.0,  # as in AFT: with dropout, SDPA on a CPU is not fused
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        config._attn_implementation = "sdpa"
        return GPT2LMHeadModel(config)

    def reformer(self, length: int) -> PreTrainedModel:
        """The Reformer of the same depth and width, alternating local and LSH attention; 64 must divide `length`."""
        config = ReformerConfig(
            vocab_size=256,
            hidden_size=self.width,
            num_attention_heads=self.width // 64,
            attention_head_size=64,
            feed_forward_size=4 * self.width,
            attn_layers=[("local", "lsh")[i % 2] for i in range(self.num_layers)],
            num_buckets=max(2, 2 * length // 64),  # the value that it sets itself at the first call, with a warning
            axial_pos_shape=(length // 32, 32),
            axial_pos_embds_dim=(self.width // 4, self.width - self.width // 4),
            max_position_embeddings=length,
            is_decoder=True,
            use_cache=False,
        )
        return ReformerModelWithLMHead(config)

    def rwkv(self, length: int) -> PreTrainedModel:
        """The RWKV-4 of the same depth and width."""
        config = RwkvConfig(
            vocab_size=256,
            context_length=length,
            hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            intermediate_size=4 * self.width,
            use_cache=False,
        )
        return RwkvForCausalLM(config)


class ProductMixer(nn.Module):
    """A mixer without mixing over positions: act(Q) K V, projected. Its time is a lower bound for any mixer."""

    max_positions = None

    def __init__(self, mixer: AFTMixer):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj
        self.query_activation, self.state_window = mixer.query_activation, 0

    def forward(self, query: torch.Tensor, **_: object) -> torch.Tensor:
        key, value = self.k_proj(query), self.v_proj(query)
        features = (key.unsqueeze(-1) * value.unflatten(-1, (key.shape[-1], -1))).flatten(-2)
        assert self.q_proj is not None
        return self.o_proj(self.query_activation(self.q_proj(query)) * features)


def without_mixing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of an AFT with `ProductMixer` in every block."""
    model = copy.deepcopy(model)
    for layer in [module for module in model.modules() if isinstance(module, AFTLayer)]:
        layer.add_module("mixer", ProductMixer(layer.mixer))
    return model
