"""Images to train on."""

from pathlib import Path

import pytest


pytest.register_assert_rewrite("runs")  # to report the values in its assertions

from runs import write_images  # noqa: E402


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A parquet file of images."""
    return write_images(tmp_path_factory.mktemp("images") / "images.parquet")
