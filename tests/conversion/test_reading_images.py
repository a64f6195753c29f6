"""Tests of reading images from folders and parquet files, evenly spaced over all images."""

import datasets
import pytest
from PIL import Image

from aft_hf.conversion import ImagesOnDisk, read_images


def save_folder(path, pictures):
    for i, picture in enumerate(pictures):
        folder = path / ("cats" if i < 5 else "dogs")
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{i}.png")
    for name in ("notes.txt", "notes.pdf", "figure.eps"):  # documents beside the images are left alone
        (path / name).write_text("no image")


def save_table(path, pictures):
    rows = {"label": list(range(10)), "image": pictures}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(path / "train.parquet")


@pytest.mark.parametrize(("limit", "expected"), [(3, [0, 3, 6]), (5, [0, 2, 4, 6, 8]), (256, list(range(10)))])
@pytest.mark.parametrize("save", [save_folder, save_table])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_are_read_evenly_in_rgb(tmp_path, save, limit, expected, mode):
    save(tmp_path, [Image.new("RGB", (4, 4), (i, i, i)).convert(mode) for i in range(10)])
    images = list(read_images(tmp_path, limit))
    assert [image.getpixel((0, 0))[0] for image in images] == expected
    assert {image.mode for image in images} == {"RGB"} and len(ImagesOnDisk(tmp_path)) == 10
