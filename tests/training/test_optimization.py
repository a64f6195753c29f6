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


@pytest.mark.parametrize(("aft_type", "rank", "scale"), [("conv", 4, 9.0), ("full", None, 9.0), ("full", 4, 3.0)])
def test_a_multiplier_of_w_trains_as_a_learning_rate_of_its_own(aft_type, rank, scale):
    """AdamW's steps do not depend on the scale of gradients, so a parameter times m moves m times as fast.

    The two factors of a factorized w have a multiplier of sqrt(m) each, equal to sqrt(m) times the learning rate.
    """
    biases = []
    for multiplier, position_bias_scale in ((9.0, 1.0), (1.0, scale)):
        torch.manual_seed(0)
        config = AFTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            vocab_size=9,
            aft_type=aft_type,
            kernel_size=4,
            max_position_embeddings=9,
            position_bias_dim=rank,
            position_bias_multiplier=multiplier,
        )
        model = AFTForCausalLM(config).double()
        tokens = torch.arange(9).unsqueeze(0)
        optimizer = build_optimizer(model, 1e-2, position_bias_scale=position_bias_scale)
        for group in optimizer.param_groups:
            group["eps"] = 0.0  # eps would make steps depend on the scale of gradients
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            for parameter in model.parameters():  # avoids 0 / 0 for rows of w without effect
                parameter.grad += 1e-30
            optimizer.step()
        # The first token sees only itself, so the gradient of its w is 0 up to rounding; it is left out.
        biases.append(model.aft.layers[0].mixer.position_bias(9)[:, 1:])
    assert biases[0].abs().max() > 0.05
    torch.testing.assert_close(*biases, rtol=1e-4, atol=1e-6)


def test_frozen_parameters_are_left_out():
    model = AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, max_position_embeddings=9))
    model.aft.embeddings.requires_grad_(False)
    optimizer = build_optimizer(model, 0.1)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert isinstance(optimizer, torch.optim.AdamW)
