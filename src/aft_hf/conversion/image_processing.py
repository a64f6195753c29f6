"""Image processors: what a checkpoint was trained to see, in the words of transformers."""

import math
from collections.abc import Mapping
from typing import Any

from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import PILImageResampling
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from .errors import ConversionError


INTERPOLATIONS = {
    "nearest": PILImageResampling.NEAREST,
    "bilinear": PILImageResampling.BILINEAR,
    "bicubic": PILImageResampling.BICUBIC,
    "lanczos": PILImageResampling.LANCZOS,
}


def vit_image_processor(image_size: tuple[int, int]) -> BaseImageProcessor:
    """That of transformers' ViT: resized to (height, width), values in -1 .. 1."""
    height, width = image_size
    return ViTImageProcessorPil(size={"height": height, "width": width})


def timm_image_processor(
    name: str, pretrained_cfg: Mapping[str, Any], image_size: tuple[int, int]
) -> BaseImageProcessor:
    """As timm's transform for evaluation: the shorter side to floor(size / crop_pct), a centre crop, normalized.

    What `pretrained_cfg` does not say is timm's default, which is also the transform of the original DeiT: bicubic, a
    crop of 224 out of 256, ImageNet's mean and standard deviation. Where a margin is odd, the crop may lie one pixel
    beside torchvision's.

    Args:
        name: of the checkpoint, for messages.
        pretrained_cfg: of timm's config.json; may be empty.
        image_size: (height, width) in pixels.

    Raises:
        ConversionError: a way to crop or interpolate that transformers does not have.
    """
    crop_mode, interpolation = (
        pretrained_cfg.get("crop_mode", "center"),
        pretrained_cfg.get("interpolation", "bicubic"),
    )
    if crop_mode != "center" or interpolation not in INTERPOLATIONS:
        raise ConversionError(
            f"{name}: images cropped by {crop_mode!r} and resized by {interpolation!r} are not supported; edit its "
            f"pretrained_cfg to 'center' and one of {', '.join(INTERPOLATIONS)}"
        )
    height, width = image_size
    return DeiTImageProcessorPil(
        do_convert_rgb=True,
        size={"shortest_edge": math.floor(max(image_size) / pretrained_cfg.get("crop_pct", 0.875))},
        crop_size={"height": height, "width": width},
        resample=INTERPOLATIONS[interpolation],
        image_mean=list(pretrained_cfg.get("mean", IMAGENET_DEFAULT_MEAN)),
        image_std=list(pretrained_cfg.get("std", IMAGENET_DEFAULT_STD)),
    )
