"""Training images: they are decoded and cropped one by one by the loader, and augmented in batches on the device."""

import math
from collections.abc import Sequence
from typing import Any

import kornia.augmentation as augmentation
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from .images import ImagePipeline
from .rand_augment import RandAugment
from .samples import SampleKey


class TrainingImages(ImagePipeline):
    """Maker of training samples: `pixel_values`, (3, size, size) in uint8, and `labels`.

    Args:
        size: side of the resized images in pixels.
        crop_scale: smallest and largest area of the random crops, as a share of the image (the aspect ratio is in
            [3/4, 4/3]). None: the whole image.
        seed: seed of the crops.
        **options: columns and class numbers, as for `ImagePipeline`.
    """

    def __init__(self, size: int, crop_scale: Sequence[float] | None, seed: int, **options: Any):
        super().__init__(None, **options)
        self.size, self.crop_scale, self.seed = (size, size), crop_scale, seed

    def pixels(self, image: Image.Image, key: SampleKey | None) -> torch.Tensor:
        box = None
        if self.crop_scale is not None and key is not None:
            box = crop_box(image.size, self.crop_scale, key.random(self.seed))
        resized = image.convert("RGB").resize(self.size, Image.Resampling.BICUBIC, box=box)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def crop_box(
    size: tuple[int, int], scale: Sequence[float], random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Draw a random crop (left, top, right, bottom) of an image of `size` (width, height), as for Inception.

    The share of the area is uniform in the range `scale`, the aspect ratio log-uniform in [3/4, 4/3]. If ten draws do
    not fit into the image, the crop is the largest one at the center whose aspect ratio is in [3/4, 4/3].
    """
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
    """Augment and normalize a batch on the device.

    The input is (B, 3, H, W) images in uint8 and (B,) labels. The output is pixel values, normalized as by the model's
    image processor with `mean` and `std` for values in [0, 1], and (B, num_classes) targets. Random numbers come from
    PyTorch's global generators. The other arguments are the keys of `data.augmentation` in a recipe.
    """

    def __init__(
        self,
        num_classes: int,
        mean: list[float],
        std: list[float],
        *,
        flip: bool = True,
        rand_augment_operations: int = 0,
        rand_augment_magnitude: float = 9.0,
        rand_augment_noise: float = 0.0,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ):
        super().__init__()
        self.num_classes, self.mixup, self.cutmix = num_classes, mixup, cutmix
        self.flip = augmentation.RandomHorizontalFlip() if flip else nn.Identity()
        self.rand_augment = RandAugment(rand_augment_operations, rand_augment_magnitude, rand_augment_noise, mean)
        self.normalize = augmentation.Normalize(torch.tensor(mean), torch.tensor(std))
        self.erase = augmentation.RandomErasing(scale=(0.02, 1 / 3), ratio=(0.3, 3.3), p=erasing) if erasing else None

    @torch.no_grad()
    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = self.normalize(self.rand_augment(self.flip(pixels.float() / 255)))
        if self.erase is not None:
            # kornia erases to a constant: an erased image of ones is the mask for the noise.
            pixels = pixels.where(self.erase(torch.ones_like(pixels)) > 0, torch.randn_like(pixels))
        targets = F.one_hot(labels, self.num_classes).to(pixels.dtype)
        return mix_batch(pixels, targets, mixup=self.mixup, cutmix=self.cutmix)


def mix_batch(
    pixels: torch.Tensor, targets: torch.Tensor, *, mixup: float = 0.0, cutmix: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix a batch with its reverse by mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019).

    Args:
        pixels: (B, channels, height, width).
        targets: (B, classes), the class probabilities of each image.
        mixup, cutmix: alpha of the Beta distributions of mixup and CutMix, 0 to switch them off. With both, one of
            them is drawn with probability 1/2.
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
    """Return the start and end of a range of `share` of the length around a random center, clipped to the length."""
    half, centre = int(length * share) // 2, int(torch.randint(length, ()))
    return max(centre - half, 0), min(centre + half, length)
