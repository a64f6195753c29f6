"""The wording of errors: any exception of a library becomes a one-line message for the user."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from reprlib import repr as shown  # formats a value of any size and depth for a message, shortened

from pydantic import ValidationError
from pydantic_core import PydanticCustomError


LONGEST_MESSAGE = 300  # characters that are quoted from the message of a library
SHOWN_PROBLEMS = 3  # the number of problems of a document that a message lists
COMPLETE = "complete_message"  # type of the errors of `complete_message`
TYPE = re.compile(r"str|int|float|bool|none|[A-Z]\w+|(list|dict)\[.*\]")  # of a union, in a path of pydantic

# Exceptions that end the process. A panic of a library in Rust, such as tokenizers, is no `Exception` either.
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class InputError(ValueError):
    """What a user gave is invalid; the message is one line, with its name, the value and what is allowed."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Context manager that converts any exception of a library to a one-line error: `what`, with the message of the
    exception in parentheses.

    Libraries index into parsed content, so a file with unexpected content can cause any exception. Only interrupts,
    `MemoryError`, `ModuleNotFoundError` and errors that are already one line pass unchanged.
    """
    try:
        yield
    except (*ENDS, InputError, MemoryError, ModuleNotFoundError):
        raise
    except BaseException as problem:
        raise InputError(f"{what} ({described(problem)})") from problem


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it replaces, means that memory could not be allocated."""
    said = isinstance(error, RuntimeError) and re.search("out of memory|(allocate|enough) memory", message_of(error))
    if said or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_out_of_memory(before)


def explain(problems: ValidationError, suggest: Callable[[str], str] = lambda key: "") -> str:
    """Describe the problems of a document in one line; `suggest` returns the end of what is said of an unknown key."""
    lines: dict[str, str] = {}
    for problem in problems.errors(include_url=False):
        if problem["type"] == "json_invalid":
            return f"is not JSON that can be read ({problem['ctx']['error']})"
        # For a union, pydantic reports one problem per type, with the type as the last part of the key.
        # The last part of an unknown key is from the document, even if it looks like a type.
        is_unknown, last = problem["type"] == "extra_forbidden", len(problem["loc"]) - 1
        parts = enumerate(problem["loc"])
        key = ".".join(str(part) for i, part in parts if not TYPE.fullmatch(str(part)) or (is_unknown and i == last))
        message = re.sub("^[A-Z][a-z]+ should ", "must ", problem["msg"].removeprefix("Value error, "))
        message = message.replace(" after validation", "").replace("a valid boolean", "true or false")
        number = {"int_type": r"[-+]?\d+", "float_type": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"}.get(problem["type"])
        if number and isinstance(problem["input"], str) and re.fullmatch(number, problem["input"]):
            message += " without quotes"
        if "instance of" in message:  # of a class that a user does not know
            message = "must be a mapping of keys to values"
        if problem["type"] == COMPLETE:
            line = message
        elif problem["type"] == "missing":
            line = f"{key} is missing"
        elif is_unknown:
            line = f"unknown key {shortened(key)}{suggest(key) if len(lines) < SHOWN_PROBLEMS else ''}"
        else:
            line = f"{f'{key}=' if key else ''}{shown(problem['input'])}: {message}"
        lines.setdefault(key, line)
    shorter = [shortened(line) for line in lines.values()]
    more = f"; and {len(shorter) - SHOWN_PROBLEMS} more" if len(shorter) > SHOWN_PROBLEMS else ""
    return "; ".join(shorter[:SHOWN_PROBLEMS]) + more


def complete_message(text: str) -> PydanticCustomError:
    """Return an error for a validator whose message names the keys itself; `explain` passes it on as it is."""
    return PydanticCustomError(COMPLETE, "{text}", {"text": text})


def described(error: BaseException) -> str:
    """An error's message in one line, shortened; with the class if it alone says little, as in KeyError: 'shape'."""
    words = shortened(message_of(error))
    return words if words and isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {words}"


def message_of(error: BaseException) -> str:
    """An error's message. For an error in a worker of a data loader, that is the end of the traceback in its text."""
    text = str(error).strip()
    if "Original Traceback (most recent call last)" in text:
        last = text.rpartition("\n  File ")[2]
        text = re.split(r"\n(?=\S)", last, maxsplit=1)[-1].partition(": ")[2] or text
    return text


def shortened(text: str) -> str:
    """Shorten a text to `LONGEST_MESSAGE` printable characters."""
    text = printable(text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 4]} ..."


def printable(text: str) -> str:
    """Convert a text to one line, without characters that control a terminal or change the writing direction."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
