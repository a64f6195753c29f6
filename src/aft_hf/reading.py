"""Validation of untrusted files and server responses: each becomes a value of a declared type, or a one-line error.

A JSON document of any content, size or depth either becomes a `Document` with the declared types, or raises an error
of one line. `explained` guards reads by other libraries: it converts any exception to a one-line error. `reported`
guards a whole command: it prints any exception as one line. Where a function takes the class of the error, that is
`UnreadableError` by default.
"""

import errno
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path, PurePosixPath
from reprlib import repr as shown  # formats a value of any size and depth for a message, shortened
from typing import Annotated, Any, TypeVar

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError


LARGEST_JSON = 2**26  # bytes: ten times the size of the weight index or results of the largest existing models
LARGEST_YAML = 2**20  # characters, which take half a minute
LONGEST_MESSAGE = 300  # characters that are quoted from the message of a library
SHOWN_PROBLEMS = 3  # the number of problems of a document that a message lists
COMPLETE = "complete_message"  # type of the errors of `complete_message`
TYPE = re.compile(r"str|int|float|bool|none|[A-Z]\w+|(list|dict)\[.*\]")  # of a union, in a path of pydantic
TRACEBACK = "AFT_HF_TRACEBACK"  # environment variable: if it is set, a command that fails shows the traceback

# Exceptions that end the process. A panic of a library in Rust, such as tokenizers, is no `Exception` either.
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)

Content = TypeVar("Content")


class UnreadableError(ValueError):
    """A file or response is invalid. The message is one line: its name, the invalid value and what is allowed."""


class Document(BaseModel):
    """Base class of the schemas of JSON objects: declared keys have exactly their types, other keys are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError("must name a file beside this one")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


def _at_most(largest: int) -> AfterValidator:
    """Return a validator that limits numbers, also in objects and lists; the config class itself checks types."""

    def check(value: Any) -> Any:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(part)
        if isinstance(value, (int, float)) and not abs(value) <= largest:
            raise ValueError(f"must be at most {largest}")
        return value

    return AfterValidator(check)


def _whole(value: float) -> float:
    if value < 1 or value % 1:
        raise ValueError("must be a whole number of at least 1")
    return value


def _numbered(labels: dict[str, Any] | None) -> dict[str, Any] | None:
    if labels is not None and labels.keys() != {str(number) for number in range(len(labels))}:
        raise ValueError("must map each label 0 .. num_labels - 1 to its name")
    return labels


Layers = Annotated[Any, _at_most(2**12)]
Labels = Annotated[Any, _at_most(2**22)]
Side = Annotated[Any, _at_most(2**12)]  # pixels
Number = Annotated[float, Field(allow_inf_nan=False)]


class ModelConfig(Document):
    """Schema of the config.json of any model: the keys that select its classes, and those that configs make lists of.

    All other sizes and the classes are checked while they are loaded, see `aft_hf.loading`.
    """

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    id2label: Annotated[dict[str, Any] | None, AfterValidator(_numbered)] = None
    num_labels: Labels = None
    num_hidden_layers: Layers = None
    n_layer: Layers = None
    n_layers: Layers = None
    num_layers: Layers = None
    tokenizer_class: str | None = None
    image_processor_type: str | None = None


class ImageProcessorConfig(Document):
    """Schema of preprocessor_config.json: the class, the image sizes in any form, and the normalization."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    size: Side = None
    crop_size: Side = None
    pad_size: Side = None
    rescale_factor: Number | None = None
    image_mean: Number | list[Number] | None = None
    image_std: Number | list[Number] | None = None


class ProcessorConfig(Document):
    """Schema of processor_config.json: the image processor, if it is stored there."""

    image_processor: ImageProcessorConfig | None = None


class TokenizerConfig(Document):
    """Schema of tokenizer_config.json: the class, and the maximum length."""

    tokenizer_class: str | None = None
    model_max_length: Annotated[Number, AfterValidator(_whole)] | None = None


class WeightsIndex(Document):
    """Schema of the index of sharded weights: the file of each tensor."""

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


