"""Checksums of files."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, or an empty string if there is no regular file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
