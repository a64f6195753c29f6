"""The lock of an output directory: a second run in it would mix its checkpoints with those of the first."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from ..errors import InputError, described, shortened
from ..reading import read_text


RUN = "_run"  # a name that neither Trainer nor `publish` uploads
FOLDERS = ("checkpoint", RUN, "runs", "aft-hf", "wandb", "mlruns")  # beginnings of the names of folders of a run
LOCK, OWNER = f"{RUN}/run.lock", f"{RUN}/owner.txt"  # OWNER names the process that holds the lock


def join_processes() -> PartialState:
    """Join the group of the processes of this launch, and return its state."""
    # Accelerate creates a group of CPU processes only with an explicit `cpu=True`.
    return PartialState(cpu=not torch.accelerator.is_available())


@contextmanager
def owned(directory: Path, *folders: Path, temporary: bool = False) -> Iterator[None]:
    """Hold the lock of a directory within the context; create the directory if it does not exist.

    If the directory was created here or is `temporary`, it is removed at the end, unless it holds a file besides the
    lock. The main process holds the lock for all processes of a launch, and the operating system releases it however
    that process ends. The `folders` that the run will write to are created and tested at once.

    All processes raise the same OSError if another launch holds the lock (the message names its owner), or if the
    directory or one of the folders cannot be written or has links in it (see `refuse_links`).
    """
    lock = FileLock(directory / LOCK, timeout=0, thread_local=False)
    removes = temporary or not directory.exists()
    try:
        refusal = [_acquire(lock, directory, folders) if PartialState().is_main_process else None]
        broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise OSError(refusal[0])
        yield
    finally:
        if lock.is_locked:
            (directory / OWNER).unlink(missing_ok=True)
            files = [path for path in directory.rglob("*") if not path.is_dir()]
            if removes and files == [directory / LOCK]:
                shutil.rmtree(directory, ignore_errors=True)
            lock.release()


def refuse_links(directory: Path) -> None:
    """Raise an OSError for a link in place of a file or folder of a run, which would replace files at its target. If
    its name begins with a dot, `directory` itself must not be a link, either: no user has made it.
    """
    own = [directory] if directory.name.startswith(".") else []
    inside = (path for pattern in ("*", "checkpoint-*/**/*", f"{RUN}/*") for path in directory.glob(pattern))
    for path in sorted({*own, *inside}):
        is_other = path.parent == directory and path.is_dir() and not (path.name.startswith(FOLDERS) or path.suffix)
        if path.is_symlink() and not is_other:
            raise OSError(f"{path}: is a link to {os.readlink(path)}; remove it, or give another output directory")


def _acquire(lock: FileLock, directory: Path, folders: tuple[Path, ...]) -> str | None:
    """Acquire the lock, and record its owner; return why that is not possible, None if it is."""
    try:
        refuse_links(directory)
        (directory / RUN).mkdir(parents=True, exist_ok=True)
        lock.acquire()
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        (directory / OWNER).write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
    except Timeout:
        owner = "another process"
        with suppress(InputError):  # it has not written its name yet
            owner = shortened(read_text(directory / OWNER)) or owner
        return f"{directory} is in use by {owner}: wait, or give another output directory"
    except OSError as error:
        return f"cannot write to {directory} ({described(error)})"
    return None
