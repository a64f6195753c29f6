"""Parameter groups of the optimizer."""

import pytest
import torch

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.training import build_optimizer


@pytest.mark.parametrize("rank", [4, None])
def test_each_parameter_is_in_one_group_and_position_biases_are_apart(rank):
    config = AFTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        aft_type=["conv", "full"],
        max_position_embeddings=9,
        position_bias_dim=rank,
    )
    model = AFTForCausalLM(config)
    decayed, plain, biases = build_optimizer(model, 0.1, weight_decay=0.5, position_bias_scale=3.0).param_groups
    grouped = [id(p) for group in (decayed, plain, biases) for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    expected = {
        name
        for name, _ in model.named_parameters()
        if "mixer" in name and not any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
    }
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in biases["params"]} == expected
    assert (decayed["weight_decay"], plain["weight_decay"], biases["weight_decay"]) == (0.5, 0.0, 0.0)
    assert (decayed["lr"], plain["lr"]) == (0.1, 0.1) and biases["lr"] == pytest.approx(0.3)
    assert all(p.dim() > 1 for p in decayed["params"]) and all(p.dim() < 2 for p in plain["params"])


def test_frozen_parameters_are_left_out():
    model = AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, max_position_embeddings=9))
    model.aft.embeddings.requires_grad_(False)
    optimizer = build_optimizer(model, 0.1)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert isinstance(optimizer, torch.optim.AdamW)
