"""The weights of labml's AFT-local, under the names that docs/labml.md gives them, compute its formula."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F


PAGE = Path(__file__).parents[2] / "docs" / "labml.md"
WIDTH, LENGTH, WINDOW = 4, 6, 3


def layer_state():
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    state = {f"{name}.weight": torch.randn(WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
    state |= {f"{name}.bias": torch.randn(WIDTH) for name in ("query", "key", "value", "output")}
    return state | {"pos_bias": torch.randn(LENGTH, LENGTH), "local_mask": distance < WINDOW}


def layer_without_biases():
    state = layer_state()
    return {name: value for name, value in state.items() if name not in ("query.bias", "key.bias", "value.bias")}


def layer_formula(state, x, mask):
    """Compute labml's layer by its formula in float64: x (T, B, d); mask (T, T, B or 1), True where visible."""

    def linear(name, z):
        bias = state.get(f"{name}.bias")
        return F.linear(z, state[f"{name}.weight"].double(), None if bias is None else bias.double())

    length = len(x)
    query, key, value = (linear(name, x) for name in ("query", "key", "value"))
    bias = (state["pos_bias"].double() * state["local_mask"])[:length, :length, None]
    shares = (bias + torch.zeros(mask.shape)).masked_fill(~mask, -math.inf).exp()  # (T, T, B)
    total = torch.einsum("ijb,jbd->ibd", shares.expand(-1, -1, x.shape[1]), key.exp())
    values = torch.einsum("ijb,jbd->ibd", shares.expand(-1, -1, x.shape[1]), key.exp() * value)
    return linear("output", query.sigmoid() * values / total)


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()[:, :, None]


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Function that runs the snippet of the page on the state of a layer, and returns its mixer."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "causal=True" in code

    def convert(state, causal=True):
        torch.save(state, "layer.pth")
        variables = {}
        exec(code.replace("causal=True", f"{causal=}"), variables)
        return variables["mixer"]

    return convert


def close(ours, theirs):
    """Assert equality up to about a thousand float32 rounding errors, for values around 1."""
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [LENGTH, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_weights_of_a_labml_layer_compute_eq_2(converted, length, bias, causal):
    state, x = layer_state() if bias else layer_without_biases(), torch.randn(length, 3, WIDTH)
    mixer = converted(state, causal)
    assert mixer.window == WINDOW and (mixer.q_proj.bias is not None) == bias
    mask = causal_mask(length) if causal else torch.ones(length, length, 1, dtype=torch.bool)
    close(mixer(x.transpose(0, 1)).transpose(0, 1), layer_formula(state, x.double(), mask))


def test_the_layers_take_attention_masks_in_the_layout_of_transformers(converted):
    state, x = layer_state(), torch.randn(LENGTH, 2, WIDTH)
    mask = causal_mask(LENGTH).repeat(1, 1, 2)
    mask[:, :3, 1] = False  # the second sequence begins at position 3
    mask[:3, :3, 1] |= torch.eye(3, dtype=torch.bool)  # a query that sees nothing would divide by 0 in labml
    mixer, expected = converted(state), layer_formula(state, x.double(), mask).transpose(0, 1)
    close(mixer(x.transpose(0, 1), attention_mask=mask.permute(2, 0, 1)), expected)
    # In this package, the positions of a padded row count from its first real token, and so do its position biases.
    padded = mixer(x.transpose(0, 1), attention_mask=mask[-1].T.long())
    close(padded[0], expected[0])
    assert (padded[1, 3:] - expected[1, 3:]).abs().max() > 0.1
    close(padded[1, 3:], mixer(x[3:, 1:].transpose(0, 1))[0])
