"""The order of training samples: the same for any number of processes and after a resume at any step."""

from collections import Counter
from itertools import chain

import pytest

from aft_hf.data.samples import GlobalBatches, SampleKey


def batches(num_samples=23, size=8, micro=2, *, start=0, stop=6, **options) -> list[list[SampleKey]]:
    return list(GlobalBatches(num_samples, size, micro, seed=5, start=start, stop=stop, **options))


def test_each_epoch_takes_each_sample_at_most_once_in_a_new_order():
    keys = [key for batch in batches() for key in batch]
    epochs = [[key.index for key in keys if key.epoch == epoch] for epoch in (0, 1, 2)]
    assert [len(epoch) for epoch in epochs] == [16, 16, 16]  # 23 samples make two batches of 8
    assert all(len(set(epoch)) == 16 and set(epoch) <= set(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches(start=3) == batches()[3 * 4 :]
    assert list(GlobalBatches(23, 8, 2, seed=6, start=0, stop=6)) != batches()
    assert sorted(key.index for batch in batches(num_samples=8, stop=1) for key in batch) == list(range(8))
    with pytest.raises(ValueError, match="7 samples, fewer than global_batch_size=8"):
        batches(num_samples=7)


def test_processes_share_the_micro_batches_of_one_process():
    alone = batches()
    two = [batches(process=process, processes=2) for process in (0, 1)]
    assert [batch for pair in zip(*two) for batch in pair] == alone
    assert len(two[1]) == 12


def test_another_micro_batch_size_cuts_the_same_global_batches():
    small, large = batches(micro=2), batches(micro=4)
    for step in range(6):
        of_step = [sorted(chain(*each[step * n : (step + 1) * n])) for each, n in ((small, 4), (large, 2))]
        assert of_step[0] == of_step[1] and len(of_step[0]) == 8


def test_repetitions_of_a_sample_come_into_different_micro_batches():
    first_epoch = batches(num_samples=24, size=12, micro=4, stop=2, repetitions=3)
    counts = Counter(key.index for batch in first_epoch for key in batch)
    # An epoch keeps its length, so it has a third of the samples.
    assert set(counts.values()) == {3} and len(counts) == 8
    assert all(len({key.index for key in batch}) == len(batch) for batch in first_epoch)
    assert {key.repetition for batch in first_epoch for key in batch} == {0, 1, 2}


def test_the_random_numbers_of_a_sample_are_its_own():
    draws = {key: key.random(1).random() for key in (SampleKey(0, 1), SampleKey(1, 0), SampleKey(0, 1, 1))}
    assert len(set(draws.values())) == 3
    assert SampleKey(0, 1).random(1).random() == draws[SampleKey(0, 1)] != SampleKey(0, 1).random(2).random()
