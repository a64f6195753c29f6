"""Folders of images: conversion, evaluation, fine-tuning and recipes read the same files of them."""

import os
import shutil

import pytest
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from aft_hf.conversion import ConversionError, ImagesOnDisk
from aft_hf.data.image_files import ImageError, list_images
from aft_hf.data.loading import load_local, load_splits, local_files


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def folder(tmp_path):
    """Two classes with two images each."""
    for i, name in enumerate(["cat/1.png", "cat/2.jpg", "dog/1.png", "dog/3.PNG"]):
        save(tmp_path / "images" / name, i)
    return tmp_path / "images"


def save(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (40 * value, 0, 0)).save(path, path.suffix[1:].lower().replace("jpg", "jpeg"))


def names(folder):
    """Return the names of the images that all readers find, and check that they agree."""
    found = list_images(folder)
    assert local_files(train=str(folder)) == found
    assert len(ImagesOnDisk(folder)) == len(found)
    for rows in (load_local(folder), load_splits(train=str(folder))["train"], load_local(folder, streaming=True)):
        paths = (
            rows.decode(False) if not hasattr(rows, "data") else rows.cast_column("image", ImageFeature(decode=False))
        )
        assert [row["image"]["path"] for row in paths] == [str(path) for path in found]
    return [path.relative_to(folder).as_posix() for path in found]


ALL = ["cat/1.png", "cat/2.jpg", "dog/1.png", "dog/3.PNG"]


@pytest.mark.parametrize(
    "name",
    [
        "._1.png",
        "cat/._1.png",
        "cat/.hidden.png",
        ".DS_Store",
        "cat/.DS_Store",
        "Thumbs.db",
        "desktop.ini",
        "cat/.ipynb_checkpoints/1-checkpoint.png",
        ".ipynb_checkpoints/cat/1.png",
        "__MACOSX/cat/._1.png",
        "__MACOSX/cat/1.png",
        ".git/1.png",
        ".cache/train.parquet",
        "._train.parquet",
        ".Trash-0/1.png",
        "@eaDir/1.png",
        "cat/@eaDir/1.png/thumbnail.png",
        "$RECYCLE.BIN/1.png",
        "notes.txt",
        "cat/figure.eps",
        "metadata.csv",
    ],
)
def test_hidden_files_system_files_and_documents_are_left_out(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"no image")
    assert names(folder) == ALL


def test_a_folder_that_is_itself_hidden_is_read(folder):
    moved = folder.rename(folder.parent / ".images")
    assert names(moved) == ALL


def test_each_suffix_of_a_known_format_is_that_of_an_image(tmp_path):
    wanted = [
        ".bmp",
        ".gif",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".jfif",
        ".pbm",
        ".pgm",
        ".png",
        ".ppm",
        ".tif",
        ".tiff",
        ".webp",
    ]
    for suffix in wanted:
        (tmp_path / "class").mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / "class" / f"x{suffix.upper()}", Image.registered_extensions()[suffix])
    assert sorted(path.suffix.lower() for path in list_images(tmp_path)) == sorted(wanted)
    assert len(load_local(tmp_path)[:]["image"]) == len(wanted)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_class_is_the_folder_of_an_image_at_any_depth(folder, depth):
    outer = folder.parent / "outer"
    shutil.move(folder, outer.joinpath(*map(str, range(depth - 1)), "images"))
    rows = load_local(outer)
    assert rows.features["label"].names == ["cat", "dog"] and rows["label"] == [0, 0, 1, 1]
    streamed = load_local(outer, streaming=True)
    assert [row["label"] for row in streamed] == [0, 0, 1, 1] and streamed.num_shards == 4
    assert len(ImagesOnDisk(outer)) == 4


def test_a_single_class_is_a_class(folder):
    shutil.rmtree(folder / "dog")
    assert load_local(folder).features["label"].names == ["cat"]


