"""The training loop: learning, resuming to the same results, and the files that it writes."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import bytes_recipe, run
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from aft_hf.data.samples import GlobalBatches
from aft_hf.loading import weights_digest
from aft_hf.running.checkpoints import find_damage
from aft_hf.training import loop
from aft_hf.training.optimization import parameter_groups
from aft_hf.training.recipe import build_recipe
from aft_hf.training.tasks import BytesTask


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The recipe and results of an uninterrupted run."""
    values = bytes_recipe(tmp_path_factory.mktemp("finished"))
    return values, run(values)


def losses(results: dict) -> list[float]:
    return [row["loss"] for row in results["losses"]]


def same_run(values: dict, results: dict, reference: tuple[dict, dict]) -> bool:
    weights, expected = (load_file(Path(v["output_dir"]) / "model.safetensors") for v in (values, reference[0]))
    same_weights = all(torch.equal(weights[name], expected[name]) for name in expected)
    return same_weights and all(results[key] == reference[1][key] for key in ("losses", "evaluations", "metrics"))


def test_the_loss_of_a_text_with_rules_falls(tmp_path):
    values = bytes_recipe(tmp_path, steps=60, save_every=60, evaluate_every=60, micro_batch_size=None)
    first, *_, last = losses(run(values))
    assert first == pytest.approx(math.log(256), abs=0.1)
    assert last < 3.5 < math.log(256) - 2  # 2 of 26 letters can follow: the loss tends to log 2


