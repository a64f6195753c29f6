"""Contents of image files: good ones, and those that must be refused."""

import io
import struct
import zlib
from pathlib import Path

import datasets
from PIL import Image


def encoded(format: str, image: Image.Image | None = None, **options) -> bytes:
    file = io.BytesIO()
    (image or Image.new("RGB", (4, 6), (200, 10, 10))).save(file, format, **options)
    return file.getvalue()


def picture(value: int = 0) -> bytes:
    """Return a PNG of one color."""
    return encoded("PNG", Image.new("RGB", (4, 4), (value, 0, 0)))


def strip(width: int, height: int) -> bytes:
    """Return a small file of a long image."""
    return encoded("PNG", Image.new("1", (width, height)))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def black(width: int, height: int) -> bytes:
    """Return a black PNG of one bit per pixel. Its data end after a million pixels: only its header is tested."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(min((width + 7) // 8 * height, 2**17)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
# Content of a file, and part of the message about it.
BAD = {
    "an EPS": (EPS, "cannot be read as an image; give one of BMP, GIF, JPEG"),
    "an icon": (encoded("ICO", Image.new("RGB", (16, 16))), "cannot be read as an image"),
    "nothing": (b"", "cannot be read as an image"),
    "a truncated JPEG": (encoded("JPEG", Image.effect_noise((64, 64), 90).convert("RGB"))[:700], "truncated"),
    "169 million pixels": (black(13000, 13000), "13000 x 13000 pixels; at most 67 million"),
    "4e18 pixels": (black(2**31 - 1, 2**31 - 1), "at most 67 million"),
}


def write_rows(path: Path, contents: list[bytes | None]) -> Path:
    """Write a parquet file of images."""
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    rows = [None if content is None else {"bytes": content, "path": None} for content in contents]
    table = datasets.Dataset.from_dict({"image": rows, "label": [0] * len(rows)}, features=features)
    table.to_parquet(path)
    return path
