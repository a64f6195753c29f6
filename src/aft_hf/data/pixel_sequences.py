"""Conversion of images to sequences of sub-pixels."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from PIL import Image

from .samples import Row, Sample, SampleKey, image_of


# The values of sub-pixels are the tokens 0 .. 255. This token, which is no sub-pixel, begins the input of a model.
START_TOKEN = 256


@dataclass
class PixelSequences:
    """Maker of sequences: `labels`, the 3 H W sub-pixels, and `input_ids`, shifted by the start token.

    Pixels are in raster order, the channels of a pixel side by side. The arguments are keys of `PixelsData` and the
    seed of the augmentation, which samples with a key get: a horizontal flip with probability 1/2, and a random shift
    of the brightness, clipped to 0 .. 255. Images of another size are resized (mean over areas).
    """

    image_size: int
    _: KW_ONLY
    image_column: str = "image"
    seed: int = 0
    flip: bool = True
    brightness_shift: int = 10

    def __call__(self, row: Row, key: SampleKey | None = None) -> Sample:
        image = image_of(row, self.image_column).convert("RGB")
        if image.size != (self.image_size, self.image_size):
            image = image.resize((self.image_size, self.image_size), Image.Resampling.BOX)
        pixels = np.asarray(image)
        if key is not None:
            random = key.random(self.seed)
            shift = random.integers(-self.brightness_shift, self.brightness_shift, endpoint=True)
            if self.flip and random.random() < 0.5:
                pixels = pixels[:, ::-1]
            pixels = np.clip(pixels.astype(np.int64) + shift, 0, 255)
        labels = torch.from_numpy(pixels.reshape(-1).astype(np.int64))
        return {"input_ids": torch.cat([torch.tensor([START_TOKEN]), labels[:-1]]), "labels": labels}
