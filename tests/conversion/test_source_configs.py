"""Tests of what the config of a source says about images, labels, pooling and channels, in every place it is said."""

import json
import sys

import numpy as np
import pytest
import torch
from checkpoints import (
    CLASSES,
    OPTIONS,
    SIZES,
    randomize,
    save_timm,
    save_vit,
    timm_tensors,
)
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTModel

from aft_hf import cli, convert_deit
from aft_hf.conversion import ConversionError, read_source
from aft_hf.conversion.source import load_image_processor
from aft_hf.loading import load


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def timm(path, flat=False, pretrained=None, **config):
    """Save a directory of timm; in the layout of older versions, the entries of `pretrained_cfg` are at top level."""
    save_timm(path)
    content = json.loads((path / "config.json").read_text())
    content["pretrained_cfg"] |= pretrained or {}
    if flat:
        content |= content.pop("pretrained_cfg")
    (path / "config.json").write_text(json.dumps(content | config))
    save_file(timm_tensors(), path / "model.safetensors")
    return path


def refusal(path):
    with pytest.raises(ConversionError) as error:
        convert_deit(path, **OPTIONS)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------------------------------------- timm


def test_the_flat_config_of_older_timm_says_the_same_as_the_current_one(tmp_path):
    processors = [read_source(timm(tmp_path / str(flat), flat)).image_processor.to_dict() for flat in (False, True)]
    assert processors[0] == processors[1]
    assert list(processors[1]["image_mean"]) == [0.1, 0.2, 0.3] and processors[1]["size"] == {"shortest_edge": 40}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("names", [["a", "b", "c"], {"0": "a", "2": "c", "1": "b"}, {"2": "c", "0": "a"}])
@pytest.mark.parametrize("key", ["labels", "label_names"])
def test_labels_are_read_wherever_timm_has_them(tmp_path, flat, names, key):
    for place, options in enumerate(({key: names}, {"pretrained": {key: names}})):
        path = timm(tmp_path / str(place), flat, label_descriptions={"a": "cat"}, **options)
        labels = ["cat", "b" if "b" in names or "1" in names else "LABEL_1", "c"]
        assert read_source(path).config.id2label == dict(enumerate(labels))
    for place, others in enumerate((["a"], ["a", "b", "c", "d"], {"7": "x"})):  # names of other classes
        source = read_source(timm(tmp_path / f"others-{place}", flat, **{key: others}))
        assert source.config.id2label == {i: f"LABEL_{i}" for i in range(CLASSES)}


@pytest.mark.parametrize("pooling", ["avg", "map"])
@pytest.mark.parametrize(
    "place",
    [
        lambda pooling: {"model_args": {"global_pool": pooling}, "global_pool": None},
        lambda pooling: {"model_args": {"global_pool": pooling}},
        lambda pooling: {"global_pool": pooling},
        lambda pooling: {"pretrained": {"global_pool": pooling}, "global_pool": None},
        lambda pooling: {"global_pool": pooling, "flat": True, "model_args": None},
    ],
)
def test_pooling_over_patches_is_refused_wherever_it_is_said(tmp_path, pooling, place):
    path = timm(tmp_path / "timm", **place(pooling))
    assert f"pools by '{pooling}'" in refusal(path)


def test_the_pooling_that_timm_builds_counts(tmp_path):
    path = timm(tmp_path / "timm", model_args={"global_pool": "token", "num_heads": 3}, global_pool="avg")
    assert read_source(path).heads == ("classifier",)


@pytest.mark.parametrize("flat", [True, False])
def test_null_means_the_default_of_timm_everywhere(tmp_path, flat):
    nulls = dict.fromkeys(("crop_pct", "crop_mode", "interpolation", "mean", "std", "input_size", "label_names"))
    path = timm(tmp_path / "timm", flat, nulls, model_args={"num_heads": 3, "img_size": None, "act_layer": None})
    source = read_source(path)
    processor = source.image_processor
    assert not source.own_image_processor and source.config.image_size == 32
    assert processor.size["shortest_edge"] == 36 and processor.resample == Image.Resampling.BICUBIC
    assert {"mean": list(processor.image_mean), "std": list(processor.image_std)} == IMAGENET
    path = timm(tmp_path / "no-arguments", flat, model_args=None, model_type=None, label_descriptions=None)
    assert not read_source(path).num_heads_known


