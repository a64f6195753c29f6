"""Texts for language models: files of bytes or tokens in the cache of `datasets`, and the windows of a file."""

import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..atomic_files import write_atomic
from ..errors import explained
from ..limits import limited
from .samples import EMPTY, SampleKey, sum_file


logger = logging.get_logger(__name__)

TOKEN_DTYPE = "uint32"
PART = 2**20  # bytes of text that are tokenized at a time
FIRST = 2**16  # characters of a text on which a tokenizer is tried
LOSSY = (  # the end of a warning
    "for example to lower case: what is lost costs no bits, so do not compare bits_per_byte with that of another "
    "tokenizer"
)
IGNORED = -100  # the label of what does not count in the loss: the default `ignore_index` of PyTorch


def read_texts(dataset: datasets.Dataset, column: str) -> Iterator[list[str]]:
    """Yield the texts of a column in lists of up to a thousand rows; a value that is no text is a ValueError."""
    for start, rows in zip(range(0, len(dataset), 1000), dataset.select_columns(column).iter(1000)):
        for i, value in enumerate(rows[column], start):
            if not isinstance(value, str):
                held = shown(value) + (EMPTY if value is None else "")
                raise ValueError(f"row {i}: column {column!r} holds {held}, not a text: correct the row or remove it")
        yield rows[column]


def cached(given: tuple[Any, ...], suffix: str) -> Path:
    """Return the path of a file in the cache of `datasets` for what is computed from the given values."""
    return Path(datasets.config.HF_DATASETS_CACHE, "aft_hf", f"{Hasher.hash(given)}.{suffix}")


def join_texts(dataset: datasets.Dataset, column: str) -> Path:
    """Write all texts, with a line break between them, to a file in UTF-8, once (see `cached`); return its path."""
    tables = [each["filename"] for each in dataset.cache_files]  # they lie where the content of the files says
    path = cached((join_texts.__name__, dataset._fingerprint, tables, column), "txt")
    if not path.exists():
        with write_atomic(path) as file:
            between = ""
            for texts in read_texts(dataset, column):
                file.write((between + "\n".join(texts)).encode())
                between = "\n"
    return path


