"""Tests of evaluate_model.py, called as a user calls it."""

import json

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer


SCRIPT = "evaluate_model.py"


@pytest.fixture
def classifier(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "kernel_size": 3, "num_labels": 2}
    config = AFTConfig(modality="image", aft_type="conv", image_size=8, patch_size=2, **sizes)
    path = tmp_path / "model"
    AFTForImageClassification(config).save_pretrained(path)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(path)
    return path


def test_a_classifier_is_evaluated_at_every_size_that_is_asked_for(classifier, tmp_path, run_command):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    rows = {"image": [PILImage.fromarray(x) for x in pixels], "label": [0, 1] * 3}
    data = tmp_path / "test.parquet"
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(2)})).to_parquet(data)
    done = run_command(
        SCRIPT, classifier, data, "--image-size", 8, "--image-size", 12, "--out", tmp_path / "metrics.json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\r" not in done.stderr and max(map(len, done.stdout.splitlines())) <= 80  # a log
    assert "8 px" in done.stdout and "12 px" in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics.keys() == {"8 px", "12 px"} and all(0 <= m["accuracy"] <= 1 for m in metrics.values())


def test_a_language_model_is_evaluated_in_blocks(tmp_path, run_command):
    AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, max_position_embeddings=16)).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 3)
    done = run_command(
        SCRIPT, tmp_path, tmp_path / "text.txt", "--block-size", 16, "--out", tmp_path / "out" / "metrics.json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (metrics,) = json.loads((tmp_path / "out" / "metrics.json").read_text()).values()
    assert 7 < metrics["bits_per_token"] < 9  # an untrained model of 256 byte values is near 8 bits


@pytest.mark.parametrize("option", ["--max-samples", "--image-size"])
def test_numbers_below_1_are_refused(option, classifier, tmp_path, run_command):
    done = run_command(SCRIPT, classifier, tmp_path, option, 0)
    assert done.returncode == 2 and f"Invalid value for '{option}'" in done.stderr


def test_what_a_user_gets_wrong_ends_in_one_line(classifier, tmp_path, run_command):
    done = run_command(SCRIPT, classifier, tmp_path / "none.parquet", "--device", "cpu")
    assert done.returncode == 1
    assert "none.parquet: no such file or folder" in done.stderr and "Traceback" not in done.stderr
