"""The tab "Draw": a model completes the lower half of a small image."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import numpy as np
import torch
from images import example_digits, image_input
from loading import Loaded, pixel_side
from messages import explained
from pictures import figure
from PIL import Image, ImageOps
from sampling import sample_tokens
from text_tab import check_seed

from aft_hf.data.samples import START_TOKEN


COMPLETIONS = 4
EXPECT = """It draws only what it was trained on, as small images: choose a similar image."""
MISSING = 235  # the gray of missing sub-pixels
NOTHING_YET = '<p class="aft-hint">Choose an image and press the button.</p>'


class PixelDemo:
    """Completes the lower half of images with one model."""

    def __init__(self, model):
        self.model, self.side = model, pixel_side(model.config)

    def small(self, image: Image.Image) -> Image.Image:
        """The center of the image at the size of the model."""
        return ImageOps.fit(image.convert("RGB"), (self.side, self.side), Image.Resampling.BOX)

    def complete(self, image: Image.Image | None, temperature: float, seed: int) -> Iterator[str]:
        """Yield HTML of the original, the given half and the completions after each row.

        The same seed gives the same images.

        Raises:
            ValueError: there is no image, or a setting is out of range.
        """
        if image is None:
            raise ValueError("There is no image yet: upload one or choose an example.")
        if temperature is None or not 0 < temperature <= 2:
            raise ValueError(f"The temperature must be above 0 and at most 2, got {temperature}.")
        check_seed(seed)
        original = self.small(image)
        tokens = torch.from_numpy(np.asarray(original).reshape(-1).astype(np.int64))
        row = 3 * self.side
        given = tokens[: self.side // 2 * row]
        made = torch.full((COMPLETIONS, len(tokens)), MISSING)
        made[:, : len(given)] = given
        yield self._page(original, made, len(given))
        prompt = torch.cat([torch.tensor([START_TOKEN]), given]).expand(COMPLETIONS, -1)
        count, options = len(tokens) - len(given), {"temperature": temperature, "seed": int(seed)}
        for i, new in enumerate(sample_tokens(self.model, prompt, count, num_tokens=START_TOKEN, **options)):
            made[:, len(given) + i] = new
            if (i + 1) % row == 0:
                yield self._page(original, made, len(given))

    def _page(self, original: Image.Image, made: torch.Tensor, given: int) -> str:
        masked = made[0].clone()
        masked[given:] = MISSING
        figures = [figure(original, "Original"), figure(self._picture(masked), "Given")]
        figures += [figure(self._picture(tokens), f"Drawing {i}") for i, tokens in enumerate(made, 1)]
        return f'<div class="aft-pixels">{"".join(figures)}</div>'

    def _picture(self, tokens: torch.Tensor) -> Image.Image:
        """The image of sub-pixels in raster order, the channels of a pixel side by side."""
        return Image.fromarray(tokens.numpy().astype(np.uint8).reshape(self.side, self.side, 3))


def example_photographs() -> list[str]:
    """Paths of the photographs that come with scikit-learn."""
    import sklearn.datasets

    return sorted(str(path) for path in (Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg"))


def build(app: gr.Blocks, loaded: Loaded) -> None:
    """Lay out the tab and connect its events."""
    demo = PixelDemo(loaded.model)
    # At 8 x 8 pixels a photograph shows nothing, and scikit-learn's digits have this size.
    digits = demo.side <= 8
    examples = example_digits(tempfile.mkdtemp(prefix="aft_digits_")) if digits else example_photographs()
    with gr.Row(elem_classes="aft-columns"):
        with gr.Column(scale=2, min_width=300):
            image = image_input(examples[0], elem_id="pixel-upload")
            button = gr.Button("Draw the lower half", variant="primary", elem_id="draw")
            gr.Examples([[path] for path in examples], image, label="Digits" if digits else "Photographs")
            with gr.Accordion("Settings", open=False, elem_classes="aft-settings"):
                temperature = gr.Slider(0.1, 2, 1.0, step=0.05, label="Temperature", buttons=[])
                seed = gr.Number(0, precision=0, label="Seed", info="The same seed gives the same images")
        with gr.Column(scale=3, min_width=300):
            pictures = gr.HTML(NOTHING_YET, elem_id="pixels", padding=False)
            gr.Markdown(
                f"The image is resized to {demo.side} x {demo.side}, a sequence of {3 * demo.side**2} sub-pixels. "
                "The model gets the upper half and generates the rest, one sub-pixel at a time."
            )
    options = {"concurrency_id": "generation", "concurrency_limit": 1, "show_progress": "hidden"}
    button.click(explained(demo.complete), [image, temperature, seed], pictures, **options)
