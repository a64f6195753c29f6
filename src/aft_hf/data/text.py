"""Texts for language models: files of bytes or tokens in the cache of `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from ..reading import explained, shown
from .atomic_files import write_atomic
from .fingerprint import sum_file


TOKEN_DTYPE = "uint32"
PART = 2**20  # bytes of text that are tokenized at a time


def read_texts(dataset: Dataset, column: str) -> Iterator[list[str]]:
    """Yield the texts of a column, which may be empty, in lists of up to a thousand rows.

    Raises:
        ValueError: a value is not a text; the message names its row.
    """
    for start, rows in zip(range(0, len(dataset), 1000), dataset.select_columns(column).iter(1000)):
        for row, value in enumerate(rows[column], start):
            if not isinstance(value, str):
                missing = " (in a CSV file: an empty cell, NA, null and the like)" if value is None else ""
                raise ValueError(
                    f"row {row}: column {column!r} holds {shown(value)}{missing}, not a text: correct the row or "
                    "remove it"
                )
        yield rows[column]


def _cached(given: tuple[Any, ...], suffix: str) -> Path:
    """Return the path of a file in the cache of `datasets` for what is computed from the given values."""
    directory = Path(datasets.config.HF_DATASETS_CACHE) / "aft_hf"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{Hasher.hash(given)}.{suffix}"


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a tokenizer does, as text."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))


def join_texts(dataset: Dataset, column: str) -> Path:
    """Write all texts, with a line break between them, to one file in UTF-8 and return its path.

    The file lies in the cache of `datasets` and is written only if it does not exist yet.
    """
    path = _cached((join_texts.__name__, dataset._fingerprint, column), "txt")
    if not path.exists():
        with write_atomic(path) as file:
            between = ""
            for texts in read_texts(dataset, column):
                file.write((between + "\n".join(texts)).encode())
                between = "\n"
    return path


def tokenize_file(source: Path, span: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> tuple[Path, int]:
    """Write the tokens of a part of a text file to a file of `TOKEN_DTYPE`; return its path and the bytes of the text.

    The file lies in the cache of `datasets` and is written only if it does not exist yet. No special tokens are added;
    one that is written in the text is a single token. Lines of about `PART` bytes are tokenized at a time. The first
    byte and the end, `span`, are moved to the next character that begins there or later.
    """
    start, stop = (_character_start(source, byte) for byte in span)
    path = _cached((tokenize_file.__name__, sum_file(source, (start, stop)), _rules(tokenizer)), "tokens")
    if not path.exists():
        with write_atomic(path) as file, explained(f"{source}: its text cannot be tokenized"):
            for part in _read_parts(source, start, stop):
                ids = tokenizer(part.decode(), add_special_tokens=False, verbose=False)["input_ids"]
                file.write(np.asarray(ids, dtype=TOKEN_DTYPE).tobytes())
    return path, stop - start


def _character_start(path: Path, byte: int) -> int:
    """Return the first position from `byte` on at which a character of UTF-8 begins, or the end of the file."""
    with path.open("rb") as file:
        file.seek(byte)
        following = file.read(3)
    return byte + next((i for i, value in enumerate(following) if value & 0xC0 != 0x80), len(following))


def _read_parts(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of a file in parts of lines, of about `PART` bytes each."""
    with path.open("rb") as file:
        file.seek(start)
        while left := max(stop - file.tell(), 0):
            yield b"".join(file.readlines(min(PART, left)))[:left]
