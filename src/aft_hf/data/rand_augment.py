"""RandAugment (Cubuk et al. 2019) as in DeiT: each image of a batch draws its own operations and strengths.

kornia's own RandAugment draws one policy for a whole batch, and its magnitudes end at 30 instead of 10.
"""

from collections.abc import Callable

import torch
from kornia.enhance import (
    adjust_brightness_accumulative,
    adjust_contrast_with_mean_subtraction,
    adjust_saturation_with_gray_subtraction,
    equalize,
    invert,
    normalize_min_max,
    posterize,
    sharpness,
)
from kornia.geometry.transform import rotate, shear, translate
from torch import nn


MAX_MAGNITUDE = 10
PROBABILITY = 0.5  # that a drawn operation is applied

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RandAugment(nn.Module):
    """RandAugment: apply randomly drawn operations to each image of a batch, each with probability 1/2.

    Args:
        operations: number of operations that are drawn for each image, with replacement.
        magnitude: mean magnitude of the operations, from 0 to 10.
        noise: standard deviation of the magnitude, which is drawn for each operation and clipped to 0 .. 10.
        fill: the color outside of rotated, sheared and translated images, in [0, 1], one value per channel.
    """

    def __init__(self, operations: int, magnitude: float, noise: float, fill: list[float]):
        super().__init__()
        self.operations, self.magnitude, self.noise = operations, magnitude, noise
        self.fill = torch.tensor(fill).view(-1, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Augment (B, 3, H, W) images in [0, 1]. Random numbers come from the CPU's generator on any device."""
        batch = len(images)
        for _ in range(self.operations):
            chosen = torch.randint(len(OPERATIONS), (batch,)).where(torch.rand(batch) < PROBABILITY, -1)
            level = (self.magnitude + self.noise * torch.randn(batch)).clamp(0, MAX_MAGNITUDE) / MAX_MAGNITUDE
            strength = level * (1 - 2 * torch.randint(2, (batch,)))
            images = images.clone()
            for number, operation in enumerate(OPERATIONS.values()):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    few, few_strengths = images[rows.to(images.device)], strength[rows].to(images.device)
                    images[rows.to(images.device)] = self._transformed(operation, few, few_strengths)
        return images

    def _transformed(self, operation: Operation, images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        if operation in GEOMETRIC:
            fill = self.fill.to(images.device)
            return operation(images - fill, strength).add(fill).clamp(0, 1)
        return operation(images, strength).clamp(0, 1)


# Each operation takes images and a strength in [-1, 1] for each image; operations without a direction use its absolute
# value. The ranges are those of DeiT's "increasing" operations: a greater strength changes the image more.


def _factor(strength: torch.Tensor) -> torch.Tensor:
    """Return the factor of an enhancement: 1 leaves the image as it is, 0 removes its color, contrast and so on."""
    return (1 + 0.9 * strength).clamp_min(0.1)


def _posterize(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    bits = 4 - (4 * strength.abs()).to(torch.int64)
    return torch.where(bits.view(-1, 1, 1, 1) == 0, 0.0, posterize(images, bits))


def _solarize(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    threshold = 1 - strength.abs().view(-1, 1, 1, 1)
    return torch.where(images < threshold, images, 1 - images)


def _solarize_add(images: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    added = 110 / 255 * strength.abs().view(-1, 1, 1, 1)
    return torch.where(images < 128 / 255, images + added, images)


def _along(axis: int, amount: torch.Tensor) -> torch.Tensor:
    """Return (B, 2) vectors with the amounts in the given component (0: x, 1: y), and 0 in the other."""
    return torch.stack([amount, torch.zeros_like(amount)][:: -1 if axis else 1], 1)


OPERATIONS: dict[str, Operation] = {
    "auto_contrast": lambda images, strength: normalize_min_max(images),
    "equalize": lambda images, strength: equalize(images),
    "invert": lambda images, strength: invert(images),
    "rotate": lambda images, strength: rotate(images, 30 * strength),
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "colour": lambda images, strength: adjust_saturation_with_gray_subtraction(images, _factor(strength)),
    "contrast": lambda images, strength: adjust_contrast_with_mean_subtraction(images, _factor(strength)),
    "brightness": lambda images, strength: adjust_brightness_accumulative(images, _factor(strength)),
    "sharpness": lambda images, strength: sharpness(images, _factor(strength)),
    "shear_x": lambda images, strength: shear(images, _along(0, 0.3 * strength)),
    "shear_y": lambda images, strength: shear(images, _along(1, 0.3 * strength)),
    "translate_x": lambda images, strength: translate(images, _along(0, 0.45 * images.shape[-1] * strength)),
    "translate_y": lambda images, strength: translate(images, _along(1, 0.45 * images.shape[-2] * strength)),
}
# These fill what they uncover with zeros.
GEOMETRIC = {OPERATIONS[name] for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")}
