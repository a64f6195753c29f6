"""The reference against loops over Eq. 2, and the fields of a problem."""

import math
from itertools import product

import pytest
import torch

from aft_hf.mixing_aft import Documents, Mixing, mixing_weights, reference_mixing
from aft_hf.position_biases_aft import Dense, NoBias


HEADS, FEATURES = 2, 3
key_widths = pytest.mark.parametrize("key_width", (1, FEATURES), ids=("one key per head", "one key per feature"))


def brute_force(key, value, bias, visible):
    """Eq. 2 number by number, from keys (B, h, T', k), values (B, h, T', c), and bias and visible (B, h, T, T')."""
    output = torch.zeros(*bias.shape[:3], value.shape[-1], dtype=torch.float64)
    for b, i, t, f in product(*map(range, output.shape)):
        numerator = denominator = 0.0
        for s in range(bias.shape[-1]):
            if visible[b, i, t, s]:
                weight = math.exp(key[b, i, s, f % key.shape[-1]].item() + bias[b, i, t, s].item())
                numerator += weight * value[b, i, s, f].item()
                denominator += weight
        output[b, i, t, f] = numerator / denominator if denominator > 0 else 0.0
    return output


def problem(length=6, key_width=FEATURES, **fields) -> Mixing:
    key = torch.randn(2, length, HEADS * key_width, dtype=torch.float64)
    value = torch.randn(2, length, HEADS * FEATURES, dtype=torch.float64)
    return Mixing(key, value, HEADS, Dense(torch.randn(HEADS, 9, 9, dtype=torch.float64)), **fields)


LATER = torch.ones(6, 6).triu(1).bool()
PADDING = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
PAIRS = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
PAIRS[0, 3] = False
STARTS = torch.tensor([[1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 0]]).bool()
OTHER = torch.tensor([[8, 1, 3, 2, 5, 0]])
ONE = torch.ones(2, 6, 6, dtype=torch.bool)
# Fields of a problem, the resulting visibility mask, and the positions of the tokens.
FIELDS = {
    "everything": ({}, ONE, None),
    "causal": ({"causal": True}, ONE & ~LATER, None),
    "padding": ({"padding_mask": PADDING}, ONE & PADDING[:, None], torch.tensor([[0, 0, 0, 1, 0, 2], [*range(6)]])),
    "pairs": ({"pair_mask": PAIRS}, PAIRS, None),
    "one mask": ({"pair_mask": PAIRS[:1]}, PAIRS[:1] & ONE, None),
    "pairs, causal": ({"pair_mask": PAIRS, "causal": True}, PAIRS & ~LATER, None),
    "positions": ({"positions": OTHER}, ONE, OTHER.expand(2, -1)),
    "documents": (
        {"documents": Documents(STARTS)},
        STARTS.cumsum(1)[:, :, None] == STARTS.cumsum(1)[:, None],
        torch.tensor([[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1]]),
    ),
}


@key_widths
@pytest.mark.parametrize("fields", FIELDS)
def test_the_reference_is_eq_2(key_width, fields):
    options, visible, positions = FIELDS[fields]
    asked = problem(key_width=key_width, **options)
    positions = torch.arange(6).expand(2, -1) if positions is None else positions
    bias = torch.stack([asked.biases.query[:, row[:, None], row] for row in positions])
    visible = visible[:, None].expand_as(bias)
    expected = brute_force(*asked.by_head(), bias, visible).transpose(1, 2).flatten(2)
    real = options.get("padding_mask", torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(reference_mixing(asked)[real], expected[real])


@pytest.mark.parametrize("queries", (4, 8))
def test_there_may_be_more_or_fewer_queries_than_keys(queries):
    asked = problem(num_queries=queries)
    bias = asked.biases.query[:, :queries, :6].expand(2, -1, -1, -1)
    expected = brute_force(*asked.by_head(), bias, torch.ones_like(bias)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(reference_mixing(asked), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_the_reference_sums_in_float32_and_gives_the_dtype_of_its_values(dtype):
    key, value = torch.randn(2, 2, 50, 4).to(dtype)
    found = reference_mixing(Mixing(key, value, 1, NoBias(1, key.device, torch.float32)))
    expected = reference_mixing(Mixing(key.float(), value.float(), 1, NoBias(1, key.device, torch.float32)))
    assert found.dtype == dtype and found.equal(expected.to(dtype))


@key_widths
def test_mixing_weights_are_what_the_reference_averages_with(key_width):
    asked = problem(key_width=key_width, pair_mask=PAIRS)
    key, value = asked.by_head()
    weights = mixing_weights(key, *asked.table())
    assert weights.shape == (2, HEADS, key_width, 6, 6)
    sees_something = PAIRS.any(-1)[:, None, None].expand(2, HEADS, key_width, 6)
    torch.testing.assert_close(weights.sum(-1), sees_something.double())
    averages = torch.einsum("bhfts,bhsf->bthf", weights.expand(-1, -1, FEATURES, -1, -1), value).flatten(2)
    torch.testing.assert_close(averages, reference_mixing(asked))
