"""What commands print: text that cannot control the terminal, errors of one line, and no progress bars in logs."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from rich.console import Console
from transformers.utils import logging

from .errors import ENDS, described, is_out_of_memory, message_of, printable


TRACEBACK = "AFT_HF_TRACEBACK"  # environment variable: if it is set, a command that fails shows the traceback
COLOR = re.compile(r"\x1b\[[\d;]*m")
MOVES = re.compile(r"(?:\x1b\[A)+\Z|\r")  # of progress bars, on stderr: to the bar above, to the start of the line


def refuse_unused(context: typer.Context, needs: Mapping[str, str]) -> None:
    """Raise a `ValueError` if an option was given that has no effect: `needs` maps such options to what they need."""
    sources = {name: context.get_parameter_source(name) for name in needs}
    if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
        raise ValueError(", ".join(f"--{name.replace('_', '-')} needs {needs[name]}" for name in given))


@contextmanager
def plain_output() -> Iterator[None]:
    """Context manager for a command: nothing that it or a library prints or logs controls the terminal.

    Colors are left out, and other characters that are not printable become spaces. The streams are changed in place,
    since handlers of logging hold them.
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
    """Disable the progress bars of transformers, datasets and huggingface_hub if stderr is not a terminal."""
    if not sys.stderr.isatty():
        # datasets reads this variable on import. An import here would be slow and often needless.
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        if "datasets" in sys.modules:
            sys.modules["datasets"].disable_progress_bars()
        logging.disable_progress_bar()  # and those of huggingface_hub


def plain_console() -> Console:
    """A console that prints text as it is. By default, rich reads brackets, as in file names, as markup."""
    return Console(markup=False, emoji=False, highlight=False)


@contextmanager
def reported(program: str) -> Iterator[None]:
    """Context manager for a whole command: print any error as a line after the name `program`, and exit with status 1.

    An error that is neither a ValueError nor an OSError may be a bug, so its line also names the code that raised it.
    Errors in destructors and threads, where that of a killed worker of a data loader can appear, are one line, too.
    """
    if os.environ.get(TRACEBACK):
        yield
        return

    def tell(failure: Any) -> None:
        problem, kind = failure.exc_value, failure.exc_type
        if not issubclass(kind, ENDS):
            text = _sentence(problem) if problem is not None and problem.__traceback__ else kind.__name__
            print(f"{program}: {printable(text)}", file=sys.stderr)

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = tell
    try:
        yield
    except ENDS:
        raise
    except BaseException as problem:
        print(f"{program}: {printable(_sentence(problem))}", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def _sentence(error: BaseException) -> str:
    text = message_of(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: run pip install '.[train]' in a clone of aft-hf"
    if is_out_of_memory(error):
        return "out of memory: use a smaller model or batch size"
    if isinstance(error, (ValueError, OSError)):
        return text or type(error).__name__
    if "DataLoader worker (pid" in text:
        return f"a worker of the data loader was killed, usually for lack of memory: give fewer workers ({text})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{described(error)} in {frame.name} ({frame.filename}:{frame.lineno}); {TRACEBACK}=1 shows the traceback"
