"""Models that are equivalent to a ViT under other names, DINOv2 and ViT-MAE, and how to tell others."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import DeiTConfig, Dinov2Config, PreTrainedConfig, ViTConfig, ViTMAEConfig

from .errors import ConversionError


# Config classes of the models that can be converted, by `model_type`.
CONFIG_CLASSES = {"vit": ViTConfig, "deit": DeiTConfig, "dinov2": Dinov2Config, "vit_mae": ViTMAEConfig}
# Types whose images are normalized by the mean and standard deviation of ImageNet if there is no image processor.
IMAGENET_NORMALIZED = ("deit", "dinov2", "vit_mae")
# Parts of the names of tensors that a ViT or DeiT does not have, and what they belong to.
UNSUPPORTED_TENSORS = {
    r"reg_tokens?|register_tokens": "register tokens, which take part in every layer, and an AFT has none",
    r"norm_pre|pre_la?yr?norm|ln_pre": "a norm before the first block, which an AFT lacks",
    r"fc_norm|attn_pool": "pooling over patches; only models that pool by their class token are converted",
    r"[qk]_norm": "norms of queries and keys, which a ViT lacks",
    r"rel_pos\w*|relative_position\w*": "relative positions, which a ViT lacks",
    r"lora_\w+|base_layer": "an adapter of peft; merge it into the model and save that (merge_and_unload)",
    r"_?flat_param\w*": "FSDP; save a full state dict",
    r"parametrizations|weight_[gv]|weight_orig": "a parametrization of torch; remove it from the model and save that",
}


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise a ConversionError if a model is not equivalent to a ViT by its config.json."""
    if (model_type := config["model_type"]) not in CONFIG_CLASSES:
        raise ConversionError(
            f"{name}: a checkpoint of type {model_type!r} cannot be converted; "
            f"give one of {', '.join(map(repr, CONFIG_CLASSES))}"
        )
    if config.get("use_swiglu_ffn"):
        raise ConversionError(f"{name}: its MLPs have gates (SwiGLU), which an AFT lacks; take a smaller DINOv2")


def check_tensors(name: str, tensors: Iterable[str]) -> None:
    """Raise a ConversionError with the reason if a tensor tells another model from a ViT."""
    for tensor in tensors:
        for pattern, reason in UNSUPPORTED_TENSORS.items():
            if re.search(rf"(^|\.)({pattern})(\.|$)", tensor):
                raise ConversionError(f"{name}: {tensor} belongs to {reason}")


def as_vit_config(config: PreTrainedConfig) -> ViTConfig | DeiTConfig:
    """Return the config as that of a ViT or DeiT, for weights into which the layer scales are folded."""
    if isinstance(config, (ViTConfig, DeiTConfig)):
        return config
    shared = {name: value for name, value in config.to_dict().items() if name in ViTConfig.__annotations__}
    if config.model_type == "dinov2":
        shared["intermediate_size"] = int(config.hidden_size * config.mlp_ratio)
    return ViTConfig(**shared)
