"""A run that is killed (SIGKILL) at random moments and resumed gives the results of an uninterrupted run.

`make soak` kills each kind of run 20 times; this test kills one kind a few times.
"""

import os

import pytest
from runs import assert_killing_changes_nothing, bytes_recipe, finish, start, wait_for


def test_a_run_killed_at_random_moments_is_the_run_that_was_not(tmp_path):
    values = bytes_recipe(tmp_path, save_every=2, evaluate_every=10, micro_batch_size=None)
    assert_killing_changes_nothing(values, kills=3, seed=0)


@pytest.mark.skipif(not hasattr(os, "kill"), reason="needs signals")
def test_a_terminated_process_exits_with_143_and_a_checkpoint(tmp_path):
    values = bytes_recipe(tmp_path, steps=10_000, save_every=2)
    (process,) = start(values)
    assert wait_for(tmp_path / "run/checkpoints/step-000000002", process)
    process.terminate()
    assert finish([process]) == [143]
