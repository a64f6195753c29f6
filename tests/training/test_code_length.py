"""Bits per byte, per dimension and per character."""

import math

import pytest

from aft_hf.training.code_length import CodeLength


def test_bits_are_summed_before_they_are_divided_by_each_unit():
    metric = CodeLength(keep_in_memory=True)
    # Two rows: 8 bytes and 4 characters in 16 bits, and 2 bytes and 2 characters in 24 bits.
    metric.add_batch(predictions=[16 * math.log(2)], references=[[8, 4]])
    metric.add_batch(predictions=[24 * math.log(2)], references=[[2, 2]])
    expected = {"bits_per_byte": pytest.approx(4.0), "bits_per_character": pytest.approx(40 / 6)}
    assert metric.compute(units=("byte", "character")) == expected


def test_small_losses_count_beside_a_large_sum():
    nats = [2.0**24 * math.log(2)] + [math.log(2)] * 1000  # float32 has 24 bits
    result = CodeLength(keep_in_memory=True).compute(predictions=nats, references=[[1]] + [[0]] * 1000)
    assert result["bits_per_byte"] == pytest.approx(2**24 + 1000, rel=1e-9)


def test_guessing_a_sub_pixel_takes_eight_bits():
    metric = CodeLength(keep_in_memory=True)
    nats = [3072 * math.log(256)] * 3
    assert metric.compute(predictions=nats, references=[[3072]] * 3, units=("dim",)) == {
        "bits_per_dim": pytest.approx(8.0)
    }
