"""Facts about a saved model, read from the files beside it: the only source of the numbers on its card."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import get_local_safetensors_metadata
from pydantic import Field
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.generic import flatten_dict

from ..atomic_files import sha256
from ..configuration_aft import AFTConfig
from ..conversion.report import REPORT_NAME, ConversionReport
from ..data.samples import START_TOKEN
from ..errors import InputError, explained
from ..loading import load, weights_digest
from ..reading import read_json
from .folder import files_to_upload


# Files of the training loop and of Trainer.
RESULTS, TRAINER_RESULTS, TRAINER_STATE = "results.json", "all_results.json", "trainer_state.json"
# The content of a file of `aft-hf evaluate --out`, which may have any name: its keys tell what it is.
SETTING = r"^(weights|(as trained|\d+ px|blocks of \d+(, stride \d+)?)(, \d+ samples)?)$"
Evaluations = dict[Annotated[str, Field(pattern=SETTING)], Any]

# Names of the numbers of Trainer that describe the run of an evaluation; the others are its results.
# Averages over samples, as scikit-learn names them, are results, too.
NO_METRIC = re.compile(
    r"(?s)train.*|(?!.*(f1|precision|recall|jaccard)_samples$)(.+_)?"
    r"(runtime|\w+_per_second|samples|steps|epoch|model_preparation_time|mem_\w+)"
)
SPLITS = {"eval": "validation", "validation": "validation", "valid": "validation", "test": "test", "predict": "test"}
# Keys that a card does not list under training, with all keys below them: the config describes the model, paths mean
# nothing to others, losses are drawn as a picture, and some keys have no influence on the model.
NOT_LISTED = re.compile(
    r"(metrics|losses|evaluations|parameters|weights|recipe\.(model|notes|paper|output_dir|resume|tracker"
    r"|\w+_every|keep_checkpoints)|recipe\.data\.(workers|\w+_column|train|validation|test))(\..*)?",
    re.DOTALL,  # keys may have line breaks
)
MODEL_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class Fact:
    """A named value and the file that it comes from."""

    name: str
    value: Any
    file: str
    split: str | None = None
    setting: str = ""  # of an evaluation, such as an image size
    dataset: str | None = None  # of a result, if its file records it

    @property
    def text(self) -> str:
        """The value as a card shows it: floats with four significant digits, whole numbers in full."""
        return ", ".join(map(_formatted, self.value if isinstance(self.value, list) else [self.value]))


@dataclass
class Facts:
    """All facts about a saved model."""

    config: AFTConfig
    architecture: str
    parameters: int | None = None  # the elements of all tensors
    results: list[Fact] = field(default_factory=list)
    training: list[Fact] = field(default_factory=list)
    dataset: str | None = None  # an id on the Hub, or the name of a file or folder
    base_model: str | None = None  # an id on the Hub
    conversion: ConversionReport | None = None
    is_unchanged: bool = False  # whether the weights are still those that the conversion wrote
    pixel_side: int = 0  # of the images of a model of sub-pixels; 0 if the tokens are not sub-pixels
    paper: dict[str, Any] = field(default_factory=dict)  # what the paper reports: its score and the rows of its tables
    outdated: list[str] = field(default_factory=list)  # files with results of other weights

    @property
    def was_trained(self) -> bool:
        """Whether the facts describe a training, and not only the runtime of an evaluation."""
        return any(not _split_of(fact.name)[0] and (fact.name, fact.value) != ("epoch", 0) for fact in self.training)

    @property
    def distillation(self) -> dict[str, Any]:
        """The record of a distillation; empty without one."""
        done = section(self.conversion.options, "distillation") if self.conversion else {}
        is_whole = all(_is_number(done.get(name)) for name in ("images", "steps", "agreement", "divergence"))
        return done if is_whole else {}


def is_hub_id(name: str) -> bool:
    """Return whether a source is on the Hub: it has the form of an id, and no local path has this name."""
    return MODEL_ID.fullmatch(name) is not None and not Path(name).exists()


def read_facts(directory: Path) -> Facts:
    """Read the facts about a saved model from its files, without results that say that they are of other weights."""
    config = load(AFTConfig, directory)
    facts = Facts(config, (config.architectures or ["AFTModel"])[0])
    with suppress(Exception):  # of missing weights or a damaged header; the checks report it
        facts.parameters = sum(get_local_safetensors_metadata(directory).parameter_count.values()) or None
    digest, results = weights_digest(directory), read_object(directory / RESULTS)
    facts.pixel_side = pixel_side(results, config)  # it describes the model, also if the results are of other weights
    if not {"metrics", "recipe"} & results.keys():  # another program may have written it
        results = {}
    if results.get("weights", digest) != digest:
        results, facts.outdated = {}, [RESULTS]
    recipe = section(results, "recipe")
    facts.dataset, pretrained = _dataset(section(recipe, "data")), section(recipe, "model").get("pretrained")
    paper = section(recipe, "paper")
    if _is_number(paper.get("score")) and isinstance(paper.get("rows"), list):
        facts.paper = paper
    _read_values(RESULTS, results, facts)
    _read_values(TRAINER_RESULTS, read_object(directory / TRAINER_RESULTS), facts)
    if not facts.was_trained:
        _read_values(TRAINER_STATE, _last_step(read_object(directory / TRAINER_STATE)), facts)
    _read_evaluations(directory, digest, facts)
    if (directory / REPORT_NAME).exists():
        facts.conversion = read_json(directory / REPORT_NAME, ConversionReport)
        written = facts.conversion.files.get(SAFE_WEIGHTS_NAME)
        facts.is_unchanged = written is None or written == sha256(directory / SAFE_WEIGHTS_NAME)
    elif record := section(vars(config), "conversion"):
        with explained(f"{CONFIG_NAME}: conversion cannot be read"):
            facts.conversion = ConversionReport.model_validate(record)
    sources = (pretrained, facts.conversion.source if facts.conversion else None)
    facts.base_model = next((each for each in sources if is_hub_id(str(each))), None)
    return facts


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; it is empty if the file does not exist."""
    return read_json(path, dict[str, Any]) if path.exists() else {}


