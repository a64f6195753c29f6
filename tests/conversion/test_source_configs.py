"""Tests of what the config of a source says about images, labels, pooling and channels, in every place it is said."""

import json
import re

import pytest
import torch
from checkpoints import (
    CLASSES,
    OPTIONS,
    SIZES,
    assert_copied,
    copies,
    randomize,
    save_pth,
    save_timm,
    save_vit,
    timm_tensors,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from saved_models import changed
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, ViTModel

from aft_hf import convert_deit
from aft_hf.conversion import read_source
from aft_hf.conversion.source import load_image_processor
from aft_hf.errors import InputError
from aft_hf.loading import load


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def refusal(path):
    with pytest.raises(InputError) as error:
        convert_deit(path, **OPTIONS)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("names", [["a", "b", "c"], {"2": "c", "0": "a"}])
def test_labels_and_images_are_read_in_the_layout_of_every_version(tmp_path, flat, names):
    labels = {"label_names": names, "mean": [0.5] * 3}
    source = read_source(save_timm(tmp_path / "timm", flat, labels, label_descriptions={"a": "cat"}))
    assert source.config.id2label == {0: "cat", 1: "b" if "b" in names else "LABEL_1", 2: "c"}
    assert list(source.image_processor.image_mean) == [0.5] * 3
    assert source.image_processor.size == {"shortest_edge": 40}
    others = save_timm(tmp_path / "others", flat, {"label_names": ["a"]})  # names of other classes
    assert read_source(others).config.id2label == {i: f"LABEL_{i}" for i in range(CLASSES)}


NAMES = {"labels": ["a", "b", "c"], "label_name": {"0": "a", "1": "b", "2": "c"}, "label_names": ["a", "b", "c"]}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("descriptions", ["display_name", "label_descriptions"])
def test_labels_have_the_names_of_any_version_of_timm(tmp_path, key, descriptions, flat, beside):
    labels = {key: NAMES[key], descriptions: {"a": "cat", "labels": "an unknown class"}}
    path = save_timm(tmp_path / "timm", flat, {} if beside else labels, **(labels if beside else {}))
    assert read_source(path).config.id2label == {0: "cat", 1: "b", 2: "c"}
    changed(label_names=["d", "e", "f"], labels=["a", "b", "c"])(path / "config.json")  # the current name counts
    assert read_source(path).config.id2label == {0: "d", 1: "e", 2: "f"}


@pytest.mark.parametrize(("within", "beside"), [("label_names", "labels"), ("labels", "label_names")])
def test_labels_beside_others_replace_them_whatever_timm_calls_them(tmp_path, within, beside):
    path = save_timm(tmp_path / "timm", False, {within: ["a", "b", "c"]}, **{beside: ["d", "e", "f"]})
    assert read_source(path).config.id2label == {0: "d", 1: "e", 2: "f"}


@pytest.mark.parametrize("flat", [True, False])
def test_null_means_the_default_of_timm_everywhere(tmp_path, flat):
    nulls = dict.fromkeys(("crop_pct", "crop_mode", "interpolation", "mean", "std", "input_size", "label_names"))
    arguments = {"num_heads": None, "img_size": None, "act_layer": None}
    source = read_source(
        save_timm(tmp_path / "timm", flat, nulls, model_args=arguments, model_type=None), source_num_heads=3
    )
    processor = source.image_processor
    assert not source.own_image_processor and source.config.image_size == 32
    assert processor.size["shortest_edge"] == 36 and processor.resample == Image.Resampling.BICUBIC
    assert {"mean": list(processor.image_mean), "std": list(processor.image_std)} == IMAGENET


@pytest.mark.parametrize("place", [{"model_args": {"global_pool": "avg"}}, {"pretrained": {"global_pool": "avg"}}, {}])
def test_pooling_over_patches_is_refused_unless_timm_is_told_otherwise(tmp_path, place):
    beside = {"global_pool": None if place else "avg"}
    assert "pools by 'avg'" in refusal(save_timm(tmp_path / "timm", **place, **beside))
    told = save_timm(tmp_path / "token", model_args={"global_pool": "token", "num_heads": 3}, global_pool="avg")
    assert read_source(told).heads == 1


WRONG = {
    "crop_pct": ["0.9", 0, float("nan"), 1e-9],
    "mean": ["imagenet", [0.5, 0.5], [0.5, 0.5, None]],
    "std": [[0.5, 0.0, 0.5], {"0": 0.5}],
    "interpolation": ["cubic"],
    "crop_mode": ["border"],
    "input_size": [[224, 224], [3, 0, 32]],
    "label_names": [5, [1, 2, 3]],
    "label_descriptions": [["a"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path, key, value):
    message = refusal(save_timm(tmp_path / "timm", False, {key: value}))
    assert key in message and re.search("must|should|is missing", message) and "config.json" in message


# --------------------------------------------------------------------------------------------- no head, other channels


def save_headless(path, kind):
    if kind == "timm":
        save_timm(path, num_classes=0)
        save_file(timm_tensors(head=False), path / "model.safetensors")
    else:
        randomize(ViTModel(ViTConfig(**SIZES, id2label={0: "cat", 1: "dog", 2: "owl"}))).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_a_source_without_a_head_needs_the_number_of_classes(tmp_path, run_command, kind):
    path = save_headless(tmp_path / "source", kind)
    assert "has no classifier; give num_labels (--num-labels)" in refusal(path)
    model, report = convert_deit(path, num_labels=5, **OPTIONS)
    assert_copied(model, copies(read_source(path).to_transformers()))
    dropped = {record.sources for record in report.with_status("dropped")}
    assert (("pooler.dense.weight",) in dropped) == (kind == "transformers")
    assert model.config.id2label == {i: f"LABEL_{i}" for i in range(5)}
    assert "classifier.weight" in {record.target for record in report.with_status("new")}
    arguments = [path, tmp_path / "aft", "--kernel-size", 3, "--num-heads", 4, "--num-labels", 5]
    done = run_command("aft-hf", "convert", *arguments)
    assert done.returncode == 0 and "aft-hf finetune" in done.stdout
    assert "--teacher" not in done.stdout and "--distill" not in done.stdout


def test_a_source_that_finetune_cannot_read_is_no_teacher_of_the_next_step(tmp_path, run_command):
    save_pth(tmp_path / "deit.pth")
    arguments = [tmp_path / "deit.pth", tmp_path / "aft", "--kernel-size", 3, "--num-heads", 4]
    done = run_command("aft-hf", "convert", *arguments, "--source-num-heads", 3, "--source-image-size", 32)
    assert done.returncode == 0 and "aft-hf finetune" in done.stdout and "--teacher" not in done.stdout


@pytest.mark.parametrize(("name", "value"), [("image_size", 30), ("patch_size", 7)])
def test_a_source_that_no_aft_can_follow_is_named(tmp_path, name, value):
    ViTForImageClassification(ViTConfig(**SIZES | {name: value})).save_pretrained(tmp_path / "vit")
    message = refusal(tmp_path / "vit")
    assert (
        message.startswith(f"{tmp_path / 'vit'}: cannot be converted with these options (")
        and f"{name}={value}" in message
    )


@pytest.mark.parametrize("channels", [1, 4])
def test_a_source_of_other_channels_than_rgb_is_refused_by_their_number(tmp_path, channels):
    model = ViTForImageClassification(ViTConfig(**SIZES, num_channels=channels))
    model.save_pretrained(tmp_path / "vit")
    tensors = timm_tensors() | {"patch_embed.proj.weight": torch.zeros(24, channels, 8, 8)}
    torch.save(tensors, tmp_path / "deit.pth")
    for source, options in ((tmp_path / "vit", {}), (tmp_path / "deit.pth", {"source_num_heads": 3}), (model, {})):
        with pytest.raises(InputError, match=f"its images have {channels} channels; .*RGB"):
            read_source(source, **options)


# ------------------------------------------------------------------------------ image processors of older transformers


@pytest.mark.parametrize(
    ("key", "name"),
    [("image_processor_type", "ViTFeatureExtractor"), ("feature_extractor_type", "DeiTFeatureExtractor")],
)
def test_the_values_of_a_feature_extractor_are_read(tmp_path, key, name):
    save_vit(tmp_path)
    values = {"do_normalize": True, "do_resize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    values |= {"resample": 2, "size": 32, key: name}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    for processor in (read_source(tmp_path).image_processor, load(AutoImageProcessor, tmp_path)):
        assert type(processor).__name__.startswith(name.removesuffix("FeatureExtractor"))
        assert list(processor.image_mean) == [0.1, 0.2, 0.3] and processor.resample == Image.Resampling.BILINEAR


def test_an_image_processor_in_processor_config_replaces_the_other_as_in_transformers(tmp_path, caplog):
    save_vit(tmp_path)
    values = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"image_mean": [0.7, 0.8, 0.9]}
    for entry, mean in (({"image_processor": values}, 0.7), ({"image_processor": None}, 0.1), ({"size": 14}, 0.1)):
        (tmp_path / "processor_config.json").write_text(json.dumps(entry))
        source = read_source(tmp_path)
        for processor in (source.image_processor, load_image_processor(str(tmp_path), source.config)):
            assert processor.image_mean[0] == mean and source.own_image_processor
    assert "has no image processor" not in caplog.text


# ----------------------------------------------------------------------------------------------- files beside a config


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_a_weight_file_is_not_read_without_the_config_beside_it(tmp_path, kind):
    save_timm(tmp_path / "source") if kind == "timm" else save_vit(tmp_path / "source")
    assert "give the directory" in refusal(tmp_path / "source" / "model.safetensors")
    if kind == "transformers":
        (tmp_path / "source" / "config.json").unlink()
        assert "give its directory" in refusal(tmp_path / "source" / "model.safetensors")


def test_two_heads_without_a_distillation_token_are_refused_by_name(tmp_path):
    save_vit(tmp_path / "vit")
    tensors = load_file(tmp_path / "vit" / "model.safetensors")
    for kind in ("weight", "bias"):
        head = tensors.pop(f"classifier.{kind}")
        tensors |= {f"cls_classifier.{kind}": head, f"distillation_classifier.{kind}": head.clone()}
    save_file(tensors, tmp_path / "vit" / "model.safetensors", {"format": "pt"})
    assert "cls_classifier" in refusal(tmp_path / "vit")
