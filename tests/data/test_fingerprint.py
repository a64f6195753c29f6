"""Fingerprints of training data: they change with the data that is read, and not with its path."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, load_dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from aft_hf.data import fingerprint
from aft_hf.data.fingerprint import spread, sum_file, sum_files, sum_images, sum_rows, sum_samples
from aft_hf.data.loading import load_local, local_files


pytestmark = pytest.mark.usefixtures("datasets_cache")


def pictures(count: int = 9) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8))


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
    content = bytearray(np.random.default_rng(0).integers(0, 256, 300, dtype=np.uint8).tobytes())
    path, sums, parts = tmp_path / "file", [], []
    for i in range(300):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        sums.append(sum_file(path))
        parts.append(sum_file(path, (20, 280)))
    path.write_bytes(content)
    assert len({*sums, sum_file(path)}) == 301
    assert len(set(parts)) == 261 and {*parts[:20], *parts[280:]} == {sum_file(path, (20, 280))}
    before = sum_file(path)
    assert sum_file(path.rename(tmp_path / "other")) == before


@pytest.mark.parametrize("size", [64, 65, 1001])
def test_of_a_large_file_blocks_from_the_first_to_the_last_count(tmp_path, monkeypatch, size):
    monkeypatch.setattr(fingerprint, "WHOLE", 64)
    monkeypatch.setattr(fingerprint, "BLOCK", 8)
    content, path = bytearray(size), tmp_path / "file"
    path.write_bytes(content)
    before, noticed = sum_file(path), []
    for i in range(size):
        path.write_bytes(content[:i] + b"x" + content[i + 1 :])
        noticed.append(sum_file(path) != before)
    assert noticed[0] and noticed[-1] and sum(noticed) == min(size, 64)
    gaps = [len(gap) for gap in "".join("x" if each else "." for each in noticed).split("x")]
    assert max(gaps) <= (size - 64) // 7 + 1  # the gaps between 8 blocks
    path.write_bytes(bytes(size + 1))
    assert sum_file(path) != before


def test_any_image_label_sample_or_order_of_rows_counts():
    pixels, labels = pictures(), [0, 1, 0, 1, 0, 1, 0, 1, 0]
    before = sum_rows(rows(pixels, labels), "image", "label")
    assert sum_rows(rows(pixels, labels), "image", "label") == before
    others = []
    for i in range(9):
        changed = [each.copy() for each in pixels]
        changed[i][3, 3, 2] ^= 1
        others.append(sum_rows(rows(changed, labels), "image", "label"))
        others.append(sum_rows(rows(pixels, [*labels[:i], 1 - labels[i], *labels[i + 1 :]]), "image", "label"))
    others.append(sum_rows(rows(pixels, labels).select([1, 0, *range(2, 9)]), "image", "label"))
    others.append(sum_rows(rows(pixels, labels).select(range(8)), "image", "label"))
    assert len({before, *others}) == 21
    samples = [{"x": np.arange(3), "y": np.float32(1)}, {"x": np.arange(3), "y": np.float32(2)}]
    assert sum_samples(samples) == sum_samples(samples)
    assert len({sum_samples(samples), sum_samples(samples[::-1]), sum_samples(samples[:1])}) == 3


def test_of_many_rows_some_count_and_all_labels(monkeypatch):
    pixels, labels = pictures(40), [0] * 40
    monkeypatch.setattr(fingerprint, "WHOLE", rows(pixels, labels).data.nbytes // 4)
    before, noticed = sum_rows(rows(pixels, labels), "image", "label"), 0
    for i in range(0, 40, 3):
        assert sum_rows(rows(pixels, [*labels[:i], 1, *labels[i + 1 :]]), "image", "label") != before
        changed = [each.copy() for each in pixels]
        changed[i] ^= 1
        noticed += sum_rows(rows(changed, labels), "image", "label") != before
    assert 2 <= noticed < 14


def test_images_in_a_folder_count_by_their_files_wherever_it_lies(tmp_path):
    def sums(folder: Path) -> tuple[str, str]:
        return sum_rows(load_local(folder), "image", "label"), sum_files(local_files(train=str(folder)))

    folder = write_folder(tmp_path / "one", pictures())
    before, moved = sums(folder), shutil.copytree(folder, tmp_path / "elsewhere/two")
    assert sums(moved) == before
    changed = pictures()
    changed[4][0, 0, 0] ^= 1
    after = sums(write_folder(tmp_path / "three", changed))
    assert after[0] != before[0] and after[1] != before[1]
    (moved / "b").rename(moved / "c")
    assert sums(moved)[1] != before[1]


def test_files_of_a_stream_are_those_of_the_training_split(tmp_path):
    for name, start in (("train-0", 0), ("train-1", 3), ("validation-0", 6)):
        rows(pictures()[start : start + 3], [0, 1, 0]).to_parquet(tmp_path / f"{name}.parquet")
    assert [path.name for path in local_files(str(tmp_path))] == ["train-0.parquet", "train-1.parquet"]
    assert load_dataset(str(tmp_path), split="train", streaming=True).num_shards == 2
    assert local_files("nobody/no-such-dataset") == []


@given(st.integers(1, 1000), st.integers(2, 300))
def test_a_spread_is_even_and_has_both_ends(count, most):
    chosen = spread(count, most)
    assert chosen[0] == 0 and chosen[-1] == count - 1 and len(chosen) == min(count, most) == len(set(chosen))
    steps = np.diff(chosen)
    assert len(steps) == 0 or steps.max() - steps.min() <= 1


@pytest.mark.parametrize("limit", [100, 4])
def test_pixels_order_and_number_of_pictures_count_and_of_many_only_some_are_opened(monkeypatch, limit):
    monkeypatch.setattr(fingerprint, "PICTURES", limit)
    images = [Picture.fromarray(each) for each in pictures(10)]
    before = sum_images(images)
    assert sum_images([image.copy() for image in images]) == before
    assert sum_images(images[::-1]) != before != sum_images(images[:9])
    assert sum_images([images[0].resize((8, 2)), *images[1:]]) != before
    noticed = [sum_images([*images[:i], images[i].rotate(90), *images[i + 1 :]]) != before for i in range(10)]
    assert sum(noticed) == min(limit, 10) and noticed[0] and noticed[9]
    assert sum_images([]) == "0 images, 00000000"
