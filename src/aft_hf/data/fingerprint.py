"""Fingerprints of training data: checksums by which a resumed run detects changed data.

A fingerprint depends on the content alone: it is the same for the same data at another path or on another machine.
Data of up to `WHOLE` bytes is read completely. For more data, the checksum covers the size and evenly spaced blocks or
rows of about `WHOLE` bytes in total.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image

from .checksums import crc32
from .image_files import check_file


WHOLE = 2**30  # bytes, which take seconds to read
BLOCK = 2**20
PICTURES = 256  # images, which take seconds to decode


def sum_file(path: str | Path, span: tuple[int, int] | None = None) -> str:
    """Return the fingerprint of a file, or of a part of it, given as (start, stop) in bytes."""
    start, stop = (0, Path(path).stat().st_size) if span is None else span
    return f"{stop - start} bytes, {crc32(Path(path), _parts(start, stop, WHOLE)):08x}"


def sum_files(files: Sequence[Path]) -> str:
    """Return the fingerprint of files in the given order.

    It covers their paths relative to their common folder, since the name of a folder may be a class.
    """
    folder = Path(os.path.commonpath([path.parent for path in files]))
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    names = [path.relative_to(folder).as_posix() for path in files] if len(files) > 1 else []
    crc = zlib.crc32(repr((sizes, names)).encode())
    for path, size in zip(files, sizes):
        crc = crc32(path, _parts(0, size, -(-size * WHOLE // max(total, 1))), crc)
    return f"{len(files)} files, {total} bytes, {crc:08x}"


def sum_rows(rows: Dataset, image_column: str, *columns: str) -> str:
    """Return the fingerprint of a column of images and of other columns, in the order of the rows."""
    rows, crc = rows.with_format("arrow"), 0
    for column in columns:  # without loading the images, which are large
        crc = zlib.crc32(repr(rows.select_columns([column])[:][column].to_pylist()).encode(), crc)
    rows = rows.select_columns([image_column])
    every = max(1, -(-_size(rows, image_column) // WHOLE))
    for table in rows.select(range(0, len(rows), every)).iter(100):
        for image in table[image_column].to_pylist():
            crc = zlib.crc32(_content(image), crc)
    return f"{len(rows)} rows, {crc:08x}"


def sum_images(images: Sequence[Image.Image]) -> str:
    """Return the fingerprint of images in the given order: of all, or of `PICTURES` evenly spaced ones."""
    chosen = (images[index].convert("RGB") for index in spread(len(images), PICTURES))
    return f"{len(images)} images, {sum_samples({'size': image.size, 'pixels': image} for image in chosen)}"


def sum_samples(samples: Iterable[Mapping[str, Any]]) -> str:
    """Return the fingerprint of samples, whose values are arrays of numbers."""
    crc = 0
    for value in (value for sample in samples for value in sample.values()):
        crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
    return f"{crc:08x}"


def _size(rows: Dataset, image_column: str) -> int:
    """Return the size of rows in Arrow's format in bytes, including the image files that they refer to."""
    size = rows.data.nbytes * len(rows) // max(len(rows.data), 1)
    images = (image for table in rows.iter(100) for image in table[image_column].to_pylist())
    first = next(images, None)
    if isinstance(first, dict) and not first["bytes"]:  # an image folder: the rows hold only paths
        paths = (image["path"] or "" for image in chain([first], images) if not image["bytes"])
        size += sum(check_file(path).stat().st_size for path in paths)
    return size


def _content(image: Any) -> bytes:
    """Return the content of the image file that a row holds or refers to, and of any other value its `repr`."""
    if not isinstance(image, dict):
        return repr(image).encode()
    return image["bytes"] or check_file(image["path"] or "").read_bytes()


def _parts(start: int, stop: int, most: int) -> Iterable[tuple[int, int]]:
    """Return the range (start, stop) itself or, if it exceeds `most` bytes, evenly spaced blocks of about `most` bytes
    in total, which include the first and the last."""
    if stop - start <= most:
        return [(start, stop)]
    offsets = spread(max(stop - start - BLOCK, 0) + 1, max(most // BLOCK, 2))
    return ((start + offset, min(start + offset + BLOCK, stop)) for offset in offsets)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers of 0 .. count - 1, which include the first and the last."""
    return sorted({(count - 1) * i // (most - 1) for i in range(most)}) if count else []
