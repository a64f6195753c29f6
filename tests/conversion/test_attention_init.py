"""Tests of position biases and keys of AFT-conv that are fitted to the attention of the source."""

import itertools

import numpy as np
import pytest
import torch
from checkpoints import HEADS, TIMM, WIDTH, save_pth
from PIL import Image

from aft_hf import convert_deit
from aft_hf.analysis.maps import relative_attention
from aft_hf.conversion import read_source
from aft_hf.conversion.attention import LARGEST_BIAS, conv_bias, head_weights
from aft_hf.conversion.deit import POSITION_BIAS_MULTIPLIER


GRID = (4, 4)


@pytest.fixture
def deit(tmp_path):
    """The file of a distilled DeiT with random weights."""
    save_pth(tmp_path / "deit.pth", distilled=True)
    return tmp_path / "deit.pth"


@pytest.fixture
def images():
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(256, size=(32, 32, 3), dtype=np.uint8)) for _ in range(6)]


def read(path, images):
    """Return the model of transformers and the pixel values of images."""
    source = read_source(path, **TIMM)
    return source.to_transformers(), source.image_processor(images, return_tensors="pt")["pixel_values"]


def attention_by_hand(path, images):
    """Return the mean attention of every layer, from the attention maps of transformers."""
    model, pixels = read(path, images)
    model.set_attn_implementation("eager")
    maps = []
    for attention in model(pixels, output_attentions=True).attentions:
        attention = attention[:, :, 2:, 2:]
        maps.append((attention / attention.sum(-1, keepdim=True)).mean(0).detach())
    return maps


# --------------------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(("ours", "theirs", "width"), [(4, 3, 24), (1, 3, 24), (2, 12, 24)])
def test_heads_share_by_the_features_they_have_in_common(ours, theirs, width):
    expected = torch.zeros(ours, theirs)
    for feature in range(width):
        expected[feature // (width // ours), feature // (width // theirs)] += ours / width
    torch.testing.assert_close(head_weights(ours, theirs, width), expected)


@pytest.mark.parametrize(("grid", "kernel_size"), [((4, 4), 3), ((2, 5), 3), ((2, 5), 5)])
def test_the_kernel_of_conv_is_the_log_of_attention_over_that_outside(grid, kernel_size):
    attention = torch.rand(2, grid[0] * grid[1], grid[0] * grid[1]).double() + 0.1
    reach, pairs = kernel_size // 2, {}  # pairs: the attention by offset
    for q, k in itertools.product(range(grid[0] * grid[1]), repeat=2):
        offset = k // grid[1] - q // grid[1], k % grid[1] - q % grid[1]
        pairs.setdefault(offset, []).append(attention[:, q, k])
    outside = [each for offset, actual in pairs.items() if max(map(abs, offset)) > reach for each in actual]
    mean_outside = torch.stack(outside).mean(0)
    expected = torch.zeros(2, kernel_size, kernel_size, dtype=torch.float64)
    for down, right in itertools.product(range(-reach, reach + 1), repeat=2):
        if (down, right) in pairs:
            means = torch.stack(pairs[down, right]).mean(0)
            expected[:, down + reach, right + reach] = (means / mean_outside).log()
    torch.testing.assert_close(conv_bias(attention, grid, kernel_size), expected)


def test_a_kernel_larger_than_the_grid_is_centred_over_the_offsets_of_the_grid():
    attention = torch.rand(2, 6, 6).double() + 0.1
    bias = conv_bias(attention, (2, 3), 5)
    logs = relative_attention(attention, (2, 3)).log()
    torch.testing.assert_close(bias[:, 1:4], logs - logs.mean((1, 2), keepdim=True))
    assert (bias[:, ::4] == 0).all()


# ------------------------------------------------------------------------------------------- the converted layers


@pytest.mark.parametrize("num_heads", [3, 4, 1])
def test_conv_begins_where_the_teacher_looks(deit, images, num_heads):
    model, report = convert_deit(deit, kernel_size=5, num_heads=num_heads, init="attention", images=images, **TIMM)
    weights = head_weights(num_heads, HEADS, WIDTH)
    for layer, attention in zip(model.aft.layers, attention_by_hand(deit, images)):
        attention = torch.einsum("ij,jts->its", weights, attention)
        expected = conv_bias(attention.double(), GRID, 5).float()
        # The parameters of Eq. 8 result in these biases.
        torch.testing.assert_close(layer.mixer.kernel_bias(), expected, atol=1e-5, rtol=1e-5)
        kernel = layer.mixer.kernel * POSITION_BIAS_MULTIPLIER
        torch.testing.assert_close(kernel, expected, atol=1e-5, rtol=1e-5)
    fitted = {record.target for record in report.with_status("fitted")}
    names = ("kernel", "kernel_scale", "kernel_shift", "k_proj.weight")
    assert report.options["images"] == 6
    assert all(layer.mixer.k_proj.bias.eq(0).all() for layer in model.aft.layers)
    assert fitted == {f"aft.layers.{i}.mixer.{name}" for i in (0, 1) for name in names}


def scores_by_hand(path, images):
    """Return the normalized input of every layer of the source, (B, T, d), and mean(q) . k_t' / sqrt(d_head)."""
    (model, pixels), inputs, scores = read(path, images), [], []
    hidden_states = model(pixels, output_hidden_states=True).hidden_states
    for layer, states in zip(model.base_model.layers, hidden_states):
        patches = layer.layernorm_before(states)[:, -16:]
        query, key = layer.attention.q_proj(patches), layer.attention.k_proj(patches)
        query = query.mean((0, 1)).unflatten(0, (HEADS, -1))
        inputs.append(patches.detach())
        scores.append((key.unflatten(-1, (HEADS, -1)) * query).sum(-1).detach() / query.shape[1] ** 0.5)
    return inputs, scores


@pytest.mark.parametrize("num_heads", [3, 4])
def test_the_keys_of_conv_are_the_scores_of_the_mean_query(deit, images, num_heads):
    options = {"kernel_size": 3, "num_heads": num_heads, "init": "attention", **TIMM}
    model, _ = convert_deit(deit, images=images, **options)
    for layer, patches, scores in zip(model.aft.layers, *scores_by_hand(deit, images)):
        expected = scores @ head_weights(num_heads, HEADS, WIDTH).T
        actual = layer.mixer.k_proj(patches)
        # A score that is the same for all keys does not change the weights of Eq. 2.
        torch.testing.assert_close(
            actual - actual.mean(1, keepdim=True), expected - expected.mean(1, keepdim=True), atol=1e-5, rtol=1e-5
        )


def test_a_head_that_looks_at_one_patch_alone_keeps_its_peak():
    """No attention is left outside the window, so the constant diverges; the kernel must keep its order."""
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    distance = (rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2
    attention = torch.softmax(-6.0 * distance.double(), -1)[None]
    bias = conv_bias(attention, (8, 8), 3)[0]
    assert bias.max() == bias[1, 1] == LARGEST_BIAS
    torch.testing.assert_close(bias[1, 1] - bias[0, 1], torch.tensor(6.0, dtype=torch.float64), rtol=0.05, atol=0)
    torch.testing.assert_close(bias[1, 1] - bias[0, 0], torch.tensor(12.0, dtype=torch.float64), rtol=0.05, atol=0)
