"""`aft-hf evaluate`, called as a user calls it."""

import json

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from transformers import DeiTForImageClassification, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer
from aft_hf.conversion import read_source


EVALUATE = ("aft-hf", "evaluate")


@pytest.fixture
def classifier(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "kernel_size": 3, "num_labels": 2}
    config = AFTConfig(modality="image", aft_type="conv", image_size=8, patch_size=2, **sizes)
    path = tmp_path / "model"
    AFTForImageClassification(config).save_pretrained(path)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(path)
    return path


def save_images(path, height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (6, height, width, 3), dtype=np.uint8)
    rows = {"image": [PILImage.fromarray(x) for x in pixels], "label": [0, 1] * 3}
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(2)})).to_parquet(path)
    return path


def test_a_classifier_is_evaluated_at_every_size_that_is_asked_for(classifier, tmp_path, run_command):
    data = save_images(tmp_path / "test.parquet", 8, 8)
    done = run_command(
        *EVALUATE, classifier, data, "--image-size", 8, "--image-size", 12, "--out", tmp_path / "metrics.json"
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
        *EVALUATE, tmp_path, tmp_path / "text.txt", "--block-size", 16, "--out", tmp_path / "out" / "metrics.json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (metrics,) = json.loads((tmp_path / "out" / "metrics.json").read_text()).values()
    assert 7 < metrics["bits_per_byte"] == metrics["bits_per_token"] < 9  # an untrained model of bytes is near 8 bits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,n\none,1\n,2\n", "rows.csv (row 1: column 'text' holds None"),
        ("story\none\n", "--text-column: the given data has no column 'text', it has 'story'"),
    ],
)
def test_rows_without_text_end_in_a_line_that_names_row_and_column(content, message, tmp_path, run_command):
    AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, vocab_size=258)).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "rows.csv").write_text(content)
    done = run_command(*EVALUATE, tmp_path, tmp_path / "rows.csv")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0


@pytest.mark.parametrize("kind", [ViTForImageClassification, DeiTForImageClassification])
def test_a_model_without_image_processor_gets_that_of_its_conversion(kind, tmp_path, run_command, caplog):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    kind(kind.config_class(**sizes, image_size=8, patch_size=2, num_labels=2)).save_pretrained(tmp_path / "model")
    save_images(tmp_path / "test.parquet", 12, 9)
    arguments = [*EVALUATE, tmp_path / "model", tmp_path / "test.parquet", "--out"]
    done = run_command(*arguments, tmp_path / "without.json")
    assert done.returncode == 0 and "has no image processor" in caplog.text
    caplog.clear()
    read_source(tmp_path / "model").image_processor.save_pretrained(tmp_path / "model")
    done = run_command(*arguments, tmp_path / "with.json")
    assert done.returncode == 0 and "has no image processor" not in caplog.text
    assert (tmp_path / "without.json").read_text() == (tmp_path / "with.json").read_text()


def test_what_a_user_gets_wrong_ends_in_one_line(classifier, tmp_path, run_command):
    Dataset.from_dict({"text": ["one"]}).to_parquet(tmp_path / "test.parquet")
    for data, options, code, message in (
        ("none.parquet", ["--device", "cpu"], 1, "none.parquet: no such file or folder"),
        ("test.parquet", [], 1, "--image-column: the given data has no column 'image', it has 'text'"),
        ("test.parquet", ["--batch-size", 0], 2, "Invalid value for '--batch-size'"),
    ):
        done = run_command(*EVALUATE, classifier, tmp_path / data, *options)
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
