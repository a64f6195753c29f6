"""Tests of runs: what identifies them, small runs of each kind, and repeated, resumed and failed runs."""

import math
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aft_hf import AFTConfig, AFTForImageClassification
from scripts.benchmark.page import read_records
from scripts.reproduction import __main__ as reproduction
from scripts.reproduction import recall, running
from scripts.reproduction.__main__ import arms_of, main, run_all, uses_gpu
from scripts.reproduction.arms import ARMS
from scripts.reproduction.measures import locality
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


# SHA-256 of the data of the records: Tiny Shakespeare, and CIFAR-10 in two parquet files.
DATA = {
    "text.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "train.parquet": "460196a25f9a54b5346e1399587c67d4bb649b70ddbf1782f5e89804ed9e8152",
    "validation.parquet": "faec71e97ca0fdddedf3a04980f6af51ab32a0904232571758cedf55d4dae178",
}


def test_the_confirmed_runs_of_the_page_are_those_of_todays_arms(tmp_path, monkeypatch):
    """Otherwise the command would repeat them, and a record would say nothing about the arm of its name."""
    for name in DATA:
        (tmp_path / name).touch()
    monkeypatch.setattr(running, "_sha256", lambda path, _: DATA[Path(path).name])
    records = read_records(Path(__file__).parents[2] / "docs" / "reproduction.json")
    runner = Runner(tmp_path, text=str(tmp_path / "text.txt"), images=str(tmp_path), records=records)
    for record in records:
        if record["identity"] is not None:
            run = Run(record["arm"].partition("@")[0], record["seed"], record["rate"])
            assert runner.digest(run) == record["identity"], (record["arm"], record["seed"])


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (2e-3, [1e-3, 2e-3, 4e-3]),
        (16e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]),
        (1e-3, [1e-3, 2e-3, 4e-3, 5e-4]),
    ],
)
def test_the_grid_of_learning_rates_grows_until_the_best_is_inside_and_then_the_seeds_follow(
    runner, monkeypatch, best, tried
):
    done = []

    def run(self, each):
        done.append((each.name, each.seed, each.rate))
        return record(self, each, metrics={"train": abs(each.rate - best)})

    monkeypatch.setattr(Runner, "run", run)
    runner.smoke = False
    assert run_all(runner, ["characters"], 2, NEVER) == []
    short = [(f"characters@{rate:g}", SEARCH_SEED, rate) for rate in tried]
    assert done == [*short, ("characters", 0, best), ("characters", 1, best)]
    assert list(runner.left(["characters"], 2)) == []
    assert [each.seed for each in runner.left(["characters"], 3)] == [2]


def test_every_arm_has_a_tiny_run(runner):
    """`--smoke` with all claims begins with the identity of every run."""
    assert len({runner.digest(Run(arm)) for arm in arms_of(["all"]) if ARMS[arm].data != "recall"}) > 50


def test_a_finished_run_is_not_repeated_and_has_all_metrics(runner, tmp_path):
    run = Run("lengths-aft-alibi", 0, 1e-3)
    first = runner.run(run)
    assert {"test", "train", "test_error", "parameters", "test_at_1x", "test_at_8x"} <= first["metrics"].keys()
    assert first["metrics"]["test_at_1x"] == pytest.approx(first["metrics"]["test"], rel=1e-4)
    assert 0 < first["metrics"]["test_error"] < 0.1 * first["metrics"]["test"]
    assert [step for step, _ in first["losses"]] == [1, 2, 3, 4]
    assert not runner.path(run).exists()  # no model is kept but those that others start from
    runner.add(first)
    again = Runner(tmp_path, text="generated", images="generated", smoke=True)
    assert again.find(run) == first


def test_a_converted_vit_is_trained_from_the_run_of_the_same_seed(runner):
    assert arms_of(["13"]).index("vit") < arms_of(["13"]).index("conv-of-vit")
    assert not runner.can_start(Run("conv-of-vit", 1, 1e-3))
    actual = runner.run(Run("conv-of-vit", 1, 1e-3))  # trains the ViT, whose model is not there
    assert 0 <= actual["metrics"]["test"] <= 1 and actual["metrics"]["test_error"] >= 0
    assert (runner.path(runner.start_of(Run("conv-of-vit", 1))) / "config.json").exists()


def test_locality_is_the_mean_distance_by_the_weights_of_w_relative_to_equal_weights(tmp_path):
    config = AFTConfig(
        modality="image",
        aft_type="full",
        position_bias_dim=None,
        hidden_size=4,
        num_hidden_layers=1,
        image_size=8,
        patch_size=4,
    )
    model = AFTForImageClassification(config)
    with torch.no_grad():
        model.aft.layers[0].mixer.position_bias_table.zero_()
    model.save_pretrained(tmp_path)
    recipe = SimpleNamespace(output_dir=str(tmp_path))
    assert locality(recipe)["distance"] == pytest.approx(1)
    # Each of 2 x 2 patches has two others at distance 1 and one at sqrt(2). Only itself and one of them count here.
    w = torch.full((1, 5, 5), -math.inf)
    w[:, [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 2, 1, 4, 3]] = math.log(3.0)
    with torch.no_grad():
        model.aft.layers[0].mixer.position_bias_table.copy_(w.clamp_min(-1e4))
    model.save_pretrained(tmp_path)
    assert locality(recipe)["distance"] == pytest.approx((1 / 2) / ((2 + math.sqrt(2)) / 4))


