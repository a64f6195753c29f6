"""The image upload of two tabs, and example images."""

from pathlib import Path

import gradio as gr
import numpy as np
from PIL import Image

from aft_hf.data.image_files import ImageError, open_image


MAX_MEGABYTES = 20  # of the largest file that is opened


def image_input(value: str | None = None, **options) -> gr.Image:
    """An image upload, which shows a message if a file is not an image of a supported format and size."""
    field = gr.Image(
        value,
        type="pil",
        sources=["upload", "clipboard"],
        height=260,
        show_label=False,
        buttons=[],
        elem_classes="aft-upload",
        **options,
    )

    def preprocess(payload):
        """Replaces the method of gradio, which opens every format that Pillow knows, at any size."""
        if payload is None:
            return None
        path = Path(payload.path or "")
        try:
            if path.is_file() and path.stat().st_size > MAX_MEGABYTES * 10**6:
                raise ImageError(f"This file has more than {MAX_MEGABYTES} MB, the limit of this page.")
            return open_image(path, "This file")
        except ImageError as error:
            raise gr.Error(str(error), title="Invalid input", print_exception=False) from error

    field.preprocess = preprocess
    return field


def is_image(path: Path) -> bool:
    """Whether a file is an image of a supported format and size."""
    try:
        open_image(path)
    except ImageError:
        return False
    return True


def example_digits(directory: str | Path, count: int = 8) -> list[str]:
    """Save digits of the held-out set of the quickstart, and return the paths."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    _, images, _, labels = train_test_split(
        digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    paths = []
    for label in range(count):
        path = Path(directory) / f"digit_{label}.png"
        pixels = images[labels == label][0] * 255 / 16
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(path)
        paths.append(str(path))
    return paths
