"""Atomic writing: a file exists completely or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing that is renamed to `path` when the block ends without an error.

    The directory is created if necessary.
    Several processes may write the same path at the same time. A symlink at `path` is replaced, its target unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Mode "x" fails if the name exists, even as a symlink. Unlike `mkstemp`, it gives the usual file permissions.
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
