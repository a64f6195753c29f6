"""Labelled images for training: decoded and cropped where they are read, augmented in batches on the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import kornia.augmentation as augmentation
import numpy as np
import torch
from datasets import Dataset as Rows
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from .fingerprint import sum_rows
from .image_files import row_at
from .order import SampleKey
from .rand_augment import RandAugment


class TrainingImages(Dataset[dict[str, torch.Tensor]]):
    """Rows with an image and a label as `pixel_values`, (3, size, size) bytes, and `labels`.

    Args:
        rows: of `datasets`, with decoded images.
        numbers: the number of the class of each label.
        size: side in pixels.
        crop_scale: smallest and largest share of the area to cut out (the aspect ratio is in [3/4, 4/3]); None for
            the whole image.
        seed: of the crops; samples are asked for by `SampleKey`.
        image_column, label_column: names in `rows`.
    """

    def __init__(
        self,
        rows: Rows,
        numbers: Mapping[Any, int],
        *,
        size: int,
        crop_scale: Sequence[float] | None,
        seed: int,
        image_column: str = "image",
        label_column: str = "label",
    ):
        self.rows, self.numbers, self.size, self.crop_scale, self.seed = rows, numbers, size, crop_scale, seed
        self.image_column, self.label_column = image_column, label_column

    def fingerprint(self) -> str:
        """What tells the images and labels from others."""
        return sum_rows(self.rows, self.image_column, self.label_column)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: SampleKey) -> dict[str, torch.Tensor]:
        return self.sample(row_at(self.rows, key.index), key)

    def sample(self, row: dict[str, Any], key: SampleKey) -> dict[str, torch.Tensor]:
        """That of a row, cropped by the random numbers of a key."""
        image = row[self.image_column].convert("RGB")
        box = None if self.crop_scale is None else crop_box(image.size, self.crop_scale, key.random(self.seed))
        image = image.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return {"pixel_values": pixels, "labels": torch.tensor(self.numbers[row[self.label_column]])}


def crop_box(
    size: tuple[int, int], scale: Sequence[float], random: np.random.Generator
) -> tuple[float, float, float, float]:
    """A random part (left, top, right, bottom) of an image of `size` (width, height), as Inception's crop: `scale` of
    the area, aspect ratio log-uniform in [3/4, 4/3]. What ten draws do not fit into the image becomes its centre."""
    (width, height), (smallest, largest) = size, scale
    for _ in range(10):
        area, ratio = (
            random.uniform(smallest, largest) * width * height,
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(width - w, endpoint=True), random.integers(height - h, endpoint=True)
            return float(left), float(top), float(left + w), float(top + h)
    across, down = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


class BatchAugmentation(nn.Module):
    """What is done to a batch on the device: (B, 3, H, W) bytes and (B,) labels to pixel values, as the model's image
    processor gives them, and (B, classes) targets. Random numbers come from PyTorch's global generator.

    Args:
        num_classes: of the labels.
        mean, std: of the processor, for values in [0, 1].
        flip: whether to mirror half of the images.
        operations, magnitude, noise: of `RandAugment`, magnitude in 0 .. 10.
        erasing: probability of replacing a part of an image by noise, normal like the pixels.
        mixup, cutmix: alpha of their Beta distributions, 0 for none; with both, each batch tosses a coin.
    """

    def __init__(
        self,
        num_classes: int,
        mean: list[float],
        std: list[float],
        *,
        flip: bool = True,
        operations: int = 0,
        magnitude: float = 9.0,
        noise: float = 0.0,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ):
        super().__init__()
        self.num_classes, self.mixup, self.cutmix = num_classes, mixup, cutmix
        self.flip = augmentation.RandomHorizontalFlip() if flip else None
        self.rand_augment = RandAugment(operations, magnitude, noise, mean) if operations else None
        self.normalize = augmentation.Normalize(torch.tensor(mean), torch.tensor(std))
        self.erase = augmentation.RandomErasing(scale=(0.02, 1 / 3), ratio=(0.3, 3.3), p=erasing) if erasing else None

    @torch.no_grad()
    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = pixels.float() / 255
        if self.flip is not None:
            pixels = self.flip(pixels)
        if self.rand_augment is not None:
            pixels = self.rand_augment(pixels)
        pixels = self.normalize(pixels)
        if self.erase is not None:
            # kornia erases to one value; where it did so in an image of ones, there is noise.
            pixels = pixels.where(self.erase(torch.ones_like(pixels)) > 0, torch.randn_like(pixels))
        targets = F.one_hot(labels, self.num_classes).to(pixels.dtype)
        return mix_batch(pixels, targets, mixup=self.mixup, cutmix=self.cutmix)


def mix_batch(
    pixels: torch.Tensor, targets: torch.Tensor, *, mixup: float = 0.0, cutmix: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019) of a batch with itself in reverse.

    Args:
        pixels: (B, channels, height, width).
        targets: (B, classes), what each image shows.
        mixup, cutmix: alpha of their Beta distributions, 0 for none; with both, the batch tosses a coin.
    """
    cut = cutmix > 0 and (mixup == 0 or torch.rand(()).item() < 0.5)
    alpha = cutmix if cut else mixup
    if alpha == 0:
        return pixels, targets
    # kornia's mixup draws the share uniformly, not from Beta(alpha, alpha).
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    other = pixels.flip(0)
    if cut:
        height, width = pixels.shape[2:]
        top, bottom = _random_range(height, math.sqrt(1 - share))
        left, right = _random_range(width, math.sqrt(1 - share))
        pixels = pixels.clone()
        pixels[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        pixels = share * pixels + (1 - share) * other
    return pixels, share * targets + (1 - share) * targets.flip(0)


def _random_range(length: int, share: float) -> tuple[int, int]:
    """Where a range of `share` of the length begins and ends, its centre anywhere; cut off at the ends."""
    half, centre = int(length * share) // 2, int(torch.randint(length, ()))
    return max(centre - half, 0), min(centre + half, length)
