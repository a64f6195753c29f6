"""The order of training samples: batches are a pure function of the seed and the step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler


class SampleKey(NamedTuple):
    """Index into a training dataset, which also determines the random numbers of the sample."""

    epoch: int
    index: int  # type: ignore[assignment]  # shadows the method of tuples
    repetition: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """Return the random generator of this sample, the same in any process and at any time."""
        return np.random.default_rng((seed, *self))


class GlobalBatches(Sampler[list[SampleKey]]):
    """Sampler of the micro-batches of one process, starting at any step.

    The global batch of a step is split into micro-batches 0 .. n - 1; with P processes, process p takes p, p + P,
    p + 2 P, ... So micro-batch k of a step holds the same samples for any number of processes, and a resumed run sees
    the same batches as an uninterrupted one. Each epoch is shuffled anew, and its last incomplete batch is dropped.

    Args:
        num_samples: number of samples in the dataset.
        global_batch_size, micro_batch_size: batch sizes in samples.
        seed: seed of the order.
        start, stop: the range of steps, start <= step < stop.
        process, processes: index of this process (with context parallelism: of its group), and their number.
        repetitions: number of consecutive copies of each sample, which are dealt out to successive micro-batches. An
            epoch keeps its length, so it sees a part of the samples (repeated augmentation, Hoffer et al. 2020, as in
            DeiT).

    Raises:
        ValueError: the dataset has fewer samples than a global batch.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        seed: int,
        start: int,
        stop: int,
        process: int = 0,
        processes: int = 1,
        repetitions: int = 1,
    ):
        self.num_samples, self.global_batch_size = num_samples, global_batch_size
        self.micro_batches = global_batch_size // micro_batch_size
        self.seed, self.start, self.stop, self.repetitions = seed, start, stop, repetitions
        self.process, self.processes = process, processes
        self.steps_per_epoch = steps_per_epoch(num_samples, global_batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch, order = -1, np.empty(0, int)
        for step in range(self.start, self.stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            first = step % self.steps_per_epoch * self.global_batch_size
            places = range(first, first + self.global_batch_size)
            batch = [SampleKey(epoch, int(order[i // self.repetitions]), i % self.repetitions) for i in places]
            yield from share(batch, self.micro_batches, self.process, self.processes)

    def position(self, step: int) -> list[Any]:
        """Return the state that a resumed run needs besides `step`: none."""
        return []

    def __len__(self) -> int:
        return (self.stop - self.start) * len(range(self.process, self.micro_batches, self.processes))


def share(batch: list[Any], micro_batches: int, process: int, processes: int) -> list[list[Any]]:
    """Return the micro-batches of one process from a global batch."""
    return [batch[k::micro_batches] for k in range(process, micro_batches, processes)]


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of complete global batches in the data.

    Raises:
        ValueError: the data has fewer samples than a global batch.
    """
    if num_samples < global_batch_size:
        raise ValueError(f"the training data has {num_samples} samples, fewer than {global_batch_size=}")
    return num_samples // global_batch_size
