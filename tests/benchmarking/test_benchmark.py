"""The benchmark: fair turns, honest peaks, and a floor that mixes nothing."""

import subprocess
import sys

import pytest
import torch

from aft_hf.benchmarking import measuring
from aft_hf.benchmarking.cases import SMOKE, model_builder
from aft_hf.benchmarking.measuring import peak_bytes, ratio, seconds_in_turns, state_bytes
from aft_hf.benchmarking.models import TextRow, VisionRow, without_mixing
from aft_hf.benchmarking.peak import measure_peak
from aft_hf.benchmarking.suites import SUITES, select_cases


CPU = torch.device("cpu")


def test_candidates_take_turns_and_the_slower_one_has_the_greater_ratio(spend):
    calls = []

    def candidate(name, seconds):
        def call():
            calls.append(name)
            spend(seconds)

        return call

    seconds = seconds_in_turns({"ours": candidate("a", 0.002), "peer": candidate("b", 0.02)}, CPU, repeats=3)
    assert calls == ["a", "b"] * 5  # two turns to warm up
    assert seconds == {"ours": pytest.approx([0.002] * 3), "peer": pytest.approx([0.02] * 3)}
    assert ratio(seconds, "ours", "peer") == pytest.approx(10)


def test_what_takes_long_warms_up_once(spend):
    calls, long = [], 1.01 * measuring.LONG_CALL
    candidates = {"short": lambda: calls.append("s"), "long": lambda: (calls.append("l"), spend(long))}
    seconds = seconds_in_turns(candidates, CPU, repeats=2)
    assert calls == ["s", "l", "s", "s", "l", "s", "l"]
    assert len(seconds["short"]) == len(seconds["long"]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_what_a_call_needs_beyond_what_was_there():
    held = torch.ones(2**24)  # 64 MiB that were there before
    peak = peak_bytes(lambda: torch.ones(2**25).sum(), CPU)
    assert 120 * 2**20 < peak < 160 * 2**20 and held[0] == 1


KEEP_AND_RELEASE = """
from pathlib import Path
import torch
from aft_hf.benchmarking.measuring import keep_freed_memory, release_freed_memory

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

keep_freed_memory()
before = resident()
x = torch.ones(2**25)  # 128 MiB
del x
kept = resident()
release_freed_memory()
print(kept - before, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_process_has_kept_it_can_give_back():
    done = subprocess.run([sys.executable, "-c", KEEP_AND_RELEASE], check=True, capture_output=True, text=True)
    kept, left = (int(kibibytes) for kibibytes in done.stdout.split())
    assert kept > 120 * 2**10
    assert left < 40 * 2**10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_peak_is_measured_in_a_process_of_its_own():
    (case,) = select_cases(["growth"], "growth T=32 training", SMOKE)
    peak = measure_peak(case, "GPT-2", CPU, SMOKE)
    assert 2**20 < peak < 2**28
    with pytest.raises(RuntimeError, match="peak memory of nothing ended with 1: KeyError: 'nothing'"):
        measure_peak(case, "nothing", CPU, SMOKE)


@pytest.mark.parametrize("name", SUITES)
def test_every_case_has_a_name_of_its_own_and_something_to_compare_with(name):
    cases = select_cases([name], None)
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.suite == name and set(case.peaks) <= set(case.builders)
        assert set(case.required) | set(case.required_memory) <= set(case.builders)
        assert set(case.required_memory) <= set(case.peaks)
        assert name == "growth" or (list(case.builders)[:2] == ["ours", "peer"] and case.peer)
        assert (name == "growth") == (case.size is not None)


def test_models_of_one_length_or_context_share_their_peer():
    for suite, pattern in {"causal": "*T=4096 training fp32", "decode": "*after 4096 batch 8 decode fp32"}.items():
        cases = select_cases([suite], pattern)
        assert len(cases) == 4 and len({case.builders["peer"] for case in cases}) == 1
        assert len({build for case in cases for name, build in case.builders.items() if name != "peer"}) in (4, 8)


def test_what_is_required_is_asked():
    asked = {case.name: case for case in select_cases(["all"], None)}
    assert asked["AFT-conv tiny 11/32 at 224 inference fp32"].required == {"peer": 1.10}
    assert asked["AFT-conv base 25/32 at 1024 inference bf16"].required == {"peer": 1.8}
    assert asked["AFT-full small at 224 training fp32"].required_memory == {"peer": 1.0}
    assert asked["AFT-local-32 L24 d256 T=16384 training fp32"].required == {"floor": 1 / 1.2, "peer": 5.0}
    assert asked["AFT-local-32 L24 d256 T=1024 training bf16"].required_memory == {"peer": 1.0}
    assert asked["AFT-alibi L24 d256 T=4096 training fp32"].required_memory == {}
    assert asked["AFT-simple L24 d256 after 4096 batch 8 decode fp32"].required == {"peer": 3.0}
    assert asked["AFT-conv L24 d256 after 65536 against 1024 decode fp32"].required == {"peer": 1 / 1.05}
    labml = asked["AFT-local-32 layer T=4096 beside labml-nn training fp32"]
    assert labml.required == {"peer": 5.0} and labml.required_memory == {"peer": 0.1}
    assert not any(case.required or case.required_memory for case in select_cases(["all"], None, SMOKE))


@pytest.mark.parametrize("case", select_cases(["mixer"], None, SMOKE), ids=lambda case: case.name)
def test_a_layer_and_its_peer_take_a_step(case):
    if case.package is not None:
        pytest.importorskip(
            {"labml-nn": "labml_nn.transformers.aft"}.get(case.package, case.package.replace("-", "_"))
        )
    for build in case.builders.values():
        build(CPU)()


@pytest.mark.parametrize("peer", ["GPT-2", "Reformer", "RWKV"])
def test_language_models_are_of_one_size_and_answer_for_every_token(peer):
    row = TextRow("local", num_layers=2, width=64)
    aft, other = row.aft(64), {"GPT-2": row.gpt2, "Reformer": row.reformer, "RWKV": row.rwkv}[peer](64).eval()
    with torch.inference_mode():
        assert other(input_ids=torch.randint(256, (1, 64))).logits.shape == (1, 64, 256)

    def in_blocks(model):
        return sum(x.numel() for name, x in model.named_parameters() if ".1." in name and "position_bias" not in name)

    assert in_blocks(other) == pytest.approx(in_blocks(aft), rel=0.3)


def test_a_decode_call_returns_the_cache_whose_bytes_count():
    (case,) = select_cases(["decode"], "AFT-simple * after 16 batch 1 decode fp32", SMOKE)
    ours, peer = (state_bytes(case.builders[name](CPU)()) for name in ("ours", "peer"))
    assert peer == 2 * 2 * 4 * 64 * 17  # 2 layers: keys and values of 64 features for 16 tokens and a new one
    assert ours < peer
    (case,) = select_cases(["decode"], "AFT-simple * after 64 against 8 decode fp32", SMOKE)
    assert len({state_bytes(case.builders[name](CPU)()) for name in ("ours", "peer")}) == 1


def test_only_what_is_to_be_compiled_is(monkeypatch):
    compiled = []

    def compile(model):
        compiled.append(type(model).__name__)
        return model

    monkeypatch.setattr(torch, "compile", compile)
    (case,) = select_cases(["causal"], "* compiled", SMOKE)
    for build in case.builders.values():
        build(CPU)()
    assert list(case.builders) == ["ours", "peer", "ours not compiled"]
    assert compiled == ["AFTForCausalLM", "GPT2LMHeadModel"]


def test_bf16_is_of_the_weights_in_inference_and_autocast_in_training():
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append((self.weight.dtype, torch.is_autocast_enabled("cpu")))
            return type("Output", (), {"loss": super().forward(x).sum()})

    for task in ("inference", "training"):
        model_builder(lambda: Model(2, 2), lambda: {"x": torch.ones(1, 2)}, task, torch.bfloat16)(CPU)()
    assert seen == [(torch.bfloat16, False), (torch.float32, True)]


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


def test_a_pattern_that_fits_no_case_ends_in_one_line(run_command):
    done = run_command("benchmark.py", "--suite", "vision", "--only", "nothing")
    assert done.returncode == 1 and done.stderr.strip() == "aft-hf: no case matches 'nothing'"
