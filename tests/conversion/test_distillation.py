"""Tests of distillation without labels: losses, interruption and resumption, and its record in report and card."""

import itertools
import json
import shutil
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import OPTIONS, SIZES, randomize, save_backbone
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTForImageClassification, convert_deit
from aft_hf.conversion import REPORT_NAME, ConversionReport, read_source, save_converted, saving, verify_conversion
from aft_hf.conversion import distillation as module
from aft_hf.conversion.distillation import distill, rate, student_losses
from aft_hf.errors import InputError
from aft_hf.publishing import write_card
from aft_hf.running.checkpoints import read_manifest
from aft_hf.running.ownership import RUN, join_processes, owned
from aft_hf.running.steps import StopSignal


pytestmark = pytest.mark.usefixtures("without_limits")


CHECKPOINTS = ".out-distillation"


@pytest.fixture(scope="module")
def images():
    """Images of a colored square on a background of another color."""
    random, pictures = np.random.default_rng(0), []
    for _ in range(24):
        pixels = np.broadcast_to(random.integers(256, size=3), (32, 32, 3)).astype(np.uint8)
        row, column = random.integers(16, size=2)
        pixels[row : row + 16, column : column + 16] = random.integers(256, size=3)
        pictures.append(Image.fromarray(pixels))
    return pictures


@pytest.fixture
def source(vit):
    return read_source(vit)


def pixels_of(source, images):
    return source.image_processor(list(images), return_tensors="pt")["pixel_values"]


def divergence(model, source, images):
    """Return KL(teacher || student) in nats, from the outputs of both models."""
    pixels = pixels_of(source, images)
    with torch.no_grad():
        expected = source.to_transformers().float()(pixel_values=pixels).logits.log_softmax(-1)
        actual = model.float()(pixel_values=pixels).logits.log_softmax(-1)
    return (expected.exp() * (expected - actual)).sum(-1).mean().item()


def converted(source, **options):
    torch.manual_seed(0)
    return convert_deit(source, **{**OPTIONS, **options})[0]


@pytest.mark.parametrize("options", ({}, {"aft_type": "full"}, {"image_size": 48}), ids=str)
def test_a_distilled_model_computes_nearly_what_its_teacher_does(source, images, options):
    model = converted(source, **options)
    resized = [image.resize((48, 48)) for image in images] if "image_size" in options else images
    before = None if "image_size" in options else divergence(model, source, images)
    done = distill(model, source, resized, steps=60, batch_size=8, learning_rate=6e-3, augmentation="none")
    assert done["steps"] == 60 and done["images"] == 24 and len(done["hidden_state_errors"]) == 2
    assert not model.training and model.dtype == torch.float32
    assert before is None or divergence(model, source, images) < 0.3 * before
    assert done["agreement"] > 0.7 and done["divergence"] < 0.5


@pytest.mark.parametrize("size", ((64, 32), (32, 32)))
def test_a_teacher_of_images_of_another_shape_sees_those_of_the_model(images, size):
    teacher = read_source(randomize(ViTForImageClassification(ViTConfig(**SIZES | {"image_size": (32, 64)}))))
    done = distill(converted(teacher, image_size=size), teacher, images, steps=1, batch_size=8)
    assert done["steps"] == 1


