"""Canonical names and shapes of the tensors of a vision transformer, to which all checkpoint formats are mapped.

The names are those in the files that transformers writes for ViT and DeiT, without the prefix `vit.` or `deit.`.
"""

import re
from collections.abc import Iterable

from transformers import DeiTConfig, ViTConfig

from ..configuration_aft import pair


HEAD = ("classifier",)
# The two heads of a distilled DeiT, for its class token and its distillation token. The model predicts their mean.
DISTILLED_HEADS = ("cls_classifier", "distillation_classifier")
# Tensors that a file may hold in addition to the classifier network.
OPTIONAL = r"pooler\.dense\.(weight|bias)|embeddings\.mask_token|decoder\..+"


def grid_of(config: ViTConfig | DeiTConfig) -> tuple[int, int]:
    """Return the rows and columns of patches."""
    (height, width), (patch_height, patch_width) = pair(config.image_size), pair(config.patch_size)
    return height // patch_height, width // patch_width


def num_prefix_tokens(config: ViTConfig | DeiTConfig) -> int:
    """Return the number of tokens before the patches: the class token, and the distillation token of a DeiT."""
    return 2 if config.model_type == "deit" else 1


def canonical_shapes(config: ViTConfig | DeiTConfig, heads: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a ViT, or of a DeiT with distillation token, with these heads, by name."""
    d, mlp = config.hidden_size, config.intermediate_size
    rows, columns = grid_of(config)
    shapes = {
        "embeddings.cls_token": (1, 1, d),
        "embeddings.position_embeddings": (1, num_prefix_tokens(config) + rows * columns, d),
        "embeddings.patch_embeddings.projection.weight": (d, config.num_channels, *pair(config.patch_size)),
        "embeddings.patch_embeddings.projection.bias": (d,),
        **_norm("layernorm", d),
    }
    if config.model_type == "deit":
        shapes["embeddings.distillation_token"] = (1, 1, d)
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        shapes |= _norm(f"{layer}.layernorm_before", d) | _norm(f"{layer}.layernorm_after", d)
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{layer}.attention.attention.{name}", d, d, bias=config.qkv_bias)
        shapes |= _linear(f"{layer}.attention.output.dense", d, d)
        shapes |= _linear(f"{layer}.intermediate.dense", d, mlp) | _linear(f"{layer}.output.dense", mlp, d)
    for head in heads:
        shapes |= _linear(head, d, config.num_labels or 0)
    return shapes


def is_optional(name: str) -> bool:
    """Whether a tensor of this name is allowed in a checkpoint but not needed."""
    return re.fullmatch(OPTIONAL, name) is not None


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
