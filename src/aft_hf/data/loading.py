"""Loading datasets from the Hub, from folders of images, and from parquet, csv, json and text files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import fsspec
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    IterableDatasetDict,
    Value,
    load_dataset,
    load_dataset_builder,
)
from PIL import Image as PILImage
from transformers.utils import logging

from ..reading import described
from .image_files import open_image


logger = logging.get_logger(__name__)

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}


class ImageColumn(Image):
    """Feature type of RGB images that are decoded by `open_image`; `datasets` itself opens any format of Pillow."""

    def decode_example(self, value: Any, token_per_repo_id: dict[str, str] | None = None) -> PILImage.Image:
        """Decode {"bytes": content or None, "path": path or URL of the image or None}."""
        if isinstance(value, PILImage.Image):
            return value
        content, path = value["bytes"], value["path"]
        if content is None and path is not None and "://" in path:  # streamed from the Hub or an archive
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
    """Load the splits "train" and "validation", as far as they exist. A "test" split replaces a missing "validation".

    Args:
        dataset_name, dataset_config_name: name and configuration of a dataset, as for `load_named`.
        train, validation: the data of the splits, instead of a name: a folder of images with a folder for each class,
            or a parquet, csv, json or text file.
        streaming: whether rows are read during iteration. Streamed rows cannot be indexed.

    Raises:
        ValueError: neither a name nor files are given, or both, or a file does not exist or cannot be read.
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
    """Load the splits "train", "validation" and "test" of a dataset, as far as they exist.

    Args:
        name: a dataset on the Hub, a local dataset that `datasets` can load, or a file, which becomes "train".
        config_name: name of the dataset's configuration.
        streaming: whether rows are read during iteration.

    Raises:
        ValueError: the file cannot be read.
    """
    if Path(name).is_file():
        splits = {"train": load_local(name, streaming=streaming)}
    else:
        splits = load_dataset(name, config_name, streaming=streaming)
    kept = {split: with_safe_images(splits[split]) for split in ("train", "validation", "test") if split in splits}
    return IterableDatasetDict(kept) if streaming else DatasetDict(kept)


def load_local(path: str | Path, *, streaming: bool = False) -> Dataset | IterableDataset:
    """Load one file, or one folder of images with a folder for each class.

    Raises:
        ValueError: the path does not exist, has an unknown format, or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        # All files in one split: by default, `datasets` takes "test_1.png" for a part of a test split.
        reader, options = "imagefolder", {"data_dir": str(path), "data_files": "**"}
    elif not path.is_file():
        raise ValueError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    elif path.suffix not in FORMATS:
        raise ValueError(f"{path}: give a folder of images or a file that ends in one of {', '.join(FORMATS)}")
    else:
        reader, options = FORMATS[path.suffix], {"data_files": str(path)}
    try:
        if reader == "text":
            return _read_document(path, streaming)
        return with_safe_images(load_dataset(reader, split="train", streaming=streaming, **options))
    except Exception as error:  # the readers can raise any exception
        what = "a folder of images" if reader == "imagefolder" else f"a file of type {reader}"
        raise ValueError(f"{path}: cannot be read as {what} ({described(error.__cause__ or error)})") from error


def _read_document(path: Path, streaming: bool) -> Dataset | IterableDataset:
    """Return a text file as one row; the text reader of `datasets` would change line breaks (CR and CRLF to LF)."""
    kind: Any = IterableDataset if streaming else Dataset
    source = {"path": str(path.resolve()), "changed": path.stat().st_mtime_ns}  # also the key in the cache
    return kind.from_generator(_document, gen_kwargs=source, features=Features({"text": Value("large_string")}))


def _document(path: str, changed: int) -> Iterator[dict[str, str]]:
    yield {"text": Path(path).read_bytes().decode()}


def local_files(
    dataset_name: str | None = None, dataset_config_name: str | None = None, train: str | None = None
) -> list[Path]:
    """Return the files of the split "train" as `load_splits` reads it; none if they are on the Hub.

    Their order does not depend on the path of their folder.
    """
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
    """Return the same rows with an `ImageColumn` in place of each column of images."""
    for column, feature in (rows.features or {}).items():
        if isinstance(feature, Image) and not isinstance(feature, ImageColumn):
            rows = rows.cast_column(column, ImageColumn())
    return rows


def hold_out(splits: DatasetDict, share: float, *, shuffle: bool = True) -> DatasetDict:
    """Return `splits` with a split "validation", held out from the training rows, with a message, if it is missing.

    Args:
        splits: the splits of a dataset, with a split "train".
        share: the share of rows to hold out, less than 1; 0 holds out none.
        shuffle: whether to hold out random rows (with a fixed seed) or the last ones.

    Raises:
        ValueError: the share is not in [0, 1), or there are less than two rows.
    """
    if "validation" in splits or share == 0:
        return splits
    if not 0 < share < 1:
        raise ValueError(f"validation_share must be between 0 and 1, got {share}")
    rows = len(splits["train"])
    if rows < 2:
        raise ValueError(f"{rows} rows cannot be split into training and validation data: give validation data")
    parts = splits["train"].train_test_split(share, seed=0, shuffle=shuffle)
    logger.warning(
        f"there is no validation data: {len(parts['test'])} of the {rows} training samples are held out for it "
        f"(validation_share={share})"
    )
    return DatasetDict(train=parts["train"], validation=parts["test"])


def require_column(splits: DatasetDict | IterableDatasetDict, column: str, option: str) -> None:
    """Raise a ValueError if a split lacks `column`, the value of `option`. The message lists the columns it has."""
    for split, dataset in splits.items():
        if column not in dataset.column_names:
            names = ", ".join(map(repr, dataset.column_names))
            raise ValueError(f"{option}: the {split} data has no column {column!r}, it has {names}")
