"""Config and image processor of a checkpoint of timm or the original DeiT, mostly from the shapes of its tensors."""

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat
from torch import nn
from transformers import DeiTConfig, ViTConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import PILImageResampling
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.utils import CONFIG_NAME

from ..configuration_aft import pair
from ..errors import InputError, explained
from ..reading import Document, parse_json
from .names import DISTILLATION_TOKEN, PATCHES, POSITIONS, Part
from .resizing import one_or_pair


# timm's names of plain ViTs and DeiTs: vit_base_patch16_224, deit_tiny_distilled_patch16_224, deit3_base_patch16_384.
ARCHITECTURES = r"(vit|deit|deit3)_[a-z]+(_distilled)?_patch\d+_(\d+(_in21k|_in21ft1k)?|dinov2)"
# Activations whose names in timm are not those in transformers.
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "swish": "silu"}
HEAD_WIDTH = 64
# The widths of the huge, giant and gigantic ViT, which have 16 heads of more than `HEAD_WIDTH` features.
HEADS_OF_WIDTH = {1280: 16, 1408: 16, 1664: 16}

Size = Annotated[int, Field(gt=0, le=2**20)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
CLASSIFIERS = {"classifier.weight", "cls_classifier.weight"}  # the latter of two heads
BESIDE = {"label_names", "label_descriptions", "global_pool"}
# Keys of earlier versions of timm.
RENAMED = {"labels": "label_names", "label_name": "label_names", "display_name": "label_descriptions"}


class PretrainedConfig(Document):
    """Schema of `pretrained_cfg` of timm, the images and labels that a model was trained on, with timm's defaults."""

    input_size: tuple[Size, Size, Size] | None = None
    crop_pct: Annotated[float, Field(ge=0.1, le=10)] = 0.875
    crop_mode: Literal["center"] = "center"
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    mean: tuple[FiniteFloat, FiniteFloat, FiniteFloat] = (0.485, 0.456, 0.406)  # of ImageNet
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    global_pool: str | None = None
    label_names: list[str] | dict[str, str] = {}
    label_descriptions: dict[str, str] = {}


class ModelArgs(Document):
    """Schema of `model_args` of timm: arguments of the model that the tensors do not determine."""

    img_size: Size | tuple[Size, Size] | None = None
    num_heads: Size | None = None
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swish"] = "gelu"
    global_pool: str | None = None


class TimmConfig(Document):
    """Schema of timm's config.json."""

    architecture: str | None = None
    model_args: ModelArgs = ModelArgs()
    pretrained_cfg: PretrainedConfig = PretrainedConfig()


def read_timm_config(name: str, config: Mapping[str, Any]) -> TimmConfig:
    """Return a config of timm; raise an InputError unless it is that of a ViT or DeiT with a class token.

    As in timm, null means the default; a config of older versions, without `pretrained_cfg`, has its entries itself,
    and some under other names; and entries beside `pretrained_cfg` replace those in it.
    """

    def current(entries: dict[str, Any]) -> dict[str, Any]:
        stated = {key: value for key, value in entries.items() if value is not None}
        return {RENAMED[key]: stated[key] for key in RENAMED if key in stated} | stated

    stated = json.loads(json.dumps(config), object_hook=current)
    if isinstance(pretrained := stated.get("pretrained_cfg", stated), dict):
        stated["pretrained_cfg"] = pretrained | {key: stated[key] for key in BESIDE & stated.keys()}
    checked = parse_json(json.dumps(stated), TimmConfig, f"{name}: {CONFIG_NAME}")
    if not re.fullmatch(ARCHITECTURES, checked.architecture or ""):
        raise InputError(
            f"{name}: timm's {checked.architecture!r} cannot be converted; give a plain ViT or DeiT such as "
            "deit_small_patch16_224 or deit3_base_patch16_384"
        )
    pooling = checked.model_args.global_pool or checked.pretrained_cfg.global_pool
    if pooling not in (None, "", "token"):
        raise InputError(f"{name}: pools by {pooling!r}; only models that pool by their class token are converted")
    return checked


def infer_config(
    name: str, parts: dict[str, Part], stated: TimmConfig, image_size: int | tuple[int, int] | None, heads: int | None
) -> ViTConfig | DeiTConfig:
    """Return a config of transformers: a `DeiTConfig` if there is a distillation token, else a `ViTConfig`.

    Without an image size or a number of heads in timm's config, the grid is square and the number is the usual one.
    Position embeddings without one of the class token, as in DeiT-III, get a zero for it in `parts`.
    """
    if ".patch_embeddings." in parts[PATCHES].sources[0]:
        raise InputError(f"{name}: is a weight file of transformers; give its directory with the config.json")
    used = (PATCHES, POSITIONS, "layers.0.mlp.fc1.weight")
    if missing := [each for each in used if each not in parts]:
        raise InputError(f"{name}: has no {missing[0]} (the name in transformers); save all tensors of a ViT")
    with explained(f"{name}: {', '.join(used)} (names in transformers) do not have the shapes of those of a ViT"):
        shapes = [tuple(parts[each].tensor.shape) for each in used]
        (features, channels, *patch_size), (_, length, _), (intermediate_size, _) = shapes
        rows, columns = patch_size
    distilled = DISTILLATION_TOKEN in parts
    model_args, pretrained_cfg = stated.model_args, stated.pretrained_cfg
    usual = 0 if features % HEAD_WIDTH else features // HEAD_WIDTH
    num_heads = (model_args.num_heads or HEADS_OF_WIDTH.get(features, usual)) if heads is None else heads
    if num_heads < 1 or features % num_heads:
        raise InputError(
            f"{name}: the number of heads at its width of {features} is not known, or does not divide it; give "
            "source_num_heads (--source-num-heads)"
        )
    if image_size is None:
        image_size = model_args.img_size or (pretrained_cfg.input_size and pretrained_cfg.input_size[1:])
    counts = (length - (2 if distilled else 1), length)  # of patches, with or without positions of the other tokens
    sides = (math.isqrt(max(count, 0)) for count in counts)
    side = next((side for side in sides if side**2 in counts), 0)  # of a square grid
    height, width = (side * rows, side * columns) if image_size is None else pair(image_size)
    num_patches = (height // rows) * (width // columns)
    if num_patches not in counts or height % rows or width % columns or height < 1:
        size = "square images" if image_size is None else f"images of {height} x {width} pixels"
        raise InputError(
            f"{name}: {size} do not fit its {length} positions and patches of {rows} x {columns} pixels; give "
            "source_image_size (--source-image-size), the height and width it was trained at"
        )
    if length == num_patches:
        padded = nn.functional.pad(parts[POSITIONS].tensor, (0, 0, 1, 0))
        parts[POSITIONS] = parts[POSITIONS]._replace(tensor=padded)
    return (DeiTConfig if distilled else ViTConfig)(
        hidden_size=features,
        num_hidden_layers=len({key.split(".")[1] for key in parts if key.startswith("layers.")}),
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        hidden_act=ACTIVATIONS.get(model_args.act_layer, model_args.act_layer),
        layer_norm_eps=1e-6,
        image_size=one_or_pair((height, width)),
        patch_size=one_or_pair((rows, columns)),
        num_channels=channels,
        qkv_bias="layers.0.attention.q_proj.bias" in parts,
        **_labels(pretrained_cfg, max((len(parts[name].tensor) for name in CLASSIFIERS & parts.keys()), default=0)),
    )


def _labels(config: PretrainedConfig, num_labels: int) -> dict[str, Any]:
    """Return the names of the classes if timm's config has them, their descriptions where it has these, too."""
    names = config.label_names
    numbered = {int(key): name for key, name in names.items()} if isinstance(names, dict) else dict(enumerate(names))
    if not numbered or max(numbered) >= num_labels or (isinstance(names, list) and len(names) < num_labels):
        return {"num_labels": num_labels} if num_labels else {}  # no names, or names of other classes
    names = [numbered.get(i, f"LABEL_{i}") for i in range(num_labels)]
    id2label = {i: config.label_descriptions.get(label, label) for i, label in enumerate(names)}
    return {"id2label": id2label, "label2id": {label: i for i, label in id2label.items()}}


def image_processor(config: PretrainedConfig, image_size: tuple[int, int]) -> BaseImageProcessor:
    """Return timm's evaluation transform: resize the shorter side to floor(size / crop_pct), center crop, normalize.

    The defaults of `PretrainedConfig` are also the transform of the original DeiT: bicubic, a crop of 224 from 256,
    ImageNet's mean and standard deviation. If a margin is odd, the crop may be one pixel off torchvision's.
    """
    return DeiTImageProcessorPil(
        do_convert_rgb=True,
        size={"shortest_edge": math.floor(max(image_size) / config.crop_pct)},
        crop_size={"height": image_size[0], "width": image_size[1]},
        resample=getattr(PILImageResampling, config.interpolation.upper()),
        image_mean=list(config.mean),
        image_std=list(config.std),
    )
