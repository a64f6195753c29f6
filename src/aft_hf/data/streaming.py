"""Streaming datasets: shuffling in blocks, and the position from which a run resumes."""

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
from .order import SampleKey, process_micro_batches


SHARDS = 4  # shards of a remote stream whose first row enters the fingerprint


Row = dict[str, Any]
Sample = dict[str, torch.Tensor]


class StreamedKey(NamedTuple):
    """Index into a streamed training dataset: the key of a sample together with its undecoded row."""

    key: SampleKey
    row: Row


class Block(NamedTuple):
    """Position in a stream from which a run can resume: the beginning of a block of rows to shuffle together."""

    rows: int = 0  # rows before the block, in all epochs
    epoch: int = 0
    number: int = 0  # number of the block in its epoch
    state: dict[str, Any] | None = None  # state of the stream; None at the beginning of an epoch


class StreamedSamples(Dataset[Sample]):
    """Dataset of streamed training samples: it decodes the rows that `StreamedBatches` reads, in the workers.

    Args:
        rows: streamed dataset of the library `datasets`.
        make: function that returns the sample of a decoded row and its key.
        files: the local files that the rows are read from, if any (see `loading.local_files`).
    """

    def __init__(self, rows: StreamedRows, make: Callable[[Row, SampleKey], Sample], files: Sequence[Path] = ()):
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
    """Dataset of streamed evaluation samples: each row once, in the order of the stream.

    Args:
        rows: streamed dataset of the library `datasets`.
        make: function that returns the sample of a decoded row.
    """

    def __init__(self, rows: StreamedRows, make: Callable[[Row], Sample]):
        self.rows, self.make = rows, make

    def __iter__(self) -> Iterator[Sample]:
        return map(self.make, self.rows)


class StreamedBatches(Sampler[list[StreamedKey]]):
    """Sampler of the micro-batches of one process, starting at any step: `GlobalBatches` for a streamed dataset.

    Every process reads the whole stream, but decodes only the images of its micro-batches; so a global batch holds
    the same samples for any number of processes. Each epoch reads the files in a new order, and blocks of
    `shuffle_buffer` rows are shuffled. Unlike the shuffle buffer of `datasets`, a block depends only on the position
    where it begins: a resumed run reads the current block again, and no rows before it. A batch may contain the end of
    an epoch and the beginning of the next.

    Args:
        rows: streamed dataset of the library `datasets`.
        global_batch_size, micro_batch_size: batch sizes in samples.
        seed: seed of the order.
        shuffle_buffer: number of rows in a block.
        start, stop: the range of steps, start <= step < stop.
        position: the block that `position(start)` returned. Default: read and skip all rows before `start`.
        process, processes: index of this process (with context parallelism: of its group), and their number.
        repetitions: number of consecutive copies of each sample.
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
        self.begun = [Block(*position)]  # blocks from which a checkpoint may resume: prefetching is ahead of training

    def __iter__(self) -> Iterator[list[StreamedKey]]:
        first = self.start * self.global_batch_size - self.begun[0].rows * self.repetitions
        samples = islice(self._samples(), first, None)
        for _ in range(self.start, self.stop):
            batch = list(islice(samples, self.global_batch_size))
            yield from process_micro_batches(batch, self.micro_batches, self.process, self.processes)

    def position(self, step: int) -> Block:
        """Return the block to resume from after `step` steps. Earlier blocks are dropped: steps must not decrease."""
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
        """Yield blocks with their rows, epoch after epoch without end."""
        block = self.begun[0]
        while True:
            # `datasets` shuffles the files with the number of the epoch as the seed, so the seed of the run enters it.
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
        """Return the rows from the beginning of a block to the end of its epoch.

        Raises:
            ValueError: the state of the block does not belong to this stream.
        """
        if block.state is None:
            return iter(self.rows)
        with explained("the checkpoint's position in the stream of training data cannot be used"):
            self.rows.load_state_dict(block.state)
            stream = iter(self.rows)
            return chain(list(islice(stream, 1)), stream)
