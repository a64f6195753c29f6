"""The model card: README.md, with the metadata that the Hub reads, filled from the files beside the model."""

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
from transformers import PreTrainedConfig

from ..analysis import plot_position_biases
from ..configuration_aft import AFTConfig, pair
from ..data.whole_files import write_whole
from ..modeling_aft import HEADS, AFTModel
from ..reading import first_line
from .errors import PublishError
from .escaping import code, escaped, plain, quoted
from .facts import CONVERSION, MODEL_ID, RESULTS, Fact, Facts, is_hub_id, measured, read_facts
from .folder import refuse_misplaced_files
from .licenses import DEFAULT, known_license


TEMPLATE = Path(__file__).with_name("template.md")
README, PICTURE = "README.md", "position_biases.png"
PICTURES = {
    PICTURE: "Position biases w of layers and heads: red where a position counts more, blue where it counts less.",
    "losses.png": "The loss over the steps of the training, and what was evaluated on the way.",
}
MAX_POSITIONS_DRAWN = 1100  # tables of T x T numbers, for all layers and heads at once
# A card with this line is written anew whenever the model is published.
MARKER = "<!-- Written by aft-hf from the files beside it. Remove this line, and it stays as you change it. -->"
SOFTWARE = "aft-hf"  # in our pictures
REQUIRED = ("library_name", "pipeline_tag", "license", "tags")
ARCHITECTURES = {each.__name__: each for each in (AFTModel, *HEADS)}
TASKS = {
    ("AFTForCausalLM", "text"): "text-generation",
    ("AFTForImageClassification", "image"): "image-classification",
    ("AFTForSequenceClassification", "text"): "text-classification",
    ("AFTForTokenClassification", "text"): "token-classification",
    ("AFTModel", "text"): "feature-extraction",
    ("AFTModel", "image"): "image-feature-extraction",
}
# What cards call other models, by model_type or, of `aft_hf.baselines`, by mixer.
KINDS = {
    "beit": "DeiT",
    "gpt2": "GPT-2",
    "lambda": "lambda layers",
    "linear": "Linear Transformer",
    "performer": "Performer",
    "reformer": "Reformer",
    "resnet": "ResNet",
    "synthesizer": "Synthesizer",
    "vit": "ViT",
}
PIXELS = "unconditional-image-generation"  # what a causal language model of sub-pixels does
AUTO_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    PIXELS: "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}

# Fields that a card shows where they are not the default: the paper's ablations, and what the paper has not. The first
# two are of any type, the others of position biases.
SWITCHES: tuple[str, ...] = ("use_query", "query_activation", "position_bias_reparameterized", "global_connectivity")
SWITCHES += ("position_bias_entropy_weight", "position_bias_selection", "position_bias_multiplier")


