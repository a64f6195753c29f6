"""Formats of ViT and DeiT checkpoints: how each canonical tensor is derived from the tensors of a file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from transformers import DeiTConfig, ViTConfig

from .canonical import DISTILLED_HEADS, HEAD, canonical_shapes, grid_of, is_optional
from .derivation import PREPEND_POSITION, SCALE, Derivation, rows


# Modules of a layer: their names in transformers 5 in memory, which `torch.save(model.state_dict())` writes, and in
# the files of `save_pretrained`.
TRANSFORMERS_IN_MEMORY = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}
# Norms of a layer of DINOv2; its other modules have the names of ViT, in files or in memory.
DINOV2 = {".norm1.": ".layernorm_before.", ".norm2.": ".layernorm_after."}

# Canonical modules and tensors, and their names in timm and the original DeiT.
TIMM = {
    "embeddings.cls_token": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
    "cls_classifier": "head",
    "distillation_classifier": "head_dist",
}
TIMM_LAYER = {
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
# The layer scales of DeiT-III, by their names in timm and in the original code: gamma in x + gamma * branch(x) is
# folded into the last module of the branch.
LAYER_SCALES = {"attention.output.dense": ("ls1.gamma", "gamma_1"), "output.dense": ("ls2.gamma", "gamma_2")}
DINOV2_LAYER_SCALES = {"attention.output.dense": "layer_scale1.lambda1", "output.dense": "layer_scale2.lambda1"}
# The parts of the fused projection, in the order of its rows.
FUSED = ("attention.attention.query", "attention.attention.key", "attention.attention.value")


def transformers_derivations(config: ViTConfig | DeiTConfig, names: Iterable[str]) -> dict[str, Derivation]:
    """Return the derivations for checkpoints of transformers: copies, but for modules with a layer scale of DINOv2."""
    here = {_canonical_name(name): name for name in names}
    heads = _heads(config, "classifier.weight" in here, "cls_classifier.weight" in here)
    needed = [*canonical_shapes(config, heads), *filter(is_optional, here)]
    derivations = {name: Derivation((here.get(name, name),)) for name in needed}
    for name in derivations:
        module = name.rpartition(".")[0]
        for part, scale in DINOV2_LAYER_SCALES.items():
            factor = module.removesuffix(part) + scale
            if re.fullmatch(rf"encoder\.layer\.\d+\.{part}", module) and factor in here:
                derivations[name] = replace(derivations[name].then(SCALE), factor=here[factor])
    return derivations


def timm_derivations(config: ViTConfig | DeiTConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, Derivation]:
    """Return the derivations for timm and the original DeiT: fused projections are split, layer scales folded in."""
    heads = _heads(config, "head.weight" in tensors, "head_dist.weight" in tensors)
    derivations = {}
    for name in canonical_shapes(config, heads):
        module, _, kind = name.rpartition(".")
        if in_layer := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module):
            block, part = f"blocks.{in_layer[1]}", in_layer[2]
            derivations[name] = _timm_layer_derivation(block, part, kind, config.hidden_size, tensors)
        else:
            derivations[name] = Derivation((TIMM.get(name) or f"{TIMM[module]}.{kind}",))
    positions = "embeddings.position_embeddings"
    if len(tensors["pos_embed"][0]) == grid_of(config)[0] * grid_of(config)[1]:
        # The class token of DeiT-III has no position embedding.
        derivations[positions] = derivations[positions].then(PREPEND_POSITION)
    return derivations


def _timm_layer_derivation(
    block: str, part: str, kind: str, width: int, tensors: Mapping[str, torch.Tensor]
) -> Derivation:
    if part in FUSED:
        start = FUSED.index(part) * width
        return Derivation((f"{block}.attn.qkv.{kind}",), (rows(start, start + width),))
    derivation = Derivation((f"{block}.{TIMM_LAYER[part]}.{kind}",))
    for scale in LAYER_SCALES.get(part, ()):
        if f"{block}.{scale}" in tensors:
            return Derivation(derivation.sources, (SCALE,), factor=f"{block}.{scale}")
    return derivation


def _heads(config: ViTConfig | DeiTConfig, one: bool, two: bool) -> tuple[str, ...]:
    if two and config.model_type == "deit":
        return DISTILLED_HEADS
    return HEAD if one else ()


def _canonical_name(name: str) -> str:
    name = re.sub(r"^(vit|deit|dinov2)\.", "", name)
    name = re.sub(r"^layers\.(\d+)\.", r"encoder.layer.\1.", name)
    for in_memory, on_disk in (TRANSFORMERS_IN_MEMORY | DINOV2).items():
        name = name.replace(in_memory, on_disk)
    return name
