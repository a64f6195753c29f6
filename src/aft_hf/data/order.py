"""The order of training samples: batches are a pure function of the seed and the step."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from .samples import SampleKey


class GlobalBatches(Sampler[list[SampleKey]]):
    """Sampler of the micro-batches of one process, starting at any step.

    Each epoch is shuffled anew, and its last incomplete batch is dropped. The global batch of a step is split into
    micro-batches 0 .. n - 1; with P processes, process p takes p, p + P, p + 2 P, ... So micro-batch k of a step holds
    the same samples for any number of processes, and a resumed run sees the same batches as an uninterrupted one.

    Args:
        num_samples: number of samples of the dataset.
        global_batch_size, micro_batch_size: batch sizes in samples.
        seed: seed of the order.
        start, stop: the range of steps, start <= step < stop.
        process, processes: index of this process (with context parallelism: of its group), and their number.
        repetitions: number of consecutive copies of each sample, which are dealt out to successive micro-batches. An
            epoch keeps its length, so it sees a part of the samples (repeated augmentation, Hoffer et al. 2020, as in
            DeiT).

    Raises:
        ValueError: there are fewer samples than a global batch.
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
        self.num_samples, self.steps_per_epoch = num_samples, steps_per_epoch(num_samples, global_batch_size)
        self.global_batch_size, self.micro_batches = global_batch_size, global_batch_size // micro_batch_size
        self.seed, self.start, self.stop, self.repetitions = seed, start, stop, repetitions
        self.process, self.processes = process, processes

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch, order = -1, np.empty(0, int)
        for step in range(self.start, self.stop):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            first = step % self.steps_per_epoch * self.global_batch_size
            places = range(first, first + self.global_batch_size)
            batch = [SampleKey(epoch, int(order[i // self.repetitions]), i % self.repetitions) for i in places]
            for k in range(self.process, self.micro_batches, self.processes):
                yield batch[k :: self.micro_batches]

    def __len__(self) -> int:
        return (self.stop - self.start) * len(range(self.process, self.micro_batches, self.processes))


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of complete global batches in the data.

    Raises:
        ValueError: the data has fewer samples than a global batch.
    """
    if num_samples < global_batch_size:
        raise ValueError(f"the training data has {num_samples} samples, fewer than {global_batch_size=}")
    return num_samples // global_batch_size
