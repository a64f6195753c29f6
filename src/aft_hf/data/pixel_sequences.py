"""Conversion of images to sequences of sub-pixels and back, and a dataset of such sequences."""

from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows
from PIL import Image
from torch.utils.data import Dataset

from .fingerprint import sum_rows
from .image_files import check_resizing, row_at
from .order import SampleKey


# The values of sub-pixels are the tokens 0 .. 255. This token, which is no sub-pixel, begins the input of a model.
START_TOKEN = 256


def pixels_to_tokens(pixels: np.ndarray) -> np.ndarray:
    """Flatten (H, W, C) bytes to (H * W * C,): pixels in raster order, the channels of a pixel side by side."""
    return pixels.reshape(-1)


def tokens_to_image(tokens: torch.Tensor | np.ndarray, size: tuple[int, int], channels: int = 3) -> Image.Image:
    """Return the image of (H * W * channels,) tokens; the inverse of `pixels_to_tokens`.

    Raises:
        ValueError: the number of tokens does not match the size, or a token is not in 0 .. 255.
    """
    tokens = np.asarray(tokens)
    if tokens.shape != (size[0] * size[1] * channels,):
        raise ValueError(
            f"an image of {size[0]} x {size[1]} x {channels} does not match tokens of shape {tokens.shape}"
        )
    if tokens.min() < 0 or tokens.max() > 255:
        raise ValueError(f"sub-pixels are 0 .. 255, got tokens {tokens.min()} .. {tokens.max()}")
    pixels = tokens.astype(np.uint8).reshape(*size, channels)
    return Image.fromarray(pixels if channels == 3 else pixels[..., 0])


class PixelSequences(Dataset[dict[str, torch.Tensor]]):
    """Dataset of images as sequences: `labels`, the 3 H W sub-pixels, and `input_ids`, shifted by the start token.

    Args:
        rows: dataset of the library `datasets` with a column of images.
        image_size: side in pixels; images of another size are resized (mean over areas).
        image_column: name of the column of images in `rows`.
        seed: seed of the augmentation in training; the dataset is then indexed by `SampleKey`. None: the dataset is
            indexed by number and does not augment.
        flip: whether to flip samples horizontally with probability 1/2.
        brightness_shift: the largest random shift of the brightness. Shifted sub-pixels are clipped to 0 .. 255.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        image_size: int,
        image_column: str = "image",
        seed: int | None = None,
        flip: bool = True,
        brightness_shift: int = 10,
    ):
        self.rows, self.image_size, self.image_column = rows, image_size, image_column
        self.seed, self.flip, self.brightness_shift = seed, flip, brightness_shift

    def fingerprint(self) -> str:
        """Return the fingerprint of the images."""
        return sum_rows(self.rows, self.image_column)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | SampleKey) -> dict[str, torch.Tensor]:
        if not isinstance(key, SampleKey):
            return self.sample(row_at(self.rows, key))
        return self.sample(row_at(self.rows, key.index), key)

    def sample(self, row: dict[str, Any], key: SampleKey | None = None) -> dict[str, torch.Tensor]:
        """Return the sample of a row, augmented by the random numbers of `key` if it is given."""
        image = row[self.image_column].convert("RGB")
        if image.size != (size := (self.image_size, self.image_size)):
            image = check_resizing(image, *size).resize(size, Image.Resampling.BOX)
        pixels = np.asarray(image)
        if key is not None and self.seed is not None:
            pixels = self._augment(pixels, key.random(self.seed))
        labels = torch.from_numpy(pixels_to_tokens(pixels).astype(np.int64))
        return {"input_ids": torch.cat([torch.tensor([START_TOKEN]), labels[:-1]]), "labels": labels}

    def _augment(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        shift = random.integers(-self.brightness_shift, self.brightness_shift, endpoint=True)
        if self.flip and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return np.clip(pixels.astype(np.int64) + shift, 0, 255)
