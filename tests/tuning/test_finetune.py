"""`aft-hf finetune`, called as users call it: images, teachers, and resumed runs."""

import json
import os
import re
import shutil
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture
from runs import Payload
from safetensors.torch import load_file
from tiny_models import image_model, vit_model
from transformers import AutoModelForImageClassification, trainer_jit_checkpoint
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.testing_utils import CaptureLogger

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.cli import app
from aft_hf.data import loading
from aft_hf.publishing.folder import files_to_upload
from aft_hf.running.ownership import RUN, owned
from aft_hf.tuning import fine_tuning
from aft_hf.tuning.evaluation import evaluate_classifier


pytestmark = pytest.mark.usefixtures("datasets_cache", "without_limits")

IMAGE_MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "kernel_size": 3, "image_size": 8}
QUIET = ["--disable_tqdm", "true", "--report_to", "none", "--save_strategy", "no", "--use_cpu", "true"]
BOTH = ["--do_train", "--do_eval"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of noisy images, red or blue."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, channel in (("blue", 2), ("red", 0)):
        (root / name).mkdir()
        for i in range(20):
            pixels = random.integers(0, 100, (10, 9, 3), dtype=np.uint8)
            pixels[..., channel] += 120
            Picture.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("classifier"), num_labels=2)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A ViT for images of twice the size."""
    directory = tmp_path_factory.mktemp("vit")
    vit_model(16).save_pretrained(directory)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory)
    return directory


def save_classifier(directory: Path, size: tuple[int, int] = (8, 8), **options) -> Path:
    image_model(**(IMAGE_MODEL | options)).save_pretrained(directory)
    ViTImageProcessorPil(size={"height": size[0], "width": size[1]}).save_pretrained(directory)
    return directory


def start(model: Path, out: Path, *options: object) -> dict[str, float]:
    """Run `aft-hf finetune` in this process."""
    words = ["--model_name_or_path", model, "--output-dir", out, *QUIET, *options]
    return app(["finetune", *map(str, words)], standalone_mode=False)


def tuner_with(monkeypatch, **methods) -> None:
    """Replace methods of the command's FineTuner; each gets the original method as its first argument after self."""
    kind = fine_tuning.FineTuner
    replaced = {name: partialmethod(method, getattr(kind, name)) for name, method in methods.items()}
    monkeypatch.setattr(fine_tuning, "FineTuner", type("Tuner", (kind,), replaced))


