"""Tests of scripts/benchmark: the models and their limit, records and what is left to measure, and the page."""

import json

import pytest
import torch

from scripts.benchmark import __main__ as command
from scripts.benchmark import cases as module
from scripts.benchmark.cases import GROWTH, TABLE, Case, all_cases
from scripts.benchmark.models import Images, Text, without_mixing
from scripts.benchmark.page import BEGIN, END, _memory, _speed, read_records


TINY = Text("local", 48, 1, 64)


@pytest.fixture
def quick(monkeypatch):
    """Measure no memory, which takes a process for each model, and keep the allocator as it is."""
    monkeypatch.setattr(module, "in_new_process", lambda _, case, name: {"ours": 3, "peer": 6}[name])
    monkeypatch.setattr(module, "keep_freed_memory", lambda: None)


def made_up(case: Case, **values):
    actual = {"seconds": {"ours": 2.0, "peer": 3.0}, "ratio": {"peer": 1.5, "limit": 0.9}, "turns": 3}
    return case.key() | actual | {"bytes": {"ours": 3, "peer": 6}, "weights": {"ours": 3, "peer": 4}} | values


def test_every_case_has_a_name_of_its_own_and_the_table_at_most_twelve_rows():
    cases = list(all_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert len(TABLE) + 1 <= 12
    assert {case.model for case in cases if case.part == "growth"} == set(GROWTH)


@pytest.mark.parametrize(
    ("task", "bf16", "others"),
    [
        ("inference", True, {"peer", "eager", "limit"}),
        ("training", False, {"peer", "limit"}),
        ("decoding", False, {"peer", "eager"}),
    ],
)
def test_a_record_compares_our_model_with_its_peer_and_its_limit(quick, task, bf16, others):
    case = Case("table", TINY, task, bf16, 1)
    record = case.measure(turns=1)
    assert set(record["ratio"]) == others and set(record["seconds"]) == others | {"ours"}
    assert record["bytes"] == ({} if task == "decoding" else {"ours": 3, "peer": 6})
    assert record["weights"].keys() == record["bytes"].keys()
    assert case.key().items() <= record.items() and json.loads(json.dumps(record)) == record


def test_memory_counts_the_weights():
    with torch.no_grad():
        case = Case("table", TINY, "inference", True, 1)
        assert case.weights()["ours"] == sum(x.nbytes for x in TINY.aft().bfloat16().parameters())
    assert _memory(made_up(case)) == "0.60"  # (3 + 3) / (6 + 4)


def test_the_peer_with_the_faster_attention_counts():
    record = made_up(Case("table", TINY, "training", True, 1), ratio={"peer": 1.5, "eager": 1.2, "limit": 0.9})
    assert _speed(record) == "1.20 (0.90)"


@pytest.mark.parametrize("model", [TINY, Images("tiny", "conv", 11, 32), Images("tiny", "full")], ids=lambda x: x.name)
def test_a_model_and_its_peer_have_the_same_width_and_depth(model):
    with torch.device("meta"):
        aft, peer = model.aft(), model.peer()
    for field in ("hidden_size", "num_hidden_layers"):
        assert getattr(aft.config, field) == getattr(peer.config, field)
    biases = sum(x.numel() for name, x in aft.named_parameters() if "position" in name)
    assert aft.num_parameters() - biases == pytest.approx(
        peer.num_parameters(), rel=0.25
    )  # GPT-2 shares its embeddings with the head


def test_the_limit_has_the_projections_of_the_model_and_mixes_nothing():
    model = TINY.aft().eval()
    limit = without_mixing(model)
    assert torch.equal(limit.aft.layers[0].mixer.v_proj.weight, model.aft.layers[0].mixer.v_proj.weight)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % 256
    with torch.no_grad():
        (first, second), (mixed, other) = (
            [m(x, use_cache=False).logits for x in (tokens, changed)] for m in (limit, model)
        )
    same = torch.arange(16) != 3
    torch.testing.assert_close(first[:, same], second[:, same])  # other positions do not depend on it
    assert not torch.allclose(mixed[:, 4:], other[:, 4:])


def test_the_command_measures_what_is_missing_and_writes_the_page(tmp_path, monkeypatch, quick):
    chosen = [Case("table", TINY, task, False, 1) for task in ("inference", "training")]
    monkeypatch.setattr(command, "all_cases", lambda: iter(chosen))
    path, page = tmp_path / "benchmark.json", tmp_path / "benchmark.md"
    page.write_text(f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    stale = made_up(chosen[1]) | {"versions": {"aft-hf": "0.1, code 00000000"}}
    path.write_text(json.dumps([made_up(chosen[0]), stale]))
    command.main(path, turns=1, seconds=0)  # measures nothing
    assert read_records(path)[1]["ratio"]["peer"] == 1.5
    command.main(path, only="*", turns=1)
    records = read_records(path)
    assert records[0] == made_up(chosen[0]) and records[1]["turns"] == 1
    assert len(path.read_text().splitlines()) == 2 + len(records)  # one record per line
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "old" not in text
    assert {"benchmark_text.svg", "benchmark_images.svg"} == {x.name for x in (tmp_path / "images").iterdir()}
    with pytest.raises(ValueError, match="no case matches 'nothing'"):
        command.main(path, only="nothing")
