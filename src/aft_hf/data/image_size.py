"""Image processors for another image size than they were made for."""

import copy
import math
from typing import Any

from transformers.image_processing_utils import BaseImageProcessor


def resized_processor(processor: BaseImageProcessor, size: tuple[int, int]) -> BaseImageProcessor:
    """A copy of an image processor that makes images of `size`, (height, width) in pixels.

    The margin that a centre crop leaves away keeps its share: a resize to 256 before a crop of 224 becomes one to 438
    before a crop of 384.
    """
    resized: Any = copy.deepcopy(processor)  # whose class declares the sizes
    height, width = size
    if getattr(resized, "do_center_crop", False):
        crop = dict(resized.crop_size)
        ratio = max(size) / max(crop["height"], crop["width"])
        resized.size = {side: math.floor(length * ratio) for side, length in dict(resized.size).items() if length}
        resized.crop_size = {"height": height, "width": width}
    else:
        resized.size = {"height": height, "width": width}
    return resized


def makes_images_of(processor: BaseImageProcessor, size: tuple[int, int]) -> bool:
    """Whether an image processor makes images of `size`, (height, width) in pixels, as it is."""
    declared: Any = processor
    made = dict(declared.crop_size if getattr(processor, "do_center_crop", False) else declared.size)
    return made == {"height": size[0], "width": size[1]}