def losses(out: Path) -> list[float]:
    """The losses of a run that logged every step."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def parquet(path: Path, labels: list, feature=None, image=None) -> Path:
    """Images whose brightness grows with the index of the row, and labels."""
    rows = {"image": [Picture.new("RGB", (8, 8), (20 * i,) * 3) for i in range(len(labels))], "label": labels}
    features = Features(image=Image(), label=feature or Value("string"))
    Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


# Images


def test_an_aft_conv_learns_two_colours_from_a_folder(classifier, images, tmp_path):
    options = ["--train", images, "--validation_share", 0.25, "--learning_rate", 1e-2, "--position_bias_scale", 20]
    options += ["--augmentation", "crop", "--eval_on_start", "true", "--eval_strategy", "epoch"]
    metrics = start(classifier, tmp_path, *BOTH, "--num_train_epochs", 5, *options)
    assert metrics["eval_accuracy"] == 1.0
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert model.config.id2label == {0: "blue", 1: "red"}
    assert json.loads((tmp_path / "all_results.json").read_text())["eval_accuracy"] == 1.0
    again = start(tmp_path, tmp_path / "again", "--do_eval", "--validation", images)
    assert again["eval_accuracy"] == 1.0


@pytest.mark.parametrize("id2label", [{0: "blue", 1: "red"}, {0: "red", 1: "blue"}, dict(enumerate("abcde"))], ids=str)
def test_the_classifier_is_kept_where_the_number_of_classes_is_and_new_where_it_is_not(id2label, images, tmp_path):
    options = {"id2label": id2label, "label2id": {name: number for number, name in id2label.items()}}
    model = save_classifier(tmp_path / "before", size=(8, 12), image_size=[8, 12], **options)
    options = ["--do_train", "--train", images, "--max_steps", 1, "--learning_rate", 0, "--augmentation", "crop"]
    start(model, tmp_path / "after", *options)
    before, after = (AutoModelForImageClassification.from_pretrained(tmp_path / name) for name in ("before", "after"))
    if len(id2label) == 2:  # the order is that of the model, if it knows the classes
        assert after.config.id2label == id2label
        torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
    else:
        assert after.config.id2label == {0: "blue", 1: "red"} and after.classifier.weight.shape == (2, 16)
        assert torch.equal(after.aft.layers[0].mixer.v_proj.weight, before.aft.layers[0].mixer.v_proj.weight)


def test_a_model_keeps_the_names_of_its_classes_if_the_labels_are_numbers(images, tmp_path, caplog):
    names = {0: "red", 1: "blue"}
    options = {"id2label": names, "label2id": {"red": 0, "blue": 1}, "output_hidden_states": True}
    model = save_classifier(tmp_path / "before", **options)
    numbers = parquet(tmp_path / "numbers.parquet", [0, 1] * 4, Value("int64"))
    start(model, tmp_path / "after", "--do_train", "--train", numbers, "--max_steps", 1, "--validation_share", 0)
    config = AutoModelForImageClassification.from_pretrained(tmp_path / "after").config
    assert config.id2label == names and config.output_hidden_states
    assert "classes are matched by number: the data has the 2 classes ['0', '1']" in caplog.text


@pytest.mark.parametrize("names", [["0", "1"], ["7", "12"]], ids=str)
def test_declared_names_of_classes_replace_those_of_the_model(names, tmp_path):
    model = save_classifier(tmp_path / "before", id2label={0: "red", 1: "blue"}, label2id={"red": 0, "blue": 1})
    rows = parquet(tmp_path / "numbers.parquet", [0, 1] * 4, ClassLabel(names=names))
    start(model, tmp_path / "after", "--do_train", "--train", rows, "--max_steps", 1, "--validation_share", 0)
    actual = AutoModelForImageClassification.from_pretrained(tmp_path / "after").config.id2label
    assert actual == dict(enumerate(names))


def test_an_evaluation_alone_uses_the_classes_of_the_model(classifier, images, tmp_path):
    names = {0: "red", 1: "green", 2: "blue"}  # the images are red and blue
    labels = {name: number for number, name in names.items()}
    model = save_classifier(tmp_path / "model", id2label=names, label2id=labels, output_hidden_states=True)
    actual = start(model, tmp_path / "out", "--do_eval", "--validation", images)
    expected = evaluate_classifier(
        AutoModelForImageClassification.from_pretrained(model),
        ViTImageProcessorPil.from_pretrained(model),
        loading.load_local(images),
    )
    assert actual["eval_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    with pytest.raises(
        ValueError, match=r"are not among the 2 of the model: .*give data with the model's classes \(.*'cat'"
    ):
        other = save_classifier(tmp_path / "other", id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
        start(other, tmp_path / "out", "--do_eval", "--validation", images)


def test_the_results_of_an_earlier_training_do_not_outlive_it(classifier, images, tmp_path):
    options = ["--train", images, "--max_steps", 1]
    start(classifier, tmp_path, *BOTH, *options)
    start(classifier, tmp_path, "--do_train", *options, "--learning_rate", 1e-2)
    assert not [name for name in json.loads((tmp_path / "all_results.json").read_text()) if name.startswith("eval")]


def test_labels_mean_the_same_classes_in_files_that_number_them_otherwise(classifier, tmp_path):
    parquet(tmp_path / "train.parquet", [0, 1] * 4, ClassLabel(names=["dark", "light"]))
    # The same images and class names, numbered in another order.
    parquet(tmp_path / "validation.parquet", [1, 0] * 4, ClassLabel(names=["light", "dark"]))
    parquet(tmp_path / "strings.parquet", ["dark", "light"] * 4)
    results = []
    for validation in ("train", "validation", "strings"):
        paths = ["--train", tmp_path / "train.parquet", "--validation", tmp_path / f"{validation}.parquet"]
        options = [*BOTH, *paths, "--max_steps", 1, "--learning_rate", 0]
        results.append(start(classifier, tmp_path / validation, *options)["eval_loss"])
    assert results[0] == results[1] == results[2]


def test_a_vit_for_larger_images_teaches(classifier, vit, images, tmp_path):
    options = [*BOTH, "--train", images, "--max_steps", 2, "--teacher", vit, "--distillation", "hard"]
    smoothed = ["--label_smoothing_factor", 0.1, "--gradient_accumulation_steps", 2, "--augmentation", "resized_crop"]
    assert np.isfinite(start(classifier, tmp_path, *options, *smoothed)["train_loss"])


@pytest.mark.parametrize("option", ["--eval_do_concat_batches=false", "--batch_eval_metrics=true"])
def test_the_accuracy_is_that_of_all_batches_however_trainer_collects_them(option, classifier, images, tmp_path):
    options = ["--do_eval", "--validation", images, "--per_device_eval_batch_size", 3]
    metrics = start(classifier, tmp_path, *options, option)
    assert metrics["eval_accuracy"] == start(classifier, tmp_path, *options)["eval_accuracy"]


# Held-out data


@pytest.fixture
def given(monkeypatch):
    """The number of training and evaluation samples that the last Trainer was given, and its model's attention."""
    seen = []

    def noted(self, original, model, train_dataset, eval_dataset, **options):
        sizes = len(train_dataset), None if eval_dataset is None else len(eval_dataset)
        seen[:] = *sizes, model.config._attn_implementation
        original(self, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset, **options)

    tuner_with(monkeypatch, __init__=noted)
    return seen


