"""The model card, README.md with metadata for the Hub, generated from the files beside the model."""

import importlib.util
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, metadata_save
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..analysis import plot_position_biases
from ..configuration_aft import AFTConfig, pair
from ..data.atomic_files import write_atomic
from ..loading import load
from ..modeling_aft import HEADS, AFTModel
from ..reading import explained, first_line
from .errors import PublishError
from .escaping import code, escaped, plain, quoted
from .facts import CONVERSION, MODEL_ID, RESULTS, Fact, Facts, format_metric, is_hub_id, read_facts
from .folder import refuse_misplaced_files


TEMPLATE = Path(__file__).with_name("template.md")
README, PICTURE = "README.md", "position_biases.png"
DEFAULT_LICENSE = "apache-2.0"
PICTURES = {
    PICTURE: "Position biases w of layers and heads: red where a position counts more, blue where it counts less.",
    "losses.png": "The loss over the training steps, and the results of evaluations during training.",
}
MAX_POSITIONS_DRAWN = 1100  # above it, the T x T biases of all layers and heads take too much memory
# A card with this line is regenerated whenever the model is published.
MARKER = "<!-- Written by aft-hf from the files beside it. Remove this line, and it stays as you change it. -->"
UNTRAINED = "No training is recorded in this repository: take the weights as untrained, for tests and for fine-tuning."
SOFTWARE = "aft-hf"  # PNG metadata that marks generated pictures
LICENSE_KEYS = ("license", "license_name", "license_link")
REQUIRED = ("library_name", "pipeline_tag", "license", "tags")
ARCHITECTURES = {each.__name__: each for each in (AFTModel, *HEADS)}
PIXELS = "unconditional-image-generation"  # the task of a causal language model of sub-pixels
# Tasks on the Hub, and the classes of transformers for them, by architecture and modality.
TASKS = {
    ("AFTForCausalLM", "text"): ("text-generation", "AutoModelForCausalLM"),
    ("AFTForImageClassification", "image"): ("image-classification", "AutoModelForImageClassification"),
    ("AFTForSequenceClassification", "text"): ("text-classification", "AutoModelForSequenceClassification"),
    ("AFTForTokenClassification", "text"): ("token-classification", "AutoModelForTokenClassification"),
    ("AFTModel", "text"): ("feature-extraction", "AutoModel"),
    ("AFTModel", "image"): ("image-feature-extraction", "AutoModel"),
}
AUTO_CLASSES = dict(TASKS.values()) | {PIXELS: "AutoModelForCausalLM"}

# Config fields that a card shows if they differ from the default: the paper's ablations, and options beyond the paper.
# The first two apply to all types, the others only to types with position biases.
SWITCHES: tuple[str, ...] = ("use_query", "query_activation", "position_bias_reparameterized", "global_connectivity")
SWITCHES += ("position_bias_entropy_weight", "position_bias_selection", "position_bias_multiplier")
IMAGE_SIZES = ("image_size", "patch_size", "patch_stride")


