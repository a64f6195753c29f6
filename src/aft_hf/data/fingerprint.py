"""Fingerprints of training data: checksums by which a resumed run detects changed data.

A fingerprint depends on the content alone: it is the same for the same data at another path or on another machine. It
covers the size, all labels, and the first `WHOLE` bytes of files or images.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image

from .image_files import check_file


WHOLE = 2**30  # bytes, which take seconds to read
PICTURES = 256  # images, which take seconds to decode


def sum_file(path: str | Path, span: tuple[int, int] | None = None) -> str:
    """Return the fingerprint of a file, or of a part of it, given as (start, stop) in bytes."""
    start, stop = (0, Path(path).stat().st_size) if span is None else span
    digest, end = sha256(), min(stop, start + WHOLE)
    with Path(path).open("rb") as file:
        file.seek(start)
        while block := file.read(min(end - file.tell(), 2**20)):
            digest.update(block)
    return f"{stop - start} bytes, {digest.hexdigest()}"


def sum_rows(rows: Dataset, image_column: str, *columns: str) -> str:
    """Return the fingerprint of a column of images and of other columns, in the order of the rows."""
    rows, left = rows.with_format("arrow"), WHOLE
    values = [rows.select_columns([column])[:][column].to_pylist() for column in columns]  # without the images
    digest = sha256(repr(values).encode())
    for table in rows.select_columns([image_column]).iter(100):
        for image in table[image_column].to_pylist():
            content = _content(image)
            digest.update(content)
            left -= len(content)
        if left <= 0:
            break
    return f"{len(rows)} rows, {digest.hexdigest()}"


def sum_images(images: Sequence[Image.Image]) -> str:
    """Return the fingerprint of images in the given order: of up to `PICTURES` evenly spaced ones."""
    count = min(len(images), PICTURES)
    chosen = (images[len(images) * i // count].convert("RGB") for i in range(count))
    return f"{len(images)} images, {sum_arrays(each for image in chosen for each in (image.size, image))}"


def sum_arrays(arrays: Iterable[Any]) -> str:
    """Return the fingerprint of arrays, of anything that numpy converts to one."""
    digest = sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _content(image: Any) -> bytes:
    """Return the content of the image file that a row holds or refers to, and of any other value its `repr`."""
    if not isinstance(image, dict):
        return repr(image).encode()
    return image["bytes"] or check_file(image["path"] or "").read_bytes()
