"""Tests of reading images from folders and parquet files, evenly spaced over all images."""

import datasets
import pytest
from PIL import Image

from aft_hf.conversion import ConversionError, read_images


@pytest.fixture
def pictures():
    return [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(10)]


def shades(images):
    return [image.getpixel((0, 0))[0] for image in images]


@pytest.mark.parametrize("limit", [3, 10, 256])
def test_a_folder_is_read_evenly_through_its_folders(tmp_path, pictures, limit):
    for i, picture in enumerate(pictures):
        folder = tmp_path / ("cats" if i < 5 else "dogs")
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{i}.png")
    (tmp_path / "notes.txt").write_text("no image")
    expected = [0, 3, 6] if limit == 3 else list(range(10))
    assert shades(read_images(tmp_path, limit)) == expected


@pytest.mark.parametrize("as_folder", [False, True])
def test_parquet_files_are_read_evenly(tmp_path, pictures, as_folder):
    rows = {"label": list(range(10)), "image": pictures}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "train.parquet")
    path = tmp_path if as_folder else tmp_path / "train.parquet"
    assert shades(read_images(path, 5)) == [0, 2, 4, 6, 8]


def test_a_parquet_file_without_images_is_refused_by_its_columns(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "text.parquet")
    with pytest.raises(ConversionError, match="text holds images"):
        read_images(tmp_path / "text.parquet", 5)


def test_images_become_rgb(tmp_path):
    Image.new("L", (4, 4), 7).save(tmp_path / "grey.png")
    (image,) = read_images(tmp_path, 5)
    assert image.mode == "RGB"


def test_documents_beside_the_images_are_left_alone(tmp_path, pictures):
    (tmp_path / "notes.pdf").write_text("no image")
    (tmp_path / "figure.eps").write_text("no image")
    pictures[0].save(tmp_path / "picture.png")
    assert len(list(read_images(tmp_path, 100))) == 1
