"""What commands print: text that cannot control the terminal, and progress bars only in a terminal, not in logs."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers.utils import logging


COLOR = re.compile(r"\x1b\[[\d;]*m")
MOVES = re.compile(r"(?:\x1b\[A)+\Z|\r")  # of progress bars, on stderr: to the bar above, to the start of the line


@contextmanager
def plain_output() -> Iterator[None]:
    """Context manager for a command: nothing that it or a library prints or logs controls the terminal.

    Names and contents of files can hold escape sequences. Colors are left out, and other characters that are not
    printable become spaces. The streams are changed in place, since handlers of logging hold them.
    """
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        stream.write = partial(_write_plain, stream.write, stream is sys.stderr)
    try:
        yield
    finally:
        for stream in streams:
            del stream.write


def _write_plain(write: Callable[[str], int], has_bars: bool, text: str) -> int:
    move = MOVES.match(text) if has_bars else None
    start = move[0] if move else ""
    characters = COLOR.sub("", text[len(start) :])
    return write(start + "".join(each if each.isprintable() or each in "\n\t" else " " for each in characters))


def no_bars_in_logs() -> None:
    """Disable the progress bars of transformers, datasets and huggingface_hub if stderr is not a terminal.

    For bars of tqdm, the argument `disable=None` has the same effect.
    """
    if sys.stderr.isatty():
        return
    # datasets reads this variable on import. An import here would be slow and often needless.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    disable_progress_bars()
    logging.disable_progress_bar()


def plain_console(**options: Any) -> Console:
    """A console that prints text as it is. By default, rich reads brackets, as in file names, as markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)
