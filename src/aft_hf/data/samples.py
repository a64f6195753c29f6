"""Datasets of samples that are made from rows of the library `datasets`, in place or streamed.

A sample is made by a function of its row and, in training, of its `SampleKey`, whose random numbers augment it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset as Rows
from datasets import IterableDataset as StreamedRows
from torch.utils.data import Dataset, IterableDataset

from .fingerprint import spread, sum_files, sum_rows, sum_samples
from .image_files import ImageError


SHARDS = 4  # shards of a remote stream whose first row enters the fingerprint

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
        files: the local files that the rows are read from, if any (see `loading.local_files`).
    """

    def __init__(self, rows: StreamedRows, make: Maker, files: Sequence[Path] = ()):
        self.rows, self.make, self.features, self.files = rows, make, rows.features, files

    def __getitem__(self, streamed: StreamedKey) -> Sample:
        return self.make(self.features.decode_example(streamed.row), streamed.key)

    def fingerprint(self) -> str:
        """Return the fingerprint of the data.

        It covers the local files. A remote stream would have to be read completely, so its fingerprint covers the
        number of shards and the first samples of up to `SHARDS` of them.

        Raises:
            ValueError: the stream has no rows.
        """
        if self.files:
            return sum_files(self.files)
        count = self.rows.num_shards
        parts = [self.rows.shard(count, i) for i in spread(count, SHARDS)] if count > 1 else [self.rows]
        first = [self.make(row, SampleKey(0, 0)) for part in parts for row in part.take(1)]
        if not first:
            raise ValueError("the stream of training data has no rows")
        return f"{count} shards, {sum_samples(first)}"


class StreamedEvaluation(IterableDataset[Sample]):
    """Dataset of streamed evaluation samples: each row once, in the order of the stream."""

    def __init__(self, rows: StreamedRows, make: Maker):
        self.rows, self.make = rows, make

    def __iter__(self) -> Iterator[Sample]:
        return (self.make(row, None) for row in self.rows)
