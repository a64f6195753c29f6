"""Tests of distillation without labels: losses, interruption and resumption, and its record in report and card."""

import itertools
import json
import shlex
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import OPTIONS, TIMM, save_pth
from PIL import Image
from transformers import ViTConfig, ViTModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForImageClassification, convert_deit
from aft_hf.cli import main
from aft_hf.conversion import (
    REPORT_NAME,
    ConversionError,
    ConversionReport,
    read_source,
    save_converted,
    verify_conversion,
)
from aft_hf.conversion import distillation as module
from aft_hf.conversion.distillation import DistillationOptions, distill, rate, student_losses, weight_of_hidden_states
from aft_hf.data.image_size import resized_processor
from aft_hf.publishing import write_card
from aft_hf.training.manifest import Manifest, read_manifest, write_manifest
from aft_hf.training.ownership import owned
from aft_hf.training.steps import StopSignal


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


def pixels_of(source, images):
    return source.image_processor(list(images), return_tensors="pt")["pixel_values"]


def divergence(model, source, images):
    """Return KL(teacher || student) in nats, from the outputs of both models."""
    pixels = pixels_of(source, images)
    with torch.no_grad():
        expected = source.to_transformers().float()(pixel_values=pixels).logits.log_softmax(-1)
        found = model.float()(pixel_values=pixels).logits.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def converted(source, **options):
    torch.manual_seed(0)
    return convert_deit(source, **{**OPTIONS, **options})[0]


@pytest.mark.parametrize(
    "options",
    (
        pytest.param({}, id="conv"),
        pytest.param({"aft_type": "full"}, id="full", marks=pytest.mark.slow),
        pytest.param({"image_size": 48}, id="larger", marks=pytest.mark.slow),
    ),
)
def test_a_distilled_model_computes_nearly_what_its_teacher_does(vit, images, options):
    source, model = read_source(vit), converted(read_source(vit), **options)
    assert not model.training
    resized = [image.resize((48, 48)) for image in images] if "image_size" in options else images
    before = None if "image_size" in options else divergence(model, source, images)
    done = distill(model, source, resized, steps=120, batch_size=8, learning_rate=3e-3, augmentation="none")
    assert done["steps"] == 120 and done["images"] == 24 and len(done["hidden_state_errors"]) == 2
    assert not model.training and model.dtype == torch.float32
    assert before is None or divergence(model, source, images) < 0.2 * before
    assert done["agreement"] > 0.8 and done["divergence"] < 0.3


def test_a_distilled_deit_and_half_precision_are_teachers_too(tmp_path, images):
    save_pth(tmp_path / "deit.pth", distilled=True)
    source = read_source(tmp_path / "deit.pth", **TIMM)
    model = converted(source).bfloat16()
    weight = model.aft.layers[0].mixer.q_proj.weight.clone()
    distill(model, source, images, steps=3, batch_size=8)
    assert model.dtype == torch.bfloat16 and not torch.equal(model.aft.layers[0].mixer.q_proj.weight, weight)


def test_hidden_states_count_less_and_less():
    settings = DistillationOptions(steps=10, hidden_states=3.0)
    assert [weight_of_hidden_states(settings, x) for x in (0.0, 0.5, 1.0)] == [3.0, 0.75, 0.0]


@pytest.mark.parametrize("aft_type", ("conv", "full"))
def test_the_losses_are_those_of_the_outputs_of_both_models(vit, images, aft_type):
    source = read_source(vit)
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


def run_stopped(monkeypatch, step, *arguments, **options):
    """Run a distillation that is stopped in a step."""
    stop_at(monkeypatch, step)
    with pytest.raises(SystemExit) as stopped:
        run(*arguments, **options)
    monkeypatch.undo()
    assert stopped.value.code == 143


@pytest.mark.parametrize("step", (1, 5))
def test_a_distillation_that_was_stopped_goes_on_to_the_same_weights(vit, images, tmp_path, monkeypatch, step):
    source = read_source(vit)
    expected, done = run(source, images)
    run_stopped(monkeypatch, step, source, images, checkpoints=tmp_path / "checkpoints")
    torch.manual_seed(99)  # another random state, as in a new process
    weights, again = run(source, images, checkpoints=tmp_path / "checkpoints")
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert {**again, "minutes": 0} == {**done, "minutes": 0}


