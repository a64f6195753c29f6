"""Tests of reading ViT and DeiT checkpoints of every format: tensors, config and image processor."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    CLASSES,
    OPTIONS,
    TIMM,
    assert_copied,
    assert_read,
    copies,
    save_backbone,
    save_deit,
    save_distilled_deit,
    save_pth,
    save_timm,
    save_vit,
    timm_logits,
    timm_tensors,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTForImageClassification

from aft_hf import convert_deit
from aft_hf.conversion import read_source, save_converted, verify_conversion
from aft_hf.conversion.timm_config import PretrainedConfig, image_processor


HEAD = ("weight", "bias")

# ------------------------------------------------------------------------------------------------------------- formats


def pickled_shards(path, tensors):
    names, weight_map = sorted(tensors), {}
    for i in (0, 1):
        part, filename = names[i::2], f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, path / filename)
        weight_map |= dict.fromkeys(part, filename)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# How a ViT of transformers can be saved, given its directory, its tensors and itself.
OF_TRANSFORMERS = {
    "safetensors": lambda path, tensors, model: model.save_pretrained(path),
    "shards": lambda path, tensors, model: model.save_pretrained(path, max_shard_size="10KB"),
    "pickle": lambda path, tensors, model: torch.save(tensors, path / "pytorch_model.bin"),
    "pickled shards": lambda path, tensors, model: pickled_shards(path, tensors),
    "names in memory": lambda path, tensors, model: torch.save(model.state_dict(), path / "pytorch_model.bin"),
}


@pytest.mark.parametrize("save", OF_TRANSFORMERS.values(), ids=OF_TRANSFORMERS)
def test_a_vit_gives_its_values_outputs_mlps_norms_and_classifier(vit, save):
    tensors, original = load_file(vit / "model.safetensors"), ViTForImageClassification.from_pretrained(vit)
    (vit / "model.safetensors").unlink()
    save(vit, tensors, original)
    model, report = convert_deit(vit, **OPTIONS)
    expected = copies(original) | {f"classifier.{kind}": tensors[f"classifier.{kind}"] for kind in HEAD}
    assert_copied(model, expected)
    assert {record.target for record in report.with_status("copied")} == expected.keys()
    new = {record.target.split(".mixer.")[1] for record in report.with_status("new")}
    projections = {f"{name}_proj.{kind}" for name in "qk" for kind in HEAD}
    assert new == {"kernel", "kernel_scale", "kernel_shift"} | projections
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "owl"}


# How tensors of timm can be saved.
BESIDE = {"epoch": 3, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=1e-3, out=Path("out"), sizes=(1, 2))}
BESIDE |= {"array": (np.arange(3), 3), "nested": {"nested": [argparse.Namespace(lr=1e-3), np.int64(3)]}}
OF_TIMM = {
    "original": lambda tensors, path: torch.save({"model": tensors}, path),
    "flat": torch.save,
    "old": lambda tensors, path: torch.save(tensors, path, _use_new_zipfile_serialization=False),
    "training": lambda tensors, path: torch.save({"model": tensors, **BESIDE}, path),
    "safetensors": save_file,
}


@pytest.mark.parametrize(("save", "bias"), [(save, name != "flat") for name, save in OF_TIMM.items()], ids=OF_TIMM)
def test_a_file_of_timm_or_deit_gives_what_the_paper_transfers(tmp_path, save, bias):
    save(tensors := timm_tensors(bias=bias), tmp_path / "deit.pth")
    source = assert_read(tmp_path / "deit.pth", tensors)
    model, report = convert_deit(source, **OPTIONS)
    expected = copies(source.to_transformers()) | {f"classifier.{kind}": tensors[f"head.{kind}"] for kind in HEAD}
    assert_copied(model, expected)
    assert {record.target for record in report.with_status("copied")} == expected.keys()
    assert (model.aft.layers[0].mixer.v_proj.bias is not None) == model.config.qkv_bias == bias


@pytest.mark.parametrize("save", (save_vit, save_deit, save_distilled_deit, save_backbone))
def test_a_model_in_memory_is_converted_as_its_files_are_and_is_the_one_that_was_saved(tmp_path, save):
    original, pixels = save(tmp_path), torch.randn(2, 3, 32, 32).double()
    model = read_source(tmp_path).to_transformers()
    assert type(model) is type(original) and not model.training
    ours, theirs = (each.double()(pixels)[0] for each in (model, original))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    options = OPTIONS | ({"num_labels": 3} if save is save_backbone else {})
    results = []
    for source in (tmp_path, model.float()):
        torch.manual_seed(0)
        results.append(convert_deit(source, **options))
    (expected, report), (actual, of_model) = results
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert actual.config.to_dict() == expected.config.to_dict()
    assert len(of_model.with_status("copied")) == len(report.with_status("copied"))


def test_mixed_dtypes_become_the_smallest_that_holds_all(tmp_path):
    tensors = {name: tensor.half() for name, tensor in timm_tensors(distilled=True, layer_scale="ls{}.gamma").items()}
    for name in ("norm.weight", "blocks.0.attn.qkv.weight", "head.weight"):
        tensors[name] = tensors[name].bfloat16()
    torch.save(tensors, tmp_path / "deit.pth")
    model, _ = save_converted(tmp_path / "deit.pth", tmp_path / "aft", **OPTIONS, **TIMM)
    assert model.dtype == torch.float32
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    weight = wide["blocks.0.mlp.fc2.weight"] * wide["blocks.0.ls2.gamma"][:, None]
    expected = {"aft.layers.0.mlp.fc2.weight": weight, "aft.layernorm.weight": wide["norm.weight"]}
    assert_copied(model, expected | {"classifier.weight": (wide["head.weight"] + wide["head_dist.weight"]) / 2})
    assert verify_conversion(tmp_path / "deit.pth", tmp_path / "aft") == 30


# -------------------------------------------------------------------------------------------------------------- config


def test_the_config_of_a_file_follows_from_its_shapes(tmp_path):
    save_pth(tmp_path / "deit.pth", grid=(3, 3), width=128)
    config = read_source(tmp_path / "deit.pth").config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("vit", 128, 2)
    assert (config.num_attention_heads, config.intermediate_size, config.num_labels) == (2, 40, CLASSES)
    assert (config.image_size, config.patch_size, config.layer_norm_eps) == (24, 8, 1e-6)
    assert config.qkv_bias
    save_pth(tmp_path / "huge.pth", width=1280)
    assert read_source(tmp_path / "huge.pth").config.num_attention_heads == 16  # with a width of their own


@pytest.mark.parametrize(
    "options",
    [
        {"distilled": True},
        {"bias": False, "grid": (2, 3)},  # images that are not square
        {"layer_scale": "ls{}.gamma", "position_of_cls": False},
        {"layer_scale": "gamma_{}"},
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


# -------------------------------------------------------------------------------------------------------------- images


def test_the_image_processor_of_timm_does_what_its_transform_does(tmp_path):
    processor = read_source(save_timm(tmp_path / "timm")).image_processor
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 77, 3), dtype=np.uint8))
    # Resize the shorter side to 32 / 0.8 = 40, bilinear, and crop the central 32 x 32.
    resized = image.resize((int(40 * 77 / 50), 40), Image.Resampling.BILINEAR)
    left, top = (resized.width - 32) // 2, (resized.height - 32) // 2
    expected = np.asarray(resized.crop((left, top, left + 32, top + 32)), dtype=np.float64) / 255
    expected = (expected - np.array([0.1, 0.2, 0.3])) / np.array([0.4, 0.5, 0.6])
    pixels = processor(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(pixels, expected.transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize("image_size", ((32, 48), (48, 32)), ids=("wide", "tall"))
def test_a_crop_that_is_not_square_lies_within_the_resized_image(image_size):
    processor = image_processor(PretrainedConfig(mean=(0.0,) * 3, std=(1.0,) * 3), image_size)
    for size in ((60, 60), (60, 90), (90, 60)):
        pixels = processor(Image.new("RGB", size, "white"), return_tensors="np")["pixel_values"][0]
        assert pixels.shape == (3, *image_size) and pixels.min() > 0.99  # no pixel of it is padding
    assert processor.size["shortest_edge"] == int(48 / 0.875)
