"""Trainer and its options, Optuna, Ignite, attributions by captum, and the FLOP counter of PyTorch."""

import pytest
import torch
from client_models import image_classifier
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module


TEXTS = ["Friends, Romans, countrymen", "lend me your ears;"] * 4
OPTIONS = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 2, "disable_tqdm": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "gradient_checkpointing": True},
        {"auto_find_batch_size": True, "label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_trainer_collates_and_trains(options, load, tokenizer, tmp_path):
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = [{"input_ids": [*text.encode(), tokenizer.eos_token_id]} for text in TEXTS]
    arguments = TrainingArguments(str(tmp_path), learning_rate=0.05, logging_steps=1, **(OPTIONS | options))
    model = load()
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    first, second = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert second < first < 20


def test_optuna_searches_the_learning_rate(load, tmp_path):
    pytest.importorskip("optuna", reason="needs optuna: run `make clients`")
    ids = torch.randint(256, (8, 12)).tolist()
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(str(tmp_path), eval_strategy="steps", eval_steps=2, **OPTIONS)
    trainer = Trainer(None, arguments, model_init=lambda trial: load(), train_dataset=data, eval_dataset=data)
    space = lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}  # noqa: E731
    best = trainer.hyperparameter_search(space, n_trials=1, direction="minimize", backend="optuna")
    assert best.objective < 20 and "learning_rate" in best.hyperparameters


def test_ignite_trains(load):
    engine = pytest.importorskip("ignite.engine", reason="needs pytorch-ignite: run `make clients`")
    model, ids = load(), torch.randint(256, (2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    loss_of = lambda output, labels: output.loss  # noqa: E731
    step = engine.create_supervised_trainer(
        model, optimizer, loss_of, model_fn=lambda model, x: model(input_ids=x, labels=x)
    )
    losses = []
    step.add_event_handler(engine.Events.ITERATION_COMPLETED, lambda state: losses.append(state.state.output))
    step.run([(ids, ids)] * 4)
    assert losses[-1] < losses[0]


def test_captum_attributions_sum_to_the_difference_of_the_logits(tmp_path):
    attr = pytest.importorskip("captum.attr", reason="needs captum: run `make clients`")
    image_classifier().save_pretrained(tmp_path)
    remote = get_class_from_dynamic_module("modeling_aft.AFTForImageClassification", str(tmp_path))
    model, pixels = remote.from_pretrained(tmp_path).eval(), torch.randn(1, 3, 16, 16)
    gradients = attr.IntegratedGradients(lambda x: model(pixel_values=x).logits)
    attributions = gradients.attribute(pixels, target=1, n_steps=200)
    with torch.no_grad():
        difference = (model(pixel_values=pixels).logits - model(pixel_values=torch.zeros_like(pixels)).logits)[0, 1]
    assert attributions.sum().item() == pytest.approx(difference.item(), rel=0.02, abs=0.01)


def test_floating_point_operations_are_counted(load):
    """A forward pass takes 2 operations per linear weight and token, and more for matrix products of the mixing."""
    model, ids = load(), torch.randint(256, (2, 12))
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(input_ids=ids)
    with FlopCounterMode(display=False) as step:
        model(input_ids=ids, labels=ids).loss.backward()
    assert 2 * weights * ids.numel() <= forward.get_total_flops() < 4 * weights * ids.numel()
    assert step.get_total_flops() > 2 * forward.get_total_flops()
