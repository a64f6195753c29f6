"""Images to train on."""

from pathlib import Path

import pytest
from runs import write_images


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A parquet file of images."""
    return write_images(tmp_path_factory.mktemp("images") / "images.parquet")
