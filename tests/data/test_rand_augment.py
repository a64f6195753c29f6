"""RandAugment: its operations agree with Pillow, and each image draws its own."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from aft_hf.data.classification import OPERATIONS, RandAugment


SIDE = 32
FILL = [0.5, 0.4, 0.3]


def picture() -> np.ndarray:
    """Return a (SIDE, SIDE, 3) uint8 image with some noise, so smooth that all interpolations nearly agree."""
    down, right = np.mgrid[0:SIDE, 0:SIDE]
    smooth = np.stack([right * 6 + 20, down * 5 + 40, (right + down) * 3 + 10], -1)
    return (smooth + np.random.default_rng(0).integers(-2, 3, smooth.shape)).clip(5, 240).astype(np.uint8)


def affine(*coefficients):
    return lambda image: image.transform(image.size, Image.AFFINE, coefficients, resample=Image.BILINEAR)


# DeiT's operations at a magnitude of 9 of 10: (strength, the same operation in Pillow).
PILLOW = {
    "auto_contrast": (0.9, ImageOps.autocontrast),
    "equalize": (0.9, ImageOps.equalize),
    "invert": (0.9, ImageOps.invert),
    "rotate": (0.9, lambda image: image.rotate(27, resample=Image.BILINEAR)),
    "posterize": (0.9, lambda image: ImageOps.posterize(image, 1)),
    "solarize": (0.9, lambda image: ImageOps.solarize(image, 26)),
    "solarize_add": (0.9, lambda image: image.point([min(255, i + 99) if i < 128 else i for i in range(256)] * 3)),
    "colour": (0.9, lambda image: ImageEnhance.Color(image).enhance(1.81)),
    "contrast": (-0.9, lambda image: ImageEnhance.Contrast(image).enhance(0.19)),
    "brightness": (-0.9, lambda image: ImageEnhance.Brightness(image).enhance(0.19)),
    "sharpness": (0.9, lambda image: ImageEnhance.Sharpness(image).enhance(1.81)),
    "shear_x": (-0.9, affine(1, 0.27, 0, 0, 1, 0)),
    "shear_y": (-0.9, affine(1, 0, 0, 0.27, 1, 0)),
    "translate_x": (0.9, affine(1, 0, -0.405 * SIDE, 0, 1, 0)),
    "translate_y": (0.9, affine(1, 0, 0, 0, 1, -0.405 * SIDE)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_pillow(name):
    strength, reference = PILLOW[name]
    pixels = torch.from_numpy(picture()).permute(2, 0, 1).float().div(255).expand(2, -1, -1, -1)
    weak, changed = OPERATIONS[name](pixels, torch.tensor([0.0, strength])).clamp(0, 1)  # one strength per image
    if name not in ("auto_contrast", "equalize", "invert", "posterize"):
        assert (weak - pixels[0]).abs().mean() < 1e-3
    expected = np.asarray(reference(Image.fromarray(picture()))).astype(float)
    difference = np.abs(changed.permute(1, 2, 0).numpy() * 255 - expected).max(-1)
    # Pillow rounds to integers, once or twice. At the border of a moved picture, interpolations differ.
    assert np.quantile(difference, 0.85) < 3.0
    if name not in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        assert difference.max() < 3.0


def test_the_images_of_a_batch_get_operations_and_strengths_of_their_own():
    torch.manual_seed(0)
    pixels = torch.from_numpy(picture()).permute(2, 0, 1).float().div(255).expand(200, -1, -1, -1)
    once = RandAugment(1, 9, 0.5, FILL)(pixels)
    assert once.min() >= 0 and once.max() <= 1
    untouched = (once == pixels).flatten(1).all(1).float().mean()
    assert 0.3 < untouched < 0.7  # each operation is applied with probability 1/2: five standard errors
    distinct = len({image.numpy().tobytes() for image in once})
    fixed = len({image.numpy().tobytes() for image in RandAugment(1, 9, 0.0, FILL)(pixels)})
    # At most both signs of each operation, and the picture itself.
    assert distinct > 50 and fixed <= 2 * len(OPERATIONS) + 1


def test_what_comes_in_from_outside_has_the_fill_colour():
    torch.manual_seed(1)
    augment = RandAugment(1, 10, 0.0, FILL)
    moved = augment._transformed(OPERATIONS["translate_x"], torch.ones(1, 3, SIDE, SIDE), torch.tensor([1.0]))
    torch.testing.assert_close(moved[0, :, :, 0], torch.tensor(FILL)[:, None].expand(3, SIDE))
    torch.testing.assert_close(moved[0, :, :, -1], torch.ones(3, SIDE))
