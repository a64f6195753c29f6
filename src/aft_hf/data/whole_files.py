"""Files that are there as a whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write into that in the end gets the name `path`, whatever other processes do; makes the directory.

    A link of that name is replaced, and nothing is written to where it leads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # "x" refuses what is there already, links included. Other than `mkstemp`, it gives the usual access rights.
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