def test_the_number_of_held_out_rows_is_logged_and_a_share_of_0_holds_out_none(vit, images, given, tmp_path):
    options = ["--train", images, "--max_steps", 1]
    with CaptureLogger(loading.logger) as log:
        start(vit, tmp_path, "--do_train", *options)
    assert given == [38, 2, "sdpa"] and "2 of the 40 training samples are held out" in log.out
    with CaptureLogger(loading.logger) as log:
        start(vit, tmp_path, "--do_train", *options, "--validation_share", 0, "--attn-implementation", "eager")
    assert given == [40, None, "eager"] and log.out == ""
    start(vit, tmp_path, "--do_train", *options, "--max_train_samples", 7, "--max-eval-samples", 1)
    assert given[:2] == [7, 1]
    with pytest.raises(ValueError, match="no validation data: give --validation, or a --validation-share above 0"):
        start(vit, tmp_path, *BOTH, *options, "--validation_share", 0)


# Resuming


@pytest.mark.parametrize(("kind", "every"), [("aft", 3), ("vit", 2)])  # steps; an epoch has 3
def test_a_resumed_training_equals_an_uninterrupted_one(kind, every, vit, images, tmp_path):
    model = vit if kind == "vit" else save_classifier(tmp_path / "model", num_labels=2, hidden_dropout_prob=0.2)
    options = [*BOTH, "--train", images, "--validation_share", 0.4, "--num_train_epochs", 3, "--logging_steps", 1]
    options += ["--augmentation", "crop", "--save_strategy", "steps", "--save_steps", every]
    options += ["--eval_strategy", "epoch", "--resume_from_checkpoint", "true"]
    start(model, tmp_path / "whole", *options)
    whole = AutoModelForImageClassification.from_pretrained(tmp_path / "whole").state_dict()

    def stopped(self, original, *arguments):
        original(self, *arguments)
        raise RuntimeError("as if it were killed")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        tuner_with(patch, _save_checkpoint=stopped)
        start(model, tmp_path / "parts", *options)
    for name in ("checkpoint-0", "checkpoint-100"):
        (tmp_path / "parts" / name).mkdir()  # the last one as of a run that was stopped while writing
    (tmp_path / "parts" / "checkpoint-0" / "trainer_state.json").write_text("{}")  # not the newest one
    torch.rand(7)
    start(model, tmp_path / "parts", *options)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 9
    parts = AutoModelForImageClassification.from_pretrained(tmp_path / "parts").state_dict()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_the_best_checkpoint_of_a_vit_is_loaded_at_the_end(vit, images, tmp_path):
    options = [*BOTH, "--train", images, "--num_train_epochs", 3, "--eval_strategy", "epoch"]
    options += ["--save_strategy", "epoch"]
    options += ["--load_best_model_at_end", "true", "--metric_for_best_model", "eval_loss", "--learning_rate", 1e-3]
    start(vit, tmp_path, *options, "--greater_is_better", "true")  # the first checkpoint, before the model has learned
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["best_global_step"] < state["global_step"]
    actual, best = (load_file(path / "model.safetensors") for path in (tmp_path, Path(state["best_model_checkpoint"])))
    assert actual.keys() == best.keys() and all(torch.equal(actual[name], best[name]) for name in best)


