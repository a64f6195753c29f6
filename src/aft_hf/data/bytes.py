"""Datasets for language models: the windows of a file of bytes or of token ids."""

import os
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from .fingerprint import sum_file
from .samples import SampleKey


# The label of bytes that do not count in the loss: the default `ignore_index` of PyTorch.
IGNORED = -100

ENWIK8_BYTES = 10**8


def split_bytes(size: int) -> dict[str, tuple[int, int]]:
    """Return the first byte and the end of each split of a file of `size` bytes.

    As is usual for enwik8, the first 90 million bytes are for training, the next 5 million for validation and the last
    5 million for testing. A file of another size is split in the same proportions.
    """
    if size == ENWIK8_BYTES:
        first, second = 90_000_000, 95_000_000
    else:
        first, second = size * 90 // 100, size * 95 // 100
    return {"train": (0, first), "validation": (first, second), "test": (second, size)}


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Dataset of the windows of a file: `input_ids`, and the next tokens as `labels`, (seq_len,) each.

    A token is a byte, or with another `dtype` a number in the file.

    For evaluation (no seed), the windows predict every token of the span except the first exactly once. Labels are
    -100 where an earlier window predicts the token, and where the last window extends beyond the span.
    For training (with a seed), all windows are full, and each epoch draws a new offset at which they begin.

    Each access maps its window into memory and releases it at once: memory use does not grow with the file, and
    nothing is copied into worker processes.

    Args:
        path: the file.
        span: first token and end of the part to use. Default: the whole file.
        seq_len: T, the number of predicted tokens per window.
        stride: number of tokens from one window to the next in evaluation. If it is less than `seq_len`, the first
            `seq_len - stride` tokens of a window are only context. Default: `seq_len`.
        seed: seed of the offsets in training; the dataset is then indexed by `SampleKey`. Default: evaluation.
        limit: the number of windows to use, the first ones. Default: all.
        dtype: type of the tokens in the file.

    Raises:
        ValueError: the span is too short for a single window, or the stride is not in 1 .. seq_len.
    """

    def __init__(
        self,
        path: str | Path,
        span: tuple[int, int] | None = None,
        *,
        seq_len: int,
        stride: int | None = None,
        seed: int | None = None,
        limit: int | None = None,
        dtype: str = "uint8",
    ):
        self.path, self.seq_len, self.seed, self.limit, self.dtype = str(path), seq_len, seed, limit, np.dtype(dtype)
        self.start, self.stop = (0, os.path.getsize(path) // self.dtype.itemsize) if span is None else span
        self.stride = seq_len if stride is None else stride
        if not 0 < self.stride <= seq_len:
            raise ValueError(f"the stride of windows of {seq_len} tokens must be in 1 .. {seq_len}, got {stride}")
        self.predicted = self.stop - self.start - 1  # all but the first token
        needed = 1 if seed is None else seq_len
        if self.predicted < needed:
            unit = "bytes" if dtype == "uint8" else "tokens"
            raise ValueError(
                f"{path}: {self.stop - self.start} {unit} are too few for windows of seq_len={seq_len} {unit}"
            )
        if seed is None:
            self.windows = 1 + max(0, -(-(self.predicted - seq_len) // self.stride))
        else:
            self.windows = max(1, (self.predicted - seq_len + 1) // seq_len)  # leaves room for the offset

    def fingerprint(self) -> str:
        """Return the fingerprint of the bytes of the tokens."""
        size = self.dtype.itemsize
        return sum_file(self.path, (self.start * size, self.stop * size))

    def __len__(self) -> int:
        return self.windows if self.limit is None else min(self.windows, self.limit)

    def __getitem__(self, key: int | SampleKey) -> dict[str, torch.Tensor]:
        if self.seed is None:
            number = cast(int, key)
            return self._window(self.start + number * self.stride, self.seq_len - self.stride if number else 0)
        key = cast(SampleKey, key)
        slack = min(self.seq_len, self.predicted - self.windows * self.seq_len + 1)
        offset = int(np.random.default_rng((self.seed, key.epoch)).integers(slack))
        return self._window(self.start + offset + key.index * self.seq_len, 0)

    def _window(self, start: int, context: int) -> dict[str, torch.Tensor]:
        """Return the window that begins at token `start`. Its first `context` labels do not count."""
        length, offset = min(self.seq_len + 1, self.stop - start), start * self.dtype.itemsize
        values = np.memmap(self.path, dtype=self.dtype, mode="r", offset=offset, shape=(length,)).astype(np.int64)
        input_ids, labels = torch.zeros(self.seq_len, dtype=torch.long), torch.full((self.seq_len,), IGNORED)
        input_ids[: length - 1] = torch.from_numpy(values[:-1])
        labels[context : length - 1] = torch.from_numpy(values[1 + context :])
        return {"input_ids": input_ids, "labels": labels}


def starts_character(byte: torch.Tensor) -> torch.Tensor:
    """Return whether each byte of UTF-8 begins a character. Their count is the number of characters."""
    return (byte & 0xC0) != 0x80
