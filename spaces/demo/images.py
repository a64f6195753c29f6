"""The field that takes an image, for two of the tabs."""

import gradio as gr
from PIL import Image


def image_input(value: str | None = None, **options) -> gr.Image:
    """An upload of any size and kind of image, which says so on the page when a file is none."""
    field = gr.Image(
        value, type="pil", sources=["upload", "clipboard"], height=260, show_label=False, buttons=[], **options
    )
    read = field.preprocess

    def preprocess(payload):
        try:
            return read(payload)
        except (OSError, Image.DecompressionBombError) as error:
            message = "This file cannot be read as an image: try a PNG or a JPEG."
            raise gr.Error(message, title="That does not work", print_exception=False) from error

    field.preprocess = preprocess
    return field
