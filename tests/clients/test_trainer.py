"""Trainer and its options."""

import pytest
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


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
