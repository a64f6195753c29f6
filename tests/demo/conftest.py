"""Fixtures: a tiny model for each tab of the demo, and the import path of its modules."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer


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
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("models")
    tiny = {"hidden_size": 8, "num_hidden_layers": 2, "position_bias_dim": 4}
    digits = {"id2label": {i: str(i) for i in range(10)}, "label2id": {str(i): i for i in range(10)}}
    image = AFTConfig(
        modality="image",
        aft_type="conv",
        image_size=16,
        patch_size=4,
        num_heads=4,
        kernel_size=3,
        **tiny,
        **digits,
    )
    text = AFTConfig(vocab_size=258, max_position_embeddings=64, window_size=8, **tiny)
    pixel = AFTConfig(max_position_embeddings=48, window_size=8, vocab_size=257, bos_token_id=256, **tiny)
    classifier = AFTForImageClassification(image)
    for layer in classifier.aft.layers:  # biases that differ between layers, as after training
        torch.nn.init.normal_(layer.mixer.kernel_scale)
    classifier.save_pretrained(directory / "image")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(directory / "image")
    AFTForCausalLM(text).save_pretrained(directory / "text")
    build_byte_tokenizer(model_max_length=64).save_pretrained(directory / "text")
    AFTForCausalLM(pixel).save_pretrained(directory / "pixel")
    return {name: str(directory / name) for name in ("image", "text", "pixel")}
