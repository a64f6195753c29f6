"""The optimizer of a recipe."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.training.adamw import build_adamw
from aft_hf.training.averaging import averaged, keep_average
from aft_hf.training.recipe import Optimizer


SETTINGS = Optimizer(learning_rate=0.1, weight_decay=0.5, position_bias_scale=3.0)


def decayed_names(model: nn.Module) -> set[str]:
    groups = build_adamw(model, SETTINGS).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, model.parameters()))
    return {name for name, parameter in model.named_parameters() if id(parameter) in decayed}


def test_only_linear_weights_of_an_aft_decay():
    config = AFTConfig(hidden_size=8, num_hidden_layers=1, aft_type="full", max_position_embeddings=9)
    block = "aft.layers.0."
    names = [f"mixer.{name}_proj" for name in "qkvo"] + ["mlp.fc1", "mlp.fc2"]
    assert decayed_names(AFTForCausalLM(config)) == {f"{block}{name}.weight" for name in names} | {"lm_head.weight"}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_gpt2_do_not_decay_though_its_head_may_share_them(tied):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=9, tie_word_embeddings=tied)
    names = {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert decayed_names(GPT2LMHeadModel(config)) == names | (set() if tied else {"lm_head.weight"})


def test_position_biases_have_their_own_rate():
    model = AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, aft_type="conv", num_heads=2))
    fast = {id(p) for group in build_adamw(model, SETTINGS).param_groups if group["lr"] > 0.2 for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in fast}
    assert names == {f"aft.layers.0.mixer.kernel{part}" for part in ("", "_scale", "_shift")}


def test_the_average_is_exponential_and_in_place_only_within_its_context():
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    keep_average(optimizer, 0.75)
    values = []
    for _ in range(3):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        values.append(weight.item())
    with averaged(optimizer, nn.ParameterList([weight])):
        average = weight.item()
    assert average == pytest.approx(0.75**2 * values[0] + 0.75 * 0.25 * values[1] + 0.25 * values[2])
    assert weight.item() == values[2] != average


def test_the_average_is_saved_and_loaded_with_the_state():
    def made() -> tuple[nn.Parameter, torch.optim.AdamW]:
        weight = nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        keep_average(optimizer, 0.75)
        return weight, optimizer

    (first, saved), (second, loaded) = made(), made()
    for _ in range(2):
        first.grad = torch.tensor([1.0])
        saved.step()
    second.data.copy_(first.data)
    loaded.load_state_dict(deepcopy(saved.state_dict()))
    trained = first.item()
    with averaged(saved, nn.ParameterList([first])), averaged(loaded, nn.ParameterList([second])):
        assert first.item() == second.item() != trained


def test_without_an_average_weights_stay_as_they_are():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.tensor([0.3, 0.1])
    optimizer.step()
    trained = weight.detach().clone()
    with averaged(optimizer, nn.ParameterList([weight])):
        assert torch.equal(weight, trained)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\)"):
        keep_average(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), decay)
