"""The tasks on generated images and texts: what is counted, and what is saved."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from runs import bytes_recipe, run
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification

from aft_hf.data.pixel_sequences import tokens_to_image


CLASSES = ["dark", "light", "red"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A parquet file of 8 x 8 images in three classes that any model can tell apart."""
    random = np.random.default_rng(0)
    colours = np.array([[40, 40, 40], [210, 210, 210], [200, 40, 40]])
    labels = [i % 3 for i in range(36)]
    pixels = [np.clip(colours[label] + random.integers(-20, 20, (8, 8, 3)), 0, 255) for label in labels]
    rows = {"image": [PILImage.fromarray(each.astype(np.uint8)) for each in pixels], "label": labels}
    path = tmp_path_factory.mktemp("images") / "images.parquet"
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=CLASSES)})).to_parquet(path)
    return path


def pixels_recipe(directory: Path, images: Path) -> dict:
    return bytes_recipe(directory) | {
        "task": "pixels",
        "data": {"train": str(images), "validation": str(images), "image_size": 4, "max_eval_samples": 5},
        "steps": 4,
    }


def images_recipe(directory: Path, images: Path, **changes) -> dict:
    augmentation = {"crop_scale": [0.5, 1.0], "rand_augment_operations": 1, "erasing": 0.2, "mixup": 0.8}
    model = {"architecture": "aft", "aft_type": "conv", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4}
    model |= {"conv_kernel_size": 3, "patch_size": 2, "drop_path_rate": 0.1, "position_bias_entropy_weight": 0.001}
    data = {"train": str(images), "validation": str(images), "image_size": 8, "workers": 2}
    changes = {"model": model, "data": data | {"augmentation": augmentation | {"cutmix": 1.0}}} | changes
    return bytes_recipe(directory) | {"task": "images", "label_smoothing": 0.1} | changes


def test_bits_per_dim_count_every_sub_pixel_of_every_image(tmp_path, images):
    values = pixels_recipe(tmp_path, images)
    results = run(values)
    model, nats = AutoModelForCausalLM.from_pretrained(values["output_dir"]).eval(), 0.0
    for row in Dataset.from_parquet(str(images)).take(5):
        pixels = np.asarray(row["image"].resize((4, 4), PILImage.Resampling.BOX)).reshape(-1)
        tokens = torch.tensor([256, *pixels.tolist()])
        with torch.no_grad():
            nats += F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="sum").item()
    expected = nats / math.log(2) / (5 * 4 * 4 * 3)
    assert results["metrics"] == {"validation": {"bits_per_dim": pytest.approx(expected, rel=1e-5)}}


def test_a_model_of_pixels_generates_images_from_the_start_token(tmp_path, images):
    values = pixels_recipe(tmp_path, images)
    run(values)
    model = AutoModelForCausalLM.from_pretrained(values["output_dir"])
    assert model.config.bos_token_id == 256 and model.config.max_position_embeddings == 48
    tokens = model.generate(max_new_tokens=47, do_sample=True, suppress_tokens=[256])[0, 1:]
    assert tokens_to_image(torch.cat([tokens, tokens[:1]]), (4, 4)).size == (4, 4)


def test_images_are_learned_augmented_and_read_by_workers(tmp_path, images):
    values = images_recipe(tmp_path, images, steps=40, evaluate_every=40, save_every=40, micro_batch_size=None)
    results = run(values)
    assert results["metrics"]["validation"]["accuracy"] > 0.9
    model = AutoModelForImageClassification.from_pretrained(values["output_dir"])
    processor = AutoImageProcessor.from_pretrained(values["output_dir"])
    assert list(model.config.id2label.values()) == CLASSES and model.config.image_size == 8
    rows = Dataset.from_parquet(str(images))
    with torch.no_grad():
        logits = model.eval()(**processor([row["image"] for row in rows], return_tensors="pt")).logits
    accuracy = (logits.argmax(-1) == torch.tensor(rows["label"])).float().mean().item()
    assert results["metrics"]["validation"]["accuracy"] == pytest.approx(accuracy)


