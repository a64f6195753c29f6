"""Pictures of position biases."""

import numpy as np
import pytest
from PIL import Image

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from aft_hf.analysis import plot_position_biases


SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_heads": 3}
MODELS = {
    "kernels of images": lambda: AFTForImageClassification(
        AFTConfig(**SMALL, modality="image", aft_type="conv", image_size=32, patch_size=4, kernel_size=5)
    ),
    "tables of text": lambda: AFTForCausalLM(AFTConfig(**SMALL, aft_type="full", max_position_embeddings=20)),
    "kernels of text and no biases at all": lambda: AFTForCausalLM(
        AFTConfig(**SMALL, aft_type=["conv", "simple"], max_position_embeddings=20)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_with_something_on_it_is_written(name, tmp_path):
    model = MODELS[name]()
    for layer in model.aft.layers:
        if hasattr(layer.mixer, "kernel_scale"):
            layer.mixer.kernel_scale.data.fill_(1.0)
    plot_position_biases(model, tmp_path / "w.png", max_heads=2)
    pixels = np.asarray(Image.open(tmp_path / "w.png").convert("RGB"))
    colours = np.unique(pixels.reshape(-1, 3), axis=0)
    red, blue = colours[:, 0].astype(int) - colours[:, 2], colours[:, 2].astype(int) - colours[:, 0]
    assert red.max() > 60 and blue.max() > 60  # biases of both signs are drawn