def test_the_seed_decides_and_nothing_else(vit, images):
    source = read_source(vit)
    first, _ = run(source, images, steps=3)
    torch.manual_seed(5)
    again, _ = run(source, images, steps=3)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    other, _ = run(source, images, steps=3, seed=1)
    assert not torch.equal(other["classifier.weight"], first["classifier.weight"])


@pytest.mark.parametrize("means", [[], [{}], [{"0": 1.0}], [{str(i): 0.5 for i in range(9)}], [{"0": 1.0}] * 2])
def test_a_checkpoint_with_a_wrong_number_of_means_is_named(vit, images, tmp_path, monkeypatch, means):
    source = read_source(vit)
    run_stopped(monkeypatch, 2, source, images, checkpoints=tmp_path)
    (checkpoint,) = tmp_path.glob("step-*")
    content = read_manifest(checkpoint).model_dump(exclude={"sum"})
    content["record"]["evaluations"] = means
    write_manifest(checkpoint, Manifest(**content))
    with pytest.raises(ValueError, match=r"step-\d+: its running means do not fit the model"):
        run(source, images, checkpoints=tmp_path)


def other_image(images):
    return [*images[:3], images[3].transpose(Image.Transpose.ROTATE_90), *images[4:]]


def with_other_weights(source):
    tensors = dict(source.tensors)
    tensors["classifier.bias"] = tensors["classifier.bias"] + 1e-3
    return replace(source, tensors=tensors)


def normalized_otherwise(source):
    processor = deepcopy(source.image_processor)
    processor.image_mean = [0.4, 0.5, 0.6]
    return replace(source, image_processor=processor)


OTHER = {
    "weights of the source": ({"source": with_other_weights}, "source_tensors"),
    "heads of the source": (
        {"source": lambda source: replace(source, config=ViTConfig(**source.config.to_dict() | HEADS))},
        r"source_config\.num_attention_heads",
    ),
    "normalization": ({"source": normalized_otherwise}, r"image_processor\.image_mean"),
    "name": ({"source": lambda source: replace(source, name="another")}, "source"),
    "type": ({"options": {"aft_type": "simple"}}, r"model\.aft_type"),
    "multiplier": ({"options": {"position_bias_multiplier": 2.0}}, r"model\.position_bias_multiplier"),
    "init": ({"conversion": {"init": "attention"}}, r"conversion\.init"),
    "an image": ({"images": other_image}, "images"),
    "learning rate": ({"distillation": {"learning_rate": 1e-4}}, "learning_rate"),
}
HEADS = {"num_attention_heads": 1}


@pytest.mark.parametrize(("change", "told"), OTHER.values(), ids=OTHER)
def test_checkpoints_of_another_conversion_are_refused(vit, images, tmp_path, monkeypatch, change, told):
    source, conversion = read_source(vit), {"init": "paper", "image_size": (32, 32)}
    shared = {"steps": 2, "batch_size": 8, "checkpoints": tmp_path}
    stop_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        distill(converted(source), source, images, conversion=conversion, **shared)
    monkeypatch.undo()
    source = change.get("source", lambda same: same)(source)
    images = change.get("images", lambda same: same)(images)
    conversion = conversion | change.get("conversion", {})
    with pytest.raises(ValueError, match=rf"another distillation was begun there \({told}: "):
        shared |= change.get("distillation", {})
        distill(converted(source, **change.get("options", {})), source, images, conversion=conversion, **shared)


def test_a_damaged_checkpoint_is_set_aside_and_does_not_displace_the_ones_that_follow(
    vit, images, tmp_path, monkeypatch
):
    source = read_source(vit)
    run_stopped(monkeypatch, 5, source, images, checkpoints=tmp_path)
    (tmp_path / "step-000000005" / "checkpoint.json").write_text("{}")
    run_stopped(monkeypatch, 2, source, images, checkpoints=tmp_path)
    assert {path.name for path in tmp_path.glob("*step-*")} == {"set-aside-step-000000005", "step-000000002"}
    expected, _ = run(source, images)
    weights, _ = run(source, images, checkpoints=tmp_path)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


