"""The maps of one layer over the patches of an image."""

from functools import partial

import pytest
import torch
from tiny_models import image_model


classifier = partial(image_model, image_size=(8, 12), patch_size=2, hidden_size=8, num_heads=2, kernel_size=3)


def patch_maps(*arguments, **options):
    import maps  # of the demo, whose folder is on the import path while a test runs

    return maps.patch_maps(*arguments, **options)


@pytest.mark.parametrize("aft_type", ["conv", "full", "local", "simple"])
def test_the_weights_are_the_implicit_attention_of_the_model(aft_type):
    model, pixels = classifier(aft_type, use_query=False), torch.randn(1, 3, 8, 12)
    maps = patch_maps(model, pixels, layer=1, query=(2, 4))
    outputs = model(pixels, output_attentions=True)
    first = int(model.config.use_cls_token)
    rows = outputs.attentions[1][0, :, first + 2 * 6 + 4, first:]  # (d, T) of Eq. 3; without a query there is no gate
    torch.testing.assert_close(maps.weights, rows.unflatten(0, (2, 4)).mean(1).unflatten(-1, (4, 6)))
    bias = model.aft.layers[1].mixer.position_bias(24 + first, (4, 6))
    torch.testing.assert_close(maps.biases.flatten(1), bias[:, first + 2 * 6 + 4, first:])
    assert all(each.shape == (2, 4, 6) for each in maps)


def test_without_biases_the_weights_are_those_of_the_keys_and_0_where_a_query_does_not_see():
    model, pixels = classifier("simple"), torch.randn(1, 3, 8, 12)
    maps = patch_maps(model, pixels, layer=0)
    assert torch.equal(maps.weights, patch_maps(model, pixels, layer=0, query=(2, 3)).weights)  # the center
    torch.testing.assert_close(maps.keys, maps.weights)
    assert maps.biases.abs().max() == 0
    model = classifier("conv", global_connectivity=False)
    maps = patch_maps(model, pixels, layer=0, query=(0, 0))
    assert torch.isneginf(maps.biases[:, 2:]).all() and maps.weights[:, 2:].abs().max() == 0


@pytest.mark.parametrize("layer, query, message", [(2, None, "layer must be 0 .. 1"), (0, (4, 0), "4 x 6")])
def test_what_does_not_exist_is_named(layer, query, message):
    with pytest.raises(ValueError, match=message):
        patch_maps(classifier("conv"), torch.randn(1, 3, 8, 12), layer=layer, query=query)
