"""Tests of reading ViT and DeiT checkpoints of every format: tensors, config and image processor."""

import argparse
import json

import numpy as np
import pytest
import torch
from checkpoints import (
    CLASSES,
    OPTIONS,
    TIMM,
    WIDTH,
    assert_copied,
    save_backbone,
    save_deit,
    save_distilled_deit,
    save_pth,
    save_timm,
    save_vit,
    timm_block,
    timm_copies,
    timm_logits,
    timm_tensors,
    transformers_copies,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTForImageClassification

from aft_hf import convert_deit
from aft_hf.conversion import read_source, save_converted, verify_conversion
from aft_hf.conversion.image_processing import timm_image_processor
from aft_hf.conversion.timm_config import PretrainedConfig


# ------------------------------------------------------------------------------------------------------ transformers


def test_a_vit_gives_its_values_outputs_mlps_norms_and_classifier(vit):
    model, report = convert_deit(vit, **OPTIONS)
    tensors = load_file(vit / "model.safetensors")
    expected = transformers_copies(tensors, "vit.")
    expected |= {f"classifier.{kind}": tensors[f"classifier.{kind}"] for kind in ("weight", "bias")}
    assert_copied(model, expected)
    assert {record.target for record in report.with_status("copied")} == expected.keys()
    new = {record.target.split(".mixer.")[1] for record in report.with_status("new")}
    projections = {f"{name}_proj.{kind}" for name in "qk" for kind in ("weight", "bias")}
    assert new == {"kernel", "kernel_scale", "kernel_shift"} | projections
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "owl"}


@pytest.mark.parametrize("save", (save_vit, save_deit, save_distilled_deit, save_backbone))
def test_a_model_in_memory_is_converted_as_its_files_are(tmp_path, save):
    save(tmp_path)
    model = read_source(tmp_path).to_transformers()
    options = OPTIONS | ({"num_labels": 3} if save is save_backbone else {})
    torch.manual_seed(0)
    expected, report = convert_deit(tmp_path, **options)
    torch.manual_seed(0)
    found, of_model = convert_deit(model, **options)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert found.config.to_dict() == expected.config.to_dict()
    assert len(of_model.with_status("copied")) == len(report.with_status("copied"))


def test_heads_that_nobody_knows_are_asked_for_only_where_attention_matters(tmp_path):
    save_pth(tmp_path / "deit.pth")  # its width is no multiple of 64
    torch.manual_seed(0)
    expected, _ = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    torch.manual_seed(0)
    model, report = convert_deit(tmp_path / "deit.pth", **OPTIONS)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert report.options["source_num_heads"] is None
    with pytest.raises(ValueError, match="give source_num_heads"):
        read_source(tmp_path / "deit.pth").to_transformers()


def test_a_distilled_deit_gives_the_mean_of_its_two_heads(tmp_path):
    save_distilled_deit(tmp_path)
    model, report = convert_deit(tmp_path, **OPTIONS)
    tensors, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    for kind in ("weight", "bias"):
        mean = (tensors[f"cls_classifier.{kind}"] + tensors[f"distillation_classifier.{kind}"]) / 2
        torch.testing.assert_close(state[f"classifier.{kind}"], mean)
    assert_copied(model, transformers_copies(tensors, "deit."))
    dropped = {record.sources[0] for record in report.with_status("dropped")}
    assert "deit.embeddings.distillation_token" in dropped


def test_a_backbone_gets_a_new_classifier_and_loses_its_pooler(tmp_path):
    save_backbone(tmp_path)
    model, report = convert_deit(tmp_path, num_labels=7, **OPTIONS)
    assert model.config.num_labels == 7
    assert_copied(model, transformers_copies(load_file(tmp_path / "model.safetensors"), ""))
    assert "classifier.weight" in {record.target for record in report.with_status("new")}
    assert ("pooler.dense.weight",) in {record.sources for record in report.with_status("dropped")}


