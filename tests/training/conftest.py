"""Images to train on."""

from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage


pytest.register_assert_rewrite("runs")  # so that what it asserts is told, too

from runs import CLASSES  # noqa: E402


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A parquet file of 8 x 8 images in three classes that any model can tell apart."""
    random = np.random.default_rng(0)
    colours = np.array([[40, 40, 40], [210, 210, 210], [200, 40, 40]])
    labels = [i % 3 for i in range(36)]
    pixels = [np.clip(colours[label] + random.integers(-20, 20, (8, 8, 3)), 0, 255) for label in labels]
    rows = {"image": [PILImage.fromarray(each.astype(np.uint8)) for each in pixels], "label": labels}
    path = tmp_path_factory.mktemp("images") / "images.parquet"
    Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=CLASSES)})).to_parquet(path)
    return path
