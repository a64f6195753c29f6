"""TRL: supervised fine-tuning with and without packing, and direct preference optimization."""

import pytest
import torch
from client_models import AFT_TYPES, language_model
from datasets import Dataset


trl = pytest.importorskip("trl", reason="needs trl: run `make clients`")

TEXTS = ["Friends, Romans, countrymen", "lend me your ears;"]
OPTIONS = {
    "max_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1.0,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def tune(model, tokenizer, directory, texts=TEXTS, **options):
    """Fine-tune the model in place; return the loss of the first step."""
    arguments = trl.SFTConfig(str(directory), **(OPTIONS | options))
    data = Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize(
    "packed", [{"packing": True, "max_length": 64}, {"padding_free": True, "max_length": None}], ids=str
)
@pytest.mark.parametrize("aft_type", AFT_TYPES)
@pytest.mark.parametrize("form", ["auto", "portable"])  # the portable form is that of remote code without the package
def test_packed_documents_give_the_same_update_as_padded_ones(form, aft_type, packed, tokenizer, tmp_path):
    one, other = (language_model(aft_type, mixing_implementation=form) for _ in range(2))
    before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
    loss = tune(one, tokenizer, tmp_path, max_length=64)
    assert tune(other, tokenizer, tmp_path, **packed) == pytest.approx(loss, rel=1e-5)
    changed = 0
    for (name, expected), actual in zip(one.named_parameters(), other.parameters()):
        # Tolerance for float32 sums of gradients of about 1 over at most 64 tokens, in a different order.
        torch.testing.assert_close(actual - before[name], expected - before[name], rtol=1e-4, atol=1e-5)
        changed += not torch.equal(expected, before[name])
    assert changed == len(before)


def test_preferences_are_learned(load, tokenizer, tmp_path):
    data = Dataset.from_dict({"prompt": ["To be or "] * 2, "chosen": ["not to be"] * 2, "rejected": ["else"] * 2})
    arguments = trl.DPOConfig(str(tmp_path), **(OPTIONS | {"learning_rate": 0.1, "max_steps": 3, "logging_steps": 1}))
    trainer = trl.DPOTrainer(load(), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert margins[0] == pytest.approx(0.0, abs=1e-5) and margins[-1] > 0.01
