"""Gradient accumulation: the batches of an optimizer step add up to the loss of one large batch, for every head."""

import pytest
import torch
from tiny_models import image_model, language_model
from torch import nn
from transformers import Trainer, TrainingArguments

from aft_hf import (
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
)


LENGTHS = (3, 9, 5, 1, 7, 2)
PAD, IGNORED, CLASSES = 257, -100, 3
SIZES = {"aft_type": "conv", "hidden_size": 8, "num_heads": 2, "num_hidden_layers": 1, "kernel_size": 3}
# The entropy of Eq. 9 is as large as the loss.
SIZES |= {"num_labels": CLASSES, "position_bias_entropy_weight": 0.5}
REGRESSION, MULTI_LABEL = ({"problem_type": kind} for kind in ("regression", "multi_label_classification"))
TOKENS = [torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
NUMBERS = torch.randn(len(LENGTHS), CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.double)
IMAGES = torch.randn(len(LENGTHS), 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
CLASS = torch.arange(len(LENGTHS)) % CLASSES

# The head, options of its config, and the labels of each row.
CASES = {
    "causal LM": (AFTForCausalLM, {}, TOKENS),
    "tokens": (AFTForTokenClassification, {}, [row % CLASSES for row in TOKENS]),
    "tokens, some rows without labels": (
        AFTForTokenClassification,
        {},
        [row % CLASSES if i % 2 else torch.full_like(row, IGNORED) for i, row in enumerate(TOKENS)],
    ),
}
for head in (AFTForSequenceClassification, AFTForImageClassification):
    CASES |= {
        f"{head.__name__}, classes": (head, {}, CLASS),
        f"{head.__name__}, several labels": (head, MULTI_LABEL, (NUMBERS > 0).double()),
        f"{head.__name__}, several labels by their dtype": (head, {}, (NUMBERS > 0).double()),
        f"{head.__name__}, several numbers": (head, REGRESSION, NUMBERS),
        f"{head.__name__}, a number": (head, {"num_labels": 1}, NUMBERS[:, 0]),
    }


def padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    inputs = {name: [row[name] for row in rows] for name in rows[0]}
    per_token = "input_ids" in inputs and inputs["labels"][0].shape == inputs["input_ids"][0].shape
    if "pixel_values" in inputs or not per_token:
        inputs["labels"] = torch.stack(inputs["labels"])
    else:
        inputs["labels"] = padded(inputs["labels"], IGNORED)
    if "pixel_values" in inputs:
        return inputs | {"pixel_values": torch.stack(inputs["pixel_values"])}
    mask = padded([torch.ones_like(row) for row in inputs["input_ids"]], 0)
    return inputs | {"input_ids": padded(inputs["input_ids"], PAD), "attention_mask": mask}


def build(case: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The model of a case, and its rows."""
    head, options, labels = CASES[case]
    if head is AFTForImageClassification:
        model, inputs = image_model(head=head, image_size=8, patch_size=2, **(SIZES | options)), IMAGES
    else:
        model, inputs = language_model(head=head, vocab_size=258, pad_token_id=PAD, **(SIZES | options)), TOKENS
    return model.double(), [{model.main_input_name: row, "labels": label} for row, label in zip(inputs, labels)]


def step(case: str, batch_size: int, directory) -> torch.Tensor:
    """The change of all weights in one step of gradient descent on all rows."""
    model, rows = build(case)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    settings = {"per_device_train_batch_size": batch_size, "max_steps": 1, "max_grad_norm": 0.0}
    settings |= {"gradient_accumulation_steps": -(-len(rows) // batch_size), "remove_unused_columns": False}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "use_cpu": True}
    settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    Trainer(model, TrainingArguments(str(directory), **settings), collate, rows).train()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.parametrize("case", CASES)
def test_accumulated_batches_of_trainer_are_one_large_batch(case, tmp_path):
    whole, parts = step(case, len(LENGTHS), tmp_path), step(case, 4, tmp_path)  # of 4 and 2 rows
    # The share of a batch is a quotient in float32, PyTorch's for integers. An error is at least a few percent.
    tolerance = 4 * torch.finfo(torch.float32).eps * whole.abs().max().item()
    torch.testing.assert_close(parts, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_a_step_of_one_batch_is_the_mean_also_in_a_tuple(case):
    model, rows = build(case)
    batch = collate(rows)
    counted = batch["labels"][..., 1:] if type(model) is AFTForCausalLM else batch["labels"]
    alone = model(**batch).loss
    for count in ((counted != IGNORED).sum(), int((counted != IGNORED).sum())):
        loss, *_ = model(**batch, num_items_in_batch=count, return_dict=False)
        torch.testing.assert_close(loss, alone)
