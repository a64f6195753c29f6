"""Tiny models of every type, in evaluation mode and with random position biases, since those of a new conv are 0."""

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification


SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_heads": 3, "position_bias_dim": 4}


def with_biases(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "kernel" in name or "position_bias" in name:
            nn.init.normal_(parameter)
    return model.eval()


def language_model(aft_type: str | list[str] = "local", head: type = AFTForCausalLM, **options) -> nn.Module:
    """A model of bytes for at most 80 tokens, with a window of 7 and kernels of 5."""
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": 80, "window_size": 7, "kernel_size": 5, **SIZES}
    return with_biases(head(AFTConfig(aft_type=aft_type, **(sizes | options))))


def image_model(aft_type: str = "conv", head: type = AFTForImageClassification, **options) -> nn.Module:
    """A model of 32 x 32 pixels in patches of 4 x 4, with a window of 3 and kernels of 5 x 5."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 3, "kernel_size": 5, **SIZES}
    return with_biases(head(AFTConfig(modality="image", aft_type=aft_type, **(sizes | options))))


def vit_model(image_size: int = 16, **options) -> ViTForImageClassification:
    """A new ViT of transformers, in patches of 4 x 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(image_size=image_size, **({"patch_size": 4} | sizes | options)))
