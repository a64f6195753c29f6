"""Unexpected JSON values and malformed files, saved models to put them into, and the commands that read them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer
from aft_hf.conversion import save_converted
from aft_hf.publishing import write_card


MISSING = object()
VALUES = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "a number": 7,
    "a fraction": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "a billion": 10**9,
    "an integer of 400 digits": 10**400,
    "a string": "text",
    "an empty string": "",
    "a list": [1],
    "an empty list": [],
    "lists in lists": [[["text"]]],
    "an object": {"a": 1},
    "an empty object": {},
    "missing": MISSING,
}
TEXTS = {
    "an empty file": b"",
    "half an object": b'{"a": [1, ',
    "invalid UTF-8": b'{"a": "\xff\xfe"}',
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94K\x01a.",
    "100,000 lists": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "an integer of 5,000 digits": b'{"a": ' + b"1" * 5_000 + b"}",
    "a lone surrogate": b'{"a": "\\ud800"}',
}
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
LABELS = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}


def save_models(root: Path) -> None:
    """Save models as "text", "image", "vit", "shards" and "converted", data to evaluate them on, and a recipe."""
    text = AFTConfig(aft_type="conv", kernel_size=4, max_position_embeddings=16, **SIZES)
    AFTForCausalLM(text).save_pretrained(root / "text")
    build_byte_tokenizer(model_max_length=16).save_pretrained(root / "text")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    image = AFTConfig(modality="image", aft_type="conv", image_size=8, patch_size=4, kernel_size=3, **SIZES, **LABELS)
    AFTForImageClassification(image).save_pretrained(root / "image")
    processor.save_pretrained(root / "image")
    vit = ViTConfig(image_size=8, patch_size=4, num_attention_heads=2, **SIZES, **LABELS)
    ViTForImageClassification(vit).save_pretrained(root / "vit")
    ViTForImageClassification(vit).save_pretrained(root / "shards", max_shard_size="1KB")
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


# For each command, the directory that it reads a copy of, and the files that the tests damage in this copy.
READERS = {
    "evaluate text": ("text", ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")),
    "evaluate image": ("image", ("config.json", "preprocessor_config.json")),
    "evaluate vit": ("vit", ("config.json", "preprocessor_config.json")),
    "evaluate shards": ("shards", ("model.safetensors.index.json",)),
    "convert vit": ("vit", ("config.json", "preprocessor_config.json")),
    "convert shards": ("shards", ("model.safetensors.index.json",)),
    "publish text": ("text", ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")),
    "publish image": (
        "image",
        ("config.json", "results.json", "all_results.json", "trainer_state.json", "preprocessor_config.json"),
    ),
    "publish converted": ("converted", ("conversion_report.json",)),
    "train": (".", ("recipe.yaml",)),
    "visualize text": ("text", ("config.json", "tokenizer_config.json", "tokenizer.json")),
    "visualize image": ("image", ("config.json", "preprocessor_config.json")),
}


def arguments(reader: str, root: Path, directory: Path) -> list[str]:
    """Return the arguments of `aft-hf` for a command that reads `directory` and the data in `root`."""
    command, _, name = reader.partition(" ")
    if command == "evaluate":
        data = ["text.txt"] if name == "text" else ["images"]
        return ["evaluate", str(directory), str(root / data[0]), "--block-size", "8"]
    if command == "convert":
        return ["convert", str(directory), str(directory.parent / "out"), "--kernel-size", "3", "--num-heads", "2"]
    if command == "publish":
        return ["publish", str(directory), "me/tiny", "--dry-run"]
    if command == "visualize":
        inputs = ["--text", "abc"] if name == "text" else ["--images", str(root / "images")]
        return ["visualize", str(directory), "keys", *inputs, "--out", str(directory / "keys.png")]
    return ["train", str(directory / "recipe.yaml"), "--print-config", "--smoke"]


def with_value(content: Any, path: tuple, value: Any) -> Any:
    """Return a copy of nested content with `value` at `path`; the value MISSING removes the entry."""
    if not path:
        return None if value is MISSING else value
    copy = dict(content) if isinstance(content, dict) else list(content)
    if len(path) == 1 and value is MISSING:
        del copy[path[0]]
    else:
        inside = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
        copy[path[0]] = with_value(inside, path[1:], value)
    return copy


def places(content: Any, depth: int = 3, prefix: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each value in nested content, down to `depth` levels; of a list, only of the first value."""
    yield prefix
    if depth and isinstance(content, (dict, list)):
        keys = list(content) if isinstance(content, dict) else list(range(min(1, len(content))))
        for key in keys:
            yield from places(content[key], depth - 1, (*prefix, key))
