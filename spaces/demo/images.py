"""The field that takes an image, for two of the tabs."""

import gradio as gr

from aft_hf.data.image_files import ImageError, open_image


def image_input(value: str | None = None, **options) -> gr.Image:
    """An upload of an image in a usual format and size, which says so on the page when a file is none."""
    field = gr.Image(
        value, type="pil", sources=["upload", "clipboard"], height=260, show_label=False, buttons=[], **options
    )

    def preprocess(payload):
        """In place of gradio's, which opens every format that Pillow knows, of any size."""
        try:
            return None if payload is None else open_image(payload.path or "", "This file")
        except ImageError as error:
            raise gr.Error(str(error), title="That does not work", print_exception=False) from error

    field.preprocess = preprocess
    return field
