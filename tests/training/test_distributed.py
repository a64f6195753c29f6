"""Two processes give the results of one: DDP, FSDP2, and a run resumed by another number of processes."""

import pytest
import torch
from runs import FSDP2, assert_same_run, bytes_recipe, finish, results_of, run, start
from transformers import AutoModelForCausalLM


STRATEGIES = {"DDP": {}, "FSDP2": FSDP2}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The recipe and results of one process; 7 evaluated windows are no multiple of 2 processes x 2 samples."""
    values = bytes_recipe(tmp_path_factory.mktemp("single"))
    return values, run(values)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_have_the_losses_of_one_also_after_a_restart(tmp_path, single, strategy):
    values = bytes_recipe(tmp_path)
    assert finish(start(values | {"steps": 6}, 2, **STRATEGIES[strategy])) == [0, 0]
    assert finish(start(values, 2, **STRATEGIES[strategy])) == [0, 0]
    results = results_of(values)
    assert results["processes"] == 2
    assert_same_run(results, single[1])

    # Logits are compared, not weights: AFT does not depend on key biases, whose gradients are rounding errors.
    text = torch.arange(97, 113)[None]
    logits = [AutoModelForCausalLM.from_pretrained(v["output_dir"])(text).logits for v in (values, single[0])]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_run_of_two_processes_goes_on_in_one(tmp_path, single):
    values = bytes_recipe(tmp_path)
    assert finish(start(values | {"steps": 6}, 2)) == [0, 0]
    results = run(values)
    assert results["processes"] == 1
    assert_same_run(results, single[1])
