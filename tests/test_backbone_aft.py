"""AFTBackbone: feature maps for the detection and segmentation models of transformers."""

import json

import pytest
import torch
from transformers import (
    DPTConfig,
    DPTForDepthEstimation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from aft_hf import AFTBackbone, AFTConfig, AFTForImageClassification, AFTModel


def config_of(aft_type="conv", **options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8, "kernel_size": 3}
    return AFTConfig(modality="image", aft_type=aft_type, num_heads=4, **{**sizes, **options})


def save_classifier(path, **options):
    """Save a classifier whose position biases and logits are not negligible."""
    model = AFTForImageClassification(config_of(**options)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("kernel_scale", "classifier.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("patches", ({}, {"patch_size": 13, "patch_stride": 8}), ids=("disjoint", "overlapping"))
@pytest.mark.parametrize("size", ((32, 32), (24, 64)))
def test_the_last_feature_map_gives_the_logits_of_the_classifier(tmp_path, size, patches):
    model = save_classifier(tmp_path, **patches)
    backbone = AFTBackbone.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, *size)
    (feature_map,) = backbone(pixels).feature_maps
    assert feature_map.shape == (2, 16, size[0] // 8, size[1] // 8)
    torch.testing.assert_close(model.classifier(feature_map.mean((2, 3))), model(pixels).logits)


@pytest.mark.parametrize("chosen", ({"out_features": ["stem", "stage2", "stage3"]}, {"out_indices": [0, 2, 3]}))
@pytest.mark.parametrize("aft_type", ("conv", "full"))
def test_each_chosen_stage_is_its_hidden_state_normalized_at_its_place(tmp_path, chosen, aft_type):
    model = save_classifier(tmp_path, aft_type=aft_type)
    backbone = AFTBackbone.from_pretrained(tmp_path, **chosen).eval()
    pixels = torch.randn(2, 3, 32, 32)
    states = []
    for module in (model.aft.layers[0], model.aft.layers[2]):
        module.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    model.aft.layers[2].register_forward_hook(lambda module, inputs, output: states.append(output))
    model(pixels)
    feature_maps = backbone(pixels).feature_maps
    assert backbone.channels == [16] * 3 and len(feature_maps) == 3
    for state, feature_map in zip(states, feature_maps):
        patches = model.aft.layernorm(state)[:, -16:]  # without the class token of "full"
        for row, column in ((0, 0), (1, 3), (3, 2)):
            torch.testing.assert_close(feature_map[:, :, row, column], patches[:, 4 * row + column])


@pytest.mark.parametrize("use_cls_token", (True, False))
def test_without_reshaping_the_stages_are_sequences_of_class_token_and_patches(use_cls_token):
    torch.manual_seed(0)
    config = config_of("full", use_cls_token=use_cls_token, out_indices=[0, 3], reshape_hidden_states=False)
    backbone, pixels = AFTBackbone(config).eval(), torch.randn(2, 3, 32, 32)
    sequences = backbone(pixels).feature_maps
    assert [tuple(x.shape) for x in sequences] == [(2, 16 + use_cls_token, 16)] * 2
    torch.testing.assert_close(sequences[1], AFTModel.forward(backbone, pixel_values=pixels).last_hidden_state)
    config.reshape_hidden_states = True
    for sequence, feature_map in zip(sequences, backbone(pixels).feature_maps):
        torch.testing.assert_close(sequence[:, use_cls_token:].mT.reshape(2, 16, 4, 4), feature_map)


@pytest.mark.parametrize("readout", ("project", "add", "ignore"))
def test_dpt_reads_the_class_token_and_keeps_the_choice_when_saved(tmp_path, readout):
    torch.manual_seed(0)
    backbone = config_of("full", out_indices=[0, 1, 2, 3], reshape_hidden_states=False)
    sizes = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "head_in_index": -1, "readout_type": readout}
    model = DPTForDepthEstimation(DPTConfig(backbone_config=backbone, **sizes)).eval()
    pixels = torch.randn(1, 3, 32, 32)
    model.save_pretrained(tmp_path)
    again = DPTForDepthEstimation.from_pretrained(tmp_path).eval()
    assert model(pixels).predicted_depth.shape == (1, 64, 64)
    torch.testing.assert_close(again(pixels).predicted_depth, model(pixels).predicted_depth, rtol=0, atol=0)


def test_dpt_does_not_run_on_conv_which_has_no_class_token():
    backbone = config_of("conv", out_indices=[0, 1, 2, 3], reshape_hidden_states=False)
    sizes = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "head_in_index": -1}
    model = DPTForDepthEstimation(DPTConfig(backbone_config=backbone, **sizes)).eval()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(1, 3, 32, 32))


def test_a_backbone_that_was_saved_keeps_its_stages_and_a_classifier_names_none(tmp_path):
    save_classifier(tmp_path / "classifier")
    assert json.loads((tmp_path / "classifier" / "config.json").read_text())["out_indices"] is None
    backbone = AFTBackbone.from_pretrained(tmp_path / "classifier", out_indices=[1, 3]).eval()
    backbone.save_pretrained(tmp_path / "backbone")
    again = AFTBackbone.from_pretrained(tmp_path / "backbone").eval()
    assert again.out_features == ["stage1", "stage3"]
    pixels = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(again(pixels).feature_maps, backbone(pixels).feature_maps, rtol=0, atol=0)
    classifier = AFTForImageClassification.from_pretrained(tmp_path / "backbone")
    assert torch.equal(classifier.aft.layers[2].mixer.kernel, backbone.layers[2].mixer.kernel)


def test_a_stage_that_does_not_exist_and_a_text_model_are_refused():
    with pytest.raises(ValueError, match="stage4"):
        config_of(out_features=["stage4"])
    with pytest.raises(ValueError, match='modality="image"'):
        AFTBackbone(AFTConfig(hidden_size=8, num_hidden_layers=1))


def test_a_segmentation_head_of_transformers_trains_the_backbone():
    backbone = config_of(patch_size=4, out_features=["stage1", "stage3"])
    sizes = {"hidden_size": 16, "pool_scales": [1, 2], "use_auxiliary_head": False, "num_labels": 2}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone, **sizes))
    output = model(torch.randn(2, 3, 32, 32), labels=torch.randint(2, (2, 32, 32)))
    output.loss.backward()
    assert output.logits.shape == (2, 2, 32, 32)
    assert all(parameter.grad is not None for parameter in model.backbone.layers.parameters())
