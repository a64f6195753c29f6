"""Models of the benchmark: AFT models by their names in the paper, their peers, and the limit without mixing."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, ViTConfig, ViTForImageClassification

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from aft_hf.mixers_aft import AFTMixer
from aft_hf.modeling_aft import AFTLayer


WIDTHS = {"tiny": 192, "small": 384, "base": 768}  # of DeiT, with a head for each 64 features


@dataclass(frozen=True)
class Images:
    """An image classifier of the paper's Tables 7 and 8; `conv` with kernel size and heads."""

    size: str
    aft_type: str
    kernel_size: int = 0
    num_heads: int = 1
    pixels: int = 224
    layers: int = 12
    peer_name = "ViT"

    @property
    def name(self) -> str:
        """The name in the form of the paper."""
        kernel = f" {self.kernel_size}/{self.num_heads}" if self.aft_type == "conv" else ""
        return f"AFT-{self.aft_type} {self.size}{kernel}, {self.pixels} px"

    def aft(self, implementation: str = "auto") -> PreTrainedModel:
        """The AFT."""
        fields: dict[str, Any] = {"kernel_size": self.kernel_size} if self.aft_type == "conv" else {}
        fields |= {"hidden_size": WIDTHS[self.size], "num_hidden_layers": self.layers, "num_labels": 1000}
        fields |= {"aft_type": self.aft_type, "num_heads": self.num_heads, "position_bias_dim": 128}
        fields |= {"image_size": self.pixels, "mixing_implementation": implementation}
        return AFTForImageClassification(AFTConfig(modality="image", **fields))

    def peer(self) -> PreTrainedModel:
        """The ViT of the same depth and width."""
        width = WIDTHS[self.size]
        fields = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
        fields |= {"num_hidden_layers": self.layers, "image_size": self.pixels, "num_labels": 1000}
        return ViTForImageClassification(ViTConfig(**fields))

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Random images."""
        return {"pixel_values": torch.randn(batch, 3, self.pixels, self.pixels)}


@dataclass(frozen=True)
class Text:
    """A language model of bytes with texts of `length` tokens."""

    aft_type: str
    length: int
    layers: int = 6
    width: int = 256
    peer_name = "GPT-2"

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"AFT-{self.aft_type}{'-32' if self.aft_type == 'local' else ''}, {self.length:,} tokens"

    def aft(self, implementation: str = "auto") -> PreTrainedModel:
        """The AFT."""
        fields: dict[str, Any] = {"hidden_size": self.width, "num_hidden_layers": self.layers}
        fields |= {"aft_type": self.aft_type, "num_heads": 8 if self.aft_type in ("alibi", "conv") else 1}
        fields |= {"kernel_size": 32, "max_position_embeddings": self.length}
        return AFTForCausalLM(AFTConfig(mixing_implementation=implementation, **fields))

    def peer(self) -> PreTrainedModel:
        """The GPT-2 of the same depth and width. It has no dropout, as AFT; with dropout, attention is not fused."""
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": self.width, "n_layer": self.layers, "n_head": self.width // 64, "n_positions": self.length}
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes, **dropout))

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        """Random tokens."""
        return {"input_ids": torch.randint(256, (batch, self.length))}


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
