"""Reading unlabeled images for a teacher from a folder of image files or from parquet files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor

from ..data.image_files import PARQUET, list_images, open_image
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
        with _one_line():
            files = list_images(Path(path))
            in_tables = files[0].suffix.lower() == PARQUET
            self.places: list[Any] = [place for file in files for place in _rows(file)] if in_tables else files
        if not self.places:
            raise ConversionError(f"{path}: no images in it")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]  # a sequence without slices
        place = self.places[index]
        with _one_line():
            if isinstance(place, Path):
                return open_image(place)
            name, (image,) = f"{place[0]}, row {place[2]}", place[1][place[2]].values()
            content, file = (image["bytes"], image["path"]) if image else (None, None)
            if not (found := content or file):
                raise ConversionError(f"{name}: has no image")
            return open_image(found, name if content else f"{name}, {file}")


def _rows(file: Path) -> Iterator[tuple[Path, Any, int]]:
    """Yield the file, the first column of images, not decoded, and the number of each row of a parquet file."""
    from datasets import Image  # from the extra "train", needed only here

    from ..data.loading import is_image, load_local

    rows: Any = load_local(file)
    if not (columns := [name for name, feature in rows.features.items() if is_image(feature)]):
        raise ConversionError(f"{file}: none of its columns {', '.join(rows.column_names)} holds images")
    images = rows.select_columns(columns[0]).cast_column(columns[0], Image(decode=False))
    yield from ((file, images, row) for row in range(len(images)))


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConversionError(first_line(error)) from error


def pixel_batches(
    images: Iterable[torch.Tensor | Image.Image], processor: BaseImageProcessor
) -> Iterator[torch.Tensor]:
    """Yield batches of pixel values, (B, channels, height, width): tensors unchanged, PIL images preprocessed."""
    waiting: list[Image.Image] = []
    for image in images:
        if isinstance(image, torch.Tensor):
            yield image.reshape(-1, *image.shape[-3:])
            continue
        waiting.append(image)
        if len(waiting) == BATCH_SIZE:
            yield pixel_values(processor, waiting)
            waiting = []
    if waiting:
        yield pixel_values(processor, waiting)
