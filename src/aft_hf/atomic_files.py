"""Atomic writing: a file exists completely or not at all, and nothing but a regular file is replaced. Checksums."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from .errors import described


UNFINISHED = ".aft-hf-unfinished"  # directory of files that are still being written


@contextmanager
def write_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing that is renamed to `path` when the block ends without an error.

    The directory is created if necessary. Several processes may write the same path at the same time. An OSError is
    raised if the path cannot be written, or is refused by `refuse_to_replace`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_to_replace(path)
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # Mode "x" fails if the name exists, even as a symlink. Unlike `mkstemp`, it gives the usual permissions.
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(aside)):  # for example of a full disk
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` to a JSON file atomically (see `write_atomic`)."""
    with write_atomic(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


@contextmanager
def move_into(directory: Path, otherwise: str = "the files in it are unchanged") -> Iterator[Path]:
    """Yield a temporary directory, and move its files to `directory` at the end of the context, all of them or none.

    If one cannot be written, an OSError gives the reason and what holds `otherwise`, whichever type of error the
    library that writes raises.
    """
    try:
        with unfinished(directory) as aside:
            yield aside
            moves = {file: directory / file.name for file in aside.iterdir()}
            for target in moves.values():
                refuse_to_replace(target)
            for file, target in moves.items():
                os.replace(file, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"cannot write to {directory} ({described(error)}); {otherwise}") from error


@contextmanager
def unfinished(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory in `directory` that is removed with what is left in it at the end of the context.

    Its name is always the same: the next call removes what a killed process left, and two processes would collide.
    """
    aside = directory / UNFINISHED
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def refuse_to_replace(path: Path) -> None:
    """Raise an OSError unless `path` is a regular file or does not exist. A symlink is refused: the caller would lose
    it if it were replaced, and its target if it were followed.
    """
    if path.is_symlink():
        raise OSError(f"{path}: is a link to {os.readlink(path)}; remove it, or give the path of a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: exists and is not a regular file; give another path")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, or an empty string if there is no regular file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
