"""Finding and opening untrusted image files: one rule for folders, a list of allowed formats, and limits on sizes."""

import io
import os
import re
import stat
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE as BITS_PER_SAMPLE
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION

from ..errors import described, shortened


# Pillow opens forty more formats. Some of them start other programs (EPS: Ghostscript), the others are hardly tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in FORMATS)
# 8192 x 8192, enough for photos. Decoding and resizing that many pixels takes 1.3 GB, however small the file is.
MAX_PIXELS = 2**26
MAX_RATIO = 32  # of the sides: an image processor that resizes the shorter side may make the longer one huge
MAX_BYTES = 8 * MAX_PIXELS  # of a file: that many pixels of four channels of 16 bits, without compression
LIMITS = (
    f"; at most {MAX_PIXELS / 1e6:.0f} million pixels are read, and a longer side of at most {MAX_RATIO} times the "
    "shorter one: make it smaller or crop it"
)
# Each scan of a JPEG visits all blocks, however few bytes it has. Encoders write up to 14, and libtiff reads 100.
MAX_SCANS = 100
SCAN = re.compile(rb"\xff\xda\0(\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # header of a scan of 1 to 4 components
MAX_EXIF = 2**17  # bytes: a tag may refer to any of them, and each is copied
MAX_COPIES = 2**34  # bytes of a header, times its parts: Pillow may copy what it has read once for each part
SYSTEM_NAMES = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information")  # hold thumbnails and deleted files
PARQUET = ".parquet"


class ImageError(ValueError):
    """Raised for an image that cannot be used. The message names the image and the reason in one line."""


def open_image(source: str | Path | bytes, name: str | None = None) -> Image.Image:
    """Open an image file as an RGB image of 8 bits per channel, rotated as its EXIF data say.

    Of 16-bit grayscale values, the upper 8 bits are kept. Transparency is ignored. The source is the path or the
    content of a file, and `name` is its name in error messages. An `ImageError` is raised if the file does not exist,
    is damaged, too large or too long, has none of the `FORMATS`, or has pixels whose range of values is unknown.
    """
    name = shortened(name or ("an image" if isinstance(source, bytes) else str(source)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd files, and about sizes that are refused below
            return _decoded(source if isinstance(source, bytes) else check_file(source, name).read_bytes(), name)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: has more pixels than Pillow opens{LIMITS}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: cannot be read as an image; give one of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoding an arbitrary file can raise any exception
        raise ImageError(f"{name}: cannot be read as an image ({described(error)})") from error


def check_file(path: str | Path, name: str | None = None) -> Path:
    """Return the path of a regular file of 1 .. `MAX_BYTES` bytes (in /proc they have 0), or raise an `ImageError`."""
    name = shortened(name or str(path))
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        where = "" if os.path.isabs(path) else " in the working directory"
        raise ImageError(f"{name}: no such file{where}") from error
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might block or never end
        raise ImageError(f"{name}: is not a regular file")
    if not 0 < status.st_size <= MAX_BYTES:
        raise ImageError(f"{name}: cannot be read as an image: it has {status.st_size} of 1 .. {MAX_BYTES} bytes")
    return Path(path)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or of the operating system."""
    return name.startswith(".") or name in SYSTEM_NAMES


def list_images(path: Path) -> list[Path]:
    """Return the image files in a folder at any depth, sorted, or else its parquet files; of a file, the file itself.

    Hidden files and folders, and those of the operating system, are left out. Links to folders are followed, except to
    a folder that the link itself is in. A ValueError is raised for a path that does not exist, a folder without images
    or with images and parquet files, and a file that is not a regular one, such as a pipe or a link to a missing file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    files: list[Path] = []
    waiting = [(path, {path.resolve()})]
    while waiting:
        inside, outer = waiting.pop()
        for entry in os.scandir(inside):
            file = Path(entry.path)
            if is_hidden(entry.name):
                continue
            if not entry.is_dir():
                if file.suffix.lower() in (*SUFFIXES, PARQUET):
                    files.append(file if entry.is_file() else check_file(file))
            elif (folder := file.resolve()) not in outer:
                waiting.append((file, {*outer, folder}))
    tables = [file for file in sorted(files) if file.suffix.lower() == PARQUET]
    images = [file for file in sorted(files) if file.suffix.lower() != PARQUET]
    if images and tables:
        raise ValueError(f"{path}: has both images ({images[0]}) and parquet files ({tables[0]}); give one of them")
    if not images and not tables:
        raise ValueError(f"{path}: no images in it; give a folder of {', '.join(FORMATS)} or parquet files")
    return images or tables


class _Header(io.BytesIO):
    """File that raises an `ImageError` if Pillow reads over twice its bytes for the header, or copies `MAX_COPIES`.

    Pillow copies the data of each tag of a TIFF or of EXIF data, and the comment of a GIF again for each part of it.
    """

    def __init__(self, content: bytes, name: str):
        super().__init__(content)
        self.name, self.size, self.parts, self.bytes, self.exif = name, len(content), 0, 0, 0
        self.is_open = False  # whether the header is read

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.is_open:
            return data
        self.parts, self.bytes = self.parts + 1, self.bytes + len(data)
        self.exif += len(data) if data.startswith(b"Exif") else 0
        _check_exif(self.exif, self.name)
        if self.bytes > 2 * self.size + 2**16 or self.parts * self.bytes > MAX_COPIES:
            raise ImageError(f"{self.name}: its header has more values than the file has bytes: save it again")
        return data


def _check_exif(size: int, name: str) -> None:
    if size > MAX_EXIF:
        raise ImageError(f"{name}: has more than {MAX_EXIF} bytes of EXIF data; remove them")


def _decoded(content: bytes, name: str) -> Image.Image:
    if content.startswith(b"\xff\xd8") and (scans := sum(1 for _ in SCAN.finditer(content))) > MAX_SCANS:
        raise ImageError(f"{name}: is a JPEG of {scans} scans; at most {MAX_SCANS} are read: save it again")
    header = _Header(content, name)
    with Image.open(header, formats=FORMATS) as image:  # reads the header only
        header.is_open = True
        short, long = sorted(image.size)
        if short * long > MAX_PIXELS or long > MAX_RATIO * short:
            raise ImageError(f"{name}: has {image.width} x {image.height} pixels{LIMITS}")
        image.load()  # EXIF data may follow the pixels
        _check_exif(max(len(image.info.get(key) or "") for key in ("exif", "Raw profile type exif")), name)
        ImageOps.exif_transpose(image, in_place=True)
        tags = getattr(image, "tag_v2", {})  # of a TIFF, which can also have 12 bits per pixel, and 0 for white
        is_plain = tags.get(BITS_PER_SAMPLE, (16,)) == (16,) and tags.get(PHOTOMETRIC_INTERPRETATION, 1) == 1
        if image.mode.startswith("I;16") and is_plain:  # `convert` would clip all values at 255
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        if image.mode.startswith(("I", "F")):
            raise ImageError(f"{name}: has unusual pixels (mode {image.mode}); save it with 8 bits per channel")
        return image.convert("RGB")
