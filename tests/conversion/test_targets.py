"""Tests of the tensors that each image type of AFT gets, at any image size."""

import pytest
import torch
from checkpoints import OPTIONS, TIMM, WIDTH, assert_copied, copies, save_pth
from torch import nn

from aft_hf import convert_deit
from aft_hf.conversion import read_source
from aft_hf.conversion.deit import POSITION_BIAS_MULTIPLIER


def resized(positions, old, new):
    """Interpolate position embeddings (n, d) of a grid as ViT does."""
    grid = positions.reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return grid.permute(0, 2, 3, 1).reshape(new[0] * new[1], -1)


@pytest.fixture
def deit(tmp_path):
    """The file of a distilled DeiT, and its tensors."""
    return tmp_path / "deit.pth", save_pth(tmp_path / "deit.pth", distilled=True)


@pytest.mark.parametrize("aft_type", ["full", "local", "simple"])
def test_types_with_a_class_token_keep_it_and_its_positions(deit, aft_type):
    path, tensors = deit
    model, report = convert_deit(path, aft_type=aft_type, **TIMM)
    expected = copies(read_source(path, **TIMM).to_transformers())
    expected["aft.embeddings.cls_token"] = tensors["cls_token"]
    # The second position is that of the distillation token.
    expected["aft.embeddings.position_embeddings"] = tensors["pos_embed"][:, [0, *range(2, 18)]]
    assert_copied(model, expected)
    assert model.config.pooling == "cls" and model.config.num_heads == 1
    assert model(torch.randn(1, 3, 32, 32)).logits.shape == (1, 3)
    dropped = {name for record in report.with_status("dropped") for name in record.sources}
    assert dropped == {"dist_token", "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"} | {
        "blocks.1.attn.qkv.weight",
        "blocks.1.attn.qkv.bias",
    }


@pytest.mark.parametrize("image_size", [48, (24, 40)])
def test_positions_are_interpolated_and_the_class_token_keeps_its_own(deit, image_size):
    path, tensors = deit
    model, _ = convert_deit(path, aft_type="simple", image_size=image_size, **TIMM)
    grid, positions = model.config.grid_size, tensors["pos_embed"][0]
    kept = model.aft.embeddings.position_embeddings[0]
    assert torch.equal(kept[0], positions[0])
    torch.testing.assert_close(kept[1:], resized(positions[2:], (4, 4), grid))


def test_a_list_of_types_with_conv_keeps_the_positions_of_patches_alone(deit):
    path, tensors = deit
    model, report = convert_deit(path, aft_type=["conv", "full"], kernel_size=3, num_heads=2, **TIMM)
    assert [type(layer.mixer).__name__ for layer in model.aft.layers] == ["AFTConv", "AFTFull"]
    assert_copied(model, {"aft.embeddings.position_embeddings": tensors["pos_embed"][:, 2:]})
    assert model.aft.embeddings.cls_token is None
    assert "cls_token" in {name for record in report.with_status("dropped") for name in record.sources}


def test_conv_has_the_heads_and_kernels_of_the_paper_by_default(tmp_path):
    save_pth(tmp_path / "deit.pth", grid=(8, 8), width=96)
    model, _ = convert_deit(tmp_path / "deit.pth", **TIMM)
    assert model.aft.layers[0].mixer.kernel.shape == (4, 11, 11)
    assert model.aft.layers[0].mixer.k_proj.weight.shape == (4, 96)


def test_a_converted_model_has_no_position_biases_at_first_and_a_multiplier_to_learn_them_with_any_optimizer(deit):
    for options, multiplier in (({}, POSITION_BIAS_MULTIPLIER), ({"position_bias_multiplier": 1}, 1)):
        model, report = convert_deit(deit[0], **OPTIONS, **TIMM, **options)
        assert model.config.position_bias_multiplier == report.options["position_bias_multiplier"] == multiplier
        for layer in model.aft.layers:
            assert layer.mixer.position_bias_multiplier == multiplier and layer.mixer.kernel_bias().eq(0).all()


def test_patches_of_two_sizes_convert(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth")
    tensors["patch_embed.proj.weight"] = torch.randn(WIDTH, 3, 4, 8)
    torch.save(tensors, tmp_path / "deit.pth")
    model, _ = convert_deit(tmp_path / "deit.pth", kernel_size=3, num_heads=4, **TIMM)
    assert tuple(model.config.patch_size) == (4, 8) and tuple(model.config.image_size) == (16, 32)
    assert_copied(model, {"aft.embeddings.patch_embeddings.weight": tensors["patch_embed.proj.weight"]})
    assert model(torch.randn(1, 3, 16, 32)).logits.shape == (1, 3)
