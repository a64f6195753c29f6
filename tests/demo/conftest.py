"""Fixtures: a tiny model for each tab of the demo, and the import path of its modules."""

import sys
from pathlib import Path

import pytest
from tiny_models import image_model, language_model
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import build_byte_tokenizer


DEMO = Path(__file__).parents[2] / "spaces" / "demo"


@pytest.fixture(scope="session", autouse=True)
def demo_modules():
    """Put the folder of app.py on the import path, as when the app runs."""
    sys.path.insert(0, str(DEMO))
    yield
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories by tab: a classifier of digits, a byte-level language model, and a model of 4 x 4 images."""
    directory = tmp_path_factory.mktemp("models")
    tiny = {"hidden_size": 8, "num_heads": 4}
    digits = {"id2label": {i: str(i) for i in range(10)}, "label2id": {str(i): i for i in range(10)}}
    image_model(image_size=16, kernel_size=3, **tiny, **digits).save_pretrained(directory / "image")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory / "image")
    language_model(vocab_size=258, max_position_embeddings=64, **tiny).save_pretrained(directory / "text")
    build_byte_tokenizer(model_max_length=64).save_pretrained(directory / "text")
    pixels = {"max_position_embeddings": 48, "vocab_size": 257, "bos_token_id": 256}
    language_model(**pixels, **tiny).save_pretrained(directory / "pixel")
    return {name: str(directory / name) for name in ("image", "text", "pixel")}
