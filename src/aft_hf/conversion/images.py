"""Reading unlabeled images for a teacher from a folder of image files or from parquet files."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor

from ..data.image_files import PARQUET, ImageError, list_images, open_image
from ..data.image_size import pixel_values
from ..reading import first_line
from .errors import ConversionError


BATCH_SIZE = 8


def read_images(path: str | Path, limit: int) -> Iterator[Image.Image]:
    """Read up to `limit` images in RGB, evenly spaced, so that images sorted by class cover all classes.

    Args:
        path: a folder with image files at any depth, a parquet file with a column of images, or a folder of parquet
            files.
        limit: maximum number of images, at least 1.

    Raises:
        ConversionError: there are no images, or an image cannot be read.
    """
    if limit < 1:
        raise ConversionError(f"the number of images must be at least 1, got {limit}")
    images = ImagesOnDisk(path)
    count = min(limit, len(images))
    return (images[index * len(images) // count] for index in range(count))


class ImagesOnDisk(Sequence[Image.Image]):
    """Sequence of the images of a path in RGB; each image is opened when it is accessed.

    Args:
        path: as for `read_images`.

    Raises:
        ConversionError: there are no images, or an image cannot be read when it is accessed.
    """

    def __init__(self, path: str | Path):
        self._total, self._image_at = _find_images(Path(path))

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]  # a sequence without slices
        if not 0 <= index < self._total:
            raise IndexError(f"there are {self._total} images, got index {index}")
        return self._image_at(index)


def _find_images(path: Path) -> tuple[int, Callable[[int], Image.Image]]:
    """Return the number of images, and a function that opens the image at an index."""
    try:
        files = list_images(path)
    except (OSError, ValueError) as error:
        raise ConversionError(first_line(error)) from error
    if files[0].suffix.lower() == PARQUET:
        return _parquet_images(path, files)
    return len(files), lambda index: _opened(files[index], str(files[index]))


def pixel_batches(
    images: Iterable[torch.Tensor | Image.Image], processor: BaseImageProcessor
) -> Iterator[torch.Tensor]:
    """Yield batches of pixel values, (B, channels, height, width): tensors unchanged, PIL images preprocessed."""
    waiting: list[Image.Image] = []
    for image in images:
        if isinstance(image, torch.Tensor):
            yield image if image.dim() == 4 else image.unsqueeze(0)
            continue
        waiting.append(image)
        if len(waiting) == BATCH_SIZE:
            yield pixel_values(processor, waiting)
            waiting = []
    if waiting:
        yield pixel_values(processor, waiting)


def _parquet_images(path: Path, files: list[Path]) -> tuple[int, Callable[[int], Image.Image]]:
    """As `_find_images`, for the first column of images in parquet files."""
    try:
        import datasets  # from the extra "train", needed only here
        from pyarrow import parquet

        from ..data.loading import is_image, read_files
    except ImportError as error:
        raise ConversionError(f"{path}: parquet files need the library datasets: pip install datasets") from error
    try:
        table = read_files(files)
        ends = list(accumulate(parquet.read_metadata(file).num_rows for file in files))
    except Exception as error:  # pyarrow and datasets raise many types
        raise ConversionError(f"{path}: no readable parquet file ({first_line(error)})") from error
    columns = [name for name, feature in table.features.items() if is_image(feature)]
    if not columns:
        raise ConversionError(f"{path}: none of its columns {', '.join(table.features)} holds images")
    rows = table.select_columns(columns[0]).cast_column(columns[0], datasets.Image(decode=False))

    def image_at(index: int) -> Image.Image:
        number = bisect_right(ends, index)
        image = rows[index][columns[0]] or {}
        row = index - (ends[number - 1] if number else 0)
        content, source = image.get("bytes"), image.get("path")
        return _opened(
            content or source, f"{files[number]}, row {row}" + (f", {source}" if source and not content else "")
        )

    if not len(rows):
        raise ConversionError(f"{path}: no images in it")
    return len(rows), image_at


def _opened(source: Path | str | bytes | None, name: str) -> Image.Image:
    if source is None:
        raise ConversionError(f"{name}: has no image")
    try:
        return open_image(source, name)
    except ImageError as error:
        raise ConversionError(str(error)) from error
