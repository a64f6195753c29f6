"""Checksums of files, which are read in blocks."""

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path


BLOCK = 2**20  # bytes per read


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, or an empty string if there is no regular file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32(path: Path, parts: Iterable[tuple[int, int]], crc: int = 0) -> int:
    """Return the CRC-32 of parts of a file, each given as (start, stop) in bytes. It continues the CRC-32 `crc`."""
    with path.open("rb") as file:
        for start, stop in parts:
            file.seek(start)
            while block := file.read(min(BLOCK, stop - file.tell())):
                crc = zlib.crc32(block, crc)
    return crc
