"""Opening images that others made: formats of pictures only, and no more pixels than there is memory for."""

import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError


# Pillow knows forty more. Some of them start other programs (EPS: Ghostscript), and hardly anybody tests the others.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# 8192 x 8192: what cameras take. To decode and resize that many takes 1.3 GB, however few bytes the file has.
MAX_PIXELS = 2**26


class ImageError(ValueError):
    """An image that cannot be used, said in one line: which one, and why."""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """An image file in RGB and upright, as its EXIF data say.

    Args:
        source: path, or content.
        name: for messages; by default the path.

    Raises:
        ImageError: there is no such file, it is damaged or too large, or of none of `FORMATS`.
    """
    name = name or ("an image" if isinstance(source, bytes) else str(source))
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise ImageError(f"{name}: {'is no regular file' if Path(source).exists() else 'no such file'}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are odd, and of sizes that are refused below
            return _decoded(io.BytesIO(source) if isinstance(source, bytes) else Path(source), name)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(_too_large(name, "more pixels than Pillow opens")) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: cannot be read as an image; give one of {', '.join(FORMATS)}") from error
    except Exception as error:  # there is no telling what decoding an arbitrary file raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ImageError(f"{name}: cannot be read as an image ({reason})") from error


def row_at(rows: Any, index: int) -> Any:
    """`rows[index]`; an image in it that cannot be used is told with the index.

    Raises:
        ImageError: as `open_image`.
    """
    try:
        return rows[index]
    except ImageError as error:
        raise ImageError(f"row {index}: {error}") from error


def _decoded(file: BinaryIO | Path, name: str) -> Image.Image:
    with Image.open(file, formats=FORMATS) as image:  # reads the header only
        if image.width * image.height > MAX_PIXELS:
            raise ImageError(_too_large(name, f"{image.width} x {image.height} pixels"))
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")


def _too_large(name: str, size: str) -> str:
    return f"{name}: has {size}; at most {MAX_PIXELS / 1e6:.0f} million are read, make it smaller"
