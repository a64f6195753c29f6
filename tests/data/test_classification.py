"""Training data of image classification: samples, crops and the augmentation of batches.

The operations of RandAugment agree with Pillow, and each image draws its own.
"""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from aft_hf.data import classification
from aft_hf.data.classification import OPERATIONS, BatchAugmentation, TrainingImages, crop_box, rand_augment
from aft_hf.data.samples import SampleKey
from aft_hf.training.recipe import Augmentation


MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % 5


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def test_crops_lie_in_the_image_and_have_the_area_and_aspect_ratio_asked_for():
    random, areas = np.random.default_rng(0), []
    for _ in range(500):
        left, top, right, bottom = crop_box((200, 100), (0.2, 0.6), random)
        assert 0 <= left < right <= 200 and 0 <= top < bottom <= 100
        areas.append((right - left) * (bottom - top) / (200 * 100))
        assert 0.73 < (right - left) / (bottom - top) < 1.37
    assert min(areas) < 0.22 and max(areas) > 0.55 and min(areas) > 0.19 and max(areas) < 0.61


def test_an_image_that_no_crop_fits_into_gives_its_centre():
    expected = (150 - 20 / 3, 0.0, 150 + 20 / 3, 10.0)
    assert crop_box((300, 10), (1.0, 1.0), np.random.default_rng(0)) == pytest.approx(expected)


def test_training_images_are_bytes_with_the_number_of_their_class():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    row = {"image": Image.fromarray(pixels), "label": "cat"}
    whole = TrainingImages(6, None, 0, numbers={"cat": 3})(row, SampleKey(0, 0))
    assert whole["labels"] == 3 and whole["pixel_values"].dtype == torch.uint8
    assert np.array_equal(whole["pixel_values"].permute(1, 2, 0).numpy(), pixels)
    cropped = TrainingImages(6, (0.1, 0.9), 0, numbers={"cat": 3})
    once, again, later = (cropped(row, SampleKey(epoch, 0))["pixel_values"] for epoch in (0, 0, 1))
    assert torch.equal(once, again) and not torch.equal(once, later)


def test_without_augmentation_pixels_are_normalized_and_labels_one_hot(batch):
    pixels, targets = BatchAugmentation(5, MEAN, STD, Augmentation(flip=False))(*batch)
    torch.testing.assert_close(pixels, normalized(batch[0]), rtol=1e-5, atol=1e-5)
    assert torch.equal(targets, torch.eye(5)[batch[1]])


def test_half_of_the_images_are_flipped(batch):
    pixels, _ = BatchAugmentation(5, MEAN, STD, Augmentation())(*batch)
    plain = normalized(batch[0])
    same = (pixels - plain).abs().amax((1, 2, 3)) < 1e-4
    flipped = (pixels - plain.flip(3)).abs().amax((1, 2, 3)) < 1e-4
    assert (same ^ flipped).all() and same.any() and flipped.any()


def test_mixup_adds_pixels_as_it_adds_targets(batch):
    shares = set()
    for seed in range(5):
        torch.manual_seed(seed)
        pixels, targets = BatchAugmentation(5, MEAN, STD, Augmentation(flip=False, mixup=0.8))(*batch)
        plain, one_hot = normalized(batch[0]), torch.eye(5)[batch[1]]
        share = targets[1, 1].item()  # images 1 and 14, of classes 1 and 4, are mixed
        torch.testing.assert_close(pixels, share * plain + (1 - share) * plain.flip(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(targets, share * one_hot + (1 - share) * one_hot.flip(0))
        shares.add(share)
    assert len(shares) == 5


def test_cutmix_gives_each_image_the_share_of_its_pixels_in_the_target(batch):
    for seed in range(10):
        torch.manual_seed(seed)
        pixels, targets = BatchAugmentation(5, MEAN, STD, Augmentation(flip=False, cutmix=1.0))(*batch)
        plain = normalized(batch[0])
        own = ((pixels - plain).abs() < 1e-4).all(1)  # (B, H, W)
        other = ((pixels - plain.flip(0)).abs() < 1e-4).all(1)
        assert (own | other).all()
        assert targets[1, 1].item() == pytest.approx(own[1].float().mean().item(), abs=1e-5)
        torch.testing.assert_close(targets.sum(1), torch.ones(16))


def test_erasing_makes_a_part_of_each_image_noise(batch):
    grey = torch.full((16, 3, 32, 32), 128, dtype=torch.uint8)
    pixels, _ = BatchAugmentation(5, MEAN, STD, Augmentation(flip=False, erasing=1.0))(grey, batch[1])
    plain = normalized(grey)
    erased = (pixels - plain).abs() > 1e-4
    assert (erased.all(1) == erased.any(1)).all()  # all channels at once
    share = erased[:, 0].float().mean((1, 2))
    assert (share > 0).all() and (share < 0.5).all()
    noise = pixels[erased]  # thousands of normal numbers: the bounds are at least five standard errors
    assert noise.numel() > 2000 and noise.mean().abs() < 0.12 and (noise.std() - 1).abs() < 0.1


SIDE = 32


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
def test_augmentation_operations_equal_those_of_pillow(name):
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
    options = Augmentation(rand_augment_operations=1, rand_augment_magnitude=9.0, rand_augment_noise=0.5)
    once = rand_augment(pixels, options, MEAN)
    assert once.min() >= 0 and once.max() <= 1
    untouched = (once == pixels).flatten(1).all(1).float().mean()
    assert 0.3 < untouched < 0.7  # each operation is applied with probability 1/2: five standard errors
    distinct = len({image.numpy().tobytes() for image in once})
    options = Augmentation(rand_augment_operations=1, rand_augment_magnitude=9.0)
    fixed = len({image.numpy().tobytes() for image in rand_augment(pixels, options, MEAN)})
    # At most both signs of each operation, and the picture itself.
    assert distinct > 50 and fixed <= 2 * len(OPERATIONS) + 1


def test_pixels_uncovered_by_geometric_operations_have_the_fill_colour(monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(classification, "OPERATIONS", {"translate_x": OPERATIONS["translate_x"]})
    options = Augmentation(rand_augment_operations=1, rand_augment_magnitude=10.0)
    images = rand_augment(torch.ones(20, 3, SIDE, SIDE), options, MEAN)
    moved = [image for image in images if image[0, 0, 0] < 1]  # to the right
    assert moved
    for image in moved:
        torch.testing.assert_close(image[:, :, 0], torch.tensor(MEAN)[:, None].expand(3, SIDE))
        torch.testing.assert_close(image[:, :, -1], torch.ones(3, SIDE))
