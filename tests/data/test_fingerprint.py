"""Fingerprints of training data: they change with the data that is read, and not with its path."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture

from aft_hf.data import samples
from aft_hf.data.loading import load_local
from aft_hf.data.samples import sum_arrays, sum_file, sum_images, sum_rows


pytestmark = pytest.mark.usefixtures("datasets_cache")

LABELS = [0, 1, 0, 1, 0, 1, 0, 1, 0]


def pictures(changed: int | None = None) -> list[np.ndarray]:
    """Return nine images; of image `changed`, one bit differs."""
    images = list(np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), dtype=np.uint8))
    if changed is not None:
        images[changed][3, 3, 2] ^= 1
    return images


def rows(pixels: list[np.ndarray], labels: list[int]) -> Dataset:
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    images = [Picture.fromarray(each) for each in pixels]
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


def write_folder(folder: Path, pixels: list[np.ndarray]) -> Path:
    for i, each in enumerate(pixels):
        path = folder / "ab"[i % 2] / f"{i}.bmp"  # in this format, all files have the same size
        path.parent.mkdir(parents=True, exist_ok=True)
        Picture.fromarray(each).save(path)
    return folder


def test_every_byte_of_a_file_or_part_counts_and_its_name_does_not(tmp_path):
    content, path, sums, parts = bytes(range(100)), tmp_path / "file", [], []
    for i in range(100):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        sums.append(sum_file(path))
        parts.append(sum_file(path, (20, 80)))
    path.write_bytes(content)
    assert len({*sums, sum_file(path)}) == 101
    assert len(set(parts)) == 61 and {*parts[:20], *parts[80:]} == {sum_file(path, (20, 80))}
    before = sum_file(path)
    assert sum_file(path.rename(tmp_path / "other")) == before
    (tmp_path / "other").write_bytes(content + b"x")
    assert sum_file(tmp_path / "other") != before


def test_any_image_label_or_order_of_rows_counts():
    before = sum_rows(rows(pictures(), LABELS), "image", "label")
    assert sum_rows(rows(pictures(), LABELS), "image", "label") == before
    others = []
    for i in range(9):
        others.append(sum_rows(rows(pictures(i), LABELS), "image", "label"))
        others.append(sum_rows(rows(pictures(), [*LABELS[:i], 1 - LABELS[i], *LABELS[i + 1 :]]), "image", "label"))
    others.append(sum_rows(rows(pictures(), LABELS).select([1, 0, *range(2, 9)]), "image", "label"))
    others.append(sum_rows(rows(pictures(), LABELS).select(range(8)), "image", "label"))
    assert len({before, *others}) == 21


def test_of_many_rows_the_first_images_count_and_all_labels(monkeypatch):
    monkeypatch.setattr(samples, "WHOLE", 1)  # of the first hundred
    pixels, labels = pictures() * 20, LABELS * 20
    before = sum_rows(rows(pixels, labels), "image", "label")
    assert sum_rows(rows(pixels, [*labels[:-1], 1]), "image", "label") != before
    assert sum_rows(rows(pictures(0) + pixels[9:], labels), "image", "label") != before
    assert sum_rows(rows(pixels[:-9] + pictures(8), labels), "image", "label") == before


def test_images_in_a_folder_count_by_their_files_wherever_it_lies(tmp_path):
    def sums(folder: Path) -> str:
        return sum_rows(load_local(folder), "image", "label")

    before = sums(write_folder(tmp_path / "one", pictures()))
    assert sums(shutil.copytree(tmp_path / "one", tmp_path / "elsewhere/two")) == before
    assert sums(write_folder(tmp_path / "three", pictures(4))) != before


@pytest.mark.parametrize("limit", [100, 4])
def test_pixels_order_and_number_of_pictures_count_and_of_many_only_some_are_opened(monkeypatch, limit):
    monkeypatch.setattr(samples, "PICTURES", limit)
    images = [Picture.fromarray(each) for each in pictures()]
    before = sum_images(images)
    assert sum_images([image.copy() for image in images]) == before
    assert sum_images(images[::-1]) != before != sum_images(images[:8])
    assert sum_images([images[0].resize((8, 2)), *images[1:]]) != before
    noticed = [sum_images([*images[:i], images[i].rotate(90), *images[i + 1 :]]) != before for i in range(9)]
    assert sum(noticed) == min(limit, 9) and noticed[0]
    assert sum_images([]).startswith("0 images") and sum_arrays([[1], [2]]) != sum_arrays([[2], [1]])