class Unreadable(Sequence):
    """Images of which the last one cannot be read."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if index == len(self.images) - 1:
            raise ConversionError("last.png: cannot be read as an image")
        return self.images[index]


def test_an_image_that_cannot_be_read_costs_no_steps(vit, images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "distillation_identity", lambda *arguments: {})  # which reads all of so few images
    source = read_source(vit)
    expected, _ = run(source, images)

    def run_to_the_image():
        with pytest.raises(ConversionError, match=r"^last\.png: cannot be read as an image$"):
            run(source, Unreadable(images), checkpoints=tmp_path)
        return capsys.readouterr().out

    def full(*arguments):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(module.Checkpoints, "save", full)
        assert "no space left" in run_to_the_image()
    said = run_to_the_image()
    (saved,) = tmp_path.glob("step-*")
    assert f"resume from {saved}" in said and f"resuming from {saved}" in run_to_the_image()
    weights, _ = run(source, images, checkpoints=tmp_path)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_a_distillation_that_fails_before_its_first_checkpoint_leaves_no_directory(vit, tmp_path, images):
    distillation = {"images": Unreadable(images[:1]), "steps": 2}
    with pytest.raises(ConversionError, match=r"cannot be read as an image$"):
        save_converted(vit, tmp_path / "out", distillation=distillation, **OPTIONS)
    assert list(tmp_path.iterdir()) == [vit]


def test_the_checkpoints_are_owned_until_the_model_is_written(vit, images, tmp_path, monkeypatch):
    refused, verify = [], verify_conversion

    def verify_and_try(*arguments):
        with pytest.raises(OSError, match="is in use by") as error, owned(tmp_path / ".out-distillation"):
            pass
        refused.append(error)
        verify(*arguments)

    monkeypatch.setattr("aft_hf.conversion.saving.verify_conversion", verify_and_try)
    save_converted(vit, tmp_path / "out", distillation={"images": images, "steps": 1, "batch_size": 8}, **OPTIONS)
    assert refused and not (tmp_path / ".out-distillation").exists()
    with owned(tmp_path / ".out-distillation"):  # the lock is released, too
        pass


def test_minutes_are_a_budget_that_interrupted_runs_share(vit, images, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0 * next(clock))  # a step takes 10 seconds
    source = read_source(vit)
    _, done = run(source, images, steps=None, minutes=1)
    assert done["minutes"] >= 1 and done["steps"] <= 6
    run_stopped(monkeypatch, 3, source, images, steps=None, minutes=1, checkpoints=tmp_path)
    clock = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0 * next(clock))
    _, again = run(source, images, steps=None, minutes=1, checkpoints=tmp_path)
    assert again["steps"] == done["steps"]


def test_the_learning_rate_rises_and_falls_to_0():
    rates = [rate(i / 1000) for i in range(1001)]
    assert max(rates) == pytest.approx(1.0) and rates[100] == pytest.approx(1.0)
    assert 0 < rates[0] < 0.02 and rates[1000] == pytest.approx(0.0, abs=1e-9)
    assert rates[:101] == sorted(rates[:101]) and rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "takes steps or minutes"),
        ({"minutes": 1}, "takes steps or minutes"),
        ({"steps": 0}, "steps=0: must be greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: must be"),
        ({"hidden_states": -1.0}, "hidden_states=-1.0: must be"),
        ({"augmentation_probability": 1.5}, "augmentation_probability=1.5: must be"),
        ({"augmentation": "rotate"}, "augmentation='rotate': augmentation must be one of none, shift"),
        ({"seed": -1}, "seed=-1: must be"),
        ({"rate": 1}, "unknown key rate"),
    ],
)
def test_options_that_make_no_sense_are_refused(vit, images, options, message):
    with pytest.raises(ValueError, match=message) as error:
        run(read_source(vit), images, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "fewest", "most"),
    [
        pytest.param({"augmentation_probability": 0.0}, 0, 0, id="none"),
        pytest.param({}, 20, 60, id="by default, half"),
        pytest.param({"augmentation_probability": 1.0}, 80, 80, id="all"),
    ],
)
def test_each_image_is_augmented_with_a_probability_for_teacher_and_student(
    vit, images, monkeypatch, options, fewest, most
):
    seen: dict[str, list[torch.Tensor]] = {"teacher": [], "student": []}
    teach = module._Run._teach

    def recorded_losses(student, pixels, *others):
        seen["student"].append(pixels)
        return student_losses(student, pixels, *others)

    def recorded_teach(run, pixels):
        seen["teacher"].append(pixels)
        return teach(run, pixels)

    monkeypatch.setattr(module._Run, "_teach", recorded_teach)
    monkeypatch.setattr(module, "student_losses", recorded_losses)
    monkeypatch.setattr(module, "build_augmentation", lambda name, size: torch.zeros_like)
    run(read_source(vit), images, steps=10, **options)
    pixels = torch.stack(seen["student"])
    assert torch.equal(pixels, torch.stack(seen["teacher"])) and pixels.shape[:2] == (10, 8)
    augmented = (pixels == 0).all((2, 3, 4)).sum(1)  # images of each batch
    assert fewest <= augmented.sum() <= most
    assert ((augmented > 0) & (augmented < 8)).any() == (fewest < most)


def test_images_have_the_size_of_the_model_if_the_processor_makes_another(vit, images):
    source = read_source(vit)
    larger = replace(source, image_processor=resized_processor(source.image_processor, (40, 48)))
    results = [run(each, images, steps=2)[1] for each in (source, larger)]
    assert results[0]["divergence"] == results[1]["divergence"]


def test_sources_without_one_choice_of_the_same_classes_and_no_images_are_refused(vit, images, tmp_path):
    config = ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, image_size=32, patch_size=8)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "headless")
    headless, source = read_source(tmp_path / "headless"), read_source(vit)
    model = converted(source)
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


def test_a_loss_that_is_not_finite_stops_the_distillation(vit, images):
    source = read_source(vit)
    model = converted(source)
    model.classifier.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="not finite after"):
        distill(model, source, images, steps=2, batch_size=8)


def test_the_agreement_of_a_short_run_is_a_plain_mean(vit, images, monkeypatch):
    agreements = []

    def recorded(*arguments):
        losses = student_losses(*arguments)
        agreements.append(losses[2].item())
        return losses

    monkeypatch.setattr(module, "student_losses", recorded)
    _, done = run(read_source(vit), images, steps=4)
    assert len(set(agreements)) > 1
    assert done["agreement"] == pytest.approx(sum(agreements) / 4, abs=1e-5)  # it is rounded to 5 digits


def test_report_and_card_say_what_was_done(vit, images, tmp_path):
    out = tmp_path / "out"
    model, _ = save_converted(vit, out, distillation={"images": images, "steps": 3, "batch_size": 8}, **OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} == {"vit", "out"}
    saved = ConversionReport.model_validate_json((out / REPORT_NAME).read_text())
    done = saved.options["distillation"]
    assert (done["images"], done["steps"], done["batch_size"], done["seed"]) == (24, 3, 8, 0)
    assert {record.target for record in saved.with_status("distilled")} == set(model.state_dict())
    assert "first copied" in {record.note for record in saved.tensors}
    assert not saved.with_status("copied") and verify_conversion(vit, out) == 0
    assert "distilled from its source on 24 unlabeled images in 3 steps" in " ".join(
        write_card(out).read_text().split()
    )


def save_images(images, path):
    path.mkdir()
    for i, image in enumerate(images):
        image.save(path / f"{i}.png")
    return path


def convert_by_command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["aft-hf", "convert", *map(str, arguments)])
    with pytest.raises(SystemExit) as finished:
        main()
    return finished.value.code, capsys.readouterr()


def test_the_command_distills_from_a_folder_of_images(vit, images, tmp_path, monkeypatch, capsys):
    folder = save_images(images, tmp_path / "images")
    options = ["--kernel-size", 3, "--num-heads", 4, "--distill", "--images", folder, "--steps", 3, "--batch-size", 8]
    code, printed = convert_by_command(monkeypatch, capsys, vit, tmp_path / "out", *options)
    assert code == 0 and "distilled on 24 images: 3 steps" in " ".join(printed.out.split())
    told = f"aft-hf finetune --do_train --do_eval --model_name_or_path {tmp_path / 'out'} --train DATA --teacher {vit}"
    assert f"{told} --learning_rate 1e-3" in printed.out
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert report["options"]["distillation"]["augmentation"] == "shift"


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
        (["--distill", "--aft-type", "conv,full"], "paper"),
        ([], "paper"),
    ],
)
def test_a_distillation_of_conv_starts_from_the_attention_by_default(
    vit, images, tmp_path, monkeypatch, capsys, options, expected
):
    # The processor of another size is resized for the fit to the attention, too.
    ViTImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(vit)
    budget = ["--steps", 1, "--batch-size", 8] if options else []
    folder, sizes = save_images(images, tmp_path / "images"), ["--kernel-size", 3, "--num-heads", 4]
    given = [*sizes, *options, *budget, *(["--images", folder] if options else [])]
    code, printed = convert_by_command(monkeypatch, capsys, vit, tmp_path / "out", *given)
    assert code == 0, printed.err
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text())["options"]["init"] == expected


def test_the_command_names_the_one_that_distills_the_same_conversion(vit, images, tmp_path, monkeypatch, capsys):
    def printed_command(out, *options):
        code, printed = convert_by_command(monkeypatch, capsys, vit, out, *options)
        assert code == 0, printed.err
        (line,) = (line for line in printed.out.splitlines() if line.startswith("  aft-hf convert "))
        return shlex.split(line)[2:]

    folder, out = save_images(images, tmp_path / "some images"), tmp_path / "out"
    save_pth(tmp_path / "deit.pth", distilled=True)
    options = ["--kernel-size", "3", "--num-heads", "4", "--image-size", "32x48", "--source-num-heads", "3"]
    told = convert_by_command(monkeypatch, capsys, tmp_path / "deit.pth", tmp_path / "deit", *options)[1].out
    assert f"{' '.join(options)} --overwrite --distill --images IMAGES" in told
    assert printed_command(tmp_path / "plain", "--aft-type", "simple") == [
        *(str(vit), str(tmp_path / "plain"), "--aft-type", "simple"),
        *("--overwrite", "--distill", "--images", "IMAGES"),
    ]
    types, sizes = ["--aft-type", "conv", "--aft-type", "full"], ["--kernel-size", "3", "--num-heads", "4"]
    biases = ["--position-bias-dim", "0", "--position-bias-multiplier", "1", "--seed", "5"]
    fit = ["--init", "attention", "--images", folder, "--num-images", "4"]
    command = printed_command(out, *types, *sizes, *biases, *fit)
    config = AFTConfig.from_pretrained(out)
    code, printed = convert_by_command(monkeypatch, capsys, *command, "--steps", 1, "--batch-size", 8)
    assert code == 0 and "distilled on 24 images" in printed.out
    told = json.loads((out / REPORT_NAME).read_text())["options"]
    assert AFTConfig.from_pretrained(out).to_dict() == config.to_dict()
    assert (told["init"], told["distillation"]["seed"]) == ("attention", 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--distill"], "--distill needs --images"),
        (["--learning-rate", 1, "--steps", 3], "--steps needs --distill, --learning-rate needs --distill"),
        (["--images", "somewhere"], "--images needs --distill or --init attention"),
        (["--num-images", 3, "--distill", "--images", ".", "--init", "paper"], "--num-images needs --init attention"),
    ],
)
def test_a_command_that_lacks_something_says_what(vit, tmp_path, monkeypatch, capsys, options, message):
    code, printed = convert_by_command(monkeypatch, capsys, vit, tmp_path / "out", *options)
    assert code == 1 and message in printed.err