@pytest.mark.slow
@pytest.mark.usefixtures("forks_for_spawned_processes")
def test_a_speed_is_measured_once(runner):
    actual = runner.run(Run("speed-characters"))
    assert min(actual["metrics"]["speed_turns"]) <= actual["metrics"]["speed_ratio"] + 1e-4
    assert actual["metrics"]["memory_ratio"] == actual["metrics"]["bytes_ours"] / actual["metrics"]["bytes_peer"]
    runner.add(actual)
    assert list(runner.left(["speed-characters"], 5)) == []


def test_one_failure_does_not_stop_the_others_and_no_run_begins_after_the_time(runner, monkeypatch):
    def run(self, each):
        if each.rate == 1e-3:
            raise ValueError("the loss is nan")
        return record(self, each)

    monkeypatch.setattr(Runner, "run", run)
    assert run_all(runner, ["characters"], 1, NEVER) == [
        "characters@0.001 with seed 1000 (the loss is nan)",
        "characters (no learning rate was chosen)",
    ]
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("a run after the time"))
    assert run_all(runner, ["conv"], 1, time.monotonic() - 1) == []


def test_a_run_that_saves_a_checkpoint_at_the_end_of_the_time_does_not_end_the_others(runner, monkeypatch, capsys):
    """It raises SystemExit(143), which a pool passes on."""

    def run(self, each):
        if each.rate == 1e-3:
            raise SystemExit(143)
        return record(self, each)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(
        reproduction, "ProcessPoolExecutor", lambda processes, **options: ThreadPoolExecutor(processes)
    )
    assert run_all(runner, ["characters"], 1, NEVER, 2) == ["characters (no learning rate was chosen)"]
    told = capsys.readouterr().out
    assert "characters@0.001, seed 1000: interrupted" in told and len(runner.records) == 2


def test_models_for_associative_recall_train_and_a_sequence_has_each_key_twice(runner):
    tokens, values = recall.sequences(5, 4, torch.Generator().manual_seed(0))
    assert tokens.shape == (5, 12) and values.shape == (5, 4)
    for row, right in zip(tokens.tolist(), values.tolist()):
        pairs = dict(zip(row[:8:2], row[1:8:2]))
        assert len(pairs) == 4 and [pairs[key] for key in row[8:]] == right
    actual = runner.run(Run("recall-aft-conv-4", 0, 1e-3))
    assert 0 <= actual["metrics"]["test"] < 0.5 and actual["losses"]


def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="finds no GPU"):
        uses_gpu("cuda")
    with pytest.raises(ValueError, match="must be auto, cpu or cuda, got 'gpu'"):
        uses_gpu("gpu")
    assert not uses_gpu("auto") and not uses_gpu("cpu")


def test_a_gpu_begins_with_images_to_convergence_then_texts_and_associative_recall(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.reproduction.__main__.uses_gpu", lambda device: True)
    options = {"text": "generated", "images": "generated", "seeds": 1, "out": tmp_path, "plan": True}
    main(["all"], **options, page=tmp_path / "page.md", device="cuda")
    names = [re.split("[@,]", line)[0] for line in capsys.readouterr().out.splitlines()]
    kinds = list(dict.fromkeys(ARMS[name].data for name in names))
    assert kinds[:3] == ["images-100", "characters", "recall"]
    assert list(dict.fromkeys(names))[:4] == ["conv-100", "vit-100", "full-100", "conv-3-100"]


@pytest.mark.slow
@pytest.mark.usefixtures("forks_for_spawned_processes")
@pytest.mark.slow
def test_the_command_runs_several_processes(tmp_path):
    """In a process of its own: the processes of a pool do not import `__main__`."""
    data = ["20", "--images", "generated", "--smoke", "--device", "cpu", "--seeds", "1", "--processes", "2"]
    places = ["--out", tmp_path / "out", "--page", tmp_path / "page.md"]
    subprocess.run([sys.executable, "-m", "scripts.reproduction", *data, *places], check=True)
    assert [x["seed"] for x in read_records(tmp_path / "out/records.json") if x["arm"] == "full"] == [0]


def test_several_processes_run_arms_at_once_are_interrupted_and_continue(tmp_path, capsys):
    """The dry run of the command for a GPU, on a CPU with tiny models."""
    what = ["10"]
    options = {"text": "generated", "images": "generated", "seeds": 1, "out": tmp_path, "smoke": True}
    options |= {"page": tmp_path / "page.md", "processes": 2, "device": "cpu"}
    main(what, **options, minutes=0.05)
    first = read_records(tmp_path / "records.json")
    main(what, **options, minutes=15)
    after = read_records(tmp_path / "records.json")
    assert after[: len(first)] == first and len({(x["arm"], x["seed"]) for x in after}) == len(after)
    assert "the time is over" in capsys.readouterr().out
    runner = Runner(tmp_path, text="generated", images="generated", smoke=True)
    assert list(runner.left(arms_of(what), 1)) == []
    main(["report"], page=tmp_path / "page.md", out=tmp_path)
    confirmed = sum("@" not in record["arm"] for record in after)
    assert f"{confirmed} runs are confirmed" in (tmp_path / "page.md").read_text() and confirmed
