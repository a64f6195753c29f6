"""A run that is killed (SIGKILL) at random moments and started again is the run that was never killed.

`make soak` kills it 20 times; the ordinary suite only a few.
"""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from runs import bytes_recipe, finish, run, start, wait_for
from safetensors.torch import load_file


KILLS = int(os.environ.get("KILLS", "3"))


def test_a_run_killed_at_random_moments_has_the_losses_of_the_run_that_was_not(tmp_path):
    moments = random.Random(int(os.environ.get("KILL_SEED", "0")))
    # Every other step writes a checkpoint, so many of the moments lie in the middle of that.
    values = bytes_recipe(tmp_path, steps=10 * KILLS, save_every=2, evaluate_every=10, micro_batch_size=None)
    reference = values | {"output_dir": str(tmp_path / "reference")}
    expected = run(reference)

    killed, done = 0, 0
    checkpoints = tmp_path / "run" / "checkpoints"
    while killed < KILLS:
        (process,) = start(values)
        # It gets up to ten steps further, so that there are enough moments in a run; or no step at all.
        goal = done + 2 * moments.randrange(5)
        if goal > done:
            assert wait_for(checkpoints / f"step-{goal:09d}", process)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        (code,) = finish([process])
        assert code == -9, "the run ended before it could be killed"
        killed += 1
        done = max((int(path.name[-9:]) for path in checkpoints.glob("step-*")), default=0)
    assert finish(start(values)) == [0]

    results = run(values)  # nothing is left to do but to read the last checkpoint
    assert results["losses"] == expected["losses"] and len(results["losses"]) == 10 * KILLS
    assert results["evaluations"] == expected["evaluations"] and results["metrics"] == expected["metrics"]
    weights, wanted = (load_file(Path(v["output_dir"]) / "model.safetensors") for v in (values, reference))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert not list(checkpoints.glob(".partial-*"))


@pytest.mark.skipif(not hasattr(os, "kill"), reason="needs signals")
def test_a_terminated_process_exits_with_143_and_a_checkpoint(tmp_path):
    values = bytes_recipe(tmp_path, steps=10_000, save_every=2)
    (process,) = start(values)
    assert wait_for(tmp_path / "run/checkpoints/step-000000002", process)
    process.terminate()
    assert finish([process]) == [143]
