"""Atomic writing: a file exists completely or not at all, and nothing but a regular file is replaced."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing that is renamed to `path` when the block ends without an error.

    The directory is created if necessary. Several processes may write the same path at the same time. A character
    device or a pipe is not replaced: the content is written into it.

    Raises:
        OSError: the path cannot be written, or is refused by `refuse_to_replace`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    receives = path.is_char_device() or path.is_fifo()  # also through a link, such as /dev/stdout
    if not receives:
        refuse_to_replace(path)
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        if receives:
            content = BytesIO()
            yield content
            # Without O_NONBLOCK, a pipe that nobody reads would block forever.
            with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
                os.set_blocking(stream.fileno(), True)
                stream.write(content.getbuffer())
        else:
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


def refuse_to_replace(path: Path) -> None:
    """Raise an OSError unless `path` is a regular file or does not exist.

    A symlink is refused, too: the caller would lose it if it were replaced, and its target if it were followed.
    """
    if path.is_symlink():
        raise OSError(f"{path}: is a link to {os.readlink(path)}; remove it, or give the path of a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: exists and is not a regular file; give another path")