def test_a_source_of_another_size_computes_what_transformers_does(source):
    pixels = torch.randn(2, 3, 48, 40)
    expected = source.to_transformers()(pixel_values=pixels, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(source.resized((48, 40)).to_transformers()(pixel_values=pixels).logits, expected)


@pytest.mark.parametrize("aft_type", ("conv", "full"))
def test_the_losses_are_those_of_the_outputs_of_both_models(source, images, aft_type):
    student, pixels = converted(source, aft_type=aft_type), pixels_of(source, images[:4])
    teacher = source.to_transformers()(pixel_values=pixels, output_hidden_states=True)
    states = [state[:, 0 if aft_type == "full" else 1 :] for state in teacher.hidden_states[:-1]]
    kl, errors, agreement = student_losses(student, pixels, states, teacher.logits)
    outputs = student(pixel_values=pixels, output_hidden_states=True)
    expected = [((x - state) ** 2).mean() / state.var() for x, state in zip(outputs.hidden_states, states)]
    torch.testing.assert_close(errors, torch.stack(expected))
    log_p = teacher.logits.log_softmax(-1)
    torch.testing.assert_close(kl, (log_p.exp() * (log_p - outputs.logits.log_softmax(-1))).sum(-1).mean())
    assert agreement == (outputs.logits.argmax(-1) == teacher.logits.argmax(-1)).float().mean()


def run(source, images, **options):
    model = converted(source)
    done = distill(model, source, images, batch_size=8, **{"steps": 8, **options})
    return model.state_dict(), done


def stop_at(monkeypatch, step):
    """Simulate a SIGTERM in a step of the next distillation."""
    calls = itertools.count(1)
    monkeypatch.setattr(StopSignal, "agreed", lambda self: 15 if next(calls) == step else 0)


def test_checkpoints_of_another_conversion_are_refused(source, images, tmp_path, monkeypatch):
    same = {"steps": 2, "batch_size": 8, "checkpoints": tmp_path}
    stop_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        distill(converted(source), source, images, **same)
    monkeypatch.undo()
    bias = source.parts["classifier.bias"]
    changed = source.parts | {"classifier.bias": bias._replace(tensor=bias.tensor + 1e-3)}
    rotated = [*images[:3], images[3].transpose(Image.Transpose.ROTATE_90), *images[4:]]
    for told, teacher, pictures, changes in (
        ("source_tensors", replace(source, parts=changed), images, {}),
        ("images", source, rotated, {}),
        ("learning_rate", source, images, {"learning_rate": 1e-4}),
    ):
        with pytest.raises(ValueError, match=f"was made with {told}=.*: give the same, or remove"):
            distill(converted(source), teacher, pictures, **same | changes)


def test_save_converted_refuses_checkpoints_of_another_conversion(vit, images, tmp_path, monkeypatch):
    stop_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        save(vit, tmp_path / "out", images)
    monkeypatch.undo()
    for option in ("seed", "position_bias_multiplier"):
        told = rf"was made with conversion\.{option}=.*: give the same, or remove"
        with pytest.raises(ValueError, match=told):
            save(vit, tmp_path / "out", images, **{option: 1})


def test_a_distillation_goes_on_from_a_source_that_was_moved(vit, images, tmp_path, monkeypatch, capsys):
    distillation = {"images": images[:8], "batch_size": 4, "steps": 2}
    options = {"init": "attention", "images": images[:8], "distillation": distillation, **OPTIONS}
    stop_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        save_converted(vit, tmp_path / "out", **options)
    monkeypatch.undo()
    (checkpoint,) = (tmp_path / CHECKPOINTS).glob("step-*")
    recipe = read_manifest(checkpoint).recipe
    # The keys of earlier versions, whose checkpoints are resumed, too.
    assert recipe["conversion"]["seed"] == 0 and not {"images", "source"} & {*recipe["conversion"]}
    assert "conversion" not in recipe["model"]
    save_converted(shutil.copytree(vit, tmp_path / "moved"), tmp_path / "out", **options)
    assert f"resuming from {checkpoint}" in capsys.readouterr().out


def test_the_learning_rate_rises_and_falls_to_0():
    rates = [rate(i / 1000) for i in range(1001)]
    assert max(rates) == rates[100] == pytest.approx(1.0) and rates[1000] == pytest.approx(0.0, abs=1e-9)
    assert 0 < rates[0] < 0.02
    assert rates[:101] == sorted(rates[:101]) and rates[100:] == sorted(rates[100:], reverse=True)


def test_minutes_are_a_budget_that_interrupted_runs_share(source, images, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0 * next(clock))  # a step takes 10 seconds
    _, done = run(source, images, steps=None, minutes=1)
    assert done["minutes"] >= 1 and done["steps"] <= 6
    stop_at(monkeypatch, 3)
    with pytest.raises(SystemExit):
        run(source, images, steps=None, minutes=1, checkpoints=tmp_path)
    monkeypatch.undo()
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0 * next(clock))
    _, again = run(source, images, steps=None, minutes=1, checkpoints=tmp_path)
    assert again["steps"] == done["steps"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 1}, "give either steps or minutes"),
        ({"steps": 0}, "steps=0: must be greater than 0"),
        ({"steps": np.int64(2)}, "steps=np.int64.2.: must be a valid integer"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: must be"),
        ({"augmentation": "rotate"}, "augmentation='rotate': must be 'none', 'shift'"),
    ],
)
def test_invalid_options_of_a_distillation_are_refused_by_name(source, images, options, message):
    with pytest.raises(ValueError, match=message) as error:
        run(source, images, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("probability", "fewest", "most"), [(0.0, 0, 0), (0.5, 20, 60), (1.0, 80, 80)])
