"""Facts about a saved model, read from the files beside it: the only source of the numbers on its card."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ValidationError

from ..configuration_aft import AFTConfig
from ..conversion.report import ConversionReport
from ..loading import load
from ..reading import Document, UnreadableError, read_safetensors_header
from ..reading import read_json as read_document
from .errors import PublishError


# Files of the training loop, of Trainer and of the converter.
RESULTS, TRAINER_RESULTS, TRAINER_STATE = "results.json", "all_results.json", "trainer_state.json"
CONVERSION = "conversion_report.json"

# Endings of the names of results; all other numbers describe the training.
METRICS = ("accuracy", "loss", "perplexity", "bits_per_token", "bits_per_byte", "bits_per_dim", "bits_per_character")
SPLITS = {"eval": "validation", "validation": "validation", "valid": "validation", "test": "test", "predict": "test"}
# Keys that a card does not list under training, with all keys below them: the config describes the model, paths mean
# nothing to others, losses are drawn as a picture, and some keys have no influence on the model.
NOT_LISTED = re.compile(
    r"(metrics|losses|evaluations|parameters|versions|recipe\.(model|notes|paper|output_dir|resume|tracker|\w+_every"
    r"|keep_checkpoints)|recipe\.data\.(workers|\w+_column|text_separator|shuffle_buffer|train|validation|test))(\..*)?",
    re.DOTALL,  # keys may have line breaks
)
COST = re.compile(r"carbon|co2|emission|energy|kwh|cost|price|watt", re.IGNORECASE)
Content = TypeVar("Content")
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Fact:
    """A named value and the file that it comes from."""

    name: str
    value: Any
    file: str
    split: str | None = None

    @property
    def text(self) -> str:
        """The value as a card shows it: floats with four significant digits, whole numbers in full."""
        return ", ".join(map(format_value, self.value)) if isinstance(self.value, list) else format_value(self.value)


@dataclass
class Facts:
    """All facts about a saved model."""

    config: AFTConfig
    architecture: str
    parameters: int | None = None
    results: list[Fact] = field(default_factory=list)
    training: list[Fact] = field(default_factory=list)
    cost: list[Fact] = field(default_factory=list)
    dataset: str | None = None  # an id on the Hub, or the name of a file or folder
    dataset_on_hub: bool = False
    base_model: str | None = None  # an id on the Hub
    conversion: dict[str, Any] | None = None
    task: str | None = None  # of the recipe
    paper: "Paper | None" = None
    versions: str | None = None  # of the software of the training

    @property
    def is_text(self) -> bool:
        """Whether the model reads tokens; otherwise it reads images."""
        return self.config.modality == "text"

    @property
    def is_pixels(self) -> bool:
        """Whether the tokens are sub-pixels."""
        return self.task == "pixels"

    @property
    def was_trained(self) -> bool:
        """Whether the facts describe a training, and not only the runtime of an evaluation."""
        return any(
            _split_of(fact.name)[0] is None and (fact.name, fact.value) != ("epoch", 0) for fact in self.training
        )


def is_hub_id(name: str) -> bool:
    """Return whether a source is on the Hub: it has the form of an id, and no local path has this name."""
    return MODEL_ID.fullmatch(name) is not None and not Path(name).exists()


def format_value(value: Any) -> str:
    """Format a float with four significant digits, or in full if it is whole. Other values become text as they are."""
    if isinstance(value, float) and not isinstance(value, bool):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def format_metric(value: float) -> str:
    """Format a number with four significant digits including trailing zeros: 2.500."""
    return f"{value:#.4g}"


def read_facts(directory: Path) -> Facts:
    """Read the facts about a saved model from its files.

    Raises:
        PublishError: config.json is not that of an AFT model, or another file cannot be read.
    """
    config = load(AFTConfig, directory, PublishError)
    architecture = (config.architectures or ["AFTModel"])[0]
    facts = Facts(config, architecture, _count_parameters(directory))
    _read_results(directory, facts)
    _read_trainer(directory, facts)
    _read_conversion(directory, facts)
    return facts


def _else(kind: type, default: Any) -> BeforeValidator:
    """Return a validator that replaces values of other types by the default."""
    return BeforeValidator(lambda value: value if isinstance(value, kind) else default)


Section = Annotated[dict[str, Any], _else(dict, {})]


class Paper(Document):
    """The rows of the paper's tables that a recipe reproduces, and their score."""

    rows: list[str]
    score: float


def _paper(value: Any) -> Any:
    """Return a valid section, else None: other programs write sections of this name, too."""
    try:
        return Paper.model_validate(value)
    except ValidationError:
        return None


class RecipeFacts(Document):
    """The sections of the recipe in results.json that a card uses."""

    task: Annotated[str | None, _else(str, None)] = None
    model: Section = {}
    data: Section = {}
    paper: Annotated[Paper | None, BeforeValidator(_paper)] = None


