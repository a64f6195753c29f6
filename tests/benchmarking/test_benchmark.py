"""The benchmark: fair turns, honest peaks, and a floor that mixes nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from aft_hf.benchmarking.cases import SUITES
from aft_hf.benchmarking.measuring import peak_bytes, ratio, seconds_in_turns
from aft_hf.benchmarking.models import TextRow, VisionRow, without_mixing


SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
CPU = torch.device("cpu")


def test_candidates_take_turns_and_the_slower_one_has_the_greater_ratio():
    calls = []

    def candidate(name, seconds):
        def call():
            calls.append(name)
            time.sleep(seconds)

        return call

    seconds = seconds_in_turns({"ours": candidate("a", 0.002), "peer": candidate("b", 0.02)}, CPU, repeats=3)
    assert calls == ["a", "b"] * 5  # two turns to warm up
    assert len(seconds["ours"]) == len(seconds["peer"]) == 3
    assert 4 < ratio(seconds, "ours", "peer") < 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_what_a_call_needs_beyond_what_was_there():
    held = torch.ones(2**24)  # 64 MiB that were there before
    peak = peak_bytes(lambda: torch.ones(2**25).sum(), CPU)
    assert 120 * 2**20 < peak < 160 * 2**20 and held[0] == 1


@pytest.mark.parametrize("name", SUITES)
def test_every_case_has_a_name_of_its_own_and_a_peer(name):
    cases = list(SUITES[name]())
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert list(case.builders)[:2] == ["ours", "peer"] and set(case.required) <= set(case.builders)


def test_the_floor_has_the_projections_of_the_model_and_mixes_nothing():
    model = TextRow("local", num_layers=1, width=64).aft(32).eval()
    floor = without_mixing(model)
    assert torch.equal(floor.aft.layers[0].mixer.v_proj.weight, model.aft.layers[0].mixer.v_proj.weight)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % 256
    with torch.no_grad():
        first, second = (floor(x, use_cache=False).logits for x in (tokens, changed))
        mixed, other = (model(x, use_cache=False).logits for x in (tokens, changed))
    same = torch.arange(16) != 3
    torch.testing.assert_close(first[:, same], second[:, same])  # other positions see nothing of it
    assert not torch.allclose(mixed[:, 4:], other[:, 4:])


@pytest.mark.parametrize("row", [VisionRow("tiny", "conv", 11, 32), VisionRow("tiny", "full")], ids=lambda r: r.name)
def test_a_model_and_its_peer_are_of_one_size(row):
    with torch.device("meta"):
        aft, vit = row.aft(), row.vit()
    assert aft.config.hidden_size == vit.config.hidden_size
    assert aft.config.num_hidden_layers == vit.config.num_hidden_layers
    assert aft.num_parameters() == pytest.approx(vit.num_parameters(), rel=0.15)


def test_a_pattern_that_fits_no_case_ends_in_one_line():
    command = [sys.executable, SCRIPT, "--suite", "vision", "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip() == "benchmark.py: no case matches 'nothing'"
