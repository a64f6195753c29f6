"""Models that compute what a ViT computes, under other names: DINOv2 and ViT-MAE; and why others cannot be read."""

from collections.abc import Mapping
from typing import Any

from transformers import DeiTConfig, Dinov2Config, PreTrainedConfig, ViTConfig, ViTMAEConfig

from .errors import ConversionError


# By `model_type`, how transformers describes what can be read.
CONFIG_CLASSES = {"vit": ViTConfig, "deit": DeiTConfig, "dinov2": Dinov2Config, "vit_mae": ViTMAEConfig}
# Whose images are normalized by the mean and deviation of ImageNet, where no image processor says otherwise.
IMAGENET_NORMALIZED = ("deit", "dinov2", "vit_mae")
# What cannot be read, and what an AFT has no place for.
REASONS = {
    "dinov2_with_registers": "its register tokens take part in every layer, and an AFT has none",
    "clip": "it has a norm before its first block, which an AFT has not",
    "clip_vision_model": "it has a norm before its first block, which an AFT has not",
    "siglip_vision_model": "it has no class token and pools by attention, which an AFT does not",
    "beit": "its attention has relative position biases, which are no part of a ViT",
}
SAME: tuple[str, ...] = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "hidden_dropout_prob",
)
SAME += ("attention_probs_dropout_prob", "initializer_range", "layer_norm_eps", "image_size", "patch_size")
SAME += ("num_channels", "qkv_bias")


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuse what does not compute what a ViT computes, by what config.json says.

    Raises:
        ConversionError: another type, with the types that can be read and why this one cannot where that is known; or
            an MLP that a ViT has not.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_CLASSES:
        reason = f" ({REASONS[model_type]})" if model_type in REASONS else ""
        raise ConversionError(
            f"{name}: a checkpoint of type {model_type!r} cannot be converted{reason}; "
            f"give one of {', '.join(map(repr, CONFIG_CLASSES))}"
        )
    if config.get("use_swiglu_ffn"):
        raise ConversionError(f"{name}: its MLPs have gates (SwiGLU), which an AFT has not; take a smaller DINOv2")


def as_vit_config(config: PreTrainedConfig) -> ViTConfig | DeiTConfig:
    """The config in the words of ViT and DeiT, for weights into which layer scales are folded."""
    if isinstance(config, (ViTConfig, DeiTConfig)):
        return config
    width = config.hidden_size
    intermediate = width * config.mlp_ratio if config.model_type == "dinov2" else config.intermediate_size
    return ViTConfig(**{field: getattr(config, field) for field in SAME}, intermediate_size=int(intermediate))
