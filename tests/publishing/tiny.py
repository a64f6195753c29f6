"""Tiny models to publish, their expected outputs, and Python in other processes with separate caches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import image_model, language_model
from transformers import PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import build_byte_tokenizer


HERE = Path(__file__).parent
TEXT_TYPES = ("full", "local", "simple", "conv", "alibi")
IMAGE_TYPES = ("full", "local", "simple", "conv")
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "num_heads": 2, "position_bias_dim": 4}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "bird"}, "label2id": {"cat": 0, "dog": 1, "bird": 2}}


def build(task: str, aft_type: str) -> PreTrainedModel:
    """Build a random model whose position biases have a visible effect."""
    if task == "text":
        sizes = SIZES | {"window_size": 4, "kernel_size": 4, "max_position_embeddings": 24}
        model = language_model(aft_type, vocab_size=len(companion("text")), **sizes)
    else:
        model = image_model(aft_type, window_size=2, kernel_size=3, image_size=16, **SIZES, **LABELS)
    for name, parameter in model.named_parameters():
        if "lm_head" in name or "classifier" in name:
            torch.nn.init.normal_(parameter)
    return model


def companion(task: str):
    """Return the tokenizer or the image processor of the models."""
    if task == "text":
        return build_byte_tokenizer(model_max_length=24)
    return ViTImageProcessorPil(size={"height": 16, "width": 16})


def save(model: PreTrainedModel, directory: Path, **options) -> None:
    """Save a model with its tokenizer or image processor, as a user would."""
    model.save_pretrained(directory, **options)
    companion(model.config.modality).save_pretrained(directory)


@torch.no_grad()
def expected_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return inputs, logits and, for text, the greedily generated tokens."""
    generator = torch.Generator().manual_seed(1)
    if model.config.modality == "image":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"inputs": pixels, "logits": model(pixel_values=pixels).logits}
    tokens = torch.randint(0, 256, (2, 9), generator=generator)
    generated = model.generate(tokens, max_new_tokens=6, do_sample=False)
    return {"inputs": tokens, "logits": model(input_ids=tokens).logits, "generated": generated}


def write_all_cases(directory: Path) -> Path:
    """Save models of all types of both tasks under `directory`, those of type `full` in shards.

    Returns the path of the list for `without_aft_hf.py`.
    """
    cases = []
    for task, types in (("text", TEXT_TYPES), ("image", IMAGE_TYPES)):
        for aft_type in types:
            model, name = build(task, aft_type), f"aft-{task}-{aft_type}"
            save(model, directory / name, **({"max_shard_size": "4KB"} if aft_type == "full" else {}))
            case = {"source": directory / name, "task": task, "out": directory / f"{name}-checked"}
            case["expected"] = case["out"] / "expected.safetensors"
            case["out"].mkdir()
            save_file(expected_of(model), case["expected"])
            cases.append({key: str(value) for key, value in case.items()})
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    return path


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a process with separate caches, which is offline."""
    variables = {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return os.environ | variables | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run Python, and show its output if it fails."""
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
