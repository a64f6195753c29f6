"""Any file as bytes: windows that language models predict."""

import os
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.data import Dataset

from .fingerprint import sum_file
from .order import SampleKey


# The label of what does not count, as everywhere in PyTorch.
IGNORED = -100

ENWIK8_BYTES = 10**8


def split_bytes(size: int) -> dict[str, tuple[int, int]]:
    """Where the splits of a file of `size` bytes begin and end: as is usual for enwik8, the first 90 million bytes for
    training, then 5 for validation and 5 for testing; files of another size by the same shares."""
    if size == ENWIK8_BYTES:
        first, second = 90_000_000, 95_000_000
    else:
        first, second = size * 90 // 100, size * 95 // 100
    return {"train": (0, first), "validation": (first, second), "test": (second, size)}


class ByteWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a file, `input_ids` and the next bytes as `labels`, (seq_len,) each.

    As evaluated (no seed), the windows predict every byte of the part but its first one exactly once; labels are -100
    where an earlier window predicts the byte, and where the last window is longer than the file.
    As trained on (with a seed), windows begin at an offset that each epoch draws anew, and are all full.

    A window is mapped into memory when it is asked for and released at once: the memory in use does not grow with the
    file, and there is nothing to copy into worker processes.

    Args:
        path: of the file.
        span: first byte and end of the part to use; by default the file.
        seq_len: T, predicted bytes in a window.
        stride: bytes from one window to the next: where it is less than `seq_len`, the first bytes of a window are
            only context. By default `seq_len`.
        seed: of the offsets, for training; samples are then asked for by `SampleKey`.

    Raises:
        ValueError: a part too short for a single window, or a stride that would leave bytes out.
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
        """What tells the bytes from others."""
        return sum_file(self.path, (self.start, self.stop))

    def __len__(self) -> int:
        if self.seed is not None:
            return max(1, (self.predicted - self.seq_len + 1) // self.seq_len)  # so that there is room for the offset
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
        """The window from `start` on, whose first `context` labels do not count."""
        length = min(self.seq_len + 1, self.stop - start)
        values = np.memmap(self.path, dtype=np.uint8, mode="r", offset=start, shape=(length,)).astype(np.int64)
        input_ids, labels = torch.zeros(self.seq_len, dtype=torch.long), torch.full((self.seq_len,), IGNORED)
        input_ids[: length - 1] = torch.from_numpy(values[:-1])
        labels[context : length - 1] = torch.from_numpy(values[1 + context :])
        return {"input_ids": input_ids, "labels": labels}


def starts_character(byte: torch.Tensor) -> torch.Tensor:
    """Whether a byte of UTF-8 is the first of a character: their number is that of the characters."""
    return (byte & 0xC0) != 0x80
