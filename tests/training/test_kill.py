"""A run that is killed (SIGKILL) at random moments and resumed gives the results of an uninterrupted run.

`make soak` kills each kind of run 20 times; this test kills one kind a few times.
"""

from runs import assert_killing_changes_nothing, bytes_recipe


def test_a_run_killed_at_random_moments_is_the_run_that_was_not(tmp_path):
    values = bytes_recipe(tmp_path, save_every=2, evaluate_every=10, micro_batch_size=None)
    assert_killing_changes_nothing(values, kills=3, seed=0)
