"""Load the models of the three tabs, each of which may be missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)

import aft_hf
from aft_hf import loading as safely
from aft_hf.data.pixel_sequences import START_TOKEN
from aft_hf.reading import first_line


@dataclass(frozen=True)
class Kind:
    """The kind of model of a tab, with its default location and the command that trains one."""

    name: str  # also --NAME-model and AFT_NAME_MODEL
    default: str
    command: str


IMAGE = Kind("image", "outputs/quickstart/aft-conv", "make quickstart")
TEXT = Kind("text", "outputs/quickstart-text", "make quickstart-text")
PIXEL = Kind(
    "pixel",
    "outputs/quickstart-pixels",
    "make quickstart-pixels",
)


class Unavailable(Exception):
    """The model of a tab is not available; the message with the reason is shown on the page."""


def load(kind: Kind, source: str) -> tuple[Any, Any]:
    """The model and its image processor or tokenizer (None for pixels) from a directory or a Hub id.

    Raises:
        Unavailable: the model does not exist, or the tab cannot use it.
    """
    is_path = Path(source).exists() or source == kind.default or source.startswith((".", "/"))
    if is_path and not (Path(source) / "config.json").is_file():
        raise Unavailable(f"There is no model in `{source}` yet. This command trains one: `{kind.command}`")
    try:  # the server runs no code of a model
        if kind is IMAGE:
            processor = safely.load(AutoImageProcessor, source)
            loaded = safely.load(AutoModelForImageClassification, source), processor
        else:
            tokenizer = safely.load(AutoTokenizer, source) if kind is TEXT else None
            loaded = safely.load(AutoModelForCausalLM, source), tokenizer
    except (OSError, ValueError) as error:
        raise Unavailable(f"`{source}` cannot be loaded as {kind.name} model: {first_line(error)}") from error
    model = loaded[0].eval()
    if kind is IMAGE and not isinstance(model, aft_hf.AFTForImageClassification):
        raise Unavailable(f"`{source}` is a {type(model).__name__}; this tab needs an AFT for image classification.")
    if kind is PIXEL:
        pixel_side(model.config)
    return model, loaded[1]


def pixel_side(config: transformers.PreTrainedConfig) -> int:
    """The side in pixels of the RGB images that a pixel model was trained on."""
    length = config.max_position_embeddings
    side = round((length / 3) ** 0.5)
    if config.vocab_size != START_TOKEN + 1 or 3 * side**2 != length or side < 2:
        raise Unavailable(
            f"This is not a model of square RGB images: it has {config.vocab_size} tokens and {length} positions, "
            f"not {START_TOKEN + 1} tokens and 3 x side x side positions."
        )
    return side
