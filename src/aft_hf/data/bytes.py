"""Byte-level datasets for language models: the windows of any file."""

import os
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from .fingerprint import sum_file
from .order import SampleKey


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


class ByteWindows(Dataset[dict[str, torch.Tensor]]):
    """Dataset of the windows of a file: `input_ids`, and the next bytes as `labels`, (seq_len,) each.

    For evaluation (no seed), the windows predict every byte of the span except the first exactly once. Labels are -100
    where an earlier window predicts the byte, and where the last window extends beyond the span.
    For training (with a seed), all windows are full, and each epoch draws a new offset at which they begin.

    Each access maps its window into memory and releases it at once: memory use does not grow with the file, and
    nothing is copied into worker processes.

    Args:
        path: the file.
        span: first byte and end of the part to use. Default: the whole file.
        seq_len: T, the number of predicted bytes per window.
        stride: number of bytes from one window to the next in evaluation. If it is less than `seq_len`, the first
            `seq_len - stride` bytes of a window are only context. Default: `seq_len`.
        seed: seed of the offsets in training; the dataset is then indexed by `SampleKey`. Default: evaluation.

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
    ):
        self.path, self.seq_len, self.seed = str(path), seq_len, seed
        self.start, self.stop = (0, os.path.getsize(path)) if span is None else span
        self.stride = seq_len if stride is None else stride
        if not 0 < self.stride <= seq_len:
            raise ValueError(f"the stride of windows of {seq_len} bytes must be in 1 .. {seq_len}, got {stride}")
        self.predicted = self.stop - self.start - 1  # all but the first byte
        needed = 1 if seed is None else seq_len
        if self.predicted < needed:
            raise ValueError(
                f"{path}: {self.stop - self.start} bytes are too few for windows of seq_len={seq_len} bytes"
            )

    def fingerprint(self) -> str:
        """Return the fingerprint of the bytes."""
        return sum_file(self.path, (self.start, self.stop))

    def __len__(self) -> int:
        if self.seed is not None:
            return max(1, (self.predicted - self.seq_len + 1) // self.seq_len)  # leaves room for the offset
        return 1 + max(0, -(-(self.predicted - self.seq_len) // self.stride))

    def __getitem__(self, key: int | SampleKey) -> dict[str, torch.Tensor]:
        if self.seed is None:
            number = cast(int, key)
            return self._window(self.start + number * self.stride, self.seq_len - self.stride if number else 0)
        key = cast(SampleKey, key)
        slack = min(self.seq_len, self.predicted - len(self) * self.seq_len + 1)
        offset = int(np.random.default_rng((self.seed, key.epoch)).integers(slack))
        return self._window(self.start + offset + key.index * self.seq_len, 0)

    def _window(self, start: int, context: int) -> dict[str, torch.Tensor]:
        """Return the window that begins at byte `start`. Its first `context` labels do not count."""
        length = min(self.seq_len + 1, self.stop - start)
        values = np.memmap(self.path, dtype=np.uint8, mode="r", offset=start, shape=(length,)).astype(np.int64)
        input_ids, labels = torch.zeros(self.seq_len, dtype=torch.long), torch.full((self.seq_len,), IGNORED)
        input_ids[: length - 1] = torch.from_numpy(values[:-1])
        labels[context : length - 1] = torch.from_numpy(values[1 + context :])
        return {"input_ids": input_ids, "labels": labels}


def starts_character(byte: torch.Tensor) -> torch.Tensor:
    """Return whether each byte of UTF-8 begins a character. Their count is the number of characters."""
    return (byte & 0xC0) != 0x80