WRONG = {
    "crop_pct": ["0.9", 0, -1.0, float("nan"), 1e-9],
    "mean": ["imagenet", [0.5, 0.5], [0.5] * 4, [0.5, 0.5, None], []],
    "std": [[0.5, 0.0, 0.5], [0.5, float("inf"), 0.5], {"0": 0.5}],
    "interpolation": [3, "cubic"],
    "crop_mode": [["center"], "border"],
    "input_size": [[224, 224], 224, [3, 0, 32]],
    "label_names": [5, [1, 2, 3], "abc"],
    "label_descriptions": [["a"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
@pytest.mark.parametrize("flat", [True, False])
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path, key, value, flat):
    message = refusal(timm(tmp_path / "timm", flat, {key: value}, **({key: value} if flat else {})))
    assert key in message
    assert ("must" in message or "is missing" in message) and "config.json" in message


def test_one_mean_counts_for_all_channels(tmp_path):
    processor = read_source(timm(tmp_path / "timm", pretrained={"mean": [0.5], "std": [1]})).image_processor
    assert list(processor.image_mean) == [0.5] * 3 and list(processor.image_std) == [1.0] * 3


# --------------------------------------------------------------------------------------------- no head, other channels


def save_headless(path, kind):
    if kind == "timm":
        timm(path, num_classes=0)
        save_file(timm_tensors(head=False), path / "model.safetensors")
    else:
        randomize(ViTModel(ViTConfig(**SIZES, id2label={0: "cat", 1: "dog", 2: "owl"}))).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_a_source_without_a_head_needs_the_number_of_classes(tmp_path, capsys, monkeypatch, kind):
    path = save_headless(tmp_path / "source", kind)
    assert "has no classifier; give num_labels (--num-labels)" in refusal(path)
    model, report = convert_deit(path, num_labels=5, **OPTIONS)
    assert model.config.id2label == {i: f"LABEL_{i}" for i in range(5)}
    assert "classifier.weight" in {record.target for record in report.with_status("new")}
    arguments = [path, tmp_path / "aft", "--kernel-size", 3, "--num-heads", 4, "--num-labels", 5]
    monkeypatch.setattr(sys, "argv", ["aft-hf", "convert", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    out = capsys.readouterr().out
    assert not exited.value.code and "aft-hf finetune" in out and "--teacher" not in out and "--distill" not in out


def test_the_classifier_of_a_source_determines_the_number_of_classes(vit):
    with pytest.raises(ConversionError, match="has a classifier; leave out num_labels"):
        convert_deit(vit, num_labels=3, **OPTIONS)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_source_of_other_channels_than_rgb_is_refused_by_their_number(tmp_path, channels):
    model = ViTForImageClassification(ViTConfig(**SIZES, num_channels=channels))
    model.save_pretrained(tmp_path / "vit")
    tensors = timm_tensors() | {"patch_embed.proj.weight": torch.zeros(24, channels, 8, 8)}
    torch.save(tensors, tmp_path / "deit.pth")
    for source in (tmp_path / "vit", tmp_path / "deit.pth", model):
        with pytest.raises(ConversionError, match=f"takes images of {channels} channels; .*RGB"):
            read_source(source)


# ------------------------------------------------------------------------------ image processors of older transformers


@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
@pytest.mark.parametrize("name", ["ViTFeatureExtractor", "DeiTFeatureExtractor"])
def test_the_values_of_a_feature_extractor_are_read(tmp_path, key, name):
    save_vit(tmp_path)
    values = {"do_normalize": True, "do_resize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    values |= {"resample": 2, "size": 32, key: name}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    expected = (np.asarray(image) / 255 - values["image_mean"]) / values["image_std"]
    for processor in (read_source(tmp_path).image_processor, load(AutoImageProcessor, tmp_path)):
        assert type(processor).__name__.startswith(name.removesuffix("FeatureExtractor"))
        assert list(processor.image_mean) == [0.1, 0.2, 0.3] and processor.resample == Image.Resampling.BILINEAR
        if name == "ViTFeatureExtractor":
            pixels = processor(image, return_tensors="np")["pixel_values"][0]
            np.testing.assert_allclose(pixels, expected.transpose(2, 0, 1), atol=1e-5)


def test_an_unknown_image_processor_is_one_line_with_the_name_of_the_source(tmp_path):
    save_vit(tmp_path / "vit")
    for name in ("NoSuchFeatureExtractor", 5, ["ViTFeatureExtractor"]):
        (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
        assert str(tmp_path / "vit") in refusal(tmp_path / "vit")


def in_processor_config(path, **changes):
    """Save a ViT whose image processor is stored as transformers 5 stores it in processors."""
    save_vit(path)
    values = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").write_text(json.dumps({"image_processor": values | changes}))
    return path


@pytest.mark.parametrize("changes", [{}, {"image_processor_type": "ViTFeatureExtractor"}])
def test_an_image_processor_in_processor_config_is_that_of_the_source(tmp_path, caplog, changes):
    path = in_processor_config(tmp_path / "vit", **changes)
    source = read_source(path)
    assert source.own_image_processor
    for processor in (source.image_processor, load_image_processor(str(path), ViTConfig(**SIZES))):
        assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert "has no image processor" not in caplog.text


def test_an_image_processor_in_processor_config_replaces_the_other_as_in_transformers(tmp_path):
    path = in_processor_config(tmp_path / "vit", image_mean=[0.7, 0.8, 0.9])
    save_vit(tmp_path / "other")
    (tmp_path / "other" / "preprocessor_config.json").rename(path / "preprocessor_config.json")
    assert list(read_source(path).image_processor.image_mean) == [0.7, 0.8, 0.9]
    for content in ({"image_processor": None}, {"processor_class": "LlavaProcessor", "patch_size": 14}):
        (path / "processor_config.json").write_text(json.dumps(content))
        assert list(read_source(path).image_processor.image_mean) == [0.1, 0.2, 0.3]


def test_a_bad_processor_config_is_refused_by_its_key(tmp_path):
    for changes in ({"image_std": "text"}, {"size": 10**9}):
        message = refusal(in_processor_config(tmp_path / "vit", **changes))
        assert "processor_config.json: " in message and f"image_processor.{next(iter(changes))}" in message
    for content in ("{bad", "[]", '{"image_processor": 5}', '{"image_processor": []}'):
        (tmp_path / "vit" / "processor_config.json").write_text(content)
        assert "processor_config.json" in refusal(tmp_path / "vit")


# ----------------------------------------------------------------------------------------------- files beside a config


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_a_weight_file_beside_its_config_is_not_read_without_it(tmp_path, monkeypatch, kind):
    path = tmp_path / "source"
    timm(path) if kind == "timm" else save_vit(path)
    key = "architecture='vit" if kind == "timm" else "model_type='vit'"
    message = refusal(path / "model.safetensors")
    assert key in message and "give the directory" in message
    monkeypatch.chdir(path)
    assert "give the directory" in refusal("model.safetensors")


def test_a_weight_file_beside_a_config_of_no_model_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 0.1, "architecture": null}')
    save_file(timm_tensors(), tmp_path / "deit.safetensors")
    assert read_source(tmp_path / "deit.safetensors", source_num_heads=3).heads == ("classifier",)


def test_a_config_that_names_another_weight_file_is_refused(tmp_path):
    save_vit(tmp_path / "vit")
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    for name in ("other.safetensors", "model.safetensors"):
        (tmp_path / "vit" / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        assert "transformers_weights" in refusal(tmp_path / "vit")
