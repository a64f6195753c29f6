"""Tensor parallelism: two processes that share the features of a model give the results of one."""

from pathlib import Path

import pytest
import torch
from runs import finish, launch
from tiny_models import language_model
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


TOKENS = torch.arange(20)[None] % 16


def share(model: torch.nn.Module, part: str) -> float:
    """Return the share of the weights of `part` that this process holds."""
    weights = [weight for name, weight in model.named_parameters() if part in name]
    here = sum(getattr(weight, "_local_tensor", weight).numel() for weight in weights)
    return here / sum(weight.numel() for weight in weights)


def sharded_gradients(directory: Path) -> None:
    """Load a shard of the model in each process, and save its outputs and its share of mixers and MLPs."""
    distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=DistributedConfig(tp_plan="auto"))
    shares = {"mixer": share(model, ".mixer."), "mlp": share(model, ".mlp.")}
    torch.save((logits_and_gradients(model), shares), directory / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


def logits_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        actual = {"logits": model.eval()(TOKENS).logits}
    loss = model.train()(TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in gradients.items()}
    return actual | {"loss": loss.detach()} | whole


@pytest.mark.parametrize(
    ("aft_type", "num_heads", "tied", "mixers"),
    [
        ("local", 1, False, True),
        ("full", 1, False, True),
        ("simple", 2, True, True),
        ("alibi", 1, False, True),
        ("conv", 4, False, False),
    ],
)
def test_two_processes_share_mlps_and_mixers_and_have_the_outputs_and_gradients_of_one(
    tmp_path, aft_type, num_heads, tied, mixers
):
    """The position biases of several heads serve some features each, so such mixers are not shared."""
    sizes = {"hidden_size": 16, "num_heads": num_heads, "vocab_size": 16, "tie_word_embeddings": tied}
    model = language_model(aft_type, **sizes).double()
    model.save_pretrained(tmp_path)
    assert finish(launch(sharded_gradients, (tmp_path,), 2)) == [0, 0]
    expected = logits_and_gradients(model)
    for rank in (0, 1):
        actual, shares = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        assert shares["mlp"] < 0.6
        assert shares["mixer"] < 0.7 if mixers else shares["mixer"] == 1
