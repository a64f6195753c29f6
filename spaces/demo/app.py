"""Web demo of AFT: classify an image and show what the layers look at, continue a text, complete an image.

    python spaces/demo/app.py --image-model outputs/quickstart/aft-conv --text-model outputs/quickstart-text

A model is a directory or a Hub id, given by an option or by AFT_IMAGE_MODEL, AFT_TEXT_MODEL or AFT_PIXEL_MODEL. A tab
without a model shows the command that trains one.
"""

import argparse
import html
import os
from pathlib import Path


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
import image_tab
import pixel_tab
import text_tab
from images import MAX_MEGABYTES
from loading import IMAGE, PIXEL, TEXT, Kind, Unavailable, load


TITLE = "Attention Free Transformer"
ABOUT = """# Attention Free Transformer
Each position takes a weighted average over all positions. The weights come from learned keys and position biases,
without query-key products ([the paper](https://arxiv.org/abs/2105.14103))."""
TABS = ((IMAGE, "Classify", image_tab), (TEXT, "Write", text_tab), (PIXEL, "Draw", pixel_tab))
SMALL = 20e6  # parameters: below this, the page says what to expect


def build_app(sources: dict[Kind, str]) -> gr.Blocks:
    """Build the page; a tab whose model cannot be loaded shows the reason."""
    with gr.Blocks(title=TITLE, analytics_enabled=False) as app:
        gr.Markdown(ABOUT, elem_classes="aft-title")
        with gr.Tabs():
            for kind, name, tab in TABS:
                with gr.Tab(name, id=kind.name):
                    try:
                        loaded = load(kind, sources[kind])
                    except Unavailable as error:
                        gr.Markdown(str(error), elem_classes="aft-unavailable")
                        continue
                    parameters = loaded[0].num_parameters()
                    if parameters < SMALL:
                        expected = f"A small model, of {parameters:,} parameters. {tab.EXPECT_OF_SMALL}"
                        gr.HTML(f'<p class="aft-expect">{expected}</p>', padding=False)
                    tab.build(app, *loaded)
                    described = f"{html.escape(sources[kind])}: {type(loaded[0]).__name__}, {parameters:,} parameters"
                    gr.HTML(f'<p class="aft-model">{described}</p>', padding=False)
    return app


def theme() -> gr.themes.Base:
    """A plain theme with the fonts of the reader's system, so that no other host is contacted."""
    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    look = gr.themes.Default(primary_hue="indigo", neutral_hue="slate", font=sans, font_mono=mono)
    plain = {"block_title_text_weight": "600", "block_label_text_weight": "600", "block_label_background_fill": "none"}
    return look.set(
        button_primary_background_fill="*primary_600", button_primary_background_fill_hover="*primary_700", **plain
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, _, _ in TABS:
        default = os.environ.get(f"AFT_{kind.name.upper()}_MODEL") or kind.default
        text = f"directory or Hub id (default: {default})"
        parser.add_argument(f"--{kind.name}-model", default=default, metavar="MODEL", help=text)
    parser.add_argument("--host", default=None, help="address to listen on (default: gradio's, 127.0.0.1)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    app = build_app({kind: getattr(arguments, f"{kind.name}_model") for kind, _, _ in TABS})
    app.launch(
        server_name=arguments.host,
        server_port=arguments.port,
        theme=theme(),
        css_paths=Path(__file__).with_name("style.css"),
        footer_links=[],
        ssr_mode=False,
        max_file_size=f"{5 * MAX_MEGABYTES}mb",  # the server stops reading here; below, the page gives the reason
    )


if __name__ == "__main__":
    main()
