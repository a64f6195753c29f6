"""Tiny checkpoints of every format, with random values in all parameters, and reference forward passes."""

import json

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf.conversion import read_source
from aft_hf.conversion.files import read_weights


WIDTH, DEPTH, HEADS, MLP, PATCH, CLASSES = 24, 2, 3, 40, 8, 3
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "image_size": 32,
    "patch_size": PATCH,
}
OPTIONS = {"kernel_size": 3, "num_heads": 4}  # options of a conversion to AFT-conv
TIMM = {"source_num_heads": HEADS}  # required, since the width 24 is no multiple of 64


def randomize(model):
    """Randomize all parameters: a forgotten copy of an initial 0 or 1 would go unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def save(model, path):
    """Save a model with random parameters, and return it."""
    randomize(model).save_pretrained(path)
    return model


def save_vit(path):
    """Save a ViT of transformers with class names and an image processor."""
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
    ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(path)
    return save(ViTForImageClassification(ViTConfig(**SIZES, **labels)), path)


def save_distilled_deit(path):
    """Save a DeiT of transformers with two heads."""
    return save(DeiTForImageClassificationWithTeacher(DeiTConfig(**SIZES, num_labels=CLASSES)), path)


def save_deit(path):
    """Save a DeiT of transformers with a distillation token and one head."""
    return save(DeiTForImageClassification(DeiTConfig(**SIZES, num_labels=CLASSES)), path)


def save_backbone(path):
    """Save a ViT of transformers with a pooler and no classifier."""
    return save(ViTModel(ViTConfig(**SIZES)), path)


def timm_tensors(
    *,
    grid=(4, 4),
    width=WIDTH,
    distilled=False,
    layer_scale=None,  # name of the two tensors: "ls{}.gamma" or "gamma_{}"
    position_of_cls=True,
    bias=True,
    head=True,
):
    """Return random tensors with the names of timm and the original DeiT."""
    tokens = grid[0] * grid[1] + position_of_cls + distilled
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, tokens, width),
        "patch_embed.proj.weight": (width, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for i in range(DEPTH):
        block = f"blocks.{i}"
        for name, outputs, inputs in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", MLP, width),
            ("mlp.fc2", width, MLP),
        ):
            shapes[f"{block}.{name}.weight"] = (outputs, inputs)
            shapes[f"{block}.{name}.bias"] = (outputs,)
        for name in ("norm1", "norm2"):
            shapes[f"{block}.{name}.weight"] = shapes[f"{block}.{name}.bias"] = (width,)
        if layer_scale:
            for j in (1, 2):
                shapes[f"{block}.{layer_scale.format(j)}"] = (width,)
        if not bias:
            del shapes[f"{block}.attn.qkv.bias"]
    if distilled:
        shapes["dist_token"] = (1, 1, width)
    for name in ["head", "head_dist"][: (1 + distilled) if head else 0]:
        shapes |= {f"{name}.weight": (CLASSES, width), f"{name}.bias": (CLASSES,)}
    return {name: torch.randn(shape) * 0.5 for name, shape in shapes.items()}


def save_pth(path, **options):
    """Save a file in the format of the original DeiT."""
    tensors = timm_tensors(**options)
    torch.save({"model": tensors}, path)
    return tensors


def save_timm(path, flat=False, pretrained=None, **config):
    """Save a directory of timm, and return its path.

    In the layout of older versions, the entries of `pretrained_cfg` are at top level, and the weights in a pickle.
    """
    images = {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.8}
    images |= {"interpolation": "bilinear"} | (pretrained or {})
    content = {"architecture": "vit_small_patch8_32", "num_classes": CLASSES, "num_features": WIDTH}
    content |= {"global_pool": "token", "model_args": {"num_heads": HEADS}}
    content |= images if flat else {"pretrained_cfg": images}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content | config))
    if flat:
        torch.save(timm_tensors(), path / "pytorch_model.bin")
    else:
        save_file(timm_tensors(), path / "model.safetensors")
    return path


def timm_block(tensors, i, x, num_heads=HEADS):
    """Compute a block of timm's ViT, with layer scales if there are any."""

    def linear(x, name):
        return nn.functional.linear(x, tensors[f"blocks.{i}.{name}.weight"], tensors.get(f"blocks.{i}.{name}.bias"))

    def norm(x, name):
        weight, bias = tensors[f"blocks.{i}.{name}.weight"], tensors[f"blocks.{i}.{name}.bias"]
        return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps=1e-6)

    def scale(j):
        names = (f"blocks.{i}.ls{j}.gamma", f"blocks.{i}.gamma_{j}")
        return next((tensors[name] for name in names if name in tensors), 1.0)

    batch, length, width = x.shape
    qkv = linear(norm(x, "norm1"), "attn.qkv").view(batch, length, 3, num_heads, width // num_heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    attention = (q @ k.mT / (width // num_heads) ** 0.5).softmax(-1)
    mixed = (attention @ v).transpose(1, 2).reshape(batch, length, width)
    x = x + scale(1) * linear(mixed, "attn.proj")
    hidden = nn.functional.gelu(linear(norm(x, "norm2"), "mlp.fc1"))
    return x + scale(2) * linear(hidden, "mlp.fc2")


def timm_logits(tensors, pixels, num_heads=HEADS):
    """Compute the logits of timm's ViT, distilled or not, for pixels (B, 3, height, width)."""
    x = nn.functional.conv2d(pixels, tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"], PATCH)
    x = x.flatten(2).mT
    batch, num_patches, width = x.shape
    prefix = [tensors[name].expand(batch, -1, -1) for name in ("cls_token", "dist_token") if name in tensors]
    if tensors["pos_embed"].shape[1] == num_patches:
        x = torch.cat([*prefix, x + tensors["pos_embed"]], 1)
    else:
        x = torch.cat([*prefix, x], 1) + tensors["pos_embed"]
    for i in range(DEPTH):
        x = timm_block(tensors, i, x, num_heads)
    x = nn.functional.layer_norm(x, (width,), tensors["norm.weight"], tensors["norm.bias"], eps=1e-6)
    heads = [name for name in ("head", "head_dist") if f"{name}.weight" in tensors]
    logits = [x[:, j] @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for j, name in enumerate(heads)]
    return sum(logits) / len(logits)


def copies(teacher):
    """Return what the paper transfers from a model of transformers, by the names of AFT-conv."""
    left = ("q_proj", "k_proj", "cls_token", "position_embeddings", "distillation_token", "pooler")
    tensors = {
        name: x for name, x in teacher.base_model.state_dict().items() if not any(part in name for part in left)
    }
    return {f"aft.{name.replace('attention.', 'mixer.').replace('.projection', '')}": x for name, x in tensors.items()}


def assert_read(path, tensors, **options):
    """Assert that a file is read as these tensors, and return the source."""
    actual, _ = read_weights(path)
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in tensors.items())
    return read_source(path, **TIMM, **options)


def assert_copied(model, expected):
    """Assert that every expected tensor is in the model, bit for bit."""
    state = model.state_dict()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
