"""Tiny models with all files that the commands read, and ways to change files and to see whether they have changed."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import vit_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer
from aft_hf.conversion import save_converted
from aft_hf.publishing import write_card


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
LABELS = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}


def save_models(root: Path) -> None:
    """Save models as "text", "image", "vit", "shards" and "converted", data to evaluate them on, and a recipe."""
    text = AFTConfig(aft_type="conv", kernel_size=4, max_position_embeddings=16, vocab_size=258, **SIZES)
    AFTForCausalLM(text).save_pretrained(root / "text")
    build_byte_tokenizer(model_max_length=16).save_pretrained(root / "text")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    image = AFTConfig(modality="image", aft_type="conv", image_size=8, patch_size=4, kernel_size=3, **SIZES, **LABELS)
    AFTForImageClassification(image).save_pretrained(root / "image")
    processor.save_pretrained(root / "image")
    vit_model(8, **LABELS).save_pretrained(root / "vit")
    vit_model(8, **LABELS).save_pretrained(root / "shards", max_shard_size="1KB")
    for name in ("vit", "shards"):
        processor.save_pretrained(root / name)
    save_converted(root / "vit", root / "converted", kernel_size=3, num_heads=2)
    results = {
        "metrics": {"validation": {"accuracy": 0.5}},
        "steps": 2,
        "recipe": {"task": "images", "data": {"dataset": "a/b"}, "model": {"architecture": "aft"}},
        "versions": {"torch": "2"},
    }
    (root / "image" / "results.json").write_text(json.dumps(results))
    (root / "image" / "all_results.json").write_text('{"eval_accuracy": 0.5, "train_runtime": 3}')
    (root / "image" / "trainer_state.json").write_text('{"global_step": 3}')
    for name in ("text", "image", "converted"):
        write_card(root / name, repo_id="me/tiny")
    (root / "text.txt").write_text("some text to read" * 8)
    for label in LABELS["label2id"]:
        (root / "images" / label).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / "images" / label / "1.png")
    recipe = {
        "task": "images",
        "model": {"architecture": "aft", "modality": "image"},
        "data": {"train": "images", "augmentation": {"crop_scale": [0.5, 1.0]}},
        "optimizer": {"learning_rate": 0.1, "betas": [0.9, 0.99]},
        "schedule": {"name": "cosine", "options": {}},
        "steps": 2,
        "global_batch_size": 2,
        "smoke": {"steps": 1},
    }
    (root / "recipe.yaml").write_text(json.dumps(recipe))


def changed(**values: Any) -> Callable[[Path], None]:
    """Return a function that gives keys of a JSON file other values, and removes those whose value is None."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text()) | values
        content = {key: value for key, value in content.items() if value is not None or key not in values}
        path.write_text(json.dumps(content))

    return change


def edited(change: Callable[[dict], Any], **metadata: str) -> Callable[[Path], None]:
    """Return a function that applies `change` to the tensors of a safetensors file."""

    def change_file(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"} | metadata)

    return change_file


def listing(directory: Path) -> dict[str, tuple]:
    """Return mode, inode, time and content of each path in a directory; the content of a link is its target."""
    actual = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        content = os.readlink(path) if path.is_symlink() else content
        actual[path.relative_to(directory).as_posix()] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return actual
