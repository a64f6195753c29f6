"""Reading unlabeled images for a teacher from a folder of image files or from parquet files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..data.image_files import PARQUET, ImageError, list_images, open_image
from ..errors import shortened


def read_images(path: str | Path, limit: int) -> Iterator[Image.Image]:
    """Read up to `limit` images in RGB, evenly spaced, so that images sorted by class cover all classes.

    Args:
        path: an image file, a folder of image files at any depth, a parquet file, or a folder of parquet files, with
            one column of images, or a column "image" of images, of image files or of their paths.
        limit: maximum number of images, at least 1.

    Raises:
        ValueError: there are no images, or no such column, or an image cannot be read.
    """
    images = ImagesOnDisk(path)
    count = min(limit, len(images))
    return (images[index * len(images) // count] for index in range(count))


class ImagesOnDisk(Sequence[Image.Image]):
    """Sequence of the images of a path, as for `read_images`, in RGB; each is opened when it is accessed."""

    def __init__(self, path: str | Path):
        self.path = path
        self.images: Sequence[Any] = list_images(Path(path))
        if self.images[0].suffix.lower() == PARQUET:
            from ..data.loading import is_image, load_local  # needs the extra "train"

            rows: Any = load_local(path, joined=True)
            columns = [name for name, feature in rows.features.items() if is_image(feature)]
            column = columns[0] if len(columns) == 1 else "image"
            if column not in (columns or rows.column_names):
                names = shortened(", ".join(columns or rows.column_names))
                several = f'several columns hold images: {names}; name the one to read "image"'
                raise ValueError(f"{path}: {several if columns else f'no column holds images: {names}'}")
            self.images = rows[column]  # decodes an image when it is accessed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]  # a sequence without slices
        if isinstance(self.images, list):
            return open_image(self.images[index])
        from ..data.samples import image_of

        try:
            return image_of({"image": self.images[index]}, "image")
        except ImageError as error:
            raise ImageError(f"{self.path}, row {index}: {error}") from error
