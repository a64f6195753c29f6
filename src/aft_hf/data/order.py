"""Which samples make which batch: a pure function of the seed, the step and nothing else."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler


class SampleKey(NamedTuple):
    """What a training dataset is indexed by: enough to draw the sample's random numbers from."""

    epoch: int
    index: int  # type: ignore[assignment]  # in the place of the method of tuples
    repetition: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """The random numbers of this sample, the same wherever and whenever it is read."""
        return np.random.default_rng((seed, *self))


class GlobalBatches(Sampler[list[SampleKey]]):
    """The micro-batches of one process, from any step on.

    A step's global batch is cut into micro-batches 0 .. n - 1; with P processes, process p takes p, p + P, p + 2 P ...
    So micro-batch k of a step holds the same samples however many processes there are, and a run that begins at a
    later step goes on as one that came there. Each epoch is shuffled anew; what fills no batch is left out of it.

    Args:
        num_samples: of the dataset.
        global_batch_size, micro_batch_size: in samples.
        seed: of the order.
        start, stop: the steps to take, start <= step < stop.
        process, processes: which of how many.
        repetitions: copies of a sample that stand in a row (and so come into different micro-batches); an epoch keeps
            its length, and sees a part of the samples (repeated augmentation, Hoffer et al. 2020, as DeiT has it).

    Raises:
        ValueError: fewer samples than a global batch.
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
        """What is needed besides `step` to go on from there: nothing."""
        return []

    def __len__(self) -> int:
        return (self.stop - self.start) * len(range(self.process, self.micro_batches, self.processes))


def share(batch: list[Any], micro_batches: int, process: int, processes: int) -> list[list[Any]]:
    """The micro-batches of one process from a global batch."""
    return [batch[k::micro_batches] for k in range(process, micro_batches, processes)]


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Whole global batches in the data.

    Raises:
        ValueError: there is none.
    """
    if num_samples < global_batch_size:
        raise ValueError(f"the training data has {num_samples} samples, fewer than {global_batch_size=}")
    return num_samples // global_batch_size