@pytest.mark.parametrize("name", ["4.png", "dog/more/4.png", "real/bird/4.png"])
@pytest.mark.parametrize("streaming", [False, True])
def test_where_the_class_is_unclear_an_image_is_named_and_labels_are_refused(folder, name, streaming):
    save(folder / name)
    with pytest.raises(ValueError, match=r"the classes are unclear: .*/CLASS/IMAGE, unlike .*4\.png") as error:
        load_local(folder, streaming=streaming)
    assert "\n" not in str(error.value)
    rows = load_local(folder, streaming=streaming, labeled=False)
    assert list(rows.features) == ["image"] and len(list(rows)) == 5
    assert len(ImagesOnDisk(folder)) == 5


def test_images_without_folders_of_classes_have_no_labels(folder):
    with pytest.raises(ValueError, match=r"the classes are unclear: .* unlike .*1\.png"):
        load_local(folder / "cat")


def test_linked_folders_are_read_under_each_name_but_not_inside_themselves(folder, tmp_path):
    save(tmp_path / "elsewhere" / "bird" / "7.png")
    (folder / "bird").symlink_to(tmp_path / "elsewhere" / "bird")
    (folder / "cat" / "loop").symlink_to(folder)
    (folder / "outer").symlink_to(tmp_path / "elsewhere" / "bird")
    (folder / "dog" / "5.png").symlink_to(folder / "dog" / "1.png")
    found = [path.name for path in list_images(folder)]
    assert sorted(found) == ["1.png", "1.png", "2.jpg", "3.PNG", "5.png", "7.png", "7.png"]


@pytest.mark.parametrize("kind", ["pipe", "device", "missing"])
@pytest.mark.parametrize("suffix", [".png", ".parquet"])
def test_what_is_no_regular_file_is_named(folder, kind, suffix):
    path = folder / "cat" / f"odd{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else folder / "nowhere")
    told = rf"odd\{suffix}: {'no such file' if kind == 'missing' else 'is not a regular file'}"
    for read in (load_local, list_images, lambda folder: local_files(train=str(folder))):
        with pytest.raises(ImageError, match=told):
            read(folder)
    with pytest.raises(ConversionError, match=told):
        ImagesOnDisk(folder)


def test_parquet_files_in_a_folder_are_read_in_order(tmp_path):
    for name, label in (("b.parquet", 2), ("a.PARQUET", 1), (".c.parquet", 3), ("deep/er/d.parquet", 4)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict({"label": [label]}).to_parquet(tmp_path / name)
    assert load_local(tmp_path)["label"] == [1, 2, 4]
    assert [row["label"] for row in load_local(tmp_path, streaming=True)] == [1, 2, 4]


def test_images_beside_parquet_files_are_refused(folder):
    Dataset.from_dict({"label": [0]}).to_parquet(folder / "rows.parquet")
    with pytest.raises(ValueError, match=r"has both images .*cat/1.png\) and parquet files .*rows.parquet\)"):
        load_local(folder)
    with pytest.raises(ConversionError, match="has both"):
        ImagesOnDisk(folder)


def test_a_folder_without_images_is_refused(folder):
    for path in list_images(folder):
        path.rename(path.with_name(f".{path.name}"))
    for read in (load_local, ImagesOnDisk):
        with pytest.raises(ValueError, match="images: no images in it; give a folder of"):
            read(folder)


def test_two_classes_that_link_to_one_folder_are_both_read(folder, tmp_path):
    save(tmp_path / "elsewhere" / "7.png")
    for name in ("bird", "fowl"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    assert load_local(folder).features["label"].names == ["bird", "cat", "dog", "fowl"]
    assert names(folder) == ["bird/7.png", *ALL, "fowl/7.png"]


@pytest.mark.parametrize("split", ["train", "val", "valid", "validation", "Test"])
@pytest.mark.parametrize("outer", ["", "deep/"])
def test_a_folder_of_splits_is_refused(folder, outer, split):
    shutil.copytree(folder, folder.parent / "ds" / outer / "other")
    shutil.copytree(folder, folder.parent / "ds" / outer / split)
    with pytest.raises(
        ValueError, match=f"ds: its folders are splits, not classes: give one of .*/ds/{outer}{split}$"
    ):
        load_local(folder.parent / "ds")
    assert len(load_local(folder.parent / "ds" / outer / split)) == 4
