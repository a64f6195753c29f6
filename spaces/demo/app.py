"""Web demo of AFT: classify an image and show what the layers look at, continue a text, complete an image.

    python spaces/demo/app.py                                     # the models in model_cards
    python spaces/demo/app.py --model outputs/quickstart/aft-conv  # another one in its tab

A model is a directory or a Hub id. `--model` may be repeated; the variable AFT_MODELS holds several, between spaces.
"""

import argparse
import html
import os
import sys
from pathlib import Path


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
import image_tab
import pixel_tab
import text_tab
from images import MAX_MEGABYTES
from loading import IMAGE, PIXEL, TEXT, kind_of, load, shipped_models

from aft_hf.errors import InputError, explained


TITLE = "Attention Free Transformer"
ABOUT = """# Attention Free Transformer
Each position takes a weighted average over all positions. The weights come from learned keys and position biases,
without query-key products ([the paper](https://arxiv.org/abs/2105.14103))."""
TABS = ((IMAGE, "Classify", image_tab), (TEXT, "Write", text_tab), (PIXEL, "Draw", pixel_tab))


def choose(given: list[str]) -> dict[str, str]:
    """The source of the model of each kind: the last one given, or that of the repository.

    Raises:
        InputError: a given model does not exist, or is of no kind that the demo shows.
    """
    return {kind_of(source): source for source in [*shipped_models(), *given]}


def build_app(sources: dict[str, str]) -> gr.Blocks:
    """Build the page; a tab whose model is missing or cannot be shown shows the reason."""
    with gr.Blocks(title=TITLE, analytics_enabled=False) as app:
        gr.Markdown(ABOUT, elem_classes="aft-title")
        with gr.Tabs():
            for kind, name, tab in TABS:
                with gr.Tab(name, id=kind):
                    try:
                        if kind not in sources:
                            raise InputError("No model is given for this tab: start the demo with --model.")
                        loaded = load(sources[kind])
                        about = f"<b>{html.escape(Path(loaded.source).name)}</b>: {html.escape(loaded.about)}"
                        gr.HTML(f'<p class="aft-about">{about} {tab.EXPECT}</p>', padding=False)
                        with explained(f"{loaded.source}: this tab cannot show the model"):
                            tab.build(app, loaded)
                    except InputError as error:
                        gr.Markdown(str(error), elem_classes="aft-unavailable")
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
    parser.add_argument("--model", action="append", metavar="MODEL", help="directory or Hub id; may be repeated")
    parser.add_argument("--host", default=None, help="address to listen on (default: gradio's, 127.0.0.1)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        sources = choose(arguments.model or os.environ.get("AFT_MODELS", "").split())
    except InputError as error:
        sys.exit(f"error: {error}")
    app = build_app(sources)
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