def test_each_image_is_augmented_with_a_probability_for_teacher_and_student(
    source, images, monkeypatch, probability, fewest, most
):
    augmented, agreement = [], []
    teacher = source.to_transformers()

    def recorded(student, pixels, states, logits):
        torch.testing.assert_close(logits, teacher(pixels).logits)
        augmented.append((pixels == 0).all((1, 2, 3)).sum())  # of 8 images
        losses = student_losses(student, pixels, states, logits)
        agreement.append(losses[2])
        return losses

    monkeypatch.setattr(module, "student_losses", recorded)
    monkeypatch.setattr(module, "build_augmentation", lambda name, size: torch.zeros_like)
    _, done = run(source, images, steps=10, augmentation_probability=probability)
    assert done["agreement"] == pytest.approx(float(torch.stack(agreement).mean()), abs=1e-5)  # a plain mean
    assert fewest <= sum(augmented) <= most and any(0 < each < 8 for each in augmented) == (fewest < most)


def test_sources_without_one_choice_of_the_same_classes_and_no_images_are_refused(source, images, tmp_path):
    save_backbone(tmp_path / "headless")
    headless, model = read_source(tmp_path / "headless"), converted(source)
    with pytest.raises(ValueError, match="no classifier"):
        distill(model, headless, images, steps=1)
    with pytest.raises(ValueError, match="no images"):
        run(source, [])
    for name, value in (("problem_type", "multi_label_classification"), ("num_labels", 1)):
        config = deepcopy(source.config)
        setattr(config, name, value)
        with pytest.raises(ValueError, match="chooses one of several classes"):
            distill(model, replace(source, config=config), images, steps=1)
    config = deepcopy(model.config)
    config.num_labels += 1
    with pytest.raises(ValueError, match="both need the same classes"):
        distill(AFTForImageClassification(config), source, images, steps=1)


def test_a_loss_that_is_not_finite_stops_the_distillation(source, images):
    model = converted(source)
    model.classifier.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="not finite after"):
        distill(model, source, images, steps=2, batch_size=8)


def test_report_and_card_say_what_was_done(vit, images, tmp_path):
    out = tmp_path / "out"
    save_converted(vit, out, distillation={"images": images, "steps": 3, "batch_size": 8}, **OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"vit", "out"}
    saved = ConversionReport.model_validate_json((out / REPORT_NAME).read_text())
    done = saved.options["distillation"]
    assert (done["images"], done["steps"], done["batch_size"], done["seed"]) == (24, 3, 8, 0)
    assert saved.with_status("copied") and verify_conversion(vit, out) == 0
    sentence = "distilled from its source on 24 unlabeled images in 3 steps"
    assert sentence in write_card(out).read_text() and "not recorded here" not in write_card(out).read_text()
    # Any training that loads and saves the model keeps the record, without the report.
    model = AFTForImageClassification.from_pretrained(out)
    model.classifier.bias.data += 1
    model.save_pretrained(tmp_path / "trained")
    text = write_card(tmp_path / "trained").read_text()
    assert "Converted from `vit`." in text and sentence in text and REPORT_NAME not in text
    assert "**Training after the conversion is not recorded here.**" in text


def save_images(images, path):
    path.mkdir()
    for i, image in enumerate(images):
        image.save(path / f"{i}.png")
    return path


def test_a_distillation_that_cannot_begin_is_refused_before_the_fit_to_the_attention(vit, images, tmp_path):
    def untouched():
        raise AssertionError("the images were read")
        yield

    fit = {**OPTIONS, "init": "attention", "images": untouched()}
    for wrong, message in (({"batch_size": 0}, "batch_size"), ({"images": []}, "no images to distill")):
        distillation = {"images": images, "steps": 1, **wrong}
        with pytest.raises(ValueError, match=message):
            save_converted(vit, tmp_path / "out", distillation=distillation, **fit)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--distill"], "attention"),
        (["--distill", "--init", "paper"], "paper"),
        ([], "paper"),
    ],
)
def test_a_distillation_of_conv_starts_from_the_attention_by_default(
    vit, images, tmp_path, run_command, options, expected
):
    # The processor of another size is resized for the fit to the attention, too.
    ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(vit)
    budget = ["--steps", 1, "--batch-size", 8] if options else []
    folder, sizes = save_images(images, tmp_path / "images"), ["--kernel-size", 3, "--num-heads", 4]
    given = [*sizes, *options, *budget, *(["--images", folder] if options else [])]
    done = run_command("aft-hf", "convert", vit, tmp_path / "out", *given)
    assert done.returncode == 0, done.stderr
    told = f"aft-hf finetune --do_train --do_eval --model_name_or_path {tmp_path / 'out'} --train DATA --teacher {vit}"
    assert f"{told} --learning_rate 1e-3" in done.stdout
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())["options"]
    assert report["init"] == expected and ("distillation" in report) == bool(options)


