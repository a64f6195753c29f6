"""A run that is killed (SIGKILL) at random moments and started again is the run that was never killed.

`make soak` kills it 20 times; the ordinary suite only a few.
"""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from runs import bytes_recipe, finish, results_of, start, wait_for
from safetensors.torch import load_file


KILLS = int(os.environ.get("KILLS", "3"))


def test_a_run_killed_at_random_moments_has_the_losses_of_the_run_that_was_not(tmp_path):
    moments = random.Random(int(os.environ.get("KILL_SEED", "0")))
    # Every other step writes a checkpoint, so many of the moments lie in the middle of that.
    values = bytes_recipe(tmp_path, save_every=2, evaluate_every=10, micro_batch_size=None)
    endless = values | {"steps": 10**6}  # whatever the machine, each kill hits a run that goes on
    killed, done = 0, 0
    checkpoints = tmp_path / "run" / "checkpoints"
    while killed < KILLS:
        (process,) = start(endless)
        # It gets some steps further, or none at all.
        goal = done + 2 * moments.randrange(5)
        if goal > done:
            assert wait_for(checkpoints / f"step-{goal:09d}", process)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        (code,) = finish([process])
        assert code == -9
        killed += 1
        done = max((int(path.name[-9:]) for path in checkpoints.glob("step-*")), default=0)
    values["steps"] = done + 3
    reference = values | {"output_dir": str(tmp_path / "reference")}
    assert finish(start(values)) == [0]
    assert finish(start(values)) == [0]  # nothing is left to do but to read the last checkpoint
    assert finish(start(reference)) == [0]

    results, expected = results_of(values), results_of(reference)
    assert results["losses"] == expected["losses"] and len(results["losses"]) == done + 3
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
