"""lm-evaluation-harness on a local task, without a network: its bits per byte equal those of `aft-hf evaluate`."""

import math
from pydoc_data.topics import topics

import pytest
import torch
from datasets import Dataset

from aft_hf.tuning.evaluation import evaluate_language_model


lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval: run `make clients`")

BLOCK = 64


@pytest.fixture(scope="module")
def text() -> str:
    text = topics["conversions"].encode("ascii", "ignore").decode()
    return text[: len(text) // BLOCK * BLOCK]


def evaluate(model, tokenizer, directory, rows, **task):
    """Evaluate the model on one task whose samples are the rows, written to a JSON file; return the results."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    Dataset.from_dict(rows).to_json(directory / "rows.json")
    config = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "rows.json")}},
        "test_split": "test",
    }
    client = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=BLOCK)
    return lm_eval.simple_evaluate(
        client, tasks=[config | task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )


def test_bits_per_byte_of_blocks_equal_those_of_our_evaluation(load, tokenizer, text, tmp_path):
    """Each block predicts its own bytes but the first, which has no context, and the first of the next block."""
    model = load()
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    following = [*(block[0] for block in blocks[1:]), ""]
    rest = [block[1:] + first for block, first in zip(blocks, following)]
    rows = {"context": [block[0] for block in blocks], "rest": rest}
    options = {"doc_to_text": "{{context}}", "doc_to_target": "{{rest}}", "target_delimiter": ""}
    metrics = [{"metric": "perplexity", "aggregation": "mean", "higher_is_better": True}]  # log-likelihoods
    task = {"output_type": "loglikelihood", "metric_list": metrics, **options}
    actual = evaluate(model, tokenizer, tmp_path, rows, **task)["results"]["local"]["perplexity,none"]
    expected = evaluate_language_model(model, tokenizer, Dataset.from_dict({"text": [text]}), block_size=BLOCK)
    bits = -actual * len(blocks) / (len(text) - 1) / math.log(2)
    assert bits == pytest.approx(expected["bits_per_byte"], rel=1e-5)


def test_rolling_bits_per_byte_equal_those_of_windows_after_an_end_of_text_token(load, tokenizer, text, tmp_path):
    model = load()
    metrics = [{"metric": "bits_per_byte"}]
    task = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    actual = evaluate(model, tokenizer, tmp_path, {"text": [text]}, metric_list=metrics, **task)
    tokens, nats = torch.tensor([tokenizer.eos_token_id, *text.encode()]), 0.0
    with torch.no_grad():
        for start in range(0, len(text), BLOCK):
            window = tokens[start : start + BLOCK + 1]
            logits = model(window[None, :-1]).logits[0].double()
            nats -= logits.log_softmax(-1).gather(1, window[1:, None]).sum().item()
    actual = actual["results"]["local"]["bits_per_byte,none"]
    assert actual == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)
