"""The tab "Write": a model continues a text."""

import html
from collections.abc import Iterator

import gradio as gr
import torch
from loading import Loaded
from messages import explained
from sampling import sample_tokens

from aft_hf.limits import limited


MOST_TOKENS = 1000
MOST_CHARACTERS = 20_000  # of a prompt, because some models have no maximum length
EXPECT = """It writes words and lines that look like its training text but say nothing."""
EXAMPLES = ["ROMEO:\n", "To be, or not to be, ", "KING RICHARD:\nNow is the winter"]
NOTHING_YET = '<p class="aft-hint">The text appears here as it is written.</p>'


class TextDemo:
    """Continues texts with one model."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        config = model.config
        types = set(getattr(config, "layer_aft_types", ["full"]))
        limited = getattr(config, "use_position_embeddings", True) or bool(types & {"full", "local"})
        self.longest = getattr(config, "max_position_embeddings", None) if limited else None

    def complete(self, prompt: str, count: int, temperature: float, seed: int) -> Iterator[str]:
        """Yield HTML of the prompt and its continuation while it grows; the same seed gives the same text.

        Raises:
            ValueError: the prompt is empty or too long, or a setting is out of range.
        """
        tokens = self._tokens(prompt, count, temperature, seed)
        end = self.model.config.eos_token_id
        ends = set(end) if isinstance(end, list) else {end}
        written: list[int] = []
        options = {"temperature": temperature, "seed": int(seed), "num_tokens": len(self.tokenizer)}
        for token in sample_tokens(self.model, tokens, int(count), **options):
            if int(token) in ends:
                break
            written.append(int(token))
            if len(written) % 4 == 0:
                # The last character may be incomplete if it has several bytes.
                yield _page(prompt, self.tokenizer.decode(written).rstrip("\ufffd"), growing=True)
        yield _page(prompt, self.tokenizer.decode(written))

    def _tokens(self, prompt: str, count: int, temperature: float, seed: int) -> torch.Tensor:
        """Check the inputs, and return the tokens of the prompt, (1, T)."""
        if not (prompt or "").strip():
            raise ValueError("The prompt is empty: type the beginning of a text first.")
        if len(prompt) > MOST_CHARACTERS:
            raise ValueError(
                f"The prompt has {len(prompt):,} characters, and this page takes {MOST_CHARACTERS:,}: shorten it."
            )
        if count is None or not 1 <= count <= MOST_TOKENS:
            raise ValueError(f"New tokens must be 1 to {MOST_TOKENS}, got {count}.")
        if temperature is None or not 0 <= temperature <= 2:
            raise ValueError(f"The temperature must be 0 to 2, got {temperature}.")
        check_seed(seed)
        tokens = torch.tensor(limited(lambda: self.tokenizer([prompt])["input_ids"], "The prompt", len(prompt)))
        room = None if self.longest is None else self.longest - tokens.shape[1]
        if room is not None and count > room:
            hint = f"ask for at most {room} new ones" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"This model reads at most {self.longest} tokens, and the prompt has {tokens.shape[1]}: {hint}."
            )
        return tokens


def check_seed(seed: int | None) -> None:
    """Raise a ValueError if a number cannot seed a generator."""
    if seed is None or not 0 <= seed < 2**31 or seed != int(seed):
        raise ValueError(f"The seed must be a whole number from 0 to {2**31 - 1}, got {seed}.")


def _page(prompt: str, continuation: str, growing: bool = False) -> str:
    cursor = '<span class="aft-cursor"></span>' if growing else ""
    return f'<div class="aft-text"><span>{html.escape(prompt)}</span>{html.escape(continuation)}{cursor}</div>'


def build(app: gr.Blocks, loaded: Loaded) -> None:
    """Lay out the tab and connect its events."""
    demo = TextDemo(loaded.model, loaded.processor)
    most = min(MOST_TOKENS, (demo.longest or MOST_TOKENS + 1) - 1)
    with gr.Row(elem_classes="aft-columns"):
        with gr.Column(scale=2, min_width=300):
            prompt = gr.Textbox(EXAMPLES[0], lines=2, max_lines=8, label="Beginning", elem_id="prompt")
            gr.Examples([[example] for example in EXAMPLES], prompt, label="Examples")
            with gr.Row(elem_classes="aft-buttons"):
                button = gr.Button("Continue", variant="primary", elem_id="write")
                stop = gr.Button("Stop", min_width=80, scale=0)
            with gr.Accordion("Settings", open=False, elem_classes="aft-settings"):
                count = gr.Slider(
                    1, most, max(1, min(200, most * 3 // 4)), step=1, label="New tokens", buttons=[], elem_id="count"
                )
                temperature = gr.Slider(
                    0,
                    2,
                    0.7,
                    step=0.05,
                    label="Temperature",
                    info="0 always takes the most probable token",
                    buttons=[],
                )
                seed = gr.Number(0, precision=0, label="Seed", info="The same seed gives the same text")
        with gr.Column(scale=3, min_width=300):
            text = gr.HTML(NOTHING_YET, elem_id="text", padding=False)
    options = {"concurrency_id": "generation", "concurrency_limit": 1, "show_progress": "hidden"}
    running = gr.on(
        [button.click, prompt.submit], explained(demo.complete), [prompt, count, temperature, seed], text, **options
    )
    stop.click(None, cancels=running)