def test_a_second_run_in_the_same_directory_is_refused(classifier, images, tmp_path):
    options = ["--do_train", "--train", images, "--max_steps", 1]
    with owned(tmp_path), pytest.raises(OSError, match=f"^{tmp_path} is in use by process {os.getpid()} on "):
        start(classifier, tmp_path, *options)
    start(classifier, tmp_path, *options)  # the directory is free again
    assert RUN in files_to_upload(tmp_path)[1]  # not to be published


@pytest.fixture(scope="module")
def checkpoint(classifier, images, tmp_path_factory):
    """The checkpoint after one of two steps."""
    out = tmp_path_factory.mktemp("run")
    start(classifier, out, "--do_train", "--train", images, "--max_steps", 1, "--save_strategy", "epoch")
    return out / "checkpoint-1"


PICKLES = ["optimizer.pt", "scheduler.pt", "rng_state.pth"]
CUT = [*PICKLES, "trainer_state.json", "model.safetensors"]
SAVED = '{"global_step": 1, "train_batch_size": 8, "stateful_callbacks": %s}'
DAMAGES = {f"{name} is cut": (name, lambda path: path.write_bytes(path.read_bytes()[:40])) for name in CUT}
DAMAGES |= {f"{name} is empty": (name, lambda path: path.write_bytes(b"")) for name in CUT}
DAMAGES |= {f"{name} is missing": (name, Path.unlink) for name in ("optimizer.pt", "scheduler.pt")}
DAMAGES |= {
    f"trainer_state.json holds {text[:20]}": ("trainer_state.json", partial(Path.write_text, data=text))
    for text in (
        *("[]", "{}", '{"global_step": -1}', '{"global_step": 1' + "0" * 400 + "}"),
        *(SAVED % text for text in ("5", '{"aft_hf": {"seed": {"a": [1]}}}')),
    )
}


