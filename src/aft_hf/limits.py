"""Limits of memory and time for libraries that expand what an untrusted file says."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from .errors import InputError, is_out_of_memory


MEMORY, SECONDS = 2**32, 20  # bytes that a process may allocate, and seconds that it may compute
BYTES_PER_BYTE, BYTES_PER_SECOND = 2**10, 2**14  # more memory and time for texts: ten times what tokenizers take
LONGEST_WAIT = 20  # times the seconds, for other load on the machine


def limited(read: Callable[[], Any], what: str, size: int = 0, again: bool = True) -> Any:
    """Return the result of a function that runs in a forked process, with limits of memory and time.

    A tokenizer of a kilobyte can double each text forty times, and a config of one line describes a billion layers.
    Changes that the function makes are lost, and what it prints is dropped. Python forks safely on Linux only:
    elsewhere, there are no limits.

    Args:
        read: a function whose result can be pickled.
        what: what is read, for the message of the error that is raised at a limit.
        size: length in bytes of the text that the function reads.
        again: whether a function that raises an exception is called again in this process, which shows its traceback.
            Otherwise only the limits are checked, and the result is None.
    """
    if sys.platform != "linux":
        return read() if again else None
    memory, seconds = MEMORY + size * BYTES_PER_BYTE, SECONDS + size // BYTES_PER_SECOND
    receiver, sender = Pipe(duplex=False)
    if (process := os.fork()) == 0:
        _run(read if again else lambda: (read(), None)[1], sender, memory, seconds)
    sender.close()
    try:
        outcome = receiver.recv() if receiver.poll(LONGEST_WAIT * seconds) else None
    except (EOFError, OSError):  # the process was killed
        outcome = None
    finally:
        receiver.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if outcome is None:
        raise InputError(f"{what}: reading it needs more than {memory / 2**30:.2g} GiB of memory or {seconds} seconds")
    is_done, result = outcome
    return result if is_done or not again else read()


def _run(read: Callable[[], Any], sender: Connection, memory: int, seconds: int) -> NoReturn:
    """Send (True, result) or, after an exception, (False, None) to the other process; send nothing at a limit."""
    import resource  # exists on Unix only

    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        torch.set_num_threads(1)  # the threads of OpenMP do not exist in a forked process
        pages = Path("/proc/self/statm").read_text().split()[5]  # of data
        resource.setrlimit(resource.RLIMIT_DATA, (int(pages) * resource.getpagesize() + memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds,) * 2)
        sender.send((True, read()))
    except BaseException as problem:
        if not is_out_of_memory(problem):
            sender.send((False, None))
    finally:
        os._exit(0)