def test_a_sharded_checkpoint_converts_like_a_whole_one(vit, tmp_path):
    whole, _ = convert_deit(vit, **OPTIONS)
    ViTForImageClassification.from_pretrained(vit).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded, report = convert_deit(tmp_path / "shards", **OPTIONS)
    state = whole.state_dict()
    assert_copied(sharded, {record.target: state[record.target] for record in report.with_status("copied")})


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_weights_convert_like_safetensors(vit, sharded):
    expected = transformers_copies(tensors := load_file(vit / "model.safetensors"), "vit.")
    (vit / "model.safetensors").unlink()
    if sharded:
        names, weight_map = sorted(tensors), {}
        for i in (0, 1):
            part, filename = names[i::2], f"pytorch_model-0000{i + 1}-of-00002.bin"
            torch.save({name: tensors[name] for name in part}, vit / filename)
            weight_map |= dict.fromkeys(part, filename)
        (vit / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        torch.save(tensors, vit / "pytorch_model.bin")
    assert_copied(convert_deit(vit, **OPTIONS)[0], expected)


def test_a_state_dict_that_a_user_saved_converts_under_its_names_in_memory(tmp_path):
    model = save_vit(tmp_path)
    expected = transformers_copies(load_file(tmp_path / "model.safetensors"), "vit.")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_copied(convert_deit(tmp_path, **OPTIONS)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_copied_bit_for_bit(tmp_path, dtype):
    save_deit(tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, _ = convert_deit(tmp_path, **OPTIONS)
    assert model.dtype == dtype
    assert_copied(model, transformers_copies(tensors, "deit."))


def test_mixed_dtypes_become_the_smallest_that_holds_all(tmp_path):
    tensors = {name: tensor.half() for name, tensor in timm_tensors(distilled=True, layer_scale="ls{}.gamma").items()}
    for name in ("norm.weight", "blocks.0.attn.qkv.weight", "head.weight"):
        tensors[name] = tensors[name].bfloat16()
    torch.save(tensors, tmp_path / "deit.pth")
    model, _ = save_converted(tmp_path / "deit.pth", tmp_path / "aft", **OPTIONS, **TIMM)
    assert model.dtype == torch.float32
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    expected = timm_copies(wide) | {"classifier.weight": (wide["head.weight"] + wide["head_dist.weight"]) / 2}
    for i in (0, 1):
        for part, j in (("mixer.o_proj", 1), ("mlp.fc2", 2)):
            gamma = wide[f"blocks.{i}.ls{j}.gamma"]
            expected[f"aft.layers.{i}.{part}.weight"] = expected[f"aft.layers.{i}.{part}.weight"] * gamma[:, None]
            expected[f"aft.layers.{i}.{part}.bias"] = expected[f"aft.layers.{i}.{part}.bias"] * gamma
    assert_copied(model, expected)
    assert verify_conversion(tmp_path / "deit.pth", tmp_path / "aft") == 30


# --------------------------------------------------------------------------------------- timm and the original DeiT


@pytest.mark.parametrize("wrap", [lambda tensors: {"model": tensors}, lambda tensors: tensors])
@pytest.mark.parametrize("zipped", [True, False])
def test_an_original_deit_file_gives_what_the_paper_transfers(tmp_path, wrap, zipped):
    tensors = timm_tensors()
    torch.save(wrap(tensors), tmp_path / "deit.pth", _use_new_zipfile_serialization=zipped)
    model, report = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    expected = timm_copies(tensors)
    expected |= {f"classifier.{kind}": tensors[f"head.{kind}"] for kind in ("weight", "bias")}
    assert_copied(model, expected)
    assert {record.target for record in report.with_status("copied")} == expected.keys()


def test_a_training_checkpoint_of_deit_is_read_with_its_options_beside_the_weights(tmp_path):
    tensors = timm_tensors()
    content = {"model": tensors, "epoch": 3, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=1e-3)}
    torch.save(content, tmp_path / "checkpoint.pth")
    assert_copied(convert_deit(tmp_path / "checkpoint.pth", **OPTIONS, **TIMM)[0], timm_copies(tensors))


def test_the_config_of_a_file_follows_from_its_shapes(tmp_path):
    save_pth(tmp_path / "deit.pth", grid=(3, 3), width=128)
    config = read_source(tmp_path / "deit.pth").config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("vit", 128, 2)
    assert (config.num_attention_heads, config.intermediate_size, config.num_labels) == (2, 40, CLASSES)
    assert (config.image_size, config.patch_size, config.layer_norm_eps) == (24, 8, 1e-6)
    assert config.qkv_bias


def test_the_huge_vit_has_heads_of_its_own_width(tmp_path):
    save_pth(tmp_path / "huge.pth", width=1280)
    assert read_source(tmp_path / "huge.pth").config.num_attention_heads == 16


@pytest.mark.parametrize("distilled", [False, True])
def test_a_file_of_images_that_are_not_square_needs_their_size(tmp_path, distilled):
    save_pth(tmp_path / "deit.pth", grid=(2, 3), distilled=distilled)
    source = read_source(tmp_path / "deit.pth", source_image_size=(16, 24), **TIMM)
    assert source.config.image_size == (16, 24) and source.grid_size == (2, 3)
    model, _ = convert_deit(source, kernel_size=3, num_heads=4)
    assert model.config.grid_size == (2, 3)


def test_values_without_biases_stay_without(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth", bias=False)
    model, _ = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    assert not model.config.qkv_bias and model.aft.layers[0].mixer.v_proj.bias is None
    assert_copied(model, timm_copies(tensors))


@pytest.mark.parametrize("filename", ["model.safetensors", "pytorch_model.bin"])
def test_a_directory_of_timm_converts_with_its_classes(tmp_path, filename):
    descriptions = {"a": "cat", "b": "dog"}
    save_timm(tmp_path / "timm", label_names=["a", "b", "c"], label_descriptions=descriptions)
    tensors = timm_tensors()
    save = save_file if filename.endswith("safetensors") else torch.save
    save(tensors, tmp_path / "timm" / filename)
    model, _ = convert_deit(tmp_path / "timm", **OPTIONS)
    assert_copied(model, timm_copies(tensors))
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "c"}


def test_a_bare_safetensors_file_of_timm_converts(tmp_path):
    save_file(tensors := timm_tensors(), tmp_path / "vit.safetensors")
    assert_copied(convert_deit(tmp_path / "vit.safetensors", **OPTIONS, **TIMM)[0], timm_copies(tensors))


@pytest.mark.parametrize("names", ["ls{}.gamma", "gamma_{}"])
def test_layer_scales_are_folded_into_the_last_module_of_their_branch(tmp_path, names):
    tensors = save_pth(tmp_path / "deit3.pth", layer_scale=names, position_of_cls=False)
    model, report = convert_deit(tmp_path / "deit3.pth", **OPTIONS, **TIMM)
    expected = timm_copies(tensors)
    for i in (0, 1):
        for part, j in (("mixer.o_proj", 1), ("mlp.fc2", 2)):
            gamma = tensors[f"blocks.{i}.{names.format(j)}"]
            expected[f"aft.layers.{i}.{part}.weight"] = expected[f"aft.layers.{i}.{part}.weight"] * gamma[:, None]
            expected[f"aft.layers.{i}.{part}.bias"] = expected[f"aft.layers.{i}.{part}.bias"] * gamma
    assert_copied(model, expected)
    folded = {record.sources[0] for record in report.with_status("folded")}
    assert folded == {f"blocks.{i}.{names.format(j)}" for i in (0, 1) for j in (1, 2)}


def test_layer_scales_of_half_precision_are_multiplied_in_float32(tmp_path):
    tensors = {name: tensor.half() for name, tensor in timm_tensors(layer_scale="ls{}.gamma").items()}
    torch.save(tensors, tmp_path / "deit3.pth")
    model, _ = convert_deit(tmp_path / "deit3.pth", **OPTIONS, **TIMM)
    product = tensors["blocks.0.attn.proj.weight"].float() * tensors["blocks.0.ls1.gamma"].float()[:, None]
    assert_copied(model, {"aft.layers.0.mixer.o_proj.weight": product.half()})


def test_a_backbone_of_timm_gets_a_new_classifier(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth", head=False)
    model, report = convert_deit(tmp_path / "deit.pth", num_labels=7, **OPTIONS, **TIMM)
    assert_copied(model, timm_copies(tensors))
    assert "classifier.weight" in {record.target for record in report.with_status("new")}


# ---------------------------------------------------------------------------------------------- models of transformers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distilled": True},
        {"bias": False},
        {"layer_scale": "ls{}.gamma", "position_of_cls": False},
        {"layer_scale": "gamma_{}", "position_of_cls": False},
        {"grid": (2, 3)},
    ],
    ids=str,
)
def test_the_model_of_transformers_computes_what_timm_computes(tmp_path, options):
    tensors = save_pth(tmp_path / "deit.pth", **options)
    size = tuple(8 * n for n in options.get("grid", (4, 4)))
    model = read_source(tmp_path / "deit.pth", source_image_size=size, **TIMM).to_transformers()
    pixels = torch.randn(2, 3, *size).double()
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    # Folding the layer scales into the weights rounds these once, to float32.
    torch.testing.assert_close(model.double()(pixels).logits, timm_logits(tensors, pixels), atol=1e-6, rtol=1e-6)
    assert not model.training


def test_a_block_with_folded_layer_scales_computes_what_it_computed(tmp_path):
    tensors = save_pth(tmp_path / "deit3.pth", layer_scale="ls{}.gamma", position_of_cls=False)
    model = read_source(tmp_path / "deit3.pth", **TIMM).to_transformers().double()
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    x = torch.randn(2, 17, WIDTH).double()
    for i in (0, 1):
        # The product of weights and layer scales is rounded once, to float32.
        torch.testing.assert_close(model.vit.layers[i](x), timm_block(tensors, i, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("save", [save_vit, save_deit, save_distilled_deit])
def test_the_model_of_transformers_is_the_one_that_was_saved(tmp_path, save):
    original = save(tmp_path)
    model = read_source(tmp_path).to_transformers()
    assert type(model) is type(original) and not model.training
    pixels = torch.randn(2, 3, 32, 32).double()
    torch.testing.assert_close(model.double()(pixels).logits, original.double()(pixels).logits, atol=1e-12, rtol=1e-12)


def test_a_backbone_gives_the_model_of_transformers_without_a_head(tmp_path):
    original = save_backbone(tmp_path)
    model = read_source(tmp_path).to_transformers()
    pixels = torch.randn(2, 3, 32, 32).double()
    ours, theirs = (each.double()(pixels).last_hidden_state for each in (model, original))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert model.pooler is None


def test_half_precision_stays_in_the_model_of_transformers(tmp_path):
    torch.save({name: tensor.bfloat16() for name, tensor in timm_tensors().items()}, tmp_path / "deit.pth")
    assert read_source(tmp_path / "deit.pth", **TIMM).to_transformers().dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------ images


def test_the_image_processor_of_timm_does_what_its_transform_does(tmp_path):
    save_timm(tmp_path / "timm")
    save_file(timm_tensors(), tmp_path / "timm" / "model.safetensors")
    processor = read_source(tmp_path / "timm").image_processor
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 77, 3), dtype=np.uint8))
    # Resize the shorter side to 32 / 0.8 = 40, bilinear, and crop the central 32 x 32.
    resized = image.resize((int(40 * 77 / 50), 40), Image.Resampling.BILINEAR)
    left, top = (resized.width - 32) // 2, (resized.height - 32) // 2
    expected = np.asarray(resized.crop((left, top, left + 32, top + 32)), dtype=np.float64) / 255
    expected = (expected - np.array([0.1, 0.2, 0.3])) / np.array([0.4, 0.5, 0.6])
    pixels = processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels, expected.transpose(2, 0, 1), atol=1e-5)


