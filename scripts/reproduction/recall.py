"""Associative recall (MQAR; Arora et al. 2023, arXiv 2312.04927): which value followed this key?

A sequence has n pairs of a key and a value, both drawn at random for each sequence, and then all of its keys in
another order. At each of these keys, a model predicts the value. A model that knows only which values occurred is
right in about 1 / n of the cases.
"""

import math
import time
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from aft_hf.training.optimization import build_optimizer

from . import baselines  # noqa: F401  (registers their architecture)
from .arms import Recall


SYMBOLS = 32  # keys, and as many values
TESTED = 1024  # sequences
TEST_SEED = 2**31  # no training step has it


def sequences(batch: int, pairs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sequences of 3 `pairs` tokens, and the values that the last third of the positions predicts."""
    keys = torch.rand(batch, SYMBOLS, generator=generator).argsort(1)[:, :pairs]
    values = SYMBOLS + torch.randint(SYMBOLS, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    tokens = torch.cat([torch.stack([keys, values], 2).flatten(1), keys.gather(1, order)], 1)
    return tokens, values.gather(1, order)


def train_recall(arm: Recall, seed: int, rate: float, steps: int) -> dict[str, Any]:
    """Train a model, and measure the share of right values on new sequences: the same for all arms and seeds."""
    since = time.perf_counter()
    torch.manual_seed(seed)
    fields = dict(arm.model)
    sizes = {"vocab_size": 2 * SYMBOLS, "max_position_embeddings": 3 * arm.pairs}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("architecture"), **sizes | fields))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer = build_optimizer(model, learning_rate=rate, weight_decay=0.1, betas=(0.9, 0.98))
    schedule = get_scheduler("cosine", optimizer, steps // 10, steps)
    generator, losses = torch.Generator().manual_seed(seed), []

    def outputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, values = (x.to(device) for x in sequences(batch, arm.pairs, generator))
        return model(input_ids=tokens, use_cache=False).logits[:, -arm.pairs :].float(), values

    for step in range(1, steps + 1):
        logits, values = outputs(arm.batch)
        loss = F.cross_entropy(logits.flatten(0, 1), values.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, steps // 50) == 0:
            losses.append([step, round(loss.item(), 3)])
    if not math.isfinite(losses[-1][1]):
        raise ValueError("the loss is not finite")
    generator.manual_seed(TEST_SEED)
    with torch.inference_mode():
        logits, values = outputs(TESTED)
    last = [loss for step, loss in losses if step > 0.9 * steps]
    metrics = {"test": (logits.argmax(-1) == values).double().mean().item(), "train": sum(last) / len(last)}
    metrics |= {"parameters": model.num_parameters(), "seconds": time.perf_counter() - since}
    return {"metrics": metrics, "losses": losses}