def write_card(directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write README.md into the directory of a saved model, and a picture of its position biases if there is none
    but ours.

    A README.md without the line that marks it as ours is the user's, and stays as it is, but for a license that is
    given.

    Args:
        directory: what `save_pretrained` wrote, and what training and conversion left beside it.
        repo_id: "name/model" on the Hub; by default the name of the directory.
        license: of the weights, as the Hub calls it; by default what README.md says already, or else Apache 2.0.

    Raises:
        PublishError: a file is a link out of the directory, config.json is not that of an AFT, a file with results
            cannot be read, or the Hub does not know the license.
    """
    directory = Path(directory)
    with made_card(directory, repo_id=repo_id, license=license) as made:
        put_into(directory, made)
    return directory / README


@contextmanager
def made_card(directory: Path, *, repo_id: str | None = None, license: str | None = None) -> Iterator[Path]:
    """A temporary directory with what `write_card` writes. Arguments and errors are those of `write_card`."""
    refuse_misplaced_files(directory)
    terms = _license(directory, license)
    with tempfile.TemporaryDirectory(prefix="aft-hf-card-") as temporary:
        made, path = Path(temporary), directory / README
        if not path.is_file() or is_ours(path.read_text(encoding="utf-8", errors="replace")):
            facts = read_facts(directory)
            _draw_position_biases(directory, facts, made)
            _card(directory, facts, made, repo_id=repo_id, license=license).save(made / README)
        elif license is not None:
            shutil.copyfile(path, made / README)
            _set_license(made / README, terms)
        yield made


def put_into(directory: Path, made: Path) -> None:
    """Copy the files of `made`, each as a whole or not at all; a link in the place of one is replaced."""
    for path in made.iterdir():
        with write_whole(directory / path.name) as file:
            file.write(path.read_bytes())


def is_ours(content: str) -> bool:
    """Whether a card may be replaced: it is ours, or one of transformers', which say nothing of the model."""
    return MARKER in content or "generated_from_trainer" in content or "# Model Card for Model ID" in content


def build_card(
    directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None
) -> ModelCard:
    """The card of a saved model, without writing anything. Arguments and errors are those of `write_card`."""
    directory = Path(directory)
    return _card(directory, read_facts(directory), directory, repo_id=repo_id, license=license)


def _card(directory: Path, facts: Facts, made: Path, *, repo_id: str | None, license: str | None) -> ModelCard:
    name = repo_id or directory.resolve().name
    status = (
        "Nothing in this repository records a training: take the weights as untrained, for tests and for fine-tuning."
    )
    return fill_card(
        facts,
        name.split("/")[-1],
        source=name,
        marker=MARKER,
        pictures={
            file: text for file, text in PICTURES.items() if (directory / file).is_file() or (made / file).is_file()
        },
        status="" if facts.was_trained else status,
        license=_license(directory, license),
    )


def fill_card(
    facts: Facts,
    name: str,
    *,
    source: str,
    marker: str,
    pictures: dict[str, str],
    license: dict[str, str],
    status: str = "",
    recipe: dict[str, str] | None = None,
) -> ModelCard:
    """The template, filled.

    Args:
        facts: what is known.
        name: of the model.
        source: where the code on the card loads it from: an id on the Hub, or a directory.
        marker: a comment that says where the card comes from.
        pictures: what they show, by their path from the card.
        license: of the metadata: `license`, and of another one `license_name` and `license_link`.
        status: what a reader has to know first.
        recipe: what the template tells of it, if the card is that of a recipe.
    """
    task = _task(facts)
    return ModelCard.from_template(
        _metadata(facts, name, license),
        template_path=str(TEMPLATE),
        marker=marker,
        name=name,
        source=source,
        status=status,
        recipe=recipe,
        facts=facts,
        config=facts.config,
        kind=_kind(facts),
        task=task,
        auto=AUTO_CLASSES.get(task, "AutoModel"),
        architecture=_architecture(facts),
        longest=_longest(facts.config) if facts.is_text else None,
        any_size=_takes_any_size(facts),
        side=_side(facts) if facts.is_pixels else None,
        size=None if facts.is_text else _size(getattr(facts.config, "image_size", None)),
        conversion_file=CONVERSION,
        pictures=[{"file": file, "name": _label(Path(file).stem), "text": text} for file, text in pictures.items()],
        hub_link=_hub_link,
        data_of=lambda fact: _data(facts, fact),
        label=_label,
        one_file=_one_file,
        escaped=escaped,
        measured=measured,
        quoted=quoted,
    )


def card_problems(path: str | os.PathLike[str], names: Collection[str] = ()) -> list[str]:
    """What the Hub, or a reader, would miss in a card; an empty list if nothing. Needs no network.

    Args:
        path: of the card.
        names: of files that will lie beside it, and need not yet.
    """
    path = Path(path)
    if not path.is_file():
        return ["is missing; `aft_hf.publishing.write_card` writes it"]
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        card = ModelCard(text)
        data = card.data.to_dict()
    except Exception as error:  # whatever a YAML parser and the card classes make of it
        return [f"the metadata cannot be read ({first_line(error)})"]
    problems = [f"the metadata lacks {name}" for name in REQUIRED if not data.get(name)]
    if data.get("library_name") not in (None, "transformers"):
        problems.append(f"library_name is {data['library_name']!r}, not 'transformers'")
    bases = data.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        if not MODEL_ID.fullmatch(str(base)):
            problems.append(f"base_model {base!r} is no id on the Hub")
    for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text):
        if "://" not in picture and picture not in names and not (path.parent / picture).is_file():
            problems.append(f"shows {picture}, which is not there")
    return problems


