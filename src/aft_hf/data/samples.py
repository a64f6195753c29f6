"""A dataset of samples that are made from rows of the library `datasets`.

A sample is made by a function of its row and, in training, of its `SampleKey`, whose random numbers augment it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset as Rows
from torch.utils.data import Dataset

from .fingerprint import sum_rows
from .image_files import ImageError


Row = dict[str, Any]
Sample = dict[str, torch.Tensor]


class SampleKey(NamedTuple):
    """Index into a training dataset, which also determines the random numbers of the sample."""

    epoch: int
    index: int  # type: ignore[assignment]  # shadows the method of tuples
    repetition: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """Return the random generator of this sample, the same in any process and at any time."""
        return np.random.default_rng((seed, *self))


Maker = Callable[[Row, SampleKey | None], Sample]


class RowSamples(Dataset[Sample]):
    """Dataset of the samples of rows, indexed by `SampleKey` in training and by number in evaluation.

    Args:
        rows: dataset of the library `datasets`.
        make: function that returns the sample of a row.
        columns: the columns whose content is the fingerprint, that of the images first.
    """

    def __init__(self, rows: Rows, make: Maker, columns: Sequence[str] = ()):
        self.rows, self.make, self.columns = rows, make, columns

    def fingerprint(self) -> str:
        """Return the fingerprint of the columns."""
        return sum_rows(self.rows, *self.columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | SampleKey) -> Sample:
        index, own = (key.index, key) if isinstance(key, SampleKey) else (key, None)
        try:
            return self.make(self.rows[index], own)
        except ImageError as error:
            raise ImageError(f"row {index}: {error}") from error
