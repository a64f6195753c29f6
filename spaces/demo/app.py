"""AFT in a browser: classify an image and see what the layers look at, complete text, complete an image.

    python spaces/demo/app.py --image-model outputs/quickstart/aft-conv --text-model outputs/quickstart-text

A model is a directory or a Hub id, by option or by AFT_IMAGE_MODEL, AFT_TEXT_MODEL and AFT_PIXEL_MODEL. A tab without
one says how to make it.
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
from loading import IMAGE, PIXEL, TEXT, Kind, Unavailable, load


TITLE = "Attention Free Transformer"
ABOUT = """# Attention Free Transformer
An AFT layer mixes positions by learned position biases and weighted averages, with no query-key products: [the
paper](https://arxiv.org/abs/2105.14103)."""
TABS = ((IMAGE, "Classify", image_tab), (TEXT, "Write", text_tab), (PIXEL, "Complete", pixel_tab))


def build_app(sources: dict[Kind, str]) -> gr.Blocks:
    """The page, with a model for each tab that has one."""
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
                    tab.build(app, *loaded)
                    model, parameters = loaded[0], loaded[0].num_parameters() / 1e6
                    described = f"{html.escape(sources[kind])}: {type(model).__name__}, {parameters:.2f} M parameters"
                    gr.HTML(f'<p class="aft-model">{described}</p>', padding=False)
    return app


def theme() -> gr.themes.Base:
    """Plain, with the fonts of the reader's system: no other host is asked for anything."""
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
        max_file_size="20mb",
    )


if __name__ == "__main__":
    main()