# ----------------------------------------------------------------------------------------------------------- metadata


def card_license(path: Path) -> str:
    """What a card without problems names as the license of the weights."""
    return (metadata_load(path) or {})["license"]


def _license(directory: Path, license: str | None) -> dict[str, str]:
    """What the metadata say of the license: the one that is asked for, or what they say already."""
    if license is None:
        try:
            written = metadata_load(directory / README) or {}
        except Exception:  # no card yet, or one of which the checks say what is wrong
            written = {}
        kept = {name: written[name] for name in ("license", "license_name", "license_link") if written.get(name)}
        return kept if "license" in kept else {"license": DEFAULT}
    license = known_license(license)
    if license != "other":
        return {"license": license}
    if not (directory / "LICENSE").is_file():
        raise PublishError(f"license other: put the text of the license into {directory / 'LICENSE'}")
    return {"license": license, "license_name": "other", "license_link": "LICENSE"}


def _set_license(path: Path, terms: dict[str, str]) -> None:
    """Change the license in the metadata of a card, and nothing else."""
    try:
        metadata = metadata_load(path) or {}
    except Exception as error:  # whatever a YAML parser makes of it
        raise PublishError(f"{README}: the metadata cannot be read ({first_line(error)})") from error
    kept = {name: value for name, value in metadata.items() if name not in ("license_name", "license_link")}
    metadata_save(path, kept | terms)


def _task(facts: Facts) -> str:
    if facts.is_pixels:
        return PIXELS
    if not facts.is_aft:
        return "text-generation" if facts.is_text else "image-classification"
    task = TASKS.get((facts.architecture, facts.config.modality))
    if task is None:
        raise PublishError(f"architectures names {facts.architecture} for modality {facts.config.modality}")
    return task