# --------------------------------------------------------------------------------------------- saving the result


def save(vit, out, images, **options):
    """Convert and distill into a directory, and return the weights and the record of the distillation."""
    distillation = {"images": images[:8], "batch_size": 4, **(options.pop("budget", None) or {"steps": 3})}
    _, report = saving.save_converted(vit, out, distillation=distillation, **OPTIONS, **options)
    return load_file(out / "model.safetensors"), report.options["distillation"]


def test_a_directory_in_use_is_refused_before_anything_is_computed(vit, images, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "read_source", lambda *arguments, **options: pytest.fail("the source was read"))
    join_processes()
    with owned(tmp_path / CHECKPOINTS), pytest.raises(OSError, match="is in use by"):
        save(vit, tmp_path / "out", images)


@pytest.mark.parametrize("step", [1, 2])
def test_a_killed_distillation_goes_on_with_the_same_command_and_leaves_only_the_model(
    vit, images, tmp_path, monkeypatch, step
):
    expected, done = save(vit, tmp_path / "uninterrupted", images)
    stop_at(monkeypatch, step)
    with pytest.raises(SystemExit, match="143"):
        save(vit, tmp_path / "out", images)
    monkeypatch.undo()
    (tmp_path / CHECKPOINTS / ".aft-hf-unfinished").mkdir()  # as after a kill
    verify = saving.verify_conversion

    def verify_and_try(*arguments):  # the checkpoints are locked until the model is written
        with pytest.raises(OSError, match="is in use by"), owned(tmp_path / CHECKPOINTS):
            pass
        verify(*arguments)

    monkeypatch.setattr(saving, "verify_conversion", verify_and_try)
    torch.manual_seed(99)  # another random state, as in a new process
    weights, again = save(vit, tmp_path / "out", images)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert {**again, "minutes": 0} == {**done, "minutes": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"vit", "uninterrupted", "out"}


@pytest.mark.parametrize("name", ["notes.txt", "more/notes.txt", "step-500/notes.txt"])
def test_other_files_beside_the_checkpoints_of_a_distillation_stay(vit, images, tmp_path, name):
    (tmp_path / CHECKPOINTS / name).parent.mkdir(parents=True)
    (tmp_path / CHECKPOINTS / name).write_text("mine")
    save(vit, tmp_path / "out", images)
    left = {path for path in (tmp_path / CHECKPOINTS).rglob("*") if path.is_file()}
    assert left <= {tmp_path / CHECKPOINTS / name, tmp_path / CHECKPOINTS / RUN / "run.lock"}
    assert (tmp_path / CHECKPOINTS / name).read_text() == "mine"


def test_a_link_as_output_stays_and_the_model_is_where_it_leads(vit, images, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/model")
    save(vit, tmp_path / "out", images)
    assert (tmp_path / "out").is_symlink() and [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


@pytest.mark.parametrize("budget", [{"steps": 3}, {"minutes": 0.0005}], ids=["steps", "minutes"])
@pytest.mark.parametrize(
    "failing", ["aft_hf.AFTForImageClassification.save_pretrained", "aft_hf.conversion.saving.move_into"]
)
def test_no_step_is_lost_if_the_model_cannot_be_written(vit, images, tmp_path, monkeypatch, failing, budget):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(failing, full)
        with pytest.raises(InputError, match=rf"; run again to resume from {tmp_path / CHECKPOINTS}$"):
            save(vit, tmp_path / "out", images, budget=budget)
    (saved,) = (tmp_path / CHECKPOINTS).glob("step-*")
    monkeypatch.setattr(module._Run, "update", lambda *arguments: pytest.fail("a step is computed again"))
    _, done = save(vit, tmp_path / "out", images, budget=budget)
    assert done["steps"] == int(saved.name[-9:]) and not (tmp_path / CHECKPOINTS).exists()


def test_files_that_another_process_writes_into_the_output_meanwhile_stay(vit, images, tmp_path, monkeypatch):
    def convert_meanwhile(*arguments, **options):
        monkeypatch.undo()
        saving.save_converted(vit, tmp_path / "out", **OPTIONS)
        return convert_deit(*arguments, **options)

    monkeypatch.setattr(saving, "convert_deit", convert_meanwhile)
    with pytest.raises(InputError, match="is not empty"):
        save(vit, tmp_path / "out", images)
    report = ConversionReport.model_validate_json((tmp_path / "out" / REPORT_NAME).read_text())
    assert "distillation" not in report.options and list(tmp_path.glob(f"{CHECKPOINTS}/step-000000003"))
