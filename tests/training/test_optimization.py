"""Parameter groups of the optimizer."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from aft_hf import AFTConfig, AFTForCausalLM
from aft_hf.training import build_optimizer


def small_model(**options) -> AFTForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "max_position_embeddings": 9}
    return AFTForCausalLM(AFTConfig(**sizes | {"kernel_size": 4} | options))


@pytest.mark.parametrize("rank", [4, None])
def test_each_parameter_is_in_one_group_and_position_biases_are_apart(rank):
    model = small_model(num_hidden_layers=2, aft_type=["conv", "full"], position_bias_dim=rank)
    model.aft.embeddings.requires_grad_(False)  # frozen parameters are left out
    decayed, plain, biases = build_optimizer(model, 0.1, weight_decay=0.5, position_bias_scale=3.0).param_groups
    grouped = [id(p) for group in (decayed, plain, biases) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {id(p): name for name, p in model.named_parameters()}
    expected = {name for name in names.values() if "mixer" in name and "_proj" not in name}
    assert {names[id(p)] for p in biases["params"]} == expected
    assert (decayed["weight_decay"], plain["weight_decay"], biases["weight_decay"]) == (0.5, 0.0, 0.0)
    assert (decayed["lr"], plain["lr"]) == (0.1, 0.1) and biases["lr"] == pytest.approx(0.3)


GPT2 = {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
AFT = {f"aft.layers.0.{name}.weight" for name in [f"mixer.{name}_proj" for name in "qkvo"] + ["mlp.fc1", "mlp.fc2"]}


@pytest.mark.parametrize(
    ("architecture", "tied", "linear"),
    [("aft", False, AFT | {"lm_head.weight"}), ("gpt2", True, GPT2), ("gpt2", False, GPT2 | {"lm_head.weight"})],
    ids=["AFT", "GPT-2, tied", "GPT-2"],
)
def test_only_linear_weights_decay_and_no_embeddings_though_a_head_may_share_them(architecture, tied, linear):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 9}
    if architecture == "aft":
        model = small_model(aft_type="full")
    else:
        model = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=tied, **sizes))
    groups = build_optimizer(model, 0.1, weight_decay=0.5).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in decayed} == linear
