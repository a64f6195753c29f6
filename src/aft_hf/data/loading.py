"""Loading datasets from the Hub, from folders of images, and from parquet, csv, json and text files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_dataset
from datasets.data_files import SPLIT_KEYWORDS, DataFilesDict, DataFilesList
from datasets.features.features import require_storage_embed
from transformers.utils import logging

from ..atomic_files import sha256, write_atomic
from ..errors import InputError, described, explained, shortened
from ..reading import parse_header, parse_yaml, read_text
from .image_files import PARQUET, SUFFIXES, is_hidden, list_images
from .text import cached


logger = logging.get_logger(__name__)

READERS = {PARQUET: Dataset.from_parquet, ".json": Dataset.from_json, ".jsonl": Dataset.from_json}
FORMATS = (PARQUET, ".csv", ".json", ".jsonl", ".txt")
# The split that a word in the name of a folder or file means.
SPLITS = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}

GENERATED = "generated"


def load_splits(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train: str | None = None,
    validation: str | None = None,
    *,
    labeled: bool = True,
) -> DatasetDict:
    """Load "train" and "validation" of a dataset or of files, as far as they exist; "test" replaces "validation"."""
    paths = {split: path for split, path in (("train", train), ("validation", validation)) if path is not None}
    if (dataset_name is None) == (not paths):
        raise ValueError(
            "no data, or twice: give either a dataset (data.dataset, --dataset-name), or a file or folder "
            "(data.train, --train)"
        )
    if dataset_name is None and dataset_config_name is not None:
        raise ValueError(f"a file or folder has no configuration {dataset_config_name!r}; leave it out")
    if dataset_name is None:
        return DatasetDict({split: load_local(path, labeled=labeled) for split, path in paths.items()})
    splits = load_named(dataset_name, dataset_config_name)
    if "validation" not in splits and "test" in splits:
        splits["validation"] = splits["test"]
    splits.pop("test", None)
    return splits


def load_named(name: str, config_name: str | None = None) -> DatasetDict:
    """Load "train", "validation" and "test" of a dataset of the Hub, a local one, or a file, which is "train"."""
    place = Path(name)
    if place.is_file():
        if config_name is not None:
            raise ValueError(f"{name}: is a file, which has no configuration {config_name!r}; leave it out")
        return DatasetDict(train=load_local(name))
    if place.is_dir() and re.search(r"[*?[]|::", str(place.resolve())):
        raise ValueError(f"{name}: datasets reads *, ?, [ and :: in a path as a pattern; rename the directory")
    # `datasets` would also read addresses in place of a local dataset's files.
    for file, read in ((place / "README.md", parse_header), (place / ".huggingface.yaml", parse_yaml)):
        if file.is_file():
            values = read(read_text(file), str(file))
            if isinstance(values, dict) and "://" in repr(values.get("configs")):
                raise InputError(f"{file}: its configs name addresses; only files of a local dataset are read")
    if (place / "state.json").is_file():
        raise ValueError(f"{name}: is a dataset of save_to_disk; save it as a file (Dataset.to_parquet), and give it")
    try:
        cache = None
        if place.is_dir():  # a cache for the present content: `datasets` compares only times, and only paths of images
            files = datasets.load_dataset_builder(name, config_name).config.data_files or {}
            paths = [path for split in files.values() for path in map(Path, split)]
            sums = [sha256(path) for path in paths if path.suffix.lower() not in SUFFIXES]
            cache = str(cached((load_named.__name__, sums), "rows"))
        splits = load_dataset(name, config_name, cache_dir=cache)
    except Exception as error:  # of any type, and mostly without the name
        raise ValueError(f"{name}: cannot be loaded ({described(error.__cause__ or error)})") from error
    kept = [split for split in ("train", "validation", "test") if split in splits]
    return DatasetDict({split: with_safe_images(splits[split]) for split in kept})


def load_local(path: str | Path, *, labeled: bool = True, joined: bool = False) -> Dataset:
    """Load a parquet, csv, json or text file, or a folder of images or parquet files (see `list_images`).

    A name is never a pattern or an address. With `labeled`, the label of an image is the name of its folder. Parquet
    files whose names are of several splits are read only if `joined`. What cannot be read is a ValueError.
    """
    path = Path(path)
    files = list_images(path)
    suffix = files[0].suffix.lower()
    if path.is_dir() and suffix != PARQUET:
        return _image_rows(path, files, labeled)
    if suffix not in FORMATS:
        raise ValueError(f"{path}: give a folder of images or a file that ends in one of {', '.join(FORMATS)}")
    of_splits = {_split(file.relative_to(path)): file for file in files if not joined}
    of_splits.pop(None, None)
    if len(of_splits) > 1:
        raise ValueError(
            f"{path}: its files are of several splits ({', '.join(map(str, sorted(of_splits.values())))}): give a "
            "folder or file of one, or rename them; for training, the folder can be data.dataset (--dataset-name)"
        )
    try:
        if suffix in READERS:
            return with_safe_images(_read_files(files))
        if suffix == ".csv":
            return _read_table(path)
        # One row: the text reader of `datasets` would change line breaks (CR and CRLF to LF).
        text = {"text": [path.read_bytes().decode()]}
        return Dataset.from_dict(text, Features({"text": Value("large_string")}))
    except Exception as error:  # the readers can raise any exception
        empty = isinstance(error, StopIteration) or "corresponds to no data" in str(error)  # from JSON
        reason = "it has no rows" if empty else described(error.__cause__ or error)
        raise ValueError(f"{path}: cannot be read as a file of type {suffix[1:]} ({reason})") from error


def _split(file: Path) -> str | None:
    """Return the split that the outermost part of a path names, such as train/0 or train-00000-of-00001, or None."""
    words = (word for part in file.parts for word in re.split(r"[\W_\d]+", part.lower()))
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _read_files(files: Sequence[Path]) -> Dataset:
    """Read parquet or JSON files by the reader of `datasets`. `load_dataset` would take their names as patterns."""
    names = [str(file.absolute()) for file in files]
    if odd := [name for name in names if "::" in name]:
        raise ValueError(f"the path {odd[0]} contains '::', which datasets reads as a chained URL; rename it")
    versions = [(sha256(file),) for file in files]  # for the cache: a copied file may keep its time and size
    data_files = DataFilesDict(train=DataFilesList(names, versions))
    return READERS[files[0].suffix.lower()](data_files, split="train")


def _read_table(path: Path) -> Dataset:
    """Read a CSV file at once: parts of it, as `datasets` reads it, would have types of their own (007 becomes 7)."""
    table = pandas.read_csv(path, low_memory=False)
    if table.empty:
        raise ValueError("it has no rows")
    if not isinstance(table.index, pandas.RangeIndex):  # pandas takes surplus cells as an index
        raise ValueError("rows have more cells than the header: put texts with commas in quotes")
    return Dataset.from_pandas(table)


def _image_rows(folder: Path, files: Sequence[Path], labeled: bool) -> Dataset:
    inner = {file.parent for file in files}
    outer = {parent for path in inner - {folder} for parent in path.parents}
    splits = {path for path in outer if path.name.lower() in SPLITS and folder in path.parents}
    of_splits = {path: SPLITS[path.name.lower()] for path in inner if path.name.lower() in SPLITS and path != folder}
    if len({*of_splits.values()}) > 1:
        splits |= of_splits.keys()
    if splits:
        places = shortened(", ".join(map(str, sorted(splits))))
        raise ValueError(
            f"{folder}: its folders are splits, not classes: give one of {places}, with a folder for each class; for "
            "training, the folder can be data.dataset (--dataset-name)"
        )
    columns: dict[str, list[Any]] = {"image": [{"bytes": None, "path": str(file)} for file in files]}
    features = Features(image=Image(decode=False))
    if labeled:
        shallow, deep = (most(files, key=lambda file: len(file.parts)) for most in (min, max))
        if shallow.parent == folder or len(shallow.parts) < len(deep.parts):
            raise ValueError(
                f"{folder}: the classes are unclear: put all images equally deep, each in the folder of its class, at "
                f"{folder}/CLASS/IMAGE, unlike {' and '.join(map(str, dict.fromkeys((shallow, deep))))}, or for "
                "training, give a folder with a metadata.csv as data.dataset (--dataset-name)"
            )
        beside = {path for parent in {path.parent for path in inner} for path in parent.iterdir() if path.is_dir()}
        if empty := sorted(str(path) for path in beside - inner if not is_hidden(path.name)):
            logger.warning(f"{shortened(', '.join(empty))}: no images in it, so it is no class")
        columns["label"] = [file.parent.name for file in files]
        features["label"] = ClassLabel(names=sorted(set(columns["label"])))
    return Dataset.from_dict(columns, features)


def with_safe_images(rows: Dataset) -> Dataset:
    """Return the same rows with undecoded images, which `image_of` opens: `datasets` opens any format of Pillow."""
    for name, feature in rows.features.items():
        if is_image(feature):
            rows = rows.cast_column(name, Image(decode=False))
        elif require_storage_embed(feature):  # of other files, also in lists: their paths may be addresses
            rows = rows.remove_columns(name)
    return rows


def is_image(feature: Any) -> bool:
    """Whether a column holds images: by its type, or as structs of bytes and path, as in files of other libraries."""
    types = {name: getattr(part, "dtype", "") for name, part in feature.items()} if isinstance(feature, dict) else {}
    stored = types.keys() == {"bytes", "path"} and types["bytes"] in ("binary", "large_binary", "null")
    return isinstance(feature, Image) or (stored and types["path"] in ("string", "large_string", "null"))


def hold_out(splits: DatasetDict, share: float) -> DatasetDict:
    """Return `splits` with a split "validation": if there is none, a share of the training rows, with a message."""
    if "validation" in splits or share == 0:
        return splits
    with explained("validation data cannot be held out, so give some"):
        parts = splits["train"].train_test_split(share, seed=0)
    held, count = len(parts["test"]), len(splits["train"])
    logger.warning(f"there is no validation data: {held} of the {count} training samples are held out for it")
    return DatasetDict(train=parts["train"], validation=parts["test"])


def refuse_inside(output_dir: str, *data: str | None) -> None:
    """Raise a ValueError if an output directory lies in a folder of data: the next run would read its files."""
    for path in map(Path, filter(None, data)):
        if path.is_dir() and Path(output_dir).resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{output_dir}: lies in the data, {path}, which the next run reads; give another folder")


def require_column(splits: DatasetDict, column: str, option: str) -> None:
    """Raise a ValueError if a split lacks `column`, the value of `option`. The message lists the columns it has."""
    for split, dataset in splits.items():
        if column not in dataset.column_names:
            names = shortened(", ".join(map(repr, dataset.column_names)))
            raise ValueError(f"{option}: the {split} data has no column {column!r}, it has {names}")


def write_text(directory: str | Path) -> str:
    """Write a text of 200,000 bytes, always the same words in random order, to a file in `directory`; return its path.

    Runs resume only with the same text, also after an update of this package.
    """
    random, letters = np.random.default_rng(0), np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
    words = [random.choice(letters, random.integers(1, 9)).tobytes() for _ in range(200)]
    path = Path(directory) / "generated.txt"
    with write_atomic(path) as file:  # other processes may write it at the same time
        file.write(b" ".join(words[i] for i in random.integers(200, size=100_000))[:200_000])
    return str(path)


def draw_images(split: str, image_column: str, label_column: str) -> Dataset:
    """Return noisy images whose classes differ in color. The images of a split are always the same."""
    colours = np.random.default_rng(0).integers(30, 225, (10, 3))
    labels = [i % 10 for i in range(128)]
    noise = np.random.default_rng(list(split.encode())).integers(-30, 30, (128, 32, 32, 3))
    pixels = (colours[labels][:, None, None] + noise).astype(np.uint8)
    features = Features({image_column: Image(), label_column: ClassLabel(num_classes=10)})
    return Dataset.from_dict({image_column: list(pixels), label_column: labels}, features)
