"""Text datasets for language models: blocks of tokens, or a file of bytes or tokens."""

from collections.abc import Iterable, Iterator
from itertools import chain
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


def require_texts(values: Iterable[Any], column: str, rows: Iterable[int]) -> list[str]:
    """Return the values of a column; raise a ValueError that names the row unless each is a text, possibly empty."""
    values = list(values)
    for row, value in zip(rows, values):
        if not isinstance(value, str):
            missing = " (in a CSV file: an empty cell, NA, null and the like)" if value is None else ""
            raise ValueError(
                f"row {row}: column {column!r} holds {shown(value)}{missing}, not a text: correct the row or remove it"
            )
    return values


def read_texts(dataset: Dataset, column: str) -> Iterator[list[str]]:
    """Yield the texts of a column in lists of up to a thousand rows; see `require_texts`."""
    for start, rows in zip(range(0, len(dataset), 1000), dataset.select_columns(column).iter(1000)):
        yield require_texts(rows[column], column, range(start, start + 1000))


def group_into_blocks(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    column: str = "text",
) -> Dataset:
    """Tokenize texts, concatenate them and split them into rows of `input_ids` and `labels`, `block_size` tokens each.

    Each text is followed by the tokenizer's `eos_token`, if it has one. A thousand rows are concatenated at a time;
    their last tokens that do not fill a block are dropped.

    Raises:
        ValueError: `block_size` is less than 2, or a row holds no text; the message names it.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[list[int]]]:
        # `verbose=False`: texts are split into blocks, so one that is longer than the model's limit needs no warning.
        values = require_texts(rows[column], column, numbers)
        texts = tokenizer(values, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*ids, *end] for ids in texts))
        stop = len(tokens) // block_size * block_size
        blocks = [tokens[i : i + block_size] for i in range(0, stop, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    given = group_into_blocks.__name__, dataset._fingerprint, _rules(tokenizer), end, block_size, column
    return dataset.map(
        tokenize,
        with_indices=True,
        batched=True,
        remove_columns=dataset.column_names,
        desc="Tokenizing",
        cache_file_name=str(_cached(given, "arrow")),  # rows in memory have no file of their own
    )


def _cached(given: tuple[Any, ...], suffix: str) -> Path:
    """Return the path of a file in the cache of `datasets` for what is computed from the given values."""
    directory = Path(datasets.config.HF_DATASETS_CACHE) / "aft_hf"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{Hasher.hash(given)}.{suffix}"


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a tokenizer does, as text."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))


def join_texts(dataset: Dataset, column: str, separator: str) -> Path:
    """Write all texts, with the separator between them, to one file in UTF-8 and return its path.

    The file lies in the cache of `datasets` and is written only if it does not exist yet.
    """
    path = _cached((join_texts.__name__, dataset._fingerprint, column, separator), "txt")
    if not path.exists():
        with write_atomic(path) as file:
            between = b""
            for texts in read_texts(dataset, column):
                file.write(between + separator.join(texts).encode())
                between = separator.encode()
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
