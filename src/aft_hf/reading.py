"""Files and answers that others wrote, as checked values: what cannot be used ends in one line that says why.

A JSON document of any shape, size or depth either becomes a `Document` with the types that it declares, or raises an
error of one line. What other libraries read is guarded by `explained`, which makes one line of whatever they raise.
"""

import re
import reprlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


LARGEST_JSON = 2**26  # bytes: ten times the index or the results of the largest models there are
LARGEST_HEADER = 100_000_000  # bytes, as in the library of safetensors
LONGEST_MESSAGE = 300  # characters of a library's own words
SHOWN_PROBLEMS = 3  # of a document that has many

Content = TypeVar("Content")


class UnreadableError(ValueError):
    """A file or an answer that cannot be used, said in one line: which one, what it holds, and what is allowed."""


class Document(BaseModel):
    """A JSON object, whose declared keys have just their types. Keys that are not declared are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError("must name a file beside this one")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


def _at_most(largest: int) -> AfterValidator:
    """Bounds a number. Other types are left to the class of the config, which knows which of them it takes."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float)) and not abs(value) <= largest:
            raise ValueError(f"must be at most {largest}")
        return value

    return AfterValidator(check)


def _numbered(labels: dict[str, Any] | None) -> dict[str, Any] | None:
    if labels is not None and labels.keys() != {str(number) for number in range(len(labels))}:
        raise ValueError("must have the names of the labels 0 .. num_labels - 1")
    return labels


Layers = Annotated[Any, _at_most(2**12)]
Labels = Annotated[Any, _at_most(2**22)]
Side = Annotated[Any, _at_most(2**13)]  # pixels
Width = Annotated[Any, _at_most(2**20)]
Length = Annotated[Any, _at_most(2**27)]


class ModelConfig(Document):
    """config.json of any model: what decides which classes read the rest of it, and what it takes memory by."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, str | list[str | None]] | None = None
    id2label: Annotated[dict[str, Any] | None, AfterValidator(_numbered)] = None
    num_labels: Labels = None
    num_hidden_layers: Layers = None
    n_layer: Layers = None
    n_layers: Layers = None
    num_layers: Layers = None
    hidden_size: Width = None
    n_embd: Width = None
    d_model: Width = None
    intermediate_size: Width = None
    n_inner: Width = None
    num_attention_heads: Width = None
    n_head: Width = None
    num_channels: Width = None
    image_size: Width = None
    patch_size: Width = None
    vocab_size: Length = None
    max_position_embeddings: Length = None
    n_positions: Length = None


class ImageProcessorConfig(Document):
    """preprocessor_config.json: a number, or numbers by name, for the size that images are made."""

    size: Side | dict[str, Side] | None = None
    crop_size: Side | dict[str, Side] | None = None


class WeightsIndex(Document):
    """The index of weights in several files: the file of each tensor."""

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


class TensorHeader(Document):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**63)]]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=2, max_length=2)]


class SafetensorsHeader(Document):
    """What stands before the tensors in a safetensors file: metadata, and beside it an entry for each tensor."""

    __pydantic_extra__: dict[str, TensorHeader]
    metadata: dict[str, str] | None = Field(None, alias="__metadata__")


def parse_json(
    content: str | bytes, kind: type[Content], source: str, error: type[ValueError] = UnreadableError
) -> Content:
    """A JSON text as a value of type `kind`: a `Document`, or any type that pydantic knows, such as dict[str, Any].

    Args:
        content: the text, nested no deeper than 200 levels, integers of up to 4300 digits.
        kind: what it must be.
        source: where it comes from, for messages.
        error: what to raise.

    Raises:
        UnreadableError, or the `error` given: it is not JSON, or not of that type.
    """
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as problems:
        raise error(f"{source}: {explain(problems)}") from problems


def read_json(path: Path, kind: type[Content], error: type[ValueError] = UnreadableError) -> Content:
    """What a JSON file holds, as `parse_json` has it.

    Raises:
        UnreadableError, or the `error` given: there is no such file, it is none (a pipe would never end), is larger
            than `LARGEST_JSON`, or does not hold that.
    """
    return parse_json(_content(path, error), kind, str(path), error)


def read_text(path: Path, error: type[ValueError] = UnreadableError) -> str:
    """A text in UTF-8, as `read_json` reads one.

    Raises:
        UnreadableError, or the `error` given: there is no such text.
    """
    try:
        return _content(path, error).decode()
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is no text in UTF-8") from problem


def _content(path: Path, error: type[ValueError]) -> bytes:
    with _opened(path, error) as file:
        content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise error(f"{path}: is larger than {LARGEST_JSON >> 20} MiB, which no {path.name} has to be")
    return content


def read_safetensors_header(path: Path, error: type[ValueError] = UnreadableError) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file by name, without reading them.

    Raises:
        UnreadableError, or the `error` given: it is no safetensors file.
    """
    damaged = f"{path}: damaged or truncated safetensors file"
    with _opened(path, error) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= LARGEST_HEADER:
            raise error(f"{damaged} (a header of {length} bytes)")
        content = file.read(length)
    return parse_json(content, SafetensorsHeader, damaged, error).model_extra or {}


