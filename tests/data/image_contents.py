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


def repeated_scans(count: int) -> bytes:
    """Return a JPEG that holds its only scan several times."""
    content = encoded("JPEG", Image.new("L", (4, 6)))
    scan = content.index(b"\xff\xda")
    return content[:scan] + count * content[scan:-2] + content[-2:]


def shared_tags(count: int, length: int, order: str = "<", magic: bytes = b"II*\0") -> bytes:
    """Return a TIFF of tags that all have the whole file as their value."""
    ones = ((256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1))  # sizes and kind of pixels
    tags = [*ones, (273, 4, 1, 0), (277, 3, 1, 1), (278, 3, 1, 1), (279, 4, 1, 1)]  # and where they are
    tags += [(40_000 + i, 7, length, 0) for i in range(count)]
    if magic[2:] in (b"+\0", b"\0+"):
        head, entry = struct.pack(f"{order}HHQQ", 8, 0, 16, len(tags)), "HHQQ"
    else:
        head, entry = struct.pack(f"{order}IH", 8, len(tags)), "HHII"
    content = magic + head + b"".join(struct.pack(order + entry, *tag) for tag in tags)
    return content + bytes(length - len(content))


def exif_in_parts(count: int) -> bytes:
    """Return a JPEG whose EXIF data are in several segments, each of 60,000 bytes."""
    content, data = encoded("JPEG"), b"Exif\0\0MM\0*" + bytes(60_000)
    return content[:2] + (b"\xff\xe1" + struct.pack(">H", len(data) + 2) + data) * count + content[2:]


def exif_at_the_end(length: int) -> bytes:
    """Return a PNG whose EXIF data follow its pixels."""
    content = encoded("PNG")
    end = content.rindex(b"IEND") - 4
    return content[:end] + chunk(b"eXIf", b"MM\0*" + bytes(length)) + content[end:]


def comment_in_parts(count: int) -> bytes:
    """Return a GIF with a comment of parts of one byte."""
    content = encoded("GIF", Image.new("L", (4, 6)))
    image = content.index(b",\0\0\0\0")
    return content[:image] + b"!\xfe" + b"\1a" * count + b"\0" + content[image:]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
# Content of a file, and part of the message about it.
BAD = {
    "an EPS": (EPS, "cannot be read as an image; give one of BMP, GIF, JPEG"),
    "an icon": (encoded("ICO", Image.new("RGB", (16, 16))), "cannot be read as an image"),
    "nothing": (b"", "cannot be read as an image"),
    "a truncated JPEG": (encoded("JPEG", Image.effect_noise((64, 64), 90).convert("RGB"))[:700], "truncated"),
    "169 million pixels": (black(13000, 13000), "13000 x 13000 pixels; at most 67 million"),
    "a JPEG of 101 scans": (repeated_scans(101), "is a JPEG of 101 scans; at most 100 are read"),
    "a TIFF of shared tags": (shared_tags(200, 10_000), "more values than the file has bytes"),
    "a big TIFF of shared tags": (shared_tags(200, 10_000, "<", b"II+\0"), "header has more values than the file"),
    "a GIF with a long comment": (comment_in_parts(100_000), "its header has more values than the file has bytes"),
    "much EXIF data": (encoded("PNG", exif=b"Exif\0\0" + bytes(2**17)), "has more than 131072 bytes of EXIF data"),
    "much EXIF data in segments": (exif_in_parts(3), "has more than 131072 bytes of EXIF data"),
    "much EXIF data at the end": (exif_at_the_end(2**17), "has more than 131072 bytes of EXIF data"),
    "4e18 pixels": (black(2**31 - 1, 2**31 - 1), "at most 67 million"),
}


def write_rows(path: Path, contents: list[bytes | None]) -> Path:
    """Write a parquet file of images."""
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    rows = [None if content is None else {"bytes": content, "path": None} for content in contents]
    table = datasets.Dataset.from_dict({"image": rows, "label": [0] * len(rows)}, features=features)
    table.to_parquet(path)
    return path
