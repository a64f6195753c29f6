"""Streams of rows, of which only a part is in memory: their order, and where it goes on."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import IterableDataset as StreamedRows
from torch.utils.data import Dataset, IterableDataset, Sampler

from ..reading import explained
from .fingerprint import spread, sum_files, sum_samples
from .order import SampleKey, share


SHARDS = 4  # of a stream from elsewhere, of which the first row is read


Row = dict[str, Any]
Sample = dict[str, torch.Tensor]


class StreamedKey(NamedTuple):
    """What a training dataset is indexed by that has no rows to look up: a key with its row, not decoded yet."""

    key: SampleKey
    row: Row


class Block(NamedTuple):
    """Where a block of rows begins that are shuffled together: what a stream can go on from."""

    rows: int = 0  # before it, in all epochs
    epoch: int = 0
    number: int = 0  # in the epoch
    state: dict[str, Any] | None = None  # of the stream; None: at its beginning


class StreamedSamples(Dataset[Sample]):
    """Samples to train on, made where they are asked for; `StreamedBatches` reads their rows.

    Args:
        rows: of `datasets`, streamed.
        make: the sample of a decoded row and its key.
        files: those that the rows are read from, where they lie on this machine (see `loading.local_files`).
    """

    def __init__(self, rows: StreamedRows, make: Callable[[Row, SampleKey], Sample], files: Sequence[Path] = ()):
        self.rows, self.make, self.features, self.files = rows, make, rows.features, files

    def __getitem__(self, streamed: StreamedKey) -> Sample:
        return self.make(self.features.decode_example(streamed.row), streamed.key)

    def fingerprint(self) -> str:
        """What tells them from others: a sum of their files; of a stream from elsewhere, which would have to be read
        for that, the number of its shards and the first samples of some.

        Raises:
            ValueError: there is no row.
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
    """Samples to evaluate: each row once, in the order of the stream.

    Args:
        rows: of `datasets`, streamed.
        make: the sample of a decoded row.
    """

    def __init__(self, rows: StreamedRows, make: Callable[[Row], Sample]):
        self.rows, self.make = rows, make

    def __iter__(self) -> Iterator[Sample]:
        return map(self.make, self.rows)


class StreamedBatches(Sampler[list[StreamedKey]]):
    """The micro-batches of one process, from any step on: for a stream what `GlobalBatches` is for rows in place.

    Every process reads the whole stream, but decodes only the images of its micro-batches; so a global batch holds
    the same samples for any number of processes. Each epoch takes the files in a new order, and blocks of
    `shuffle_buffer` rows are shuffled. Other than with the buffer of `datasets`, a block follows from where it begins:
    a run that goes on reads again what came of the block, and nothing before it. An epoch is followed by the next
    within a batch.

    Args:
        rows: of `datasets`, streamed.
        global_batch_size, micro_batch_size: in samples.
        seed: of the order.
        shuffle_buffer: rows in a block.
        start, stop: the steps to take, start <= step < stop.
        position: what `position(start)` gave; without it, rows are read and skipped from the first one on.
        process, processes: which of how many.
        repetitions: copies of a sample that stand in a row.
    """

    def __init__(
        self,
        rows: StreamedRows,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        seed: int,
        shuffle_buffer: int,
        start: int,
        stop: int,
        position: Sequence[Any] = (),
        process: int = 0,
        processes: int = 1,
        repetitions: int = 1,
    ):
        self.rows, self.global_batch_size = rows.decode(False), global_batch_size
        self.micro_batches = global_batch_size // micro_batch_size
        self.seed, self.shuffle_buffer, self.start, self.stop = seed, shuffle_buffer, start, stop
        self.process, self.processes, self.repetitions = process, processes, repetitions
        self.begun = [
            Block(*position)
        ]  # the blocks of samples that may still be to come; workers are ahead of the training

    def __iter__(self) -> Iterator[list[StreamedKey]]:
        first = self.start * self.global_batch_size - self.begun[0].rows * self.repetitions
        samples = islice(self._samples(), first, None)
        for _ in range(self.start, self.stop):
            batch = list(islice(samples, self.global_batch_size))
            yield from share(batch, self.micro_batches, self.process, self.processes)

    def position(self, step: int) -> Block:
        """The block to go on from after `step` steps; it cannot be asked for earlier ones any more."""
        rows = step * self.global_batch_size // self.repetitions
        later = [block for block in self.begun if block.rows > rows]
        self.begun = self.begun[-len(later) - 1 :]
        return self.begun[0]

    def _samples(self) -> Iterator[StreamedKey]:
        for block, rows in self._blocks():
            order = np.random.default_rng((self.seed, block.epoch, block.number)).permutation(len(rows))
            for i, repetition in ((i, repetition) for i in order for repetition in range(self.repetitions)):
                index = block.number * self.shuffle_buffer + int(i)
                yield StreamedKey(SampleKey(block.epoch, index, repetition), rows[i])

    def _blocks(self) -> Iterator[tuple[Block, list[Row]]]:
        """Blocks with their rows, epoch after epoch without end."""
        block = self.begun[0]
        while True:
            # The number of an epoch also seeds the order of the files in it.
            self.rows.set_epoch(int(np.random.SeedSequence((self.seed, block.epoch)).generate_state(1)[0]))
            stream = self._rows_from(block)
            while rows := list(islice(stream, self.shuffle_buffer)):
                following = Block(block.rows + len(rows), block.epoch, block.number + 1, self.rows.state_dict())
                yield block, rows
                block = following
                self.begun.append(block)
            if block.number == 0:
                raise ValueError("the stream of training data has no rows")
            block = block._replace(epoch=block.epoch + 1, number=0, state=None)
            self.begun.append(block)

    def _rows_from(self, block: Block) -> Iterator[Row]:
        """The rows from a block on, to the end of its epoch.

        Raises:
            ValueError: its state is not one of this stream.
        """
        if block.state is None:
            return iter(self.rows)
        with explained("the checkpoint's position in the stream of training data cannot be used"):
            self.rows.load_state_dict(block.state)
            stream = iter(self.rows)
            return chain(list(islice(stream, 1)), stream)