class Results(Document):
    """results.json of `aft_hf.training`.

    Other programs write files of this name, too: a section of another type counts as empty, and other keys are kept.
    """

    metrics: Section = {}
    recipe: Annotated[RecipeFacts, _else(dict, {})] = RecipeFacts()
    versions: Section = {}


def read_json(path: Path, kind: type[Content]) -> Content | None:
    """Read and validate a JSON file; None if it does not exist.

    Raises:
        PublishError: the content of the file is not of type `kind`.
    """
    return read_document(path, kind, PublishError) if path.exists() else None


def _count_parameters(directory: Path) -> int | None:
    """Count the elements of all tensors by the headers of the weight files; None if there are no readable weights."""
    count = 0
    for path in sorted(directory.glob("model*.safetensors")):
        try:
            header = read_safetensors_header(path)
        except UnreadableError:
            return None  # the checks report it
        count += sum(math.prod(tensor.shape) for tensor in header.values())
    return count or None


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted names. A list is a leaf; empty values are skipped."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif values is not None and values != "" and values != {} and values != []:
        yield prefix, values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _split_of(name: str) -> tuple[str | None, str]:
    """Split names like "eval_accuracy" or "validation.accuracy" into ("validation", "accuracy")."""
    head, rest = (re.split("[._]", name, maxsplit=1) + [""])[:2]
    return (SPLITS[head], rest) if head in SPLITS and rest else (None, name)


def _is_result(name: str) -> bool:
    return name.endswith(METRICS) and not name.startswith("train")


# ------------------------------------------------------------------------------------------------- the training loop


def _read_results(directory: Path, facts: Facts) -> None:
    results = read_json(directory / RESULTS, Results)
    # A file with neither section is not from a training: `aft-hf evaluate --out` may have written it.
    if results is None or not {"metrics", "recipe"} & results.model_fields_set:
        return
    for name, value in _flat(results.metrics):
        split, metric = _split_of(name)
        if _is_number(value) and _is_result(metric):
            facts.results.append(Fact(metric, value, RESULTS, split))
    facts.task, facts.paper = results.recipe.task, results.recipe.paper
    data, model = results.recipe.data, results.recipe.model
    if data.get("dataset"):
        facts.dataset, facts.dataset_on_hub = str(data["dataset"]), is_hub_id(str(data["dataset"]))
    elif data.get("train"):
        facts.dataset = re.split(r"[/\\]", str(data["train"]).rstrip("/\\"))[-1]
    if is_hub_id(str(model.get("pretrained"))):
        facts.base_model = str(model["pretrained"])
    taken: set[str] = set()
    for name, value in _flat(results.model_dump(exclude_unset=True)):
        if value is False or NOT_LISTED.fullmatch(name) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        fact = Fact(name.removeprefix("recipe."), value, RESULTS)
        if fact.name not in taken:
            (facts.cost if COST.search(name) else facts.training).append(fact)
        taken.add(fact.name)
    if results.versions:
        facts.versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())


# ---------------------------------------------------------------------------------------------------------- Trainer


def _read_trainer(directory: Path, facts: Facts) -> None:
    """Read the files of transformers' Trainer: all_results.json and trainer_state.json."""
    for name, value in _flat(read_json(directory / TRAINER_RESULTS, dict[str, Any])):
        split, metric = _split_of(name)
        if _is_number(value):
            is_result = _is_result(metric) and split is not None
            kind = facts.results if is_result else facts.cost if COST.search(name) else facts.training
            kind.append(Fact(metric if is_result else name, value, TRAINER_RESULTS, split if is_result else None))
    state = read_json(directory / TRAINER_STATE, dict[str, Any]) or {}
    for name in ("global_step", "train_batch_size", "best_metric"):
        if _is_number(state.get(name)):
            facts.training.append(Fact(name, state[name], TRAINER_STATE))


# ------------------------------------------------------------------------------------------------------- conversion


def _read_conversion(directory: Path, facts: Facts) -> None:
    report = read_json(directory / CONVERSION, ConversionReport)
    if report is None:
        return
    sizes: dict[str, list[int]] = {}
    for each in report.tensors:
        sizes.setdefault(each.status, []).append(math.prod(each.shape))
    facts.base_model = facts.base_model or (report.source if is_hub_id(report.source) else None)
    facts.conversion = {
        "source": report.source,
        "counts": [(status, len(each), sum(each)) for status, each in sizes.items()],
        "has_new": "new" in sizes,
        "distillation": _distillation(report.options.get("distillation")),
    }


def _distillation(done: Any) -> str | None:
    """Return a sentence on the distillation of a converted model; None if it was not distilled."""
    names = ("images", "steps", "agreement", "divergence")
    if not isinstance(done, dict) or not all(_is_number(done.get(name)) for name in names):
        return None
    return (
        f"It was then distilled from its source on {done['images']} unlabeled images in {done['steps']} steps. On "
        f"{done['agreement']:.1%} of the images of the last steps, both models predicted the same class (KL "
        f"divergence {done['divergence']:.3f} nats)."
    )
