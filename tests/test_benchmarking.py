"""Tests of `aft-hf benchmark`: models of any architecture side by side, turns, and peak memory."""

import multiprocessing
import re
import signal
import sys

import pytest
import torch
from tiny_models import image_model, language_model, vit_model
from transformers import GPT2Config, GPT2LMHeadModel

from aft_hf import benchmarking
from aft_hf.benchmarking import LONG_CALL, in_new_process, peak_bytes, seconds_in_turns


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


@pytest.fixture
def quick(monkeypatch, spend):
    """Measure no memory, which takes a process for each model, and keep the allocator as it is."""
    monkeypatch.setattr(benchmarking, "in_new_process", lambda *_: 3 * 2**20)
    monkeypatch.setattr(benchmarking, "keep_freed_memory", lambda: None)


def test_models_are_compared_at_each_size(saved, quick, run_command):
    models = [saved / "vit", saved / "aft", saved / "vit-headless"]
    done = run_command("aft-hf", "benchmark", *models, "--image-size", 32, "--image-size", 64, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("32 px") == done.stdout.count("64 px") == 3 and "3.0" in done.stdout
    assert "forward pass, batch size 2, float32" in done.stdout


def test_a_model_that_is_twice_as_fast_has_twice_the_speed_as_on_the_pages(monkeypatch, run_command):
    rows = {"vit": (0.5, 2**20), "aft": (0.25, 2**19), "unknown": (1.0, 0)}
    monkeypatch.setattr(benchmarking, "measure", lambda *_, **__: ("32 px", rows))
    done = run_command("aft-hf", "benchmark", *rows)
    assert all(heading in done.stdout for heading in ("x speed", "x memory")) and "ratio" not in done.stdout
    cells = [re.findall(r"\S+", line.replace("│", " ")) for line in done.stdout.splitlines() if "32 px" in line]
    assert [row[3:] for row in cells] == [
        ["500.0", "1.00", "1.0", "1.00"],
        ["250.0", "2.00", "0.5", "0.50"],
        ["1000.0", "0.50", "-", "-"],
    ]


@pytest.mark.parametrize("options", [[], ["--bf16", "--length", "16"]], ids=["defaults", "bf16"])
def test_language_models_take_training_steps_at_their_own_length(saved, quick, run_command, options):
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
def test_models_that_cannot_be_compared_end_the_benchmark_in_one_line(saved, quick, run_command, words, said):
    done = run_command("aft-hf", "benchmark", *(saved / x if x in ("gpt2", "vit", "nothing") else x for x in words))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("option", "value"), [("--length", -3), ("--image-size", 0)])
def test_sizes_below_one_are_refused(saved, quick, run_command, option, value):
    done = run_command("aft-hf", "benchmark", saved / "vit", option, value)
    assert done.returncode == 2 and option in done.stderr and "Traceback" not in done.stderr


def test_an_interrupt_ends_the_measuring_process_without_a_traceback_of_its_own(capfd):
    interrupt = "os.kill(os.getpid(), 2); time.sleep(0.1); print('still there', flush=True); os.kill(os.getppid(), 2)"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            in_new_process(exec, f"import os, time; {interrupt}; time.sleep(60); print('finished')")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not multiprocessing.active_children()
    assert capfd.readouterr() == ("still there\n", "")  # ended before it was finished


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.02, ["a", "b"] * 5), (1.01 * LONG_CALL, ["a", "b", "a", *(["a", "b"] * 3)])]
)
def test_calls_take_turns_after_two_to_warm_up_or_one_that_takes_long(seconds, expected, spend):
    order, durations = [], {"a": 0.002, "b": seconds}
    calls = {name: lambda name=name: (order.append(name), spend(durations[name])) for name in "ab"}
    actual = seconds_in_turns(calls, 3)
    assert order == expected
    assert actual == {name: pytest.approx([durations[name]] * 3) for name in "ab"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_what_a_call_needs_beyond_what_was_there():
    held = torch.ones(2**24)  # 64 MiB allocated before
    peak = peak_bytes(lambda: torch.ones(2**25).sum())
    assert 120 * 2**20 < peak < 160 * 2**20 and held[0] == 1
