"""Datasets from where people have them: the Hub, local folders, parquet and text files."""

from pathlib import Path
from typing import Any, cast

import fsspec
from datasets import (
    Dataset,
    DatasetDict,
    Image,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
    load_dataset_builder,
)
from PIL import Image as PILImage

from ..reading import described
from .image_files import open_image


FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}


class ImageColumn(Image):
    """A column of images, in RGB, that `open_image` decodes and not `datasets`, which opens whatever Pillow knows."""

    def decode_example(self, value: Any, token_per_repo_id: dict[str, str] | None = None) -> PILImage.Image:
        """The image of {"bytes": content, "path": where it is or was}."""
        if isinstance(value, PILImage.Image):
            return value
        content, path = value["bytes"], value["path"]
        if content is None and path is not None and "://" in path:  # of a stream, from the Hub or an archive
            with fsspec.open(path, "rb") as file:
                content = file.read()
        return open_image((path or "") if content is None else content, path or "an image")


def load_splits(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train: str | None = None,
    validation: str | None = None,
    *,
    streaming: bool = False,
) -> DatasetDict | IterableDatasetDict:
    """The splits "train" and "validation", as far as they are there; a "test" split serves to validate, too.

    Args:
        dataset_name, dataset_config_name: as for `load_named`.
        train, validation: instead of a name, a folder of images with a folder for each class, or a parquet, csv, json
            or text file.
        streaming: whether rows are read when they are iterated over, which is all that can be done with them then.

    Raises:
        ValueError: nothing is given, or both, or something that does not exist or cannot be read.
    """
    paths = {split: path for split, path in (("train", train), ("validation", validation)) if path is not None}
    if (dataset_name is None) == (not paths):
        raise ValueError("give the data as either dataset_name, or train and validation as files or folders")
    if dataset_name is None:
        rows = {split: load_local(path, streaming=streaming) for split, path in paths.items()}
        return IterableDatasetDict(rows) if streaming else DatasetDict(rows)
    splits = load_named(dataset_name, dataset_config_name, streaming=streaming)
    if "validation" not in splits and "test" in splits:
        splits["validation"] = splits["test"]
    splits.pop("test", None)
    return splits


def load_named(
    name: str, config_name: str | None = None, *, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """The splits "train", "validation" and "test" of a dataset, as far as they are there.

    Args:
        name: a dataset of the Hub, a local one that `datasets` knows how to load, or a file, which is all "train".
        config_name: its configuration.
        streaming: as for `load_splits`.

    Raises:
        ValueError: a file that cannot be read.
    """
    if Path(name).is_file():
        splits = {"train": load_local(name, streaming=streaming)}
    else:
        splits = load_dataset(name, config_name, streaming=streaming)
    kept = {split: with_safe_images(splits[split]) for split in ("train", "validation", "test") if split in splits}
    return IterableDatasetDict(kept) if streaming else DatasetDict(kept)


def load_local(path: str | Path, *, streaming: bool = False) -> Dataset | IterableDataset:
    """One file, or one folder of images with a folder for each class.

    Raises:
        ValueError: it does not exist, has an unknown format, or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        # All files, in one split: left alone, `datasets` takes "test_1.png" for a part of a test split.
        reader, options = "imagefolder", {"data_dir": str(path), "data_files": "**"}
    elif not path.is_file():
        raise ValueError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    elif path.suffix not in FORMATS:
        raise ValueError(f"{path}: give a folder of images or a file that ends in one of {', '.join(FORMATS)}")
    else:
        reader, options = FORMATS[path.suffix], {"data_files": str(path)}
    if reader == "text":
        # A text file is one text: lines mean nothing to a language model of bytes, and line breaks must stay.
        options["sample_by"] = "document"
    try:
        return with_safe_images(load_dataset(reader, split="train", streaming=streaming, **options))
    except Exception as error:  # readers of formats raise anything
        what = "a folder of images" if reader == "imagefolder" else f"a file of type {reader}"
        raise ValueError(f"{path}: cannot be read as {what} ({described(error.__cause__ or error)})") from error


def local_files(
    dataset_name: str | None = None, dataset_config_name: str | None = None, train: str | None = None
) -> list[Path]:
    """The files of the split "train", as `load_splits` reads it, in an order that their folder's name does not change;
    none where they are on the Hub."""
    place = Path(cast(str, dataset_name or train))
    if place.is_file():
        return [place]
    if dataset_name is None:
        return sorted(path for path in place.rglob("*") if path.is_file())
    if not place.is_dir():
        return []
    files = load_dataset_builder(dataset_name, dataset_config_name).config.data_files or {}
    return [Path(file) for file in files.get("train", [])]


def with_safe_images(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The same rows, each column of images being an `ImageColumn`."""
    for column, feature in (rows.features or {}).items():
        if isinstance(feature, Image) and not isinstance(feature, ImageColumn):
            rows = rows.cast_column(column, ImageColumn())
    return rows


def hold_out(splits: DatasetDict, share: float, *, shuffle: bool = True) -> DatasetDict:
    """`splits` with a split "validation": if there is none, a share of the rows to train on.

    Args:
        share: of the rows, in (0, 1).
        shuffle: whether to take them at random, always the same ones, or from the end.

    Raises:
        ValueError: another share, or less than two rows.
    """
    if "validation" in splits:
        return splits
    if not 0 < share < 1:
        raise ValueError(f"validation_share must be between 0 and 1, got {share}")
    rows = len(splits["train"])
    if rows < 2:
        raise ValueError(f"{rows} rows cannot be divided into training and validation: give data to validate on")
    parts = splits["train"].train_test_split(share, seed=0, shuffle=shuffle)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def require_column(splits: DatasetDict | IterableDatasetDict, column: str, option: str) -> None:
    """Raise a ValueError that tells the columns there are, if `column`, as `option` has it, is not in all splits."""
    for split, dataset in splits.items():
        if column not in dataset.column_names:
            names = ", ".join(map(repr, dataset.column_names))
            raise ValueError(f"{option}: the {split} data has no column {column!r}, it has {names}")
