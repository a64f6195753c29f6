"""Training images: they are decoded and cropped one by one by the loader, and augmented in batches on the device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import kornia.augmentation as augmentation
import kornia.enhance as enhance
import numpy as np
import torch
from kornia.geometry.transform import rotate, shear, translate
from PIL import Image
from torch import nn
from torch.nn import functional as F

from .images import ImagePipeline
from .samples import SampleKey


class TrainingImages(ImagePipeline):
    """Maker of training samples: `pixel_values`, (3, size, size) in uint8, and `labels`; see `crop_box` for crops."""

    def __init__(self, size: int, crop_scale: Sequence[float] | None, seed: int, **options: Any):
        super().__init__(None, **options)
        self.size, self.crop_scale, self.seed = (size, size), crop_scale, seed

    def pixels(self, image: Image.Image, key: SampleKey | None) -> torch.Tensor:
        box: Any = None
        if self.crop_scale is not None and key is not None:
            box = crop_box(image.size, self.crop_scale, key.random(self.seed))
        resized = image.convert("RGB").resize(self.size, Image.Resampling.BICUBIC, box=box)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def crop_box(size: tuple[int, int], scale: Sequence[float], random: np.random.Generator) -> tuple[float, ...]:
    """Draw a random crop (left, top, right, bottom) of an image of `size` (width, height), as for Inception.

    The share of the area is uniform in the range `scale`, the aspect ratio log-uniform in [3/4, 4/3]. If ten draws do
    not fit into the image, the crop is the largest one at the center with such an aspect ratio.
    """
    (width, height), (smallest, largest) = size, scale
    for _ in range(10):
        area = random.uniform(smallest, largest) * width * height
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(width - w, endpoint=True), random.integers(height - h, endpoint=True)
            return float(left), float(top), float(left + w), float(top + h)
    across, down = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


class BatchAugmentation(nn.Module):
    """Augment and normalize a batch on the device: (B, 3, H, W) images in uint8 and (B,) labels.

    The output is pixel values, normalized with `mean` and `std` for values in [0, 1], and (B, num_classes) targets.
    Random numbers come from PyTorch's global generators. `options` are `data.augmentation` of a recipe.
    """

    def __init__(self, num_classes: int, mean: list[float], std: list[float], options: Any):
        super().__init__()
        self.num_classes, self.mean, self.options = num_classes, mean, options
        self.flip = augmentation.RandomHorizontalFlip() if options.flip else nn.Identity()
        self.normalize = augmentation.Normalize(torch.tensor(mean), torch.tensor(std))
        erasing = options.erasing
        self.erase = augmentation.RandomErasing(scale=(0.02, 1 / 3), ratio=(0.3, 3.3), p=erasing) if erasing else None

    @torch.no_grad()
    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = self.normalize(rand_augment(self.flip(pixels.float() / 255), self.options, self.mean))
        if self.erase is not None:
            # kornia erases to a constant: an erased image of ones is the mask for the noise.
            pixels = pixels.where(self.erase(torch.ones_like(pixels)) > 0, torch.randn_like(pixels))
        targets = F.one_hot(labels, self.num_classes).to(pixels.dtype)
        # Mix with the reversed batch, by mixup (Zhang et al. 2018), CutMix (Yun et al. 2019) or one of them at random.
        mixup, cutmix = self.options.mixup, self.options.cutmix
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


def rand_augment(images: torch.Tensor, options: Any, color: Sequence[float]) -> torch.Tensor:
    """Augment (B, 3, H, W) images in [0, 1] by RandAugment (Cubuk et al. 2019) as in DeiT.

    Unlike with kornia, each image has operations of its own, each with probability 1/2. Magnitudes, from 0 to 10, have
    the mean and the deviation in `options`, `data.augmentation` of a recipe. `color`, in [0, 1], is around moved ones.
    Random numbers come from the CPU's generator on any device.
    """
    batch, device, background = len(images), images.device, torch.tensor(color, device=images.device).view(-1, 1, 1)
    for _ in range(options.rand_augment_operations):
        chosen = torch.randint(len(OPERATIONS), (batch,)).where(torch.rand(batch) < 0.5, -1)
        level = (options.rand_augment_magnitude + options.rand_augment_noise * torch.randn(batch)).clamp(0, 10) / 10
        strength = level * (1 - 2 * torch.randint(2, (batch,)))
        images = images.clone()
        for number, (name, operation) in enumerate(OPERATIONS.items()):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                fill = background if name in GEOMETRIC else 0
                few, few_strengths = images[rows.to(device)], strength[rows].to(device)
                images[rows.to(device)] = (operation(few - fill, few_strengths) + fill).clamp(0, 1)
    return images


def _factor(strength: torch.Tensor) -> torch.Tensor:
    """Return the factor of an enhancement: 1 leaves the image as it is, 0 removes its color, contrast and so on."""
    return (1 + 0.9 * strength).clamp_min(0.1)


def _posterize(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    bits = 4 - (4 * strength.abs()).to(torch.int64)
    return torch.where(bits.view(-1, 1, 1, 1) == 0, 0.0, enhance.posterize(images, bits))


def _solarize_add(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    added = 110 / 255 * strength.abs().view(-1, 1, 1, 1)
    return torch.where(images < 128 / 255, images + added, images)


def _along(axis: int, amount: torch.Tensor) -> torch.Tensor:
    """Return (B, 2) vectors with the amounts in the given component (0: x, 1: y), and 0 in the other."""
    return torch.stack([amount, torch.zeros_like(amount)][:: -1 if axis else 1], 1)


# Each operation takes images and a strength in [-1, 1] for each image; operations without a direction use its absolute
# value. The ranges are those of DeiT's "increasing" operations: a greater strength changes the image more.
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "auto_contrast": lambda images, strength: enhance.normalize_min_max(images),
    "equalize": lambda images, strength: enhance.equalize(images),
    "invert": lambda images, strength: enhance.invert(images),
    "rotate": lambda images, strength: rotate(images, 30 * strength),
    "posterize": _posterize,
    "solarize": lambda images, strength: enhance.solarize(images, 1 - strength.abs()),
    "solarize_add": _solarize_add,
    "colour": lambda images, strength: enhance.adjust_saturation_with_gray_subtraction(images, _factor(strength)),
    "contrast": lambda images, strength: enhance.adjust_contrast_with_mean_subtraction(images, _factor(strength)),
    "brightness": lambda images, strength: enhance.adjust_brightness_accumulative(images, _factor(strength)),
    "sharpness": lambda images, strength: enhance.sharpness(images, _factor(strength)),
    "shear_x": lambda images, strength: shear(images, _along(0, 0.3 * strength)),
    "shear_y": lambda images, strength: shear(images, _along(1, 0.3 * strength)),
    "translate_x": lambda images, strength: translate(images, _along(0, 0.45 * images.shape[-1] * strength)),
    "translate_y": lambda images, strength: translate(images, _along(1, 0.45 * images.shape[-2] * strength)),
}
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")  # these fill what they uncover with zeros
