"""The maps of one layer over the patches of an image."""

import pytest
import torch

from aft_hf import AFTConfig, AFTForImageClassification
from aft_hf.analysis import patch_maps


def classifier(aft_type, num_heads=2, **options):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_heads": num_heads, "num_labels": 3}
    config = AFTConfig(modality="image", aft_type=aft_type, image_size=(8, 12), patch_size=2, **sizes, **options)
    model = AFTForImageClassification(config).eval()
    for name, parameter in model.named_parameters():
        if "kernel" in name or "position_bias" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("aft_type", ["conv", "full", "local", "simple"])
def test_the_weights_are_the_implicit_attention_of_the_model(aft_type):
    options = {"kernel_size": 3} if aft_type == "conv" else {}
    model, pixels = classifier(aft_type, use_query=False, **options), torch.randn(1, 3, 8, 12)
    maps = patch_maps(model, pixels, layer=1, query=(2, 4))
    outputs = model(pixels, output_attentions=True)
    first = int(model.config.use_cls_token)
    rows = outputs.attentions[1][0, :, first + 2 * 6 + 4, first:]  # (d, T) of Eq. 3; without a query there is no gate
    torch.testing.assert_close(maps.weights, rows.unflatten(0, (2, 4)).mean(1).unflatten(-1, (4, 6)))
    bias = model.aft.layers[1].mixer.position_bias(24 + first, (4, 6))
    torch.testing.assert_close(maps.biases.flatten(1), bias[:, first + 2 * 6 + 4, first:])
    assert all(each.shape == (2, 4, 6) for each in maps)


def test_without_biases_the_weights_are_those_of_the_keys():
    model, pixels = classifier("simple"), torch.randn(1, 3, 8, 12)
    maps = patch_maps(model, pixels, layer=0)
    assert torch.equal(maps.weights, patch_maps(model, pixels, layer=0, query=(2, 3)).weights)  # the center
    torch.testing.assert_close(maps.keys, maps.weights)
    assert maps.biases.abs().max() == 0


def test_what_a_query_does_not_see_has_no_weight():
    model = classifier("conv", kernel_size=3, global_connectivity=False)
    maps = patch_maps(model, torch.randn(1, 3, 8, 12), layer=0, query=(0, 0))
    assert torch.isneginf(maps.biases[:, 2:]).all() and maps.weights[:, 2:].abs().max() == 0


@pytest.mark.parametrize("layer, query, message", [(2, None, "layer must be 0 .. 1"), (0, (4, 0), "4 x 6")])
def test_what_does_not_exist_is_named(layer, query, message):
    with pytest.raises(ValueError, match=message):
        patch_maps(classifier("conv", kernel_size=3), torch.randn(1, 3, 8, 12), layer=layer, query=query)