def test_the_image_processor_of_the_original_deit_crops_224_out_of_256(tmp_path):
    save_pth(tmp_path / "deit.pth", grid=(28, 28))
    processor = read_source(tmp_path / "deit.pth", **TIMM).image_processor
    assert processor.size["shortest_edge"] == 256 and processor.crop_size["height"] == 224
    assert processor.resample == Image.Resampling.BICUBIC
    np.testing.assert_allclose(processor.image_mean, [0.485, 0.456, 0.406])
    np.testing.assert_allclose(processor.image_std, [0.229, 0.224, 0.225])


@pytest.mark.parametrize("image_size", ((32, 48), (48, 32)), ids=("wide", "tall"))
def test_a_crop_that_is_not_square_lies_within_the_resized_image(image_size):
    processor = timm_image_processor("name", PretrainedConfig(mean=[0.0] * 3, std=[1.0] * 3), image_size)
    for size in ((60, 60), (60, 90), (90, 60)):
        pixels = processor(Image.new("RGB", size, "white"), return_tensors="np")["pixel_values"][0]
        assert pixels.shape == (3, *image_size) and pixels.min() > 0.99  # no pixel of it is padding
    assert processor.size["shortest_edge"] == int(48 / 0.875)


def test_a_deit_of_transformers_without_a_processor_is_taken_to_see_what_deits_see(tmp_path):
    save_deit(tmp_path / "deit")
    processor = read_source(tmp_path / "deit").image_processor
    assert list(processor.image_mean) == [0.485, 0.456, 0.406] and list(processor.image_std) == [0.229, 0.224, 0.225]
    assert dict(processor.crop_size) == {"height": 32, "width": 32} and processor.size["shortest_edge"] == 36
