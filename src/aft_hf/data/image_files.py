"""Opening untrusted image files: a list of allowed formats, and a limit on the number of pixels."""

import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError


# Pillow opens forty more formats. Some of them start other programs (EPS: Ghostscript), the others are hardly tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# 8192 x 8192, enough for photos. Decoding and resizing that many pixels takes 1.3 GB, however small the file is.
MAX_PIXELS = 2**26


class ImageError(ValueError):
    """Raised for an image that cannot be used. The message names the image and the reason in one line."""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open an image file as an RGB image, rotated as its EXIF data say.

    Args:
        source: path of the file, or its content.
        name: name of the image in error messages. Default: the path.

    Raises:
        ImageError: the file does not exist, is damaged or too large, or has none of the `FORMATS`.
    """
    name = name or ("an image" if isinstance(source, bytes) else str(source))
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise ImageError(f"{name}: {'is not a regular file' if Path(source).exists() else 'no such file'}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd files, and about sizes that are refused below
            return _decoded(io.BytesIO(source) if isinstance(source, bytes) else Path(source), name)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(_too_large(name, "more pixels than Pillow opens")) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: cannot be read as an image; give one of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoding an arbitrary file can raise any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ImageError(f"{name}: cannot be read as an image ({reason})") from error


def row_at(rows: Any, index: int) -> Any:
    """Return `rows[index]`, and add the index to the error about an image that cannot be used.

    Raises:
        ImageError: an image of the row cannot be opened (see `open_image`).
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
