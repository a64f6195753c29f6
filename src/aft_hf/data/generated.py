"""Synthetic data for trying out recipes without a download: `data.train: generated`."""

from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage

from .atomic_files import write_atomic


GENERATED = "generated"

TEXT_BYTES = 200_000
IMAGES, CLASSES, SIDE = 128, 10, 32


def write_text(directory: str | Path) -> str:
    """Write a synthetic text to a file in `directory` and return its path.

    The text is always the same: words of a small vocabulary in random order.
    """
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
    words = [random.choice(letters, random.integers(1, 9)).tobytes() for _ in range(200)]
    text = b" ".join(words[i] for i in random.integers(200, size=TEXT_BYTES // 2))[:TEXT_BYTES]
    path = Path(directory) / "generated.txt"
    with write_atomic(path) as file:  # other processes may write it at the same time
        file.write(text)
    return str(path)


def draw_images(split: str, image_column: str, label_column: str) -> Dataset:
    """Return noisy images whose classes differ in color. The images of a split are always the same."""
    colours = np.random.default_rng(0).integers(30, 225, (CLASSES, 3))
    random = np.random.default_rng(list(split.encode()))
    labels = [i % CLASSES for i in range(IMAGES)]
    noise = random.integers(-30, 30, (IMAGES, SIDE, SIDE, 3))
    pixels = (colours[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8)
    features = Features({image_column: Image(), label_column: ClassLabel(num_classes=CLASSES)})
    rows = {image_column: [PILImage.fromarray(each) for each in pixels], label_column: labels}
    return Dataset.from_dict(rows, features=features)
