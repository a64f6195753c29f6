"""Tests of converting labml's AFT-local, against its formula."""

import math

import pytest
import torch
from torch.nn import functional as F

from aft_hf import AFTForCausalLM, AFTLocal
from aft_hf.conversion import convert_labml
from aft_hf.errors import InputError
from tests.properties.test_labml_states import LENGTH, TOKENS, WIDTH, WINDOW, layer_state, model_state


def layer_without_biases():
    state = layer_state()
    return {name: value for name, value in state.items() if name not in ("query.bias", "key.bias", "value.bias")}


def layer_formula(state, x, mask, prefix=""):
    """Compute labml's layer by its formula in float64: x (T, B, d); mask (T, T, B or 1), True where visible."""
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    def linear(name, z):
        bias = weights.get(f"{name}.bias")
        return F.linear(z, weights[f"{name}.weight"].double(), None if bias is None else bias.double())

    length = len(x)
    query, key, value = (linear(name, x) for name in ("query", "key", "value"))
    bias = (weights["pos_bias"].double() * weights["local_mask"])[:length, :length, None]
    shares = (bias + torch.zeros(mask.shape)).masked_fill(~mask, -math.inf).exp()  # (T, T, B)
    total = torch.einsum("ijb,jbd->ibd", shares.expand(-1, -1, x.shape[1]), key.exp())
    values = torch.einsum("ijb,jbd->ibd", shares.expand(-1, -1, x.shape[1]), key.exp() * value)
    return linear("output", query.sigmoid() * values / total)


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]


def model_formula(state, tokens):
    """Compute the logits (T, B, tokens) of labml's model in float64 for token ids (T, B)."""

    def norm(name, z):
        weight, bias = (state[f"{name}.{part}"].double() for part in ("weight", "bias"))
        return F.layer_norm(z, (WIDTH,), weight, bias)

    def linear(name, z):
        return F.linear(z, state[f"{name}.weight"].double(), state[f"{name}.bias"].double())

    x = F.embedding(tokens, state["src_embed.linear.weight"].double()) * math.sqrt(WIDTH)
    x = x + state["src_embed.positional_encodings"][: len(tokens)].double()
    for i in range(2):
        layer = f"encoder.layers.{i}."
        z = norm(f"{layer}norm_self_attn", x)
        x = x + layer_formula(state, z, causal_mask(len(tokens)), f"{layer}self_attn.")
        z = linear(f"{layer}feed_forward.layer1", norm(f"{layer}norm_ff", x)).relu()
        x = x + linear(f"{layer}feed_forward.layer2", z)
    return linear("generator.projection", norm("encoder.norm", x))


def close(ours, theirs):
    """Assert equality up to about a thousand float32 rounding errors, for values around 1."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [LENGTH, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_converted_labml_layer_computes_eq_2(length, bias, causal):
    state, x = layer_state() if bias else layer_without_biases(), torch.randn(length, 3, WIDTH)
    mixer = convert_labml(state, causal=causal)
    assert type(mixer) is AFTLocal and mixer.window == WINDOW and (mixer.q_proj.bias is not None) == bias
    mask = causal_mask(length) if causal else torch.ones(length, length, 1, dtype=torch.bool)
    close(mixer(x.transpose(0, 1)).transpose(0, 1), layer_formula(state, x.double(), mask))


def test_converted_layers_take_attention_masks_in_the_layout_of_transformers():
    state, x = layer_state(), torch.randn(LENGTH, 2, WIDTH)
    mask = causal_mask(LENGTH).repeat(1, 1, 2)
    mask[:, :3, 1] = False  # the second sequence begins at position 3
    mask[:3, :3, 1] |= torch.eye(3, dtype=torch.bool)  # a query that sees nothing would divide by 0 in labml
    mixer, expected = convert_labml(state), layer_formula(state, x.double(), mask).transpose(0, 1)
    close(mixer(x.transpose(0, 1), attention_mask=mask.permute(2, 0, 1)), expected)
    # In this package, the positions of a padded row count from its first real token, and so do its position biases.
    padded = mixer(x.transpose(0, 1), attention_mask=mask[-1].T.long())
    close(padded[0], expected[0])
    assert (padded[1, 3:] - expected[1, 3:]).abs().max() > 0.1
    close(padded[1, 3:], mixer(x[3:, 1:].transpose(0, 1))[0])


def with_a_bias_of_the_head():
    """Return a model with as many features as tokens, where the bias of the last norm can stand for any bias."""
    state = model_state()
    names = ("src_embed.linear.weight", "generator.projection.weight", "generator.projection.bias")
    return state | {name: state[name][:WIDTH] for name in names[:2]} | {names[2]: torch.randn(WIDTH)}


def test_a_converted_labml_model_has_the_outputs_of_the_original_and_can_be_saved(tmp_path):
    state, tokens = with_a_bias_of_the_head(), torch.randint(WIDTH, (LENGTH, 3))
    model = convert_labml(state)
    close(model(tokens.T).logits.transpose(0, 1), model_formula(state, tokens))
    model.save_pretrained(tmp_path)
    close(AFTForCausalLM.from_pretrained(tmp_path)(tokens.T).logits, model(tokens.T).logits)


def test_embeddings_without_positions_are_not_scaled():
    state, tokens = with_a_bias_of_the_head(), torch.randint(WIDTH, (LENGTH, 1))
    plain = {name: value for name, value in state.items() if not name.startswith("src_embed")}
    plain["src_embed.weight"] = state["src_embed.linear.weight"] * math.sqrt(WIDTH)
    without = state | {"src_embed.positional_encodings": torch.zeros(LENGTH, 1, WIDTH)}
    close(convert_labml(plain)(tokens.T).logits.transpose(0, 1), model_formula(without, tokens))


def test_a_head_bias_that_no_layer_norm_bias_can_replace_is_refused():
    state = model_state()
    state["generator.projection.bias"] = torch.randn(TOKENS)
    with pytest.raises(InputError, match="one of 5 tokens with 4 features"):
        convert_labml(state)
    state["generator.projection.bias"].zero_()
    assert convert_labml(state).config.vocab_size == TOKENS


def prefixed(state, prefix):
    for name in list(state):
        state[prefix + name] = state.pop(name)


def test_an_unknown_activation_is_not_said_to_be_a_fault_of_the_weights():
    with pytest.raises(ValueError, match="'foo' is not known") as raised:
        convert_labml(model_state(), hidden_act="foo")
    assert "weights" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("encoder.norm.bias"), "aft.layernorm.bias"),
        (
            lambda state: state.update({"encoder.norm.bias": torch.zeros(WIDTH).half()}),
            "one dtype, got torch.float16, torch.float32",
        ),
        (lambda state: state["encoder.layers.1.self_attn.local_mask"].fill_(True), "must be the same window"),
        (lambda state: state["encoder.layers.1.self_attn.local_mask"][1].fill_(False), "must be the same window"),
        (lambda state: state.clear(), r"give model\.state_dict\(\)"),
        (lambda state: state.update(model=model_state()), r"give model\.state_dict\(\)"),
        (lambda state: prefixed(state, "module."), r"no prefix \(module\., _orig_mod\.\)"),
        (lambda state: prefixed(state, "_orig_mod."), r"no prefix \(module\., _orig_mod\.\)"),
        (lambda state: state.update({"src_embed.weight": torch.zeros(TOKENS, WIDTH)}), "stand for the same tensor"),
    ],
)
def test_conversion_from_labml_refuses_state_dicts_that_are_not_of_an_aft_local(change, message):
    state = model_state()
    change(state)
    with pytest.raises(InputError, match=message):
        convert_labml(state)