def test_a_run_leaves_a_model_a_tokenizer_its_results_and_a_picture(finished):
    values, results = finished
    directory = Path(values["output_dir"])
    assert json.loads((directory / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (directory / "losses.png").read_bytes().startswith(b"\x89PNG")
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    assert tokenizer("az")["input_ids"] == [97, 122]
    assert results["parameters"] == model.num_parameters() and results["weights"] == weights_digest(directory)
    assert len(tokenizer) == model.config.vocab_size == 258
    for name in ("eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        assert token == getattr(model.config, name) == getattr(model.generation_config, name) is not None
    assert results["steps"] == len(results["losses"]) == 12 and results["processes"] == 1
    assert torch.__version__.startswith(results["versions"]["torch"])
    assert results["recipe"]["optimizer"]["learning_rate"] == 1e-2
    assert not [path for path in directory.rglob("*") if path.name.startswith(".")]
    assert results["recipe"]["data"]["train"] == Path(values["data"]["train"]).name  # not where it lay here
    assert loop.portable(notes := "and/or".rjust(999)) == notes  # no file has so long a name


def test_the_metric_is_that_of_the_saved_model_over_every_byte_but_the_first(finished):
    values, results = finished
    text = Path(values["data"]["train"]).read_bytes()
    validation = text[len(text) * 90 // 100 : len(text) * 95 // 100][: 7 * 16 + 1]
    model, nats, count = AutoModelForCausalLM.from_pretrained(values["output_dir"]).eval(), 0.0, 0
    for begin in range(0, len(validation) - 1, 16):
        window = torch.tensor(list(validation[begin : begin + 17]))
        with torch.no_grad():
            logits = model(input_ids=window[None, :-1]).logits[0]
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    assert count == len(validation) - 1 == 112
    assert results["metrics"]["validation"]["bits_per_byte"] == pytest.approx(nats / count / math.log(2), rel=1e-5)
    assert results["evaluations"][-1]["bits_per_byte"] == results["metrics"]["validation"]["bits_per_byte"]


def test_the_saved_weights_are_the_moving_average(tmp_path):
    values = bytes_recipe(tmp_path, steps=3, save_every=1, keep_checkpoints=3, ema_decay=0.8)
    run(values)
    directory = Path(values["output_dir"])
    step = [load_file(directory / f"checkpoints/step-00000000{i}/model.safetensors") for i in (1, 2, 3)]
    saved = load_file(directory / "model.safetensors")
    for name, weight in saved.items():
        expected = 0.64 * step[0][name] + 0.16 * step[1][name] + 0.2 * step[2][name]
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(saved[name], step[2][name]) for name in saved)


def test_losses_are_means_over_as_many_steps_as_asked_for_also_after_an_interruption(tmp_path, finished):
    # The average of the weights, which is evaluated here after each step, changes no loss.
    values = bytes_recipe(tmp_path, log_every=5, evaluate_every=1)
    run(values | {"steps": 6})
    rows, single = run(values)["losses"], losses(finished[1])
    assert [row["step"] for row in rows] == [5, 10, 12]
    means = [sum(single[a:b]) / (b - a) for a, b in ((0, 5), (5, 10), (10, 12))]
    assert [row["loss"] for row in rows] == pytest.approx(means, rel=1e-12)


def test_a_step_has_the_gradient_of_the_mean_loss_of_its_global_batch(tmp_path):
    values = bytes_recipe(tmp_path, steps=1, save_every=1, max_grad_norm=None, label_smoothing=0.2)
    values["model"] |= {"hidden_dropout_prob": 0.0}
    run(values)
    recipe = build_recipe(values)
    torch.manual_seed(0)
    task = BytesTask(recipe)
    model = task.build_model().double()
    (batch,) = GlobalBatches(336, 8, 8, seed=0, start=0, stop=1)
    windows = [task.train[key] for key in batch]
    logits = model(input_ids=torch.stack([window["input_ids"] for window in windows])).logits
    labels = torch.cat([window["labels"] for window in windows])
    F.cross_entropy(logits.flatten(0, 1), labels, label_smoothing=0.2).backward()
    checkpoint = tmp_path / "run/checkpoints/step-000000001/optimizer.bin"
    state = torch.load(checkpoint, weights_only=True)["state"]
    parameters = [p for group in parameter_groups(model, 1e-3) for p in group["params"]]
    assert len(parameters) == len(state) == len(list(model.parameters()))
    # Gradients are sums over 8 x 16 tokens in float32; some that should be 0 are only rounding errors of such sums.
    largest = max(parameter.grad.abs().max().item() for parameter in parameters)
    rounding = 8 * 16 * torch.finfo(torch.float32).eps * largest
    for i, parameter in enumerate(parameters):
        expected = (0.1 * parameter.grad).float()
        torch.testing.assert_close(state[i]["exp_avg"], expected, rtol=1e-5, atol=0.1 * rounding)


def test_gradients_are_clipped_to_the_norm_of_the_recipe(tmp_path):
    run(bytes_recipe(tmp_path, steps=1, save_every=1, max_grad_norm=1e-3))
    optimizer = torch.load(tmp_path / "run/checkpoints/step-000000001/optimizer.bin", weights_only=True)
    moments = [state["exp_avg"].norm() for state in optimizer["state"].values()]  # 0.1 x gradient
    assert torch.stack(moments).norm().item() == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_exits_and_the_run_goes_on(tmp_path, finished, monkeypatch, number, code):
    values, training_pass = bytes_recipe(tmp_path), loop.Run.training_pass

    def interrupted(self, index):
        if (self.step, index) == (5, 1):
            os.kill(os.getpid(), number)
        return training_pass(self, index)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stopped:
        patched.setattr(loop.Run, "training_pass", interrupted)
        run(values)
    assert stopped.value.code == code
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").glob("*step-*"))][-1] == "step-000000005"
    for _ in range(2):  # the second time, nothing is left to do
        assert same_run(values, run(values), finished)


def test_an_evaluation_that_fails_does_not_lose_the_steps_before_it(tmp_path, finished, monkeypatch):
    values = bytes_recipe(tmp_path)

    def damaged(self, model, batch):
        raise ValueError("a damaged image")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="a damaged image"):
        patched.setattr(BytesTask, "scores", damaged)
        run(values)
    assert (tmp_path / "run/checkpoints/step-000000006").is_dir()
    results = run(values)
    assert results["evaluations"] == finished[1]["evaluations"][1:]
    assert same_run(values, results | {"evaluations": finished[1]["evaluations"]}, finished)


def test_a_run_that_is_stopped_says_how_to_continue_it(tmp_path, monkeypatch, capsys):
    values, update = bytes_recipe(tmp_path), loop.Run.update

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        update(self)

    monkeypatch.setattr(loop.Run, "update", interrupted)
    for told, resume in (("the same command resumes", None), ("leave out resume to continue", "step-000000001")):
        with pytest.raises(SystemExit):
            run(values | {"resume": resume and str(tmp_path / "run/checkpoints" / resume)})
        assert told in capsys.readouterr().out


def test_the_compiler_of_accelerate_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ValueError, match="recipes are compiled by compile=true"):
        run(bytes_recipe(tmp_path))


def test_bytes_that_are_no_text_have_no_bits_per_character(tmp_path):
    (tmp_path / "silence").write_bytes(bytes([0x80]) * 1000)
    values = bytes_recipe(tmp_path, data={"train": str(tmp_path / "silence"), "seq_len": 16}, steps=2)
    assert run(values)["metrics"]["test"].keys() == {"bits_per_byte"}


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step_and_rate(tmp_path):
    values = bytes_recipe(tmp_path, max_grad_norm=None, ema_decay=None, save_every=1)
    values |= {"optimizer": {"learning_rate": 1e30}, "schedule": {"name": "constant"}}
    with pytest.raises(
        ValueError, match=r"(loss is (nan|inf) at step \d+|weights are not finite after step \d+).* 1e\+30"
    ):
        run(values)
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    for path in kept:
        assert find_damage(path) is None
        assert all(weight.isfinite().all() for weight in load_file(path / "model.safetensors").values())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without a GPU")
def test_half_precision_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="mixed_precision='fp16' needs a GPU, and there is none: give 'bf16', or"):
        run(bytes_recipe(tmp_path, mixed_precision="fp16"))


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial"])
def test_a_schedule_goes_on_from_the_numbers_in_the_manifest(tmp_path, name):
    values = bytes_recipe(tmp_path, steps=8, save_every=3, schedule={"name": name, "warmup_steps": 2})
    values |= {"global_batch_size": 2, "evaluate_every": 100}
    whole = run(values | {"output_dir": str(tmp_path / "whole")})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Run, "report", lambda self, _: interrupt(self.step == 5))
        run(values)
    assert run(values)["losses"] == whole["losses"]  # losses are recorded with learning rates