def test_augmented_images_go_on_as_if_never_stopped(tmp_path, images):
    values = images_recipe(tmp_path, images, steps=6)
    expected = run(values | {"output_dir": str(tmp_path / "whole")})
    run(values | {"steps": 3})
    assert run(values)["losses"] == expected["losses"]


def test_a_vit_trains_by_the_same_recipe_and_so_does_a_trained_model_of_another_size(tmp_path, images):
    model = {"architecture": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = images_recipe(tmp_path, images, model=model | {"intermediate_size": 16, "patch_size": 4}, steps=2)
    run(values)
    again = values | {"model": {"pretrained": values["output_dir"]}, "output_dir": str(tmp_path / "again")}
    assert run(again)["parameters"] == run(values)["parameters"]


def test_centre_crops_of_larger_images_are_evaluated_where_the_recipe_asks_for_them(tmp_path, images):
    values = images_recipe(tmp_path, images, steps=1)
    values["data"] = values["data"] | {"eval_crop_ratio": 0.8, "workers": 0}
    run(values)
    processor = AutoImageProcessor.from_pretrained(values["output_dir"])
    assert processor(PILImage.new("RGB", (30, 20)), return_tensors="pt")["pixel_values"].shape == (1, 3, 8, 8)
    assert dict(processor.size)["shortest_edge"] == 10


def test_text_beyond_ascii_has_bits_per_character_too(tmp_path):
    text = tmp_path / "text"
    text.write_text("äöü 文 " * 400, encoding="utf-8")
    metrics = run(bytes_recipe(tmp_path, steps=1))["metrics"]["validation"]
    validation = text.read_bytes()[len(text.read_bytes()) * 90 // 100 :][: 7 * 16 + 1][1:]
    characters = sum((byte & 0xC0) != 0x80 for byte in validation)
    ratio = metrics["bits_per_character"] / metrics["bits_per_byte"]
    assert ratio == pytest.approx(len(validation) / characters) and ratio > 1.3


def test_overlapping_windows_count_each_byte_once_with_the_longest_context_there_is(tmp_path):
    values = bytes_recipe(tmp_path)
    values["data"] |= {"eval_stride": 4, "max_eval_samples": None}
    results = run(values)
    text = Path(values["data"]["train"]).read_bytes()
    test = text[len(text) * 95 // 100 :]
    model, nats = AutoModelForCausalLM.from_pretrained(values["output_dir"]).eval(), 0.0
    for position in range(1, len(test)):
        begin = max(0, -(-(position - 16) // 4) * 4)  # of the first window that reaches so far
        with torch.no_grad():
            logits = model(torch.tensor([list(test[begin:position])])).logits[0, -1]
        nats -= logits.log_softmax(-1)[test[position]].item()
    expected = nats / math.log(2) / (len(test) - 1)
    assert results["metrics"]["test"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("task", ["bytes", "pixels", "images"])
def test_generated_data_and_the_first_samples_of_them_serve_to_try_a_recipe(tmp_path, capsys, task):
    values = images_recipe(tmp_path, tmp_path) if task == "images" else bytes_recipe(tmp_path)
    model = values["model"] | ({} if task == "images" else {"max_position_embeddings": 3072})
    data = {"train": "generated", "max_train_samples": 9, "max_eval_samples": 3}
    data |= {"bytes": {"seq_len": 16}, "pixels": {"image_size": 8}, "images": {"image_size": 8}}[task]
    run(values | {"task": task, "model": model, "data": data, "steps": 2})
    assert f"{task}: 9 samples, 1 steps in an epoch, 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": None}, "no data: give data.train=FILE"),
        ({"train": "nowhere"}, "data.train=nowhere: no such file"),
        ({"test": "nowhere"}, "data.test=nowhere: no such file"),
    ],
)
def test_missing_files_are_named(tmp_path, changes, message):
    values = bytes_recipe(tmp_path)
    values["data"] |= changes
    with pytest.raises(ValueError, match=message):
        run(values)


def test_missing_columns_are_named(tmp_path, images):
    values = pixels_recipe(tmp_path, images)
    values["data"] |= {"image_column": "picture"}
    with pytest.raises(ValueError, match=r"data.image_column: the train data has no column 'picture'"):
        run(values)
