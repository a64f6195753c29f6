"""Image processors: applying them, and adapting them to another image size."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor


def pixel_values(processor: BaseImageProcessor, images: Iterable[Image.Image]) -> torch.Tensor:
    """Return the pixel values of images, (B, channels, height, width)."""
    return processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]


def resized_processor(processor: BaseImageProcessor, size: tuple[int, int]) -> BaseImageProcessor:
    """Return a copy of an image processor whose images have `size`, (height, width) in pixels.

    A resize before a center crop keeps its ratio to the crop: a resize to 256 before a crop of 224 becomes a resize to
    438 before a crop of 384.
    """
    resized: Any = copy.deepcopy(processor)  # the base class does not declare the sizes
    height, width = size
    if getattr(resized, "do_center_crop", False):
        ratio = max(size) / max(resized.crop_size["height"], resized.crop_size["width"])
        resized.size = {side: math.floor(length * ratio) for side, length in dict(resized.size).items() if length}
        resized.crop_size = {"height": height, "width": width}
    else:
        resized.size = {"height": height, "width": width}
        resized.do_resize = resized.do_resize or resized.to_dict() != processor.to_dict()
    return resized