def section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object in an object. It is empty if there is none: other programs write other files."""
    part = values.get(key)
    return part if isinstance(part, dict) else {}


def pixel_side(results: dict[str, Any], config: AFTConfig) -> int:
    """Return the side in pixels of the images of a model of sub-pixels, by results.json; 0 for other models."""
    recipe = section(results, "recipe")
    side = section(recipe, "data").get("image_size")
    is_of_pixels = recipe.get("task") == "pixels" and config.bos_token_id == START_TOKEN
    return side if is_of_pixels and type(side) is int and side > 0 else 0


def _dataset(data: dict[str, Any], split: str = "") -> str | None:
    """Return what a recipe trains on, or the data of a split: an id on the Hub, or the name of a file or folder."""
    if not (path := data.get(split)) and data.get("dataset"):
        return str(data["dataset"])
    path = path or data.get("train")
    return re.split(r"[/\\]", str(path).rstrip("/\\"))[-1] if path else None


def _read_values(file: str, values: dict[str, Any], facts: Facts) -> None:
    """Add the results and the other values of a file."""
    data = section(section(values, "recipe"), "data")
    for name, value in flatten_dict(values).items():
        split, metric = _split_of(name.removeprefix("metrics."))
        has_prefix = split is not None or name.startswith("metrics.")
        if has_prefix and not NO_METRIC.fullmatch(metric) and _is_number(value):
            facts.results.append(Fact(metric, value, file, split, dataset=_dataset(data, split or "")))
        elif not NOT_LISTED.fullmatch(name) and (_is_number(value) or (value and not isinstance(value, float))):
            facts.training.append(Fact(name, value, file))


def _last_step(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of trainer_state.json that describe the weights after its last step; none before the first.

    If there is a best checkpoint, Trainer may have loaded it at the end, so the last evaluation may be of others.
    """
    step, log = state.get("global_step"), state.get("log_history")
    if not step:
        return {}
    values = {name: state.get(name) for name in ("epoch", "global_step", "train_batch_size")}
    kept = ("train_",) if state.get("best_model_checkpoint") else ("train_", "eval_")
    for entry in log if isinstance(log, list) else ():
        if isinstance(entry, dict) and entry.get("step") == step:
            values |= {name: value for name, value in entry.items() if name.startswith(kept)}
    return values


def _read_evaluations(directory: Path, digest: str | None, facts: Facts) -> None:
    """Add the results in files of `aft-hf evaluate --out` of the weights with this digest."""
    for name, path in files_to_upload(directory)[0].items():
        if "/" in name or path.suffix != ".json":
            continue
        with suppress(InputError):  # a file of another kind
            record = read_json(path, Evaluations)
            if record.get("weights", digest) != digest:
                facts.outdated.append(name)
                continue
            facts.results += [
                Fact(metric, value, name, setting=setting.removeprefix("as trained").removeprefix(", "))
                for setting in record
                for metric, value in section(record, setting).items()
                if _is_number(value)
            ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _formatted(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _split_of(name: str) -> tuple[str | None, str]:
    """Split names like "eval_accuracy" or "validation.accuracy" into ("validation", "accuracy")."""
    head, rest = (re.split("[._]", name, maxsplit=1) + [""])[:2]
    return (SPLITS[head], rest) if head in SPLITS and rest else (None, name)