def parse_json(
    content: str | bytes, kind: type[Content], source: str, error: type[ValueError] = UnreadableError
) -> Content:
    """Parse a JSON text, of at most 200 levels and integers of at most 4300 digits, as a value of type `kind`.

    `kind` is a `Document`, or any type that pydantic supports. An error of class `error` names the `source`.
    """
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as problems:
        raise error(f"{source}: {explain(problems)}") from problems


def read_json(path: Path, kind: type[Content], error: type[ValueError] = UnreadableError) -> Content:
    """Read a regular file of up to `LARGEST_JSON` bytes as a value of type `kind`; see `parse_json`."""
    return parse_json(_content(path, error), kind, str(path), error)


def read_text(path: Path, error: type[ValueError] = UnreadableError) -> str:
    """Read a text file in UTF-8, with the checks of `read_json`."""
    try:
        return _content(path, error).decode()
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is not UTF-8 text") from problem


def _content(path: Path, error: type[ValueError]) -> bytes:
    try:
        if not path.is_file():  # opening a pipe waits for a writer, and reading it may never end
            raise error(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            content = file.read(LARGEST_JSON + 1)
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem
    if len(content) > LARGEST_JSON:
        raise error(f"{path}: is larger than {LARGEST_JSON >> 20} MiB, the limit for {path.name}")
    return content


class PlainLoader(yaml.SafeLoader):
    """YAML loader that refuses aliases: nine lines of them can expand to a billion values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*) are not supported")
        return super().compose_node(parent, index)


def parse_yaml(text: str, source: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Return the value of a YAML text of up to `LARGEST_YAML` characters."""
    if len(text) > LARGEST_YAML:
        raise UnreadableError(f"{source}: is larger than {LARGEST_YAML >> 20} MiB, the limit for YAML")
    try:
        return yaml.load(text, loader)  # nosec B506  # a SafeLoader
    except Exception as problem:  # YAML's constructors pass on Python's errors for invalid dates and numbers
        raise UnreadableError(f"{source}: not YAML that can be read: {described(problem)}") from None


def parse_header(text: str, source: str) -> dict[str, Any]:
    """Return the metadata in the YAML header of a README.md; they are empty if it has none."""
    text = text.removeprefix("\ufeff")
    found = (REGEX_YAML_BLOCK.search(each) for each in (text, StringIO(text, newline=None).read()))
    raw, header = (StringIO(match[2] if match else "", newline=None).read() for match in found)
    if raw != header:  # libraries read one or the other
        raise UnreadableError(f"{source}: its header has line breaks of several kinds; save it with line feeds")
    values = parse_yaml(header, source)
    if not isinstance(values, dict | None):
        raise UnreadableError(f"{source}: its header must be a mapping of keys to values")
    return values or {}


@contextmanager
def explained(what: str, error: type[ValueError] = UnreadableError) -> Iterator[None]:
    """Context manager that converts any exception of a library that reads an untrusted file to a one-line error.

    Put it around a single call of the library: `with explained(f"{name}: no readable config.json"): ...`. Libraries
    index into parsed content, so a file with unexpected content can cause any exception. Only interrupts,
    `MemoryError`, `ModuleNotFoundError` and errors that are already one line pass unchanged. The message is `what`,
    with that of the exception in parentheses.
    """
    try:
        yield
    except (*ENDS, UnreadableError, error, MemoryError, ModuleNotFoundError):
        raise
    except BaseException as problem:
        raise error(f"{what} ({described(problem)})") from problem


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
    text = _message(error)
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it replaces, means that memory could not be allocated."""
    said = isinstance(error, RuntimeError) and re.search("out of memory|(allocate|enough) memory", _message(error))
    if said or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_out_of_memory(before)


def explain(problems: ValidationError, suggest: Callable[[str], str] = lambda key: "") -> str:
    """Describe the problems of a document in one line: the key, its value, and the allowed values.

    `suggest` returns the end of the message about an unknown key.
    """
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
        message = message.replace(" after validation", "")
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened; the name of its class if it has no message."""
    return shortened((_message(error) or type(error).__name__).splitlines()[0])


def described(error: BaseException) -> str:
    """An error's message in one line, shortened. The name of the class is added if the message alone says little, as
    in KeyError: 'shape'.
    """
    words = shortened(_message(error))
    return words if words and isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {words}"


def _message(error: BaseException) -> str:
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
    """Convert a text to one line, without characters that move the cursor of a terminal or change its colors."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
