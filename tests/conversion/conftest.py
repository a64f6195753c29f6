"""The checkpoint that most conversion tests use."""

import pytest
from checkpoints import save_vit


@pytest.fixture
def vit(tmp_path):
    """The directory of a ViT of transformers: 2 layers, 4 x 4 patches, 3 classes."""
    save_vit(tmp_path / "vit")
    return tmp_path / "vit"