def write_card(directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write README.md and a picture of the position biases into the directory of a saved model.

    A README.md without the line that marks generated cards is the user's: only a given license is changed in it. A
    picture of the user is kept, too.

    Args:
        directory: the directory that `save_pretrained` wrote, with the files of training and conversion.
        repo_id: "name/model" on the Hub. Default: the name of the directory.
        license: license of the weights by its name on the Hub, which checks it. Default: the license in README.md, or
            else Apache 2.0.

    Raises:
        PublishError: a file is a symlink out of the directory, config.json is not that of an AFT model, or a file with
            results cannot be read.
    """
    directory = Path(directory)
    with made_card(directory, repo_id=repo_id, license=license) as made:
        copy_into(directory, made)
    return directory / README


@contextmanager
def made_card(directory: Path, *, repo_id: str | None = None, license: str | None = None) -> Iterator[Path]:
    """Create a temporary directory with the files that `write_card` writes. Arguments and errors are the same."""
    refuse_misplaced_files(directory)
    terms = _license(directory, license)
    with tempfile.TemporaryDirectory(prefix="aft-hf-card-") as temporary:
        made, path = Path(temporary), directory / README
        if not path.is_file() or is_generated(path.read_text(encoding="utf-8", errors="replace")):
            facts = read_facts(directory)
            _draw_position_biases(directory, facts, made)
            _card(directory, facts, made, repo_id=repo_id, license=license).save(made / README)
        elif license is not None:
            with explained(f"{README}: the metadata cannot be read", PublishError):
                metadata = metadata_load(path) or {}
            shutil.copyfile(path, made / README)
            kept = {name: value for name, value in metadata.items() if name not in LICENSE_KEYS[1:]}
            metadata_save(made / README, kept | terms)
        yield made


def copy_into(directory: Path, made: Path) -> None:
    """Copy the files of `made` to `directory`, each atomically (see `write_atomic`)."""
    for path in made.iterdir():
        with write_atomic(directory / path.name) as file:
            file.write(path.read_bytes())


def is_generated(content: str) -> bool:
    """Return whether a card may be replaced: it was generated here, or by transformers without facts on the model."""
    return MARKER in content or "generated_from_trainer" in content or "# Model Card for Model ID" in content


def build_card(
    directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None
) -> ModelCard:
    """Build the card of a saved model without writing it. Arguments and errors are those of `write_card`."""
    directory = Path(directory)
    return _card(directory, read_facts(directory), directory, repo_id=repo_id, license=license)


def _card(directory: Path, facts: Facts, made: Path, *, repo_id: str | None, license: str | None) -> ModelCard:
    source = repo_id or directory.resolve().name
    name, task = source.split("/")[-1], _task(facts)
    distilled = facts.conversion is not None and facts.conversion["distillation"]
    pictures = [file for file in PICTURES if (directory / file).is_file() or (made / file).is_file()]
    return ModelCard.from_template(
        _metadata(facts, name, _license(directory, license)),
        template_path=str(TEMPLATE),
        marker=MARKER,
        name=name,
        source=source,
        status="" if facts.was_trained or distilled else UNTRAINED,
        facts=facts,
        config=facts.config,
        kind=f"AFT-{'/'.join(sorted(_types(facts)))}",
        task=task,
        auto=AUTO_CLASSES[task],
        architecture=_architecture(facts),
        longest=_longest(facts.config) if facts.is_text else None,
        any_size=not facts.config.use_position_embeddings and _types(facts) == {"conv"},
        side=_side(facts) if facts.is_pixels else None,
        size=None if facts.is_text else _size(facts.config.image_size),
        conversion_file=CONVERSION,
        pictures=[{"file": file, "name": _label(Path(file).stem), "text": PICTURES[file]} for file in pictures],
        hub_link=_hub_link,
        data_of=lambda fact: _data(facts, fact),
        label=_label,
        one_file=_one_file,
        escaped=escaped,
        format_metric=format_metric,
        quoted=quoted,
    )


def card_problems(path: str | os.PathLike[str], names: Collection[str] = ()) -> list[str]:
    """Return the problems of a card: missing or wrong metadata, and missing pictures. It needs no network.

    Args:
        path: path of the card.
        names: names of files that will lie beside the card, even if they do not exist yet.
    """
    path = Path(path)
    if not path.is_file():
        return ["is missing; `aft_hf.publishing.write_card` writes it"]
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        card = ModelCard(text)
        data = card.data.to_dict()
    except Exception as error:  # the YAML parser and the card classes can raise any exception
        return [f"the metadata cannot be read ({first_line(error)})"]
    problems = [f"the metadata lacks {name}" for name in REQUIRED if not data.get(name)]
    if data.get("library_name") not in (None, "transformers"):
        problems.append(f"library_name is {data['library_name']!r}, not 'transformers'")
    bases = data.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        if not MODEL_ID.fullmatch(str(base)):
            problems.append(f"base_model {base!r} is not an id on the Hub (name/model)")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text):
        if "://" not in picture and picture not in names and not (path.parent / picture).is_file():
            problems.append(f"shows {picture}, which does not exist")
    return problems


# ----------------------------------------------------------------------------------------------------------- metadata


def card_license(path: Path) -> str:
    """Return the license of the weights in the metadata of a card without problems."""
    return (metadata_load(path) or {})["license"]


def _license(directory: Path, license: str | None) -> dict[str, str]:
    """Return the metadata of the license: those of a given license, or those in README.md."""
    if license is None:
        try:
            written = metadata_load(directory / README) or {}
        except Exception:  # there is no card yet, or the checks report what is wrong with it
            written = {}
        kept = {name: written[name] for name in LICENSE_KEYS if written.get(name)}
        return kept if "license" in kept else {"license": DEFAULT_LICENSE}
    if (license := license.strip().lower()) != "other":
        return {"license": license}
    if not (directory / "LICENSE").is_file():
        raise PublishError(f"license other: put the text of the license into {directory / 'LICENSE'}")
    return {"license": license, "license_name": "other", "license_link": "LICENSE"}


def _task(facts: Facts) -> str:
    if facts.is_pixels:
        return PIXELS
    if (kind := (facts.architecture, facts.config.modality)) not in TASKS:
        raise PublishError(f"config.json: no {kind[0]} exists for the modality {kind[1]}")
    return TASKS[kind][0]


def _metadata(facts: Facts, name: str, license: dict[str, str]) -> ModelCardData:
    task = _task(facts)
    results = None
    if facts.dataset:
        results = [
            EvalResult(
                task_type=task,
                dataset_type=plain(facts.dataset),
                dataset_name=plain(facts.dataset.split("/")[-1]),
                dataset_split=fact.split,
                metric_type=plain(fact.name),
                metric_name=plain(fact.name.replace("_", " ")),
                metric_value=fact.value,
            )
            for fact in facts.results
            if fact.file == RESULTS
        ]
    more: dict[str, Any] = dict(license)
    if facts.base_model is not None:
        more["base_model_relation"] = "finetune"
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=_tags(facts),
        datasets=[facts.dataset] if facts.dataset and facts.dataset_on_hub else None,
        base_model=facts.base_model,
        metrics=sorted({plain(fact.name) for fact in facts.results}) or None,
        model_name=plain(name) if results else None,
        eval_results=results or None,
        **more,
    )


def _tags(facts: Facts) -> list[str]:
    types = sorted(f"aft-{each}" for each in set(facts.config.layer_aft_types))
    return ["aft", "attention-free-transformer", *types]


# --------------------------------------------------------------------------------------------------------------- body


def _types(facts: Facts) -> set[str]:
    return set(facts.config.layer_aft_types)


def _architecture(facts: Facts) -> dict[str, Any]:
    """Return the rows of the card's table of the architecture. The value is None if a row does not apply."""
    config, types, task = facts.config, _types(facts), _task(facts)
    rows = {
        "parameters": facts.parameters,
        "type": config.aft_type if isinstance(config.aft_type, str) else ", ".join(config.aft_type),
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "width of the MLPs": config.intermediate_size,
        "position-bias heads": config.num_heads,
        "kernel size": config.kernel_size if "conv" in types else None,
        "window": config.window_size if "local" in types else None,
    }
    if types & {"full", "local"}:
        rows["rank of the position biases"] = config.position_bias_dim or "not factorized"
    for name in SWITCHES if types - {"simple"} else SWITCHES[:2]:  # "simple" has no position biases
        if getattr(config, name) != getattr(AFTConfig(), name):
            rows[name.replace("_", " ")] = getattr(config, name)
    if facts.is_text:
        return rows | {"vocabulary": config.vocab_size, "longest sequence": _longest(config)}
    sizes = {name.replace("_", " "): _size(getattr(config, name)) for name in IMAGE_SIZES}
    return rows | sizes | {"classes": config.num_labels if task == "image-classification" else None}


def _size(sides: int | list[int] | tuple[int, ...] | None) -> str | None:
    return None if sides is None else " x ".join(map(str, pair(sides)))


def _longest(config: AFTConfig) -> int | str:
    limited = config.use_position_embeddings or set(config.layer_aft_types) & {"full", "local"}
    return config.max_position_embeddings if limited else "no limit"


def _one_file(facts: list[Fact]) -> str | None:
    """Return the file that all facts come from, or None if there are several."""
    files = {fact.file for fact in facts}
    return files.pop() if len(files) == 1 else None


def _label(name: str) -> str:
    return escaped(name.replace("_", " ").replace(".", ": "))


def _data(facts: Facts, fact: Fact) -> str:
    """Return the dataset and the split of a result, as far as its file records them."""
    dataset = facts.dataset if fact.file == RESULTS else None
    return escaped(", ".join(part for part in (dataset, fact.split) if part) or "not recorded")


def _hub_link(source: str) -> str:
    """Return a link to a source on the Hub, or the name of a directory as code."""
    if is_hub_id(source):
        return f"[{escaped(source)}](https://huggingface.co/{source})"
    return code(Path(source).name)


def _side(facts: Facts) -> int:
    """Return the side of the images that a model of sub-pixels generates."""
    return math.isqrt(facts.config.max_position_embeddings // 3)


def _draw_position_biases(directory: Path, facts: Facts, made: Path) -> None:
    """Draw the position biases if the model learns any, the user has no picture, and matplotlib is installed."""
    learned = set(facts.config.layer_aft_types) & {"full", "local", "conv"}
    if not (_is_our_picture(directory / PICTURE) and learned and facts.parameters):
        return
    if importlib.util.find_spec("matplotlib") is None:
        return
    if facts.config.max_positions > MAX_POSITIONS_DRAWN and learned != {"conv"}:
        return
    try:
        model = load(ARCHITECTURES[facts.architecture], directory, dtype="auto")
    except Exception:  # the checks before an upload report why
        return
    plot_position_biases(model, made / PICTURE)
    ours = PngInfo()
    ours.add_text("Software", SOFTWARE)
    with Image.open(made / PICTURE) as picture:
        picture.save(made / PICTURE, pnginfo=ours)


def _is_our_picture(path: Path) -> bool:
    """Return whether a picture may be drawn: there is none, or it was generated, possibly from an earlier model."""
    if not path.exists():
        return True
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.info.get("Software") == SOFTWARE
    except (OSError, ValueError, Image.DecompressionBombError):  # not a generated picture
        return False
