"""Models that are equivalent to a ViT under other names, DINOv2 and ViT-MAE, and why others cannot be converted."""

from collections.abc import Mapping
from typing import Any

from transformers import DeiTConfig, Dinov2Config, PreTrainedConfig, ViTConfig, ViTMAEConfig

from .errors import ConversionError


# Config classes of the models that can be converted, by `model_type`.
CONFIG_CLASSES = {"vit": ViTConfig, "deit": DeiTConfig, "dinov2": Dinov2Config, "vit_mae": ViTMAEConfig}
# Types whose images are normalized by the mean and standard deviation of ImageNet if there is no image processor.
IMAGENET_NORMALIZED = ("deit", "dinov2", "vit_mae")
# Types that cannot be converted, and why.
REASONS = {
    "dinov2_with_registers": "its register tokens take part in every layer, and an AFT has none",
    "clip": "it has a norm before its first block, which an AFT lacks",
    "clip_vision_model": "it has a norm before its first block, which an AFT lacks",
    "siglip_vision_model": "it has no class token and pools by attention, which an AFT does not support",
    "beit": "its attention has relative position biases, which a ViT lacks",
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
    """Check by its config.json that a model is equivalent to a ViT.

    Raises:
        ConversionError: the type cannot be converted, in which case the message lists the types that can be and, if
            known, the reason; or the MLPs are not those of a ViT.
    """
    model_type = config["model_type"]
    if model_type not in CONFIG_CLASSES:
        reason = f" ({REASONS[model_type]})" if model_type in REASONS else ""
        raise ConversionError(
            f"{name}: a checkpoint of type {model_type!r} cannot be converted{reason}; "
            f"give one of {', '.join(map(repr, CONFIG_CLASSES))}"
        )
    if config.get("use_swiglu_ffn"):
        raise ConversionError(f"{name}: its MLPs have gates (SwiGLU), which an AFT lacks; take a smaller DINOv2")


def as_vit_config(config: PreTrainedConfig) -> ViTConfig | DeiTConfig:
    """Return the config as that of a ViT or DeiT, for weights into which the layer scales are folded."""
    if isinstance(config, (ViTConfig, DeiTConfig)):
        return config
    width = config.hidden_size
    intermediate = width * config.mlp_ratio if config.model_type == "dinov2" else config.intermediate_size
    return ViTConfig(**{field: getattr(config, field) for field in SAME}, intermediate_size=int(intermediate))
