"""Images to look at with a teacher: a folder of them, or parquet files."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor

from .errors import ConversionError, first_line


BATCH_SIZE = 8
# Pictures, and not all that Pillow can open: documents are not meant, and some of them start other programs.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def read_images(path: str | Path, limit: int) -> Iterator[Image.Image]:
    """Up to `limit` images in RGB, evenly spaced: where they are sorted by class, all classes are seen.

    Args:
        path: a folder with image files somewhere in it, a parquet file with a column of images, or a folder of such.
        limit: the most images, at least 1.

    Raises:
        ConversionError: there are no images, or one cannot be read.
    """
    if limit < 1:
        raise ConversionError(f"the number of images must be at least 1, got {limit}")
    images = ImagesOnDisk(path)
    count = min(limit, len(images))
    return (images[index * len(images) // count] for index in range(count))


class ImagesOnDisk(Sequence):
    """The images of a path in RGB, each opened when it is asked for.

    Args:
        path: as for `read_images`.

    Raises:
        ConversionError: there are no images; when asked for one, that it cannot be read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._found = _find_images(self.path)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Image.Image:
        return _open(self._found, index, self.path)


def _find_images(path: Path) -> Any:
    """Files of images, or rows of a table."""
    if not path.exists():
        raise ConversionError(f"{path}: no such folder or file of images")
    parquet = [path] if path.suffix == ".parquet" else sorted(path.rglob("*.parquet"))
    images = _parquet_images(path, parquet) if parquet else _image_files(path)
    if not len(images):
        raise ConversionError(f"{path}: no images in it; give a folder of image files, or parquet files")
    return images


def pixel_batches(
    images: Iterable[torch.Tensor | Image.Image], processor: BaseImageProcessor
) -> Iterator[torch.Tensor]:
    """Batches (B, channels, height, width) of pixel values: tensors as they are, images through the processor."""
    waiting: list[Image.Image] = []
    for image in images:
        if isinstance(image, torch.Tensor):
            yield image if image.dim() == 4 else image.unsqueeze(0)
            continue
        waiting.append(image.convert("RGB"))
        if len(waiting) == BATCH_SIZE:
            yield processor(waiting, return_tensors="pt")["pixel_values"]
            waiting = []
    if waiting:
        yield processor(waiting, return_tensors="pt")["pixel_values"]


def _image_files(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES] if path.is_dir() else [path]


def _parquet_images(path: Path, files: list[Path]) -> Any:
    """The rows of the first column of images, decoded when asked for."""
    try:
        import datasets  # an extra ("train"), needed here only
    except ImportError as error:
        raise ConversionError(f"{path}: parquet files need the library datasets: pip install datasets") from error
    try:
        table = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
    except Exception as error:  # of many kinds, by pyarrow and by datasets
        raise ConversionError(f"{path}: no readable parquet file ({first_line(error)})") from error
    columns = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise ConversionError(f"{path}: none of its columns {', '.join(table.features)} holds images")
    return table.select_columns(columns[0])


def _open(images: Any, index: int, path: Path) -> Image.Image:
    where = images[index] if isinstance(images, list) else f"{path}, row {index}"
    try:
        image = Image.open(where) if isinstance(images, list) else next(iter(images[index].values()))
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, AttributeError) as error:
        raise ConversionError(f"{where}: cannot be read as an image ({first_line(error)})") from error