def _metadata(facts: Facts, name: str, license: dict[str, str]) -> ModelCardData:
    task = _task(facts)
    results = None
    if facts.dataset:
        results = [
            EvalResult(
                task_type=task,
                dataset_type=plain(facts.dataset),
                dataset_name=plain(facts.dataset_name or facts.dataset.split("/")[-1]),
                dataset_split=fact.split,
                metric_type=plain(fact.name),
                metric_name=plain(fact.name.replace("_", " ")),
                metric_value=fact.value,
            )
            for fact in facts.results
            if Path(fact.file).name == RESULTS
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
    if not facts.is_aft:
        return [facts.config.model_type, "baseline"]
    types = sorted(f"aft-{each}" for each in set(facts.config.layer_aft_types))
    return ["aft", "attention-free-transformer", *types]


# --------------------------------------------------------------------------------------------------------------- body


def _types(facts: Facts) -> set[str]:
    return set(facts.config.layer_aft_types) if facts.is_aft else set()


def _kind(facts: Facts) -> str:
    """AFT-conv, or what a baseline is called."""
    if facts.is_aft:
        return f"AFT-{'/'.join(sorted(_types(facts)))}"
    return KINDS.get(getattr(facts.config, "mixer", facts.config.model_type), facts.config.model_type.upper())


def _architecture(facts: Facts) -> dict[str, Any]:
    """The numbers of the config that matter for its types, by what a card calls them; None where there is none."""
    config, types, usual = facts.config, _types(facts), AFTConfig()
    layers = getattr(config, "num_hidden_layers", None) or sum(getattr(config, "depths", ()))
    common = {"parameters": facts.parameters, "layers": layers, "width": getattr(config, "hidden_size", None)}
    if facts.is_aft:
        rank = "not factorized" if config.position_bias_dim is None else config.position_bias_dim
        rows = {
            "parameters": facts.parameters,
            "type": config.aft_type if isinstance(config.aft_type, str) else ", ".join(config.aft_type),
            **common,
            "width of the MLPs": config.intermediate_size,
            "position-bias heads": config.num_heads,
            "kernel size": config.conv_kernel_size if "conv" in types else None,
            "window": config.local_window_size if "local" in types else None,
            "rank of the position biases": rank if types & {"full", "local"} else None,
        }
        for name in SWITCHES if types - {"simple"} else SWITCHES[:2]:  # "simple" has no position biases
            if getattr(config, name) != getattr(usual, name):
                rows[name.replace("_", " ")] = getattr(config, name)
    else:
        rows = {"parameters": facts.parameters, "type": config.model_type, **common}
        rows["heads"] = getattr(config, "num_attention_heads", getattr(config, "num_heads", None))
    if facts.is_text:
        return rows | {"vocabulary": config.vocab_size, "longest sequence": _longest(config)}
    classes = config.num_labels if _task(facts) == "image-classification" else None
    return rows | {
        "image size": _size(getattr(config, "image_size", None)),
        "patch size": _size(getattr(config, "patch_size", None)),
        "classes": classes,
    }


def _takes_any_size(facts: Facts) -> bool:
    """Whether nothing that the model has learned belongs to one size of images."""
    if facts.is_aft:
        return not facts.config.use_position_embeddings and _types(facts) == {"conv"}
    return not hasattr(facts.config, "image_size")  # as of a ResNet


def _size(sides: int | tuple[int, int] | None) -> str | None:
    return None if sides is None else " x ".join(map(str, pair(sides)))


def _longest(config: PreTrainedConfig) -> int | str:
    if not isinstance(config, AFTConfig):
        return config.max_position_embeddings
    limited = config.use_position_embeddings or set(config.layer_aft_types) & {"full", "local"}
    return config.max_position_embeddings if limited else "no limit"


def _one_file(facts: list[Fact]) -> str | None:
    """The file that all of these come from, if it is one."""
    files = {fact.file for fact in facts}
    return files.pop() if len(files) == 1 else None


def _label(name: str) -> str:
    return escaped(name.replace("_", " ").replace(".", ": "))


def _data(facts: Facts, fact: Fact) -> str:
    """The data and the part of it that a result is about, as far as its file tells."""
    dataset = (facts.dataset_name or facts.dataset) if Path(fact.file).name == RESULTS else None
    return escaped(", ".join(part for part in (dataset, fact.split) if part) or "not recorded")


def _hub_link(source: str) -> str:
    """A source on the Hub as a link; the name of a directory as code."""
    if is_hub_id(source):
        return f"[{escaped(source)}](https://huggingface.co/{source})"
    return code(Path(source).name)


def _side(facts: Facts) -> int:
    """Of the images whose sub-pixels a model of them writes."""
    return math.isqrt(facts.config.max_position_embeddings // 3)


def _draw_position_biases(directory: Path, facts: Facts, made: Path) -> None:
    """A picture, if there is none but ours, the model learns position biases, and matplotlib is there to draw it."""
    learned = set(facts.config.layer_aft_types) & {"full", "local", "conv"}
    if not (_is_our_picture(directory / PICTURE) and learned and facts.parameters):
        return
    if importlib.util.find_spec("matplotlib") is None:
        return
    if facts.config.max_positions > MAX_POSITIONS_DRAWN and learned != {"conv"}:
        return
    try:
        model = ARCHITECTURES[facts.architecture].from_pretrained(directory, dtype="auto", attn_implementation="eager")
    except Exception:  # the checks before an upload say why
        return
    plot_position_biases(model, made / PICTURE)
    ours = PngInfo()
    ours.add_text("Software", SOFTWARE)
    with Image.open(made / PICTURE) as picture:
        picture.save(made / PICTURE, pnginfo=ours)


def _is_our_picture(path: Path) -> bool:
    """Whether a picture may be drawn anew: it is ours, which may show an earlier model, or there is none."""
    if not path.exists():
        return True
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.info.get("Software") == SOFTWARE
    except (OSError, ValueError, Image.DecompressionBombError):  # whatever it is, it is not ours
        return False