def interrupt(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


def test_a_run_refuses_to_resume_with_another_recipe(tmp_path):
    values = bytes_recipe(tmp_path, steps=3)
    run(values)
    for changed, told in (
        ({"optimizer": {"learning_rate": 2e-2, "weight_decay": 0.1}}, "optimizer.learning_rate=0.01, and .* has 0.02"),
        ({"global_batch_size": 16}, "global_batch_size=8, and this run has 16"),
        ({"seed": 1}, "seed=0, and this run has 1"),
        ({"model": values["model"] | {"num_hidden_layers": 3}}, "model.num_hidden_layers=., and this run has 3"),
    ):
        with pytest.raises(ValueError, match=told):
            run(values | changed)


def test_resume_takes_the_checkpoint_that_it_is_given(tmp_path, finished):
    values = bytes_recipe(tmp_path, keep_checkpoints=9)
    run(values | {"steps": 9})
    other = values | {
        "output_dir": str(tmp_path / "other"),
        "resume": str(tmp_path / "run/checkpoints/step-000000003"),
    }
    assert same_run(other, run(other), finished)


def test_gpt2_trains_by_the_same_recipe(tmp_path):
    model = {"architecture": "gpt2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = bytes_recipe(tmp_path, model=model, gradient_checkpointing=True)
    results = run(values)
    assert losses(results)[-1] < losses(results)[0]
    config = AutoModelForCausalLM.from_pretrained(values["output_dir"]).config
    assert (config.vocab_size, config.n_positions, config.eos_token_id) == (258, 16, 256)


def test_a_run_goes_on_with_another_number_of_micro_batches(tmp_path):
    values = bytes_recipe(tmp_path, steps=8, save_every=1, micro_batch_size=8)
    values["model"] = values["model"] | {"hidden_dropout_prob": 0.0}
    whole = losses(run(values | {"output_dir": str(tmp_path / "whole")}))
    run(values | {"steps": 3})
    resumed = losses(run(values | {"micro_batch_size": 2}))
    assert resumed == pytest.approx(whole, abs=1e-5)


def test_a_damaged_newest_checkpoint_does_not_outlive_those_that_come_after_it(tmp_path):
    values = bytes_recipe(tmp_path, steps=7, save_every=2, keep_checkpoints=2)
    run(values)
    for newest in ("step-000000006", "step-000000007"):
        (tmp_path / "run/checkpoints" / newest / "model.safetensors").write_bytes(b"x")
    run(values | {"steps": 4})
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == [*(f"set-aside-step-00000000{i}" for i in (6, 7)), "step-000000002", "step-000000004"]


def test_a_run_refuses_to_resume_on_other_training_data(tmp_path):
    values = bytes_recipe(tmp_path, steps=3)
    run(values)
    content, other, moved = (tmp_path / "text").read_bytes(), tmp_path / "other", tmp_path / "moved"
    for changed in (content[::-1], content[:1234] + b"?" + content[1235:]):  # any byte counts, not only the first ones
        other.write_bytes(changed)
        with pytest.raises(ValueError, match="other training data"):
            run(values | {"data": values["data"] | {"train": str(other)}, "steps": 6})
    (tmp_path / "text").rename(moved)
    run(values | {"data": values["data"] | {"train": str(moved)}, "steps": 6})
