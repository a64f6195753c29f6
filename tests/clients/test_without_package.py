"""TRL and ONNX export in a process that cannot import `aft_hf`, by the remote code of saved models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_models import AFT_TYPES, LONGEST, image_classifier, language_model

from aft_hf import build_byte_tokenizer


pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("without_package.py")


def save_language_model(directory: Path, aft_type: str, **options) -> Path:
    language_model(aft_type, **options).save_pretrained(directory / aft_type)
    build_byte_tokenizer(model_max_length=LONGEST).save_pretrained(directory / aft_type)
    return directory / aft_type


def check(task: str, directories: list[Path], home: Path) -> None:
    """Run the script on the directories, with an empty HF_HOME and without a network."""
    variables = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, str(SCRIPT), task, *map(str, directories)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("checked ") == len(directories)


def test_packed_documents_give_the_same_update_as_padded_ones_with_remote_code(tmp_path):
    pytest.importorskip("trl", reason="needs trl: run `make clients`")
    check("packing", [save_language_model(tmp_path, aft_type) for aft_type in AFT_TYPES], tmp_path / "home")


def test_models_of_texts_and_images_are_exported_with_remote_code(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: run `make clients`")
    pytest.importorskip("onnxscript", reason="needs onnxscript: run `make clients`")
    image_classifier().save_pretrained(tmp_path / "image")
    check("onnx", [save_language_model(tmp_path, "local", num_hidden_layers=1), tmp_path / "image"], tmp_path / "home")