@pytest.mark.parametrize("name", [*PICKLES, "training_args.bin"])
def test_no_file_of_a_checkpoint_runs_code(name, classifier, images, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    torch.save({"state": Payload(tmp_path / "marker")}, tmp_path / "checkpoint-1" / name)
    options = ["--do_train", "--train", images, "--max_steps", 2, "--resume_from_checkpoint", "true"]
    if name == "training_args.bin":  # which is never read
        start(classifier, tmp_path, *options)
    else:
        with pytest.raises(ValueError, match=f"checkpoint-1/{name} is not read: .*it names posix.mkdir") as stopped:
            start(classifier, tmp_path, *options)
        assert "\n" not in str(stopped.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_of_trainer_is_refused_in_one_line(damage, classifier, images, checkpoint, tmp_path):
    name, change = DAMAGES[damage]
    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-1"))
    change(copy / name)
    options = ["--do_train", "--train", images, "--max_steps", 2, "--resume_from_checkpoint", "true"]
    with pytest.raises((ValueError, OSError), match="checkpoint-1") as stopped:
        start(classifier, tmp_path, *options)
    assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 1000


CHANGES = {
    "batch size=8, and this run has 4": ["--per_device_train_batch_size", 4],
    "batch size=8, and this run has 16": ["--gradient_accumulation_steps", 2],
    "seed=42": ["--seed", 1],
    "learning_rate=5e-05": ["--learning_rate", 1e-3],
    "optim='adamw_torch_fused'": ["--optim", "adafactor"],
    "augmentation='None'": ["--augmentation", "shift"],
    "teacher's weights=": ["--teacher", "{vit}"],
    "bf16=False": ["--bf16", "true"],
    "dataloader_drop_last=False": ["--dataloader_drop_last", "true"],
    "position_bias_scale=1.0": ["--position_bias_scale", 2],
    "model.hidden_dropout_prob=0.0": ["--model_name_or_path", "{other}"],
    "other training data": ["--max_train_samples", 37],
    "": ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2, "--num_train_epochs", 1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_resumes_only_with_the_options_of_its_checkpoint(change, classifier, vit, images, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    save_classifier(tmp_path / "other", num_labels=2, hidden_dropout_prob=0.5)
    options = [str(option).format(vit=vit, other=tmp_path / "other") for option in CHANGES[change]]
    options += ["--do_train", "--train", images, "--max_steps", 2, "--resume_from_checkpoint", "true"]
    if not change:
        start(classifier, tmp_path, *options)
        return
    with pytest.raises(
        ValueError, match=f"checkpoint-1 was made with {re.escape(change)}.*: give the same, or"
    ) as told:
        start(classifier, tmp_path, *options)
    assert "\n" not in str(told.value)


def test_a_run_that_is_stopped_with_enable_jit_checkpoint_saves_a_checkpoint_to_resume_from(
    classifier, images, tmp_path, monkeypatch
):
    callback = trainer_jit_checkpoint.JITCheckpointCallback
    end = callback.on_step_end

    def request_and_end(self, *arguments, **options):  # as after a SIGTERM, and the seconds that transformers waits
        self.jit_manager.is_checkpoint_requested = True
        end(self, *arguments, **options)

    monkeypatch.setattr(callback, "on_step_end", request_and_end)
    options = ["--do_train", "--train", images, "--max_steps", 2, "--enable_jit_checkpoint"]
    start(classifier, tmp_path, *options)
    monkeypatch.undo()
    (state,) = tmp_path.glob("checkpoint-*/trainer_state.json")
    assert fine_tuning.IDENTITY in json.loads(state.read_text())["stateful_callbacks"]
    start(classifier, tmp_path, *options[:-1], "--resume_from_checkpoint", "true")
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2


def test_a_run_resumes_only_with_a_teacher_of_the_same_config(classifier, vit, images, tmp_path):
    options = ["--do_train", "--train", images, "--max_steps", 1, "--save_strategy", "steps", "--teacher"]
    start(classifier, tmp_path, *options, vit)
    shutil.copytree(vit, tmp_path / "teacher")
    config = json.loads((vit / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"was made with teacher\.layer_norm_eps="):
        start(classifier, tmp_path, *options, tmp_path / "teacher", "--resume_from_checkpoint", "true")


def repainted(folder):
    path = folder / "red" / "0.png"
    Picture.open(path).rotate(180).save(path)


def swapped(folder):
    for old, new in (("red", "x"), ("blue", "red"), ("x", "blue")):
        (folder / old).rename(folder / new)


DATA_CHANGES = {
    "an image": repainted,
    "a label": lambda folder: (folder / "red" / "1.png").rename(folder / "blue" / "30.png"),
    "all labels": swapped,
    "the name of a class": lambda folder: (folder / "red").rename(folder / "scarlet"),
    "one image less": lambda folder: (folder / "red" / "7.png").unlink(),
}


@pytest.mark.parametrize("change", [*DATA_CHANGES, "none"])
def test_a_run_resumes_only_on_the_data_of_its_checkpoint_wherever_they_lie(
    change, classifier, images, checkpoint, tmp_path
):
    shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    shutil.copytree(images, tmp_path / "images")
    options = ["--do_train", "--train", tmp_path / "images", "--max_steps", 2, "--resume_from_checkpoint", "true"]
    if change == "none":
        start(classifier, tmp_path, *options)
        return
    DATA_CHANGES[change](tmp_path / "images")
    with pytest.raises(ValueError, match="checkpoint-1 was made with other training data: give the same, or another"):
        start(classifier, tmp_path, *options)


def test_a_checkpoint_without_a_record_of_its_data_is_resumed_with_a_warning(classifier, images, checkpoint, tmp_path):
    state = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint-1")) / "trainer_state.json"
    content = json.loads(state.read_text())
    del content["stateful_callbacks"]["aft_hf"]
    state.write_text(json.dumps(content))
    options = ["--do_train", "--train", images, "--resume_from_checkpoint", "true", "--save_strategy", "steps"]
    with CaptureLogger(fine_tuning.logger) as log:
        start(classifier, tmp_path, *options, "--max_steps", 2, "--save_steps", 1)
    assert "checkpoint-1 does not record its training data and options, so they are not compared" in log.out
    with CaptureLogger(fine_tuning.logger) as log:
        start(classifier, tmp_path, *options, "--max_steps", 3)
    assert log.out == ""


NAMES = ["trainer_state.json", "train_results.json", "eval_results.json", "all_results.json", "config.json"]
NAMES += ["README.md", "checkpoint-1", "checkpoint-1/optimizer.pt", "checkpoint-1/a/b", "_run", "runs"]


@pytest.mark.parametrize("kind", ["a file", "a directory", "nothing"])
@pytest.mark.parametrize("name", NAMES)
def test_no_link_in_the_output_directory_is_written_through(name, kind, classifier, images, tmp_path):
    target, path = tmp_path / "target", tmp_path / "out" / name
    if kind == "a file":
        target.write_text("mine")
    elif kind == "a directory":
        target.mkdir()
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(OSError, match=f"^{path}: is a link to {target}; remove it, or give another output directory"):
        start(classifier, tmp_path / "out", "--do_eval" if kind == "nothing" else "--do_train", "--train", images)
    assert not target.is_file() or target.read_text() == "mine"
    assert target.exists() == (kind != "nothing") and not (target.is_dir() and list(target.iterdir()))


def test_other_links_to_directories_may_lie_in_the_output_directory(classifier, images, tmp_path):
    (tmp_path / "latest").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    start(classifier, tmp_path / "link", "--do_train", "--train", images, "--max_steps", 1)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 10_000, "{'a': 1}", "\ufeff{}"])
def test_results_that_cannot_be_extended_are_found_before_the_training(content, classifier, images, tmp_path):
    (tmp_path / "all_results.json").write_text(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/all_results.json: "):
        start(classifier, tmp_path, "--do_train", "--train", images, "--max_steps", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["all_results.json"]


@pytest.mark.parametrize("name", ["all_results.json", "train_results.json", "trainer_state.json"])
def test_a_pipe_in_place_of_a_result_is_found_before_the_training(name, classifier, images, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"{name}: exists and is not a regular file"):
        start(classifier, tmp_path, "--do_train", "--train", images, "--max_steps", 1)


def test_a_run_that_begins_beside_a_checkpoint_says_so(classifier, images, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    with CaptureLogger(fine_tuning.logger) as log:
        start(classifier, tmp_path, "--do_train", "--train", images, "--max_steps", 1)
    assert f"begins at step 0 although {tmp_path}/checkpoint-1 exists: --resume-from-checkpoint true" in log.out


def test_a_disk_that_is_full_at_the_end_leaves_the_model_that_was_there(classifier, images, tmp_path, monkeypatch):
    options = ["--do_train", "--train", images, "--max_steps", 1]
    start(classifier, tmp_path, *options)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def full(arguments, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.trainer.torch.save", full)  # the last file of a model
    with pytest.raises(OSError, match=rf"cannot write to {tmp_path} \(.*No space left.*files in it are unchanged"):
        start(classifier, tmp_path, *options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files
    assert not list(tmp_path.glob(".*"))


# Options and errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "{images}"], "nothing to do"),
        (["--do_train"], "give either a dataset"),
        (["--do_train", "--validation", "{images}"], "no training data"),
        (["--do_train", "--train", "{images}", "--image_column", "label"], "has no image in column 'label'"),
        (["--do_train", "--train", "{images}", "--learning_rates", "1"], "not used"),
        (["--do_train", "--train", "{images}", "--augmentation", "flip"], "augmentation must be one of"),
        (["--do_train", "--train", "{images}", "--fp16"], "--fp16 needs a GPU"),
        (["--do_eval", "--train", "{images}", "--validation_share", "0"], "there is no validation data"),
        (["--do_train", "--train", "{images}", "--distillation", "hard"], "--distillation needs --teacher"),
        (["--do_train", "--train", "{images}", "--output_dir", "{images}/out"], "lies in the data"),
    ],
)
def test_invalid_options_of_finetune_are_refused_by_name(options, message, classifier, images, tmp_path):
    with pytest.raises(ValueError, match=message):
        start(classifier, tmp_path, *(option.format(images=images) for option in options))


def test_a_language_model_is_refused_with_the_command_that_trains_it(images, tmp_path):
    AFTForCausalLM(AFTConfig(aft_type="simple", hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is no image classifier; .* model.pretrained of a recipe to aft-hf train"):
        start(tmp_path, tmp_path / "out", "--do_train", "--train", images)


def test_errors_of_options_are_one_line_without_the_list_of_all_options(tmp_path, run_command):
    options = ["--do_train", "--model_name_or_path", "./missing", "--train", "x.txt", "--output_dir", tmp_path]
    done = run_command("aft-hf", "finetune", *options)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("aft-hf: ") and "./missing" in done.stderr
    for option, value in {"--max-train-samples": 0, "--distillation": "medium"}.items():
        done = run_command("aft-hf", "finetune", *options, option, value)
        assert done.returncode == 2 and option in done.stderr
    done = run_command("aft-hf", "finetune", *options, "--weight_decay", "much")  # an option of TrainingArguments
    assert done.returncode == 2 and done.stderr.count("\n") <= 2 and "weight_decay" in done.stderr
