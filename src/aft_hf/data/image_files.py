"""Finding and opening untrusted image files: one rule for folders, a list of allowed formats, and limits on sizes."""

import io
import os
import stat
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE as BITS_PER_SAMPLE
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION

from ..reading import printable


# Pillow opens forty more formats. Some of them start other programs (EPS: Ghostscript), the others are hardly tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in FORMATS)
# 8192 x 8192, enough for photos. Decoding and resizing that many pixels takes 1.3 GB, however small the file is.
MAX_PIXELS = 2**26
MAX_BYTES = 8 * MAX_PIXELS  # of a file: that many pixels of four channels of 16 bits, without compression
SYSTEM_NAMES = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information")  # hold thumbnails and deleted files
PARQUET = ".parquet"
NAME = "aft_hf.name"  # key in `Image.info`


class ImageError(ValueError):
    """Raised for an image that cannot be used. The message names the image and the reason in one line."""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open an image file as an RGB image of 8 bits per channel, rotated as its EXIF data say.

    Of 16-bit grayscale values, the upper 8 bits are kept. Transparency is ignored. The image keeps its name for the
    error messages of `check_resizing`.

    Args:
        source: path of the file, or its content.
        name: name of the image in error messages. Default: the path.

    Raises:
        ImageError: the file does not exist, is damaged or too large, has none of the `FORMATS`, or has pixels whose
            range of values is unknown, for example of 32 bits.
    """
    name = printable(name or ("an image" if isinstance(source, bytes) else str(source)))
    if not isinstance(source, bytes):
        check_file(source, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd files, and about sizes that are refused below
            image = _decoded(io.BytesIO(source) if isinstance(source, bytes) else Path(source), name)
            image.info[NAME] = name
            return image
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(_too_large(name, "more pixels than Pillow opens")) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: cannot be read as an image; give one of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoding an arbitrary file can raise any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ImageError(f"{name}: cannot be read as an image ({reason})") from error


def check_file(path: str | Path, name: str | None = None) -> Path:
    """Return the path of a file that may be read; reading a pipe or a device might block or never end.

    Raises:
        ImageError: there is no regular file of 1 .. `MAX_BYTES` bytes (those in /proc have 0).
    """
    name = printable(name or str(path))
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise ImageError(f"{name}: no such file") from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{name}: is not a regular file")
    if not 0 < status.st_size <= MAX_BYTES:
        raise ImageError(f"{name}: cannot be read as an image: it has {status.st_size} of 1 .. {MAX_BYTES} bytes")
    return Path(path)


def list_images(path: Path) -> list[Path]:
    """Return the image files in a folder at any depth, sorted, or else its parquet files; of a file, the file itself.

    Hidden files and folders, whose names begin with a dot, and those of the operating system are left out. Links to
    folders are followed, except to a folder that the link itself is in.

    Raises:
        ValueError: the path does not exist, or is a folder without images, or with images and parquet files.
        ImageError: one of the files is not a regular file, such as a pipe or a link to a missing file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    found: list[Path] = []
    waiting = [(path, {path.resolve()})]
    while waiting:
        inside, outer = waiting.pop()
        for entry in os.scandir(inside):
            file = Path(entry.path)
            if entry.name.startswith(".") or entry.name in SYSTEM_NAMES:
                continue
            if not entry.is_dir():
                if file.suffix.lower() in (*SUFFIXES, PARQUET):
                    found.append(file if entry.is_file() else check_file(file))
            elif (folder := file.resolve()) not in outer:
                waiting.append((file, {*outer, folder}))
    tables = [file for file in sorted(found) if file.suffix.lower() == PARQUET]
    images = [file for file in sorted(found) if file.suffix.lower() != PARQUET]
    if images and tables:
        raise ValueError(f"{path}: has both images ({images[0]}) and parquet files ({tables[0]}); give one of them")
    if not images and not tables:
        raise ValueError(f"{path}: no images in it; give a folder of {', '.join(FORMATS)} or parquet files")
    return images or tables


def check_resizing(image: Image.Image, width: float, height: float) -> Image.Image:
    """Return the image if resizing it takes at most `MAX_PIXELS`; rows are resized first, all rows of the image.

    Raises:
        ImageError: it takes more.
    """
    if width * max(height, image.height) > MAX_PIXELS:
        raise ImageError(
            f"{image.info.get(NAME, 'an image')}: {image.width} x {image.height} pixels cannot be resized to "
            f"{width:.0f} x {height:.0f}, since that takes more than {MAX_PIXELS / 1e6:.0f} million pixels; crop it"
        )
    return image


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
