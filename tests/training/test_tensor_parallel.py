"""Tensor parallelism: two processes that share the features of a model give the results of one."""

from pathlib import Path

import pytest
import torch
from runs import finish, launch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from aft_hf import AFTConfig, AFTForCausalLM


TOKENS = torch.arange(20)[None] % 16


def sharded_logits(directory: Path) -> None:
    """Load a shard of the model in each process, and save the logits and the process's share of mixers and MLPs."""
    distributed.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan).eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    found = {"logits": logits, "mixer": share(model, ".mixer."), "mlp": share(model, ".mlp.")}
    torch.save(found, directory / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


def share(model: torch.nn.Module, part: str) -> float:
    """Return the share of the weights of `part` that this process holds."""
    weights = [weight for name, weight in model.named_parameters() if part in name]
    here = sum(getattr(weight, "_local_tensor", weight).numel() for weight in weights)
    return here / sum(weight.numel() for weight in weights)


def sharded_gradients(directory: Path) -> None:
    """Load a shard of the model in each process, and save the logits, the loss and the full gradients."""
    distributed.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan)
    torch.save(logits_and_gradients(model), directory / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


def logits_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found = {"logits": model.eval()(TOKENS).logits}
    loss = model.train()(TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in gradients.items()}
    return found | {"loss": loss.detach()} | whole


@pytest.mark.parametrize(
    ("aft_type", "num_heads", "mixers"),
    [
        ("local", 1, True),
        ("full", 1, True),
        ("simple", 2, True),
        ("alibi", 1, True),
        ("local", 2, False),
        ("conv", 4, False),
    ],
)
def test_two_processes_share_mlps_and_the_mixers_whose_position_biases_serve_all_features(
    tmp_path, aft_type, num_heads, mixers
):
    config = AFTConfig(
        aft_type=aft_type,
        num_heads=num_heads,
        hidden_size=16,
        num_hidden_layers=2,
        position_bias_dim=4,
        window_size=4,
        kernel_size=4,
        max_position_embeddings=32,
        vocab_size=16,
    )
    model = AFTForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path)
    assert finish(launch(sharded_logits, (tmp_path,), 2)) == [0, 0]
    expected = model(TOKENS).logits
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["logits"], expected, rtol=1e-9, atol=1e-12)
        assert found["mlp"] < 0.6
        assert found["mixer"] < 0.7 if mixers else found["mixer"] == 1


@pytest.mark.parametrize(
    ("aft_type", "tied"), [("simple", False), ("simple", True), ("local", False), ("full", False)]
)
def test_two_processes_have_the_outputs_and_the_gradients_of_one(tmp_path, aft_type, tied):
    config = AFTConfig(
        aft_type=aft_type,
        hidden_size=16,
        num_hidden_layers=2,
        position_bias_dim=4,
        window_size=4,
        max_position_embeddings=32,
        vocab_size=16,
        tie_word_embeddings=tied,
    )
    model = AFTForCausalLM(config).double()
    model.save_pretrained(tmp_path)
    assert finish(launch(sharded_gradients, (tmp_path,), 2)) == [0, 0]
    expected = logits_and_gradients(model)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
