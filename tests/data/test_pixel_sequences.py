"""Conversion of images to sequences of sub-pixels, and the dataset of such sequences."""

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from aft_hf.data.image_files import ImageError
from aft_hf.data.samples import START_TOKEN, PixelSequences, SampleKey
from aft_hf.training.recipe import PixelsData


def sample_of(pixels: np.ndarray, size: int = 4, key: SampleKey | None = None) -> dict[str, torch.Tensor]:
    return PixelSequences(PixelsData(image_size=size), seed=1)({"image": PILImage.fromarray(pixels)}, key)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)


def test_tokens_are_the_channels_of_each_pixel_in_raster_order(pixels):
    sample = sample_of(pixels)
    for row in range(4):
        for column in range(4):
            for channel in range(3):
                assert sample["labels"][(row * 4 + column) * 3 + channel] == pixels[row, column, channel]
    assert sample["input_ids"][0] == START_TOKEN
    assert torch.equal(sample["input_ids"][1:], sample["labels"][:-1])
    grey = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert (sample_of(grey)["labels"].reshape(4, 4, 3) == torch.tensor(grey)[..., None]).all()


def test_a_row_without_an_image_is_an_error():
    with pytest.raises(ImageError, match="has no image in column 'image'"):
        PixelSequences(PixelsData(image_size=4))({"image": None})


@pytest.mark.parametrize("shape", ((2, 4, 3), (4, 2, 3), (8, 4, 3)))
def test_an_image_that_is_not_square_becomes_square(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    labels = sample_of(pixels)["labels"].reshape(4, 4, 3).numpy()
    repeated = pixels.repeat(-(-4 // shape[0]), 0).repeat(4 // shape[1], 1)
    expected = repeated.reshape(4, repeated.shape[0] // 4, 4, 3).mean(1)
    assert np.abs(labels - expected).max() <= 0.5


def test_training_flips_half_of_the_images_and_shifts_all_channels_of_an_image_by_one_number_clipped(pixels):
    pixels[0, 0] = (0, 255, 128)
    shifts, flips = set(), 0
    for epoch in range(400):
        first, again = (sample_of(pixels, key=SampleKey(epoch, 0))["labels"] for _ in range(2))
        assert torch.equal(first, again)
        result = first.reshape(4, 4, 3).numpy()
        actual = [
            (flip, shift)
            for flip in (False, True)
            for shift in range(-10, 11)
            if np.array_equal(np.clip(pixels[:, :: -1 if flip else 1].astype(int) + shift, 0, 255), result)
        ]
        assert len(actual) == 1
        flips, shifts = flips + actual[0][0], shifts | {actual[0][1]}
    assert shifts == set(range(-10, 11))
    assert 150 < flips < 250
