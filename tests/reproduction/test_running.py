"""Tests of runs: what identifies them, small runs of each kind, and repeated, resumed and failed runs."""

import time

import pytest

from scripts.reproduction import running
from scripts.reproduction.__main__ import arms_of, run_all
from scripts.reproduction.running import SEARCH_SEED, Run, Runner


pytestmark = pytest.mark.usefixtures("datasets_cache")
NEVER = float("inf")


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path, text="generated", images="generated", smoke=True)


def record(runner, run, **values):
    return {"arm": run.name, "seed": run.seed, "identity": runner.digest(run), "metrics": {"train": 1.0}} | values


def test_the_identity_is_the_content_of_the_data_and_not_its_name(tmp_path):
    """A text of 16 bytes once counted as the text of earlier runs, as only its name entered."""
    digests = {}
    for number, text in enumerate(("To be, or not to be. " * 100, "16 bytes of text", "To be, or not to be. " * 100)):
        path = tmp_path / str(number) / "text.txt"
        path.parent.mkdir()
        path.write_text(text)
        digests[number] = Runner(tmp_path, text=str(path)).digest(Run("characters"))
    assert digests[0] == digests[2] != digests[1]


def test_defaults_of_models_and_conversions_are_part_of_the_identity(runner, monkeypatch):
    converted, conv = (runner.digest(Run(name)) for name in ("conv-of-vit", "conv"))
    values = runner.identity(Run("conv-of-vit"))
    assert values["convert"]["init"] == "paper" and values["start"] == runner.digest(Run("vit"))
    assert runner.identity(Run("conv"))["model"]["position_bias_init_std"] == 0.1  # not in the recipe
    before = running.convert_deit
    monkeypatch.setattr(running, "convert_deit", lambda source, init="attention": before(source, init=init))
    assert runner.digest(Run("conv-of-vit")) != converted and runner.digest(Run("conv")) == conv


def test_keys_that_change_no_number_are_not_part_of_the_identity(runner, monkeypatch):
    before = runner.digest(Run("conv"))
    monkeypatch.setitem(running.RECIPES["images"], "save_every", 7)
    assert runner.digest(Run("conv")) == before
    monkeypatch.setitem(running.RECIPES["images"], "label_smoothing", 0.0)
    assert runner.digest(Run("conv")) != before


def test_the_learning_rate_of_an_arm_is_the_best_of_short_runs_and_then_its_seeds_are_left(runner, monkeypatch):
    done = []

    def run(self, each):
        done.append((each.name, each.seed, each.rate))
        self.records.append(record(self, each, metrics={"train": abs(each.rate - 2e-3)}))

    monkeypatch.setattr(Runner, "run", run)
    assert run_all(runner, ["characters"], 2, NEVER) == []
    short = [(f"characters@{rate:g}", SEARCH_SEED, rate) for rate in (1e-3, 2e-3, 4e-3)]
    assert done == [*short, ("characters", 0, 2e-3), ("characters", 1, 2e-3)]
    assert list(runner.left(["characters"], 2)) == []
    assert [each.seed for each in runner.left(["characters"], 3)] == [2]


def test_a_finished_run_is_not_repeated_and_has_all_metrics(runner, tmp_path):
    run = Run("characters-alibi", 0, 1e-3)
    first = runner.run(run)
    assert {"test", "train", "test_error", "parameters", "test_at_1x", "test_at_8x"} <= first["metrics"].keys()
    assert first["metrics"]["test_at_1x"] == pytest.approx(first["metrics"]["test"], rel=1e-4)
    assert 0 < first["metrics"]["test_error"] < 0.1 * first["metrics"]["test"]
    assert [step for step, _ in first["losses"]] == [1, 2, 3, 4]
    assert not runner.path(run).exists()  # no model is kept but those that others start from
    again = Runner(tmp_path, text="generated", images="generated", smoke=True)
    assert again.find(run) == first


def test_a_converted_vit_is_trained_from_the_run_of_the_same_seed(runner):
    assert arms_of(["13"]).index("vit") < arms_of(["13"]).index("conv-of-vit")
    found = runner.run(Run("conv-of-vit", 1, 1e-3))  # trains the ViT, whose model is not there
    assert 0 <= found["metrics"]["test"] <= 1 and found["metrics"]["test_error"] >= 0
    assert (runner.path(runner.start_of(Run("conv-of-vit", 1))) / "config.json").exists()


@pytest.mark.slow
def test_a_speed_is_measured_once(runner):
    found = runner.run(Run("speed-characters"))["metrics"]
    assert found["speed_ratio_low"] <= found["speed_ratio"] <= found["speed_ratio_high"]
    assert found["memory_ratio"] == found["bytes_ours"] / found["bytes_peer"]
    assert list(runner.left(["speed-characters"], 5)) == []


def test_one_failure_does_not_stop_the_others_and_no_run_begins_after_the_hours(runner, monkeypatch):
    def run(self, each):
        if each.rate == 1e-3:
            raise ValueError("the loss is nan")
        self.records.append(record(self, each))

    monkeypatch.setattr(Runner, "run", run)
    failed = run_all(runner, ["characters"], 1, NEVER)
    assert failed == [
        "characters@0.001 with seed 1000 (the loss is nan)",
        "characters with seed 0 (no learning rate was chosen)",
    ]
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("a run after the time"))
    assert run_all(runner, ["conv"], 1, time.monotonic() - 1) == []
