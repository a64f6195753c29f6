"""Names of the tensors of ViT and DeiT checkpoints of every format, and their names in transformers and in an AFT."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import apply_renamings

from ..errors import InputError
from ..position_biases_aft import widen


POSITIONS, DISTILLATION_TOKEN = "embeddings.position_embeddings", "embeddings.distillation_token"
PATCHES = "embeddings.patch_embeddings.projection.weight"
LAYER_SCALE = ".layer_scale"

# Parts of names of timm, the original DeiT and DINOv2, and those of transformers in memory.
TO_TRANSFORMERS = {
    r"^(vit|deit|dinov2)\.": "",
    r"^cls_token": "embeddings.cls_token",
    r"^dist_token": DISTILLATION_TOKEN,
    r"^pos_embed": POSITIONS,
    r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.",
    r"^blocks\.": "layers.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.qkv\.": ".attention.qkv.",
    r"\.attn\.proj\.": ".attention.o_proj.",
    r"^norm\.": "layernorm.",
    r"^head\.": "classifier.",
    r"^head_dist\.": "distillation_classifier.",
    # Layer scales: gamma in x + gamma * branch(x) is folded into the last module of the branch.
    r"\.(ls1\.gamma|gamma_1|layer_scale1\.lambda1)$": f".attention.o_proj{LAYER_SCALE}",
    r"\.(ls2\.gamma|gamma_2|layer_scale2\.lambda1)$": f".mlp.fc2{LAYER_SCALE}",
}
# The tensors of a ViT by their names in transformers, and those that a file may hold in addition to the classifier.
LAYER = r"layers\.\d+\.(layernorm_(before|after)|attention\.[qkvo]_proj|mlp\.fc[12])\.(weight|bias)"
KNOWN = rf"{LAYER}|embeddings\..*|layernorm\.(weight|bias)|\w*classifier\.(weight|bias)"
OPTIONAL = r"pooler\.dense\.(weight|bias)|embeddings\.mask_token|decoder\..+"

# Parts of names of transformers, and those of an AFT. The heads of a distilled DeiT become one. q_proj and k_proj have
# no counterpart: they are new, or fitted by `attention`.
TO_AFT = {
    r"^(cls_|distillation_)?classifier\.": "classifier.",
    r"^(embeddings|layers|layernorm)\.": r"aft.\1.",
    r"\.patch_embeddings\.projection\.": ".patch_embeddings.",
    r"\.attention\.([vo]_proj)\.": r".mixer.\1.",
}


class Part(NamedTuple):
    """A tensor, and the names of the tensors of the checkpoint that it is made of."""

    tensor: torch.Tensor
    sources: tuple[str, ...]


def vit_tensors(source: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """Return the tensors of a ViT by their names in transformers, made of the tensors of a checkpoint.

    Fused projections are split, and layer scales are folded into the modules before them. `source` is the name of the
    checkpoint, for the error that is raised if one of its tensors is none of a ViT.
    """
    vit: dict[str, Part] = {}
    scales: dict[str, str] = {}
    of_files = get_checkpoint_conversion_mapping("ViTModel")  # names of transformers' own files
    for name, tensor in tensors.items():
        known = renamed(apply_renamings(name, of_files), TO_TRANSFORMERS)
        if known.endswith(LAYER_SCALE):
            scales[known.removesuffix(LAYER_SCALE)] = name
            continue
        parts = {known: tensor}
        if ".attention.qkv." in known:
            parts = {known.replace("qkv", f"{kind}_proj"): part for kind, part in zip("qkv", tensor.chunk(3))}
        for each, part in parts.items():
            if each in vit or not re.fullmatch(f"{KNOWN}|{OPTIONAL}", each):
                raise InputError(
                    f"{source}: {name} is not a tensor of a ViT, or the file contains it under two names; merge "
                    "adapters (merge_and_unload), remove parametrizations, save shards of FSDP as a full state dict"
                )
            vit[each] = Part(part, (name,))
    for module, scale in scales.items():
        for name in (f"{module}.weight", f"{module}.bias"):
            if name not in vit:
                continue
            (unscaled, sources), factor = vit[name], tensors[scale]
            if factor.shape != unscaled.shape[:1]:
                raise InputError(
                    f"{source}: the layer scale {scale} has the shape {tuple(factor.shape)}, which does not fit "
                    f"{sources[0]} of the shape {tuple(unscaled.shape)}; save the state dict of the whole model"
                )
            scaled = torch.einsum("o,o...->o...", widen(factor), widen(unscaled))
            vit[name] = Part(scaled.to(unscaled.dtype), (*sources, scale))
    # A distilled DeiT predicts the mean of two heads. timm calls the first of them as the only head of others.
    if DISTILLATION_TOKEN in vit and "distillation_classifier.weight" in vit:
        for kind in ("weight", "bias"):
            if f"classifier.{kind}" in vit:
                vit[f"cls_classifier.{kind}"] = vit.pop(f"classifier.{kind}")
    return vit


def renamed(name: str, table: Mapping[str, str] = TO_AFT) -> str:
    """Replace parts of the name of a tensor; by default, a name in transformers by that in an AFT."""
    for old, new in table.items():
        name = re.sub(old, new, name)
    return name
