"""One run at a time in an output directory: a second process would mix its checkpoints with those of the first."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from ..data.json_files import write_json
from ..reading import Document, UnreadableError, first_line, read_json, shortened


RUN = "_run"  # a name that neither Trainer nor `publish` uploads
LOCK, OWNER = f"{RUN}/run.lock", f"{RUN}/run.json"


class Owner(Document):
    """Who holds the lock."""

    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Within, no other launch of processes owns the directory, which is made if it is not there.

    The main process of a launch holds the lock for all of its processes. The system releases the lock of a process
    that ends, however it ends; so that of a killed run is free.

    Raises:
        OSError: another launch owns it, for all processes; the message says who.
    """
    lock = FileLock(directory / LOCK, timeout=0, thread_local=False)
    refusal: list[str | None] = [None]
    if PartialState().is_main_process:
        try:
            _acquire(lock, directory)
        except OSError as error:
            refusal = [str(error)]
    broadcast_object_list(refusal)
    if refusal[0] is not None:
        raise OSError(refusal[0])
    try:
        yield
    finally:
        if lock.is_locked:
            (directory / OWNER).unlink(missing_ok=True)
            lock.release()


def _acquire(lock: FileLock, directory: Path) -> None:
    """Take the lock, and write down who has it."""
    try:
        (directory / RUN).mkdir(parents=True, exist_ok=True)
        lock.acquire()
        since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        write_json(directory / OWNER, Owner(host=socket.gethostname(), pid=os.getpid(), since=since).model_dump())
    except Timeout:
        raise OSError(
            f"{directory} is in use by {_owner(directory)}: wait, or give another output directory"
        ) from None
    except OSError as error:
        raise OSError(f"cannot write to {directory} ({first_line(error)})") from error


def _owner(directory: Path) -> str:
    try:
        return shortened(str(read_json(directory / OWNER, Owner)))
    except UnreadableError:  # it has the lock, and has not written its name yet
        return "another process"
