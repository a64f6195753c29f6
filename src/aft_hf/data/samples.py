"""Datasets of samples that are made from rows of the library `datasets`, in place or streamed.

A sample is made by a function of its row and, in training, of its `SampleKey`, whose random numbers augment it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset as Rows
from datasets import IterableDataset as StreamedRows
from torch.utils.data import Dataset, IterableDataset

from .fingerprint import sum_rows
from .image_files import ImageError


FIRST = 1000  # rows of a stream that enter the fingerprint

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


class StreamedKey(NamedTuple):
    """Index into a streamed training dataset: the key of a sample together with its undecoded row."""

    key: SampleKey
    row: Row


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


class StreamedSamples(Dataset[Sample]):
    """Dataset of streamed training samples: it decodes the rows that `StreamedBatches` reads, in the workers.

    Args:
        rows: streamed dataset of the library `datasets`.
        make: function that returns the sample of a decoded row.
        columns: the columns whose content is the fingerprint, that of the images first.
    """

    def __init__(self, rows: StreamedRows, make: Maker, columns: Sequence[str] = ()):
        self.rows, self.make, self.features, self.columns = rows, make, rows.features, columns

    def __getitem__(self, streamed: StreamedKey) -> Sample:
        return self.make(self.features.decode_example(streamed.row), streamed.key)

    def fingerprint(self) -> str:
        """Return the fingerprint of the columns in the first rows; the others would have to be read completely.

        Raises:
            ValueError: the stream has no rows.
        """
        first = list(self.rows.decode(False).take(FIRST))
        if not first:
            raise ValueError("the stream of training data has no rows")
        return f"{self.rows.num_shards} shards, {sum_rows(Rows.from_list(first), *self.columns)}"


class StreamedEvaluation(IterableDataset[Sample]):
    """Dataset of streamed evaluation samples: each row once, in the order of the stream."""

    def __init__(self, rows: StreamedRows, make: Maker):
        self.rows, self.make = rows, make

    def __iter__(self) -> Iterator[Sample]:
        return (self.make(row, None) for row in self.rows)