def tokenize_file(source: Path, span: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> tuple[Path, int]:
    """Write the tokens of a part of a text file to a file, once (see `cached`); return its path and the text's bytes.

    The first byte and the end, `span`, are moved to the next character that begins there or later. No special tokens
    are added; one that is written in the text is a single token.
    """
    start, stop = (_character_start(source, byte) for byte in span)
    with TemporaryDirectory() as directory:  # the rules of a tokenizer are in all of its files
        rules = [sum_file(path) for path in sorted(map(Path, tokenizer.save_pretrained(directory))) if path.is_file()]
    path = cached((tokenize_file.__name__, sum_file(source, (start, stop)), rules), "tokens")
    with explained(f"{source}: its text cannot be tokenized"):
        first = [next(_read_parts(source, start, stop), b"").decode()[:FIRST]]
        if count_changed(first, token_ids(first, tokenizer), tokenizer):
            logger.warning_once(f"the tokenizer changes the text, {LOSSY}")
    if not path.exists():
        with write_atomic(path) as file, explained(f"{source}: its text cannot be tokenized"):
            for part in _read_parts(source, start, stop):
                file.write(np.asarray(token_ids([part.decode()], tokenizer), dtype=TOKEN_DTYPE).tobytes())
    return path, stop - start


def token_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each text, without special tokens; the tokenizer runs within the limits of `limited`."""
    size = sum(len(text.encode()) for text in texts)
    options = {"add_special_tokens": False, "verbose": False}
    return limited(lambda: tokenizer(texts, **options)["input_ids"], tokenizer.name_or_path, size)


def count_changed(texts: list[str], rows: list[list[int]], tokenizer: Any) -> int:
    """Count the texts that differ from their decoded tokens."""
    size = sum(len(text.encode()) for text in texts)
    decode = partial(tokenizer.batch_decode, rows, clean_up_tokenization_spaces=False)
    return sum(a != b for a, b in zip(texts, limited(decode, tokenizer.name_or_path, size)))


def _character_start(path: Path, byte: int) -> int:
    """Return the first position from `byte` on at which a character of UTF-8 begins, or the end of the file."""
    with path.open("rb") as file:
        file.seek(byte)
        following = file.read(3)
    return byte + next((i for i, value in enumerate(following) if value & 0xC0 != 0x80), len(following))


def _read_parts(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of a file in parts of lines, or of words of a longer line, of about `PART` bytes each."""
    with path.open("rb") as file:
        file.seek(start)
        while part := file.read(min(PART, stop - file.tell())):
            cut = len(part) if file.tell() == stop else part.rfind(b"\n") + 1 or part.rfind(b" ")
            if cut > 0:
                file.seek(cut - len(part), os.SEEK_CUR)
            yield part[:cut] if cut > 0 else part + file.readline(stop - file.tell())


def split_bytes(size: int) -> dict[str, tuple[int, int]]:
    """Return the first byte and the end of each split of a file of `size` bytes, in the usual shares of enwik8."""
    first, second = size * 90 // 100, size * 95 // 100
    return {"train": (0, first), "validation": (first, second), "test": (second, size)}


@dataclass(eq=False)
class Windows(Dataset[dict[str, torch.Tensor]]):
    """Dataset of the windows of a file: `input_ids`, and the next tokens as `labels`, (seq_len,) each.

    A ValueError is raised if the span is too short for a single window, or the stride is not in 1 .. seq_len.

    For evaluation (no seed), the windows predict every token of the span except the first exactly once. Labels are
    -100 where an earlier window predicts the token, and where the last window extends beyond the span.
    For training (with a seed), all windows are full, and each epoch draws a new offset at which they begin.

    Each access maps its window into memory and releases it at once, so memory use does not grow with the file.
    """

    path: str | Path
    span: tuple[int, int] | None = None  # first token and end of the part to use; None: the whole file
    _: KW_ONLY
    seq_len: int  # T, the number of predicted tokens per window
    stride: int | None = None  # tokens from one window to the next in evaluation, the others are context; None: all
    seed: int | None = None  # of the offsets in training; the dataset is then indexed by `SampleKey`
    limit: int | None = None  # the number of windows to use, the first ones; None: all
    dtype: str = "uint8"  # of the tokens in the file

    def __post_init__(self) -> None:
        self.token_bytes, length = np.dtype(self.dtype).itemsize, self.seq_len
        self.start, self.stop = self.span or (0, os.path.getsize(self.path) // self.token_bytes)
        self.every = length if self.stride is None else self.stride
        if not 0 < self.every <= length:
            raise ValueError(f"the stride of windows of {length} tokens must be in 1 .. {length}, got {self.every}")
        self.predicted = self.stop - self.start - 1  # all but the first token
        if self.predicted < (1 if self.seed is None else length):
            count, unit = self.stop - self.start, "bytes" if self.dtype == "uint8" else "tokens"
            raise ValueError(f"{self.path}: {count} {unit} are too few for windows of seq_len={length} {unit}")
        if self.seed is None:
            self.windows = 1 + max(0, -(-(self.predicted - length) // self.every))
        else:
            self.windows = max(1, (self.predicted - length + 1) // length)  # leaves room for the offset

    def fingerprint(self) -> str:
        return sum_file(self.path, (self.start * self.token_bytes, self.stop * self.token_bytes))

    def __len__(self) -> int:
        return self.windows if self.limit is None else min(self.windows, self.limit)

    def __getitem__(self, key: int | SampleKey) -> dict[str, torch.Tensor]:
        context = 0  # the number of first labels that do not count
        if isinstance(key, SampleKey):
            assert self.seed is not None
            slack = min(self.seq_len, self.predicted - self.windows * self.seq_len + 1)
            random = np.random.default_rng((self.seed, key.epoch))
            start = self.start + int(random.integers(slack)) + key.index * self.seq_len
        else:
            start = self.start + key * self.every
            context = self.seq_len - self.every if key else 0
        length, offset = min(self.seq_len + 1, self.stop - start), start * self.token_bytes
        values = np.memmap(self.path, dtype=self.dtype, mode="r", offset=offset, shape=(length,)).astype(np.int64)
        input_ids, labels = torch.zeros(self.seq_len, dtype=torch.long), torch.full((self.seq_len,), IGNORED)
        input_ids[: length - 1] = torch.from_numpy(values[:-1])
        labels[context : length - 1] = torch.from_numpy(values[1 + context :])
        return {"input_ids": input_ids, "labels": labels}
