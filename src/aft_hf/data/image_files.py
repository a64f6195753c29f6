"""Opening untrusted image files: a list of allowed formats, and a limit on the number of pixels."""

import io
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE as BITS_PER_SAMPLE
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION


# Pillow opens forty more formats. Some of them start other programs (EPS: Ghostscript), the others are hardly tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# 8192 x 8192, enough for photos. Decoding and resizing that many pixels takes 1.3 GB, however small the file is.
MAX_PIXELS = 2**26


class ImageError(ValueError):
    """Raised for an image that cannot be used. The message names the image and the reason in one line."""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open an image file as an RGB image of 8 bits per channel, rotated as its EXIF data say.

    Of 16-bit grayscale values, the upper 8 bits are kept. Transparency is ignored.

    Args:
        source: path of the file, or its content.
        name: name of the image in error messages. Default: the path.

    Raises:
        ImageError: the file does not exist, is damaged or too large, has none of the `FORMATS`, or has pixels whose
            range of values is unknown, for example of 32 bits.
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
        if image.mode.startswith(("I", "F")):  # more than 8 bits per pixel
            return _with_8_bits(image, name).convert("RGB")
        return image.convert("RGB")


def _with_8_bits(image: Image.Image, name: str) -> Image.Image:
    """Keep the upper 8 of 16 bits per pixel; `convert` would clip all values at 255."""
    # Pillow has the mode I for pixels of 32 bits, but also for those of a 16-bit PGM.
    known = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    tags = getattr(image, "tag_v2", {})  # of a TIFF, which can also have 12 bits per pixel, and 0 for white
    if not known or tags.get(BITS_PER_SAMPLE, (16,)) != (16,) or tags.get(PHOTOMETRIC_INTERPRETATION, 1) != 1:
        raise ImageError(f"{name}: has unusual pixels (mode {image.mode}); save it with 8 bits per channel")
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _too_large(name: str, size: str) -> str:
    return f"{name}: has {size}; at most {MAX_PIXELS / 1e6:.0f} million are read, make it smaller"
