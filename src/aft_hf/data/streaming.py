"""Streaming datasets: shuffling in blocks, and the position from which a run resumes."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from datasets import IterableDataset as StreamedRows

from ..reading import explained
from .order import Batches
from .samples import Row, SampleKey, StreamedKey


class Block(NamedTuple):
    """Position in a stream from which a run can resume: the beginning of a block of rows to shuffle together."""

    rows: int = 0  # rows before the block, in all epochs
    epoch: int = 0
    number: int = 0  # number of the block in its epoch
    state: dict[str, Any] | None = None  # state of the stream; None at the beginning of an epoch


class StreamedBatches(Batches):
    """Batches of a streamed dataset.

    Every process reads the whole stream, but decodes only the images of its micro-batches; so a global batch holds
    the same samples for any number of processes. Each epoch reads the files in a new order, and blocks of
    `shuffle_buffer` rows are shuffled. Unlike the shuffle buffer of `datasets`, a block depends only on the position
    where it begins: a resumed run reads the current block again, and no rows before it. A batch may contain the end of
    an epoch and the beginning of the next.

    Args:
        rows: streamed dataset of the library `datasets`.
        shuffle_buffer: number of rows in a block.
        position: the block that `position(start)` returned. Default: read and skip all rows before `start`.

    The other arguments are those of `Batches`.
    """

    def __init__(
        self, rows: StreamedRows, *sizes: int, shuffle_buffer: int, position: Sequence[Any] = (), **options: Any
    ):
        super().__init__(*sizes, **options)
        self.rows, self.shuffle_buffer = rows.decode(False), shuffle_buffer
        self.begun = [Block(*position)]  # blocks from which a checkpoint may resume: prefetching is ahead of training

    def global_batches(self) -> Iterator[list[StreamedKey]]:
        first = self.start * self.global_batch_size - self.begun[0].rows * self.repetitions
        samples = islice(self._samples(), first, None)
        for _ in range(self.start, self.stop):
            yield list(islice(samples, self.global_batch_size))

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