@contextmanager
def _opened(path: Path, error: type[ValueError]) -> Iterator[BinaryIO]:
    """A file to be read. A pipe would never end, and opening one waits for somebody who writes."""
    try:
        if not path.is_file():
            raise error(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            yield file
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from problem


@contextmanager
def explained(what: str, error: type[ValueError] = UnreadableError) -> Iterator[None]:
    """Makes one line of whatever a library raises for a file that others wrote.

    To be put around a single call of the library: `with explained(f"{name}: no readable config.json"): ...`. Libraries
    index into what they have parsed, so a file of the wrong shape can raise anything; nothing but interrupts, a full
    memory, a missing package and errors that are lines already pass.

    Raises:
        UnreadableError, or the `error` given: `what`, and in brackets the first line of what was raised.
    """
    try:
        yield
    except (UnreadableError, error, MemoryError, ModuleNotFoundError):
        raise
    except Exception as problem:
        raise error(f"{what} ({described(problem)})") from problem


def explain(problems: ValidationError) -> str:
    """One line on what is wrong with a document: each key, what it holds and what it must be."""
    lines: dict[str, str] = {}
    for problem in problems.errors(include_url=False):
        if problem["type"] == "json_invalid":
            return f"is not JSON that can be read ({problem['ctx']['error']})"
        # Of a union, pydantic tells a line for each of its types, with the type as the last part of the key.
        key = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if problem["type"] == "missing":
            line = f"{key} is missing"
        else:
            line = f"{f'{key}=' if key else ''}{shown(problem['input'])}: {message}"
        lines.setdefault(key, line)
    shorter = [shortened(line) for line in lines.values()]
    more = f"; and {len(shorter) - SHOWN_PROBLEMS} more" if len(shorter) > SHOWN_PROBLEMS else ""
    return "; ".join(shorter[:SHOWN_PROBLEMS]) + more


def _is_type(part: int | str) -> bool:
    return (
        isinstance(part, str) and re.fullmatch(r"str|int|float|bool|none|[A-Z]\w+|(list|dict)\[.*\]", part) is not None
    )


def shown(value: Any) -> str:
    """A value of any size and depth, as a message shows it."""
    return reprlib.repr(value)


def first_line(error: BaseException) -> str:
    """What a library said, as far as it fits into a line of ours."""
    return shortened((str(error).strip() or type(error).__name__).splitlines()[0])


def described(error: BaseException) -> str:
    """All that a library said, in a line; with the kind of error where its words say little: KeyError 'shape'."""
    words = shortened(" ".join(str(error).split()))
    return words if words and isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {words}"


def shortened(text: str) -> str:
    """A text of any length in `LONGEST_MESSAGE` characters, all of them printable."""
    text = printable(text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 4]} ..."


def printable(text: str) -> str:
    """A text on one line, without characters that move the cursor of a terminal or change its colours."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
