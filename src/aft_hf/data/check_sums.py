"""Check sums of files that are too large to read at once."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits; an empty string where there is no regular file."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
