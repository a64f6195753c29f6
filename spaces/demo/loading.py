"""Load the models of the three tabs, and what their cards say about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

import aft_hf
from aft_hf import loading as safely
from aft_hf.data.classes import chooses_a_class
from aft_hf.data.samples import START_TOKEN
from aft_hf.errors import InputError, described, explained
from aft_hf.reading import parse_header, read_text


IMAGE, TEXT, PIXEL = "image", "text", "pixel"  # the kind of model of each tab
SHIPPED = Path(__file__).resolve().parents[2] / "model_cards"  # in a clone of the repository


@dataclass(frozen=True)
class Loaded:
    """A model, its image processor or tokenizer (None for pixels), and sentences from its card."""

    source: str
    model: PreTrainedModel
    processor: Any
    about: str


def shipped_models() -> list[str]:
    """Directories of the AFT models that come with the repository."""
    folders = sorted(path.parent for path in SHIPPED.glob("*/config.json"))
    return [str(each) for each in folders if safely.load(AutoConfig, each).model_type == "aft"]


def kind_of(source: str) -> str:
    """The kind of a model, from its config.

    Raises:
        InputError: there is no model, or it is of no kind that the demo shows.
    """
    try:
        config = safely.load(AutoConfig, source)
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: {described(error)}") from error
    names = config.architectures or []
    if "AFTForImageClassification" in names:
        if not chooses_a_class(config):
            raise InputError(f"{source}: the demo shows image classifiers that choose one of several classes.")
        return IMAGE
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return PIXEL if pixel_side(config) else TEXT
    raise InputError(f"{source}: the demo shows AFTs that classify images, and language models, not {names}.")


def load(source: str) -> Loaded:
    """Load a model from a directory or the Hub, without running code of its files.

    Raises:
        InputError: the model does not exist, or its files cannot be loaded.
    """
    kind = kind_of(source)
    auto = AutoModelForImageClassification if kind == IMAGE else AutoModelForCausalLM
    companion = {IMAGE: AutoImageProcessor, TEXT: AutoTokenizer}.get(kind)
    try:
        processor = safely.load(companion, source) if companion else None
        model = safely.load(auto, source, dtype="float32").eval()
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: {described(error)}") from error
    if kind == IMAGE and not isinstance(model, aft_hf.AFTForImageClassification):
        raise InputError(f"{source} is a {type(model).__name__}, not an AFT.")
    return Loaded(source, model, processor, describe(source, model))


def pixel_side(config: PreTrainedConfig) -> int | None:
    """The side in pixels of the RGB images that a model of sub-pixels was trained on; None for models of text."""
    if (config.vocab_size, config.bos_token_id) != (START_TOKEN + 1, START_TOKEN):
        return None
    # A model without a length limit has the size of its images instead.
    length = getattr(config, "max_position_embeddings", None) or 3 * getattr(config, "image_size", 0) ** 2
    side = round((length / 3) ** 0.5)
    return side if 3 * side**2 == length and side > 1 else None


def describe(source: str, model: PreTrainedModel) -> str:
    """The first paragraph and the results of the model's card, and its size."""
    try:
        with explained(f"{source}: no readable README.md"):
            path = safely.find_file(source, "README.md")
            text = "" if path is None else read_text(path)
            parse_header(text, "README.md")
            card = ModelCard(text)
    except InputError:
        card = None
    said = ""
    if card is not None:
        paragraphs = [each.strip() for each in card.text[:10_000].split("\n\n")]
        said = next((each for each in paragraphs if each and each[0] not in "#<!|`"), "").replace("\n", " ") + " "
    results = []
    for each in (card.data.eval_results if card is not None else None) or ():
        value = f"{each.metric_value:.3g}" if isinstance(each.metric_value, float) else each.metric_value
        results.append(f"{each.metric_name or each.metric_type} {value} on {each.dataset_name} ({each.dataset_split})")
    scores = f"Measured: {', '.join(results)}." if results else "No results are recorded beside it."
    return f"{said}{scores} It has {model.num_parameters() / 1e6:.2f} million parameters."
