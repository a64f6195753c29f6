"""Parameter groups of the optimizer, and FineTuner: augmentation and distillation."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from tiny_models import image_model, language_model, vit_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PoolFormerConfig,
    PoolFormerForImageClassification,
    TrainingArguments,
    ViTConfig,
)
from transformers.testing_utils import CaptureLogger

from aft_hf.data.classes import logger, teacher_classes
from aft_hf.training import build_optimizer
from aft_hf.tuning.fine_tuning import FineTuner, distillation_loss


CLASSES = 3
SIZES = {"image_size": 8, "patch_size": 2, "hidden_size": 8, "num_heads": 2, "kernel_size": 3, "num_labels": CLASSES}
classifier = partial(image_model, **SIZES)
vit = partial(vit_model, patch_size=2, initializer_range=1.0)


def rows(count: int) -> list[dict]:
    return [{"pixel_values": torch.randn(3, 8, 8), "labels": i % CLASSES} for i in range(count)]


def collated(count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 8, 8), "labels": torch.arange(count) % CLASSES}


OWN = ("teacher", "position_bias_scale", "augment", "train_dataset", "eval_dataset")


def tuner(model, directory, *, kind="soft", **options):
    """A FineTuner of one step; the options are its own or those of `TrainingArguments`."""
    own = {name: options.pop(name) for name in OWN if name in options}
    arguments = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    own["distillation"] = {"kind": kind, "weight": 0.3, "temperature": 2.0}
    return FineTuner(model=model, args=TrainingArguments(directory, **arguments | options), **own)


# The optimizer


def test_position_biases_have_a_rate_of_their_own_and_no_weight_decay_through_the_schedule(tmp_path):
    options = {"learning_rate": 0.1, "weight_decay": 0.5, "warmup_steps": 4, "lr_scheduler_type": "cosine"}
    trainer = tuner(classifier(), tmp_path, position_bias_scale=20, **options)
    trainer.create_optimizer_and_scheduler(num_training_steps=12)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.5, 0, 0]
    for _ in range(2):  # half of the warm-up
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.05, 0.05, 1.0])


@pytest.mark.parametrize("rank", [4, None])
def test_each_parameter_is_in_one_group_and_position_biases_are_apart(rank):
    model = language_model(["conv", "full"], position_bias_dim=rank)
    model.aft.embeddings.requires_grad_(False)  # frozen parameters are left out
    decayed, plain, biases = build_optimizer(model, 0.1, weight_decay=0.5, position_bias_scale=3.0).param_groups
    grouped = [id(p) for group in (decayed, plain, biases) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {id(p): name for name, p in model.named_parameters()}
    expected = {name for name in names.values() if "mixer" in name and "_proj" not in name}
    assert {names[id(p)] for p in biases["params"]} == expected
    assert (decayed["weight_decay"], plain["weight_decay"], biases["weight_decay"]) == (0.5, 0.0, 0.0)
    assert (decayed["lr"], plain["lr"]) == (0.1, 0.1) and biases["lr"] == pytest.approx(0.3)


GPT2 = {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
AFT = {f"aft.layers.0.{name}.weight" for name in [f"mixer.{name}_proj" for name in "qkvo"] + ["mlp.fc1", "mlp.fc2"]}


@pytest.mark.parametrize(
    ("architecture", "tied", "linear"),
    [("aft", False, AFT | {"lm_head.weight"}), ("gpt2", True, GPT2), ("gpt2", False, GPT2 | {"lm_head.weight"})],
    ids=["AFT", "GPT-2, tied", "GPT-2"],
)
def test_only_linear_weights_decay_and_no_embeddings_though_a_head_may_share_them(architecture, tied, linear):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 9}
    if architecture == "aft":
        model = language_model("full", num_hidden_layers=1)
    else:
        model = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=tied, **sizes))
    groups = build_optimizer(model, 0.1, weight_decay=0.5).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in decayed} == linear


# The teacher


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.parametrize(("weight", "temperature"), [(0.1, 3.0), (0.7, 1.0), (1.0, 0.5), (0.0, 3.0)])
def test_distillation_losses_are_those_of_deit(weight, temperature):
    logits, taught = torch.randn(5, 4, requires_grad=True), (3 * torch.randn(5, 4)).requires_grad_()
    z, z_t = (x.detach().double().numpy() for x in (logits, taught))
    ours, teachers = softmax(z / temperature), softmax(z_t / temperature)
    divergence = (teachers * (np.log(teachers) - np.log(ours))).sum(-1).mean()
    soft = distillation_loss(torch.tensor(2.0), logits, taught, weight=weight, temperature=temperature)
    assert soft.item() == pytest.approx((1 - weight) * 2.0 + weight * temperature**2 * divergence, rel=1e-5)
    hard = distillation_loss(torch.tensor(2.0), logits, taught, kind="hard", weight=weight)
    decided = np.log(softmax(z))[np.arange(5), z_t.argmax(-1)].mean()
    assert hard.item() == pytest.approx((1 - weight) * 2.0 - weight * decided, rel=1e-5)
    (soft + hard).backward()
    assert logits.grad.isfinite().all() and taught.grad is None
    same = taught.bfloat16()  # summed in float32
    assert distillation_loss(torch.tensor(0.0), same, same).item() == pytest.approx(0, abs=1e-6)
    for wrong in ({"kind": "medium"}, {"weight": 1.5}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            distillation_loss(torch.tensor(2.0), logits, taught, **wrong)


@pytest.mark.parametrize(("kind", "label_smoothing"), [("soft", 0.0), ("hard", 0.1)])
def test_accumulated_steps_equal_one_large_batch(kind, label_smoothing, tmp_path):
    teacher, train, trained = vit(8, num_labels=CLASSES), rows(8), []
    for batch_size in (8, 3):  # of 3, 3 and 2 rows
        model = classifier(position_bias_entropy_weight=0.0 if label_smoothing else 0.1)
        options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": -(-8 // batch_size)}
        options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        options |= {"label_smoothing_factor": label_smoothing, "train_dataset": train, "kind": kind}
        tuner(model, tmp_path, teacher=teacher, **options).train()
        trained.append(model.state_dict())
    fresh = classifier().state_dict()
    for name in fresh:
        torch.testing.assert_close(trained[0][name], trained[1][name], rtol=1e-4, atol=1e-6)
    assert not torch.equal(trained[0]["classifier.weight"], fresh["classifier.weight"])


def test_accumulated_steps_equal_one_large_batch_for_models_that_ignore_the_size_of_a_step(tmp_path):
    sizes = {"hidden_sizes": [4] * 4, "depths": [1] * 4, "patch_sizes": [3] * 4, "strides": [2, 1, 1, 1]}
    first = PoolFormerForImageClassification(PoolFormerConfig(**sizes, num_labels=CLASSES))
    train, trained = rows(8), []
    for batch_size in (8, 3):
        model = deepcopy(first)
        options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": -(-8 // batch_size)}
        options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        tuner(model, tmp_path, train_dataset=train, **options).train()
        trained.append(model.classifier.weight.detach())
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(trained[0], first.classifier.weight)


@pytest.mark.parametrize("size", [8, 16])
def test_the_loss_is_mixed_with_that_of_a_teacher_of_any_image_size(size, tmp_path):
    model, teacher, batch = classifier().train(), vit(size, num_labels=CLASSES), collated(4)
    trainer = tuner(model, tmp_path, teacher=teacher)
    outputs = model(**batch)
    logits = teacher.eval()(batch["pixel_values"], interpolate_pos_encoding=size != 8).logits
    expected = distillation_loss(outputs.loss, outputs.logits, logits, weight=0.3, temperature=2.0)
    loss = trainer.compute_loss(model, batch)
    assert loss.item() == pytest.approx(expected.item()) != pytest.approx(outputs.loss.item())
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not teacher.training and model.classifier.weight.grad is not None


def test_evaluation_is_without_teacher_and_draws_no_random_number_that_training_would_miss(tmp_path):
    model, batch = classifier().eval(), collated(4)
    trainer = tuner(model, tmp_path, teacher=vit(8, num_labels=CLASSES))
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), model(**batch).loss)
    state = torch.get_rng_state()
    trainer.evaluate([{"pixel_values": torch.full((3, 8, 8), float(i)), "labels": i % CLASSES} for i in range(4)])
    assert torch.equal(torch.get_rng_state(), state)


NAMED = {"num_labels": 2, "id2label": {0: "cat", 1: "dog"}}
NUMBERED = [str(number) for number in range(11)]


def test_classes_numbered_from_1_on_are_matched_by_place_with_names():
    named, numbered = (ViTConfig(id2label=dict(enumerate(names))) for names in (("cat", "dog"), ("1", "2")))
    for teacher, model in ((named, numbered), (numbered, named)):
        with CaptureLogger(logger) as log:
            assert teacher_classes(teacher, model) == [0, 1]
        assert "are matched by number" in log.out
    with pytest.raises(ValueError, match="both need the same classes"):
        teacher_classes(numbered, ViTConfig(id2label={0: "0", 1: "1"}))


@pytest.mark.parametrize(
    ("theirs", "ours", "numbers"),
    [
        ({1: "dog", 0: "cat"}, {0: "cat", 1: "dog"}, [0, 1]),
        ({str(i): f"class {i}" for i in sorted(NUMBERED)}, {i: f"class {i}" for i in range(11)}, [*range(11)]),
        ({0: "dog", 1: "owl", 2: "cat"}, {0: "cat", 1: "dog", 2: "owl"}, [2, 0, 1]),
        ({0: "LABEL_1", 1: "LABEL_0"}, {0: "LABEL_0", 1: "LABEL_1"}, [1, 0]),
        # As folders are sorted.
        ({i: f"LABEL_{i}" for i in range(11)}, dict(enumerate(sorted(NUMBERED))), [0, 1, 10, *range(2, 10)]),
    ],
    ids=[
        "other order of lines",
        "sorted as text",
        "names under other numbers",
        "labels",
        "numbers as names",
    ],
)
def test_classes_of_the_teacher_are_matched_to_those_of_the_model_by_name_or_number(tmp_path, theirs, ours, numbers):
    model, batch = classifier(id2label=ours, num_labels=len(ours)).train(), collated(2)
    teacher = vit(8, id2label=theirs)
    with CaptureLogger(logger) as log:
        trainer = tuner(model, tmp_path, teacher=teacher)
    outputs, logits = model(**batch), teacher.eval()(batch["pixel_values"]).logits[:, numbers]
    expected = distillation_loss(outputs.loss, outputs.logits, logits, weight=0.3, temperature=2.0)
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)
    assert not log.out


TWINS = {0: "crane", 1: "crane", 2: "owl"}  # a bird and a machine, as in ImageNet
MULTI_LABEL = {"problem_type": "multi_label_classification"}


@pytest.mark.parametrize(
    ("teacher", "model", "message"),
    [
        ({"id2label": {0: "dog", 1: "owl"}}, NAMED, "classes .'dog', 'owl'., the model 2: .'cat', 'dog'.; both need"),
        ({"id2label": {0: "owl", 1: "crane", 2: "crane"}}, {"id2label": TWINS}, r"classes \['owl', .*; both need"),
        ({"num_labels": 3}, NAMED, r"has the 3 classes \['LABEL_0', .*, the model 2"),
        (None, NAMED, "ViTModel, which has no classifier"),
        (NAMED | MULTI_LABEL, NAMED, "teacher: .* chooses one of several classes, got problem_type='multi_label_cl"),
        ({"num_labels": 1}, NAMED, "the teacher: .* chooses one of several .* and num_labels=1; .* Trainer"),
        (NAMED, NAMED | MULTI_LABEL, "the model: .* chooses one of several classes"),
    ],
    ids=["other", "twins", "other number", "backbone", "multi-label", "regression", "multi-label student"],
)
def test_a_teacher_that_cannot_teach_is_refused_at_once(tmp_path, teacher, model, message):
    with pytest.raises(ValueError, match=message):
        tuner(classifier(**model), tmp_path, teacher=vit(8).base_model if teacher is None else vit(8, **teacher))
    with CaptureLogger(logger) as log:  # classes without names are taken by number
        tuner(classifier(**NAMED), tmp_path, teacher=vit(8, num_labels=2))
    assert "matched by number: the teacher has the 2 classes ['LABEL_0', 'LABEL_1'], the model 2: ['cat'" in log.out


# Augmentation and evaluation


def test_images_are_augmented_in_training_and_not_in_evaluation(tmp_path):
    seen = []

    def augment(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels.shape)
        return pixels.flip(-1)

    model, batch = classifier(), collated(4)
    teacher = vit(8, num_labels=CLASSES)
    trainer = tuner(model, tmp_path, augment=augment, teacher=teacher)
    flipped = {**batch, "pixel_values": batch["pixel_values"].flip(-1)}
    plain = tuner(model, tmp_path, teacher=teacher)
    assert trainer.compute_loss(model.train(), batch).item() == plain.compute_loss(model, flipped).item()
    assert trainer.compute_loss(model.eval(), batch).item() == plain.compute_loss(model, batch).item()
    assert seen == [(4, 3, 8, 8)]


def test_the_card_of_an_aft_is_that_of_publishing_and_of_other_models_trainer_s(tmp_path):
    trainer = tuner(classifier(), tmp_path / "aft", train_dataset=rows(6))
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "aft" / "README.md").read_text()
    assert "Attention Free Transformer" in card and "generated_from_trainer" not in card
    trainer.create_model_card(license="mit", model_name="tiny")  # as push_to_hub(license="mit") does
    assert "license: mit" in (tmp_path / "aft" / "README.md").read_text()
    other = tuner(vit(8, num_labels=CLASSES), tmp_path / "vit")
    other.save_model()
    other.create_model_card()
    assert "generated_from_trainer" in (tmp_path / "vit" / "README.md").read_text()
