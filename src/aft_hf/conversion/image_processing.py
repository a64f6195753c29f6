"""Image processors of transformers that reproduce the preprocessing that a checkpoint was trained with."""

import math

from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import PILImageResampling
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from .errors import ConversionError
from .timm_config import PretrainedConfig


INTERPOLATIONS = {
    "nearest": PILImageResampling.NEAREST,
    "bilinear": PILImageResampling.BILINEAR,
    "bicubic": PILImageResampling.BICUBIC,
    "lanczos": PILImageResampling.LANCZOS,
}


def vit_image_processor(image_size: tuple[int, int]) -> BaseImageProcessor:
    """Return the image processor of transformers' ViT: resize to (height, width), scale values to -1 .. 1."""
    height, width = image_size
    return ViTImageProcessorPil(size={"height": height, "width": width})


def timm_image_processor(
    name: str, pretrained_cfg: PretrainedConfig, image_size: tuple[int, int]
) -> BaseImageProcessor:
    """Return timm's evaluation transform: resize the shorter side to floor(size / crop_pct), center crop, normalize.

    Entries that `pretrained_cfg` lacks get timm's defaults, which are also the transform of the original DeiT:
    bicubic, a crop of 224 from 256, ImageNet's mean and standard deviation. If a margin is odd, the crop may be one
    pixel off torchvision's.

    Args:
        name: name of the checkpoint, for error messages.
        pretrained_cfg: the `pretrained_cfg` of timm's config.json; may be without values.
        image_size: (height, width) in pixels.

    Raises:
        ConversionError: transformers does not have the crop mode or the interpolation.
    """
    crop_mode, interpolation = pretrained_cfg.crop_mode, pretrained_cfg.interpolation
    if crop_mode != "center" or interpolation not in INTERPOLATIONS:
        raise ConversionError(
            f"{name}: crop_mode {crop_mode!r} with interpolation {interpolation!r} is not supported; set crop_mode to "
            f"'center' and interpolation to one of {', '.join(INTERPOLATIONS)} in its pretrained_cfg"
        )
    height, width = image_size
    return DeiTImageProcessorPil(
        do_convert_rgb=True,
        size={"shortest_edge": math.floor(max(image_size) / pretrained_cfg.crop_pct)},
        crop_size={"height": height, "width": width},
        resample=INTERPOLATIONS[interpolation],
        image_mean=pretrained_cfg.mean,
        image_std=pretrained_cfg.std,
    )
