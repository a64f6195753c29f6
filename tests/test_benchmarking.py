"""Tests of `aft-hf benchmark`: models of any architecture side by side, which take turns."""

import re

import pytest
from tiny_models import image_model, language_model, vit_model
from transformers import GPT2Config, GPT2LMHeadModel

from aft_hf import benchmarking
from aft_hf.benchmarking import LONG_CALL, seconds_in_turns


@pytest.fixture
def spend(monkeypatch):
    """Replace the clock. `spend(seconds)` advances it, and each reading by a nanosecond."""
    now = 0.0

    def spend(seconds: float) -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr("torch.utils.benchmark.timer", lambda: spend(1e-9))
    return spend


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with small models: "vit", "vit-headless", "aft", "gpt2" and "text"."""
    folder, vit = tmp_path_factory.mktemp("models"), vit_model(32)
    text = GPT2Config(vocab_size=256, n_layer=1, n_embd=16, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    models = {
        "vit": vit,
        "vit-headless": vit.base_model,
        "aft": image_model(),
        "gpt2": GPT2LMHeadModel(text),
        "text": language_model(max_position_embeddings=64),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return folder


def test_models_are_compared_at_each_size(saved, spend, run_command):
    models = [saved / "vit", saved / "aft", saved / "vit-headless"]
    done = run_command("aft-hf", "benchmark", *models, "--image-size", 32, "--image-size", 64, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("32 px") == done.stdout.count("64 px") == 3
    assert "forward pass, batch size 2, float32" in done.stdout
    assert ("MiB" in done.stdout) == benchmarking.ON_GPU


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_model_that_is_twice_as_fast_has_twice_the_speed_as_on_the_pages(on_gpu, monkeypatch, run_command):
    rows = {"vit": (0.5, 2**20), "aft": (0.25, 2**19)}
    monkeypatch.setattr(benchmarking, "measure", lambda *_, **__: ("32 px", rows))
    monkeypatch.setattr(benchmarking, "ON_GPU", on_gpu)
    monkeypatch.setattr(benchmarking, "machine", lambda: "a machine")
    done = run_command("aft-hf", "benchmark", *rows)
    assert "x speed" in done.stdout and ("x memory" in done.stdout) == on_gpu and "ratio" not in done.stdout
    cells = [re.findall(r"\S+", line.replace("│", " ")) for line in done.stdout.splitlines() if "32 px" in line]
    memory = [["1.0", "1.00"], ["0.5", "0.50"]] if on_gpu else [[], []]
    assert [row[3:] for row in cells] == [["500.0", "1.00", *memory[0]], ["250.0", "2.00", *memory[1]]]


@pytest.mark.parametrize("options", [[], ["--bf16", "--length", "16"]], ids=["defaults", "bf16"])
def test_language_models_take_training_steps_at_their_own_length(saved, spend, run_command, options):
    done = run_command("aft-hf", "benchmark", saved / "gpt2", saved / "text", "--training", "--turns", 1, *options)
    assert done.returncode == 0, done.stderr
    assert f"{16 if options else 64} tokens" in done.stdout and "training step" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2", "--length", "65"], "gpt2: cannot be measured"),
        (["gpt2", "vit"], "vit: cannot be measured (it reads images: give --image-size, and no models of text)"),
        (["vit", "--length", "8"], "vit: cannot be measured (it reads images: give --image-size"),
        (
            ["gpt2", "--image-size", "8"],
            "gpt2: cannot be measured (it reads text: give --length, and no models of images)",
        ),
        (["vit", "--length", "8", "--image-size", "32"], "not both"),
        (["nothing"], "nothing: no such directory"),
    ],
)
def test_models_that_cannot_be_compared_end_the_benchmark_in_one_line(saved, spend, run_command, words, said):
    done = run_command("aft-hf", "benchmark", *(saved / x if x in ("gpt2", "vit", "nothing") else x for x in words))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("option", "value"), [("--length", -3), ("--image-size", 0)])
def test_sizes_below_one_are_refused(saved, spend, run_command, option, value):
    done = run_command("aft-hf", "benchmark", saved / "vit", option, value)
    assert done.returncode == 2 and option in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.02, ["a", "b"] * 5), (1.01 * LONG_CALL, ["a", "b", "a", *(["a", "b"] * 3)])]
)
def test_calls_take_turns_after_two_to_warm_up_or_one_that_takes_long(seconds, expected, spend):
    order, durations = [], {"a": 0.002, "b": seconds}
    calls = {name: lambda name=name: (order.append(name), spend(durations[name])) for name in "ab"}
    actual = seconds_in_turns(calls, 3)
    assert order == expected
    assert actual == {name: pytest.approx([durations[name]] * 3) for name in "ab"}
