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
from ..modeling_aft import (
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    AFTModel,
)
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
HEADS = (AFTForCausalLM, AFTForImageClassification, AFTForSequenceClassification, AFTForTokenClassification)
ARCHITECTURES = {each.__name__: each for each in (AFTModel, *HEADS)}
TASKS = {
    ("AFTForCausalLM", "text"): "text-generation",
    ("AFTForImageClassification", "image"): "image-classification",
    ("AFTForSequenceClassification", "text"): "text-classification",
    ("AFTForTokenClassification", "text"): "token-classification",
    ("AFTModel", "text"): "feature-extraction",
    ("AFTModel", "image"): "image-feature-extraction",
}
PIXELS = "unconditional-image-generation"  # what a causal language model of sub-pixels does

# Fields that a card shows where they are not the default: the paper's ablations, and what the paper has not.
SWITCHES = ("use_query", "query_activation", "position_bias_reparameterized", "global_connectivity")
SWITCHES += ("position_bias_entropy_weight", "position_bias_selection", "position_bias_multiplier")


def write_card(directory: str | os.PathLike, *, repo_id: str | None = None, license: str | None = None) -> Path:
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
    with tempfile.TemporaryDirectory(prefix="aft-hf-card-") as made:
        made, path = Path(made), directory / README
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


def build_card(directory: str | os.PathLike, *, repo_id: str | None = None, license: str | None = None) -> ModelCard:
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
        **_license(directory, license),
    )


def fill_card(
    facts: Facts,
    name: str,
    *,
    source: str,
    marker: str,
    pictures: dict[str, str],
    status: str = "",
    license: str = DEFAULT,
    license_name: str | None = None,
    license_link: str | None = None,
    **more: Any,
) -> ModelCard:
    """The template, filled.

    Args:
        facts: what is known.
        name: of the model.
        source: where the code on the card loads it from: an id on the Hub, or a directory.
        marker: a comment that says where the card comes from.
        pictures: what they show, by their path from the card.
        status: what a reader has to know first.
        license, license_name, license_link: of the metadata.
        more: for the template.
    """
    return ModelCard.from_template(
        _metadata(facts, name, license=license, license_name=license_name, license_link=license_link),
        template_path=str(TEMPLATE),
        marker=marker,
        model_name=escaped(name),
        summary=_summary(facts),
        is_aft=facts.is_aft,
        status=status,
        is_gated=facts.is_aft and facts.config.use_query,
        is_image=facts.is_pixels or not facts.is_text,
        load_remote=_code(facts, source, remote=True, on_hub="recipe" not in more),
        load_local=_code(facts, source, remote=False),
        architecture=[{"name": label, "value": value} for label, value in _architecture(facts)],
        config_file=facts.config_file,
        parameters=facts.parameters,
        was_trained=facts.was_trained,
        conversion=_conversion(facts),
        training=_rows(facts.training),
        training_file=_one_file(facts.training),
        versions=escaped(facts.versions or ""),
        results=[
            row | {"value": measured(fact.value), "data": _data(facts, fact)}
            for row, fact in zip(_rows(facts.results), facts.results)
        ],
        results_file=_one_file(facts.results),
        paper=facts.paper,
        pictures=[{"file": file, "name": _label(Path(file).stem), "text": text} for file, text in pictures.items()],
        limits=_limits(facts),
        cost=_rows(facts.cost),
        **more,
    )


def card_problems(path: str | os.PathLike, names: Collection[str] = ()) -> list[str]:
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
    return metadata_load(path)["license"]


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
        return "text-generation" if hasattr(facts.config, "vocab_size") else "image-classification"
    task = TASKS.get((facts.architecture, facts.config.modality))
    if task is None:
        raise PublishError(f"architectures names {facts.architecture} for modality {facts.config.modality}")
    return task


def _metadata(facts: Facts, name: str, **license: str | None) -> ModelCardData:
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
    base = {} if facts.base_model is None else {"base_model_relation": "finetune"}
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        **license,
        tags=_tags(facts),
        datasets=[facts.dataset] if facts.dataset_on_hub else None,
        base_model=facts.base_model,
        metrics=sorted({plain(fact.name) for fact in facts.results}) or None,
        model_name=plain(name) if results else None,
        eval_results=results or None,
        **base,
    )


def _tags(facts: Facts) -> list[str]:
    if not facts.is_aft:
        return [facts.config.model_type, "baseline"]
    types = sorted(f"aft-{each}" for each in set(facts.config.layer_aft_types))
    return ["aft", "attention-free-transformer", *types]


# --------------------------------------------------------------------------------------------------------------- body


def _summary(facts: Facts) -> str:
    config = facts.config
    what = {
        "text-generation": "A causal language model",
        PIXELS: "A causal language model of the sub-pixels of images",
        "image-classification": f"An image classifier of {config.num_labels} classes",
        "feature-extraction": "A causal backbone for text",
        "image-feature-extraction": "A backbone for images",
    }[_task(facts)]
    kind = "AFT-" + "/".join(sorted(set(config.layer_aft_types))) if facts.is_aft else config.model_type.upper()
    kind = {"VIT": "ViT", "GPT2": "GPT-2"}.get(kind, kind)
    return f"{what}: {kind} with {config.num_hidden_layers} layers of width {config.hidden_size}."


def _architecture(facts: Facts) -> list[tuple[str, str]]:
    """The numbers of the config that matter for its types."""
    config = facts.config
    rows = [("parameters", facts.parameters)] if facts.parameters else []
    if not facts.is_aft:
        rows += [("type", config.model_type), ("layers", config.num_hidden_layers), ("width", config.hidden_size)]
        rows.append(("attention heads", config.num_attention_heads))
        return [(label, escaped(str(value))) for label, value in [*rows, *_input_sizes(facts)]]
    types = set(config.layer_aft_types)
    rows += [
        ("type", config.aft_type if isinstance(config.aft_type, str) else ", ".join(config.aft_type)),
        ("layers", config.num_hidden_layers),
        ("width", config.hidden_size),
        ("width of the MLPs", config.intermediate_size),
        ("position-bias heads", config.num_heads),
    ]
    if "conv" in types:
        rows.append(("kernel size", config.conv_kernel_size))
    if "local" in types:
        rows.append(("window", config.local_window_size))
    if types & {"full", "local"}:
        rank = config.position_bias_dim
        rows.append(("rank of the position biases", "not factorized" if rank is None else rank))
    usual = AFTConfig()
    switched = [name for name in SWITCHES if getattr(config, name) != getattr(usual, name)]
    rows += [(name.replace("_", " "), getattr(config, name)) for name in switched]
    return [(label, escaped(str(value))) for label, value in [*rows, *_input_sizes(facts)]]


def _input_sizes(facts: Facts) -> list[tuple[str, Any]]:
    config = facts.config
    if facts.is_text:
        return [("vocabulary", config.vocab_size), ("longest sequence", _longest(config))]
    size, patch = pair(config.image_size), pair(config.patch_size)
    sizes = [("image size", f"{size[0]} x {size[1]}"), ("patch size", f"{patch[0]} x {patch[1]}")]
    return sizes + ([("classes", config.num_labels)] if _task(facts) == "image-classification" else [])


def _longest(config: PreTrainedConfig) -> int | str:
    if not isinstance(config, AFTConfig):
        return config.max_position_embeddings
    limited = config.use_position_embeddings or set(config.layer_aft_types) & {"full", "local"}
    return config.max_position_embeddings if limited else "no limit"


def _rows(facts: list[Fact]) -> list[dict[str, str]]:
    return [{"name": _label(fact.name), "value": escaped(fact.text), "file": fact.file} for fact in facts]


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


def _conversion(facts: Facts) -> dict[str, Any] | None:
    """What the model was converted from, and what became of the tensors."""
    if facts.conversion is None:
        return None
    source, counts = facts.conversion["source"], facts.conversion["counts"]
    link = f"[{escaped(source)}](https://huggingface.co/{source})" if is_hub_id(source) else code(Path(source).name)
    numbers = [f"{count} tensors ({size} parameters) {escaped(status)}" for status, count, size in counts]
    is_new = any(status == "new" for status, _, _ in counts)
    distillation = facts.conversion["distillation"]
    return {
        "source": link,
        "file": CONVERSION,
        "counts": ", ".join(numbers),
        "new": is_new,
        "distillation": None if distillation is None else escaped(distillation),
    }


def _limits(facts: Facts) -> list[str]:
    config, limits = facts.config, []
    if not facts.is_text:
        if facts.is_aft and set(config.layer_aft_types) == {"conv"} and not config.use_position_embeddings:
            limits.append(
                "Takes images whose sides are multiples of the patch size; other sizes than that of the training are "
                "untested unless a result above says so."
            )
        else:
            size = pair(config.image_size)
            limits.append(f"Takes images of {size[0]} x {size[1]} pixels only: it has learned positions for these.")
        limits.append(
            "Knows the classes of its training data and no others: whatever it is shown, it names one of them."
        )
    elif facts.is_pixels:
        limits.append("Draws what is likely after its training data, which need not be harmless or original.")
        limits.append(f"Draws images of {_side(facts)} x {_side(facts)} pixels only, a sub-pixel at a time.")
    else:
        longest = _longest(config)
        if isinstance(longest, int):
            limits.append(
                f"Takes {longest} tokens at most, of prompt and answer together: it has learned positions for these."
            )
        else:
            limits.append(
                "Takes texts of any length; how good it is beyond the length of its training is untested unless a "
                "result above says so."
            )
        limits.append("Writes what is likely after its training data, which need not be true, harmless or original.")
    if facts.is_text and facts.is_aft:
        limits.append("Its state cannot give tokens back: no assisted decoding. It takes no `position_ids`.")
    limits.append("Repeats the biases of its training data. Test it on data like yours before anything depends on it.")
    if not facts.results:
        limits.append("Its quality is unknown: no evaluation is recorded here.")
    return limits


def _side(facts: Facts) -> int:
    """Of the images whose sub-pixels a model of them writes."""
    return math.isqrt(facts.config.max_position_embeddings // 3)


def _code(facts: Facts, source: str, *, remote: bool, on_hub: bool = True) -> str:
    """How to load and run the model; from the code beside it or, with aft_hf imported, without it."""
    task, option = _task(facts), ", trust_remote_code=True" if remote and facts.is_aft else ""
    lines = [] if remote else ["import aft_hf  # makes the Auto classes know AFT"]
    name = ["", f"name = {quoted(source)}"]
    if option and on_hub:  # a directory has no revisions
        name.append('revision = "main"  # the hash of a commit runs its code and no later one')
        option = f", revision=revision{option}"
    auto = {
        "image-classification": "AutoModelForImageClassification",
        "text-classification": "AutoModelForSequenceClassification",
        "token-classification": "AutoModelForTokenClassification",
    }.get(task, "AutoModel" if task.endswith("feature-extraction") else "AutoModelForCausalLM")
    if task == PIXELS:
        side, start = _side(facts), facts.config.bos_token_id
        lines += [
            "import numpy as np",
            "import torch",
            "from PIL import Image",
            f"from transformers import {auto}",
            *name,
            f"model = {auto}.from_pretrained(name{option})",
            f"draw = {{'do_sample': True, 'top_k': 0, 'suppress_tokens': [{start}]}}".replace("'", '"'),
            f"tokens = model.generate(torch.tensor([[{start}]]), max_new_tokens=3 * {side} * {side}, **draw)[0, 1:]",
            f'Image.fromarray(np.uint8(tokens).reshape({side}, {side}, 3)).save("drawn.png")',
        ]
        return "\n".join(lines)
    if facts.is_text:
        companion, variable, inputs = "AutoTokenizer", "tokenizer", 'tokenizer("Once", return_tensors="pt")'
    else:
        companion, variable = "AutoImageProcessor", "processor"
        inputs = 'processor(Image.open("picture.png").convert("RGB"), return_tensors="pt")'
        lines.append("from PIL import Image")
    piped = task in ("text-generation", "image-classification", "text-classification", "token-classification")
    imported = [*sorted((companion, auto)), *(["pipeline"] if piped else [])]
    lines += [
        f"from transformers import {', '.join(imported)}",
        *name,
        f"model = {auto}.from_pretrained(name{option})",
        f"{variable} = {companion}.from_pretrained(name{option})",
    ]
    if task == "text-generation":
        lines += [f"inputs = {inputs}", "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"]
        lines += ["", f'write = pipeline("{task}", model=name{option})', 'print(write("Once", max_new_tokens=20))']
    elif task in ("text-classification", "token-classification"):
        lines += [f"inputs = {inputs}", "print(model(**inputs).logits.softmax(-1))"]
        lines += ["", f'classify = pipeline("{task}", model=name{option})', 'print(classify("Once"))']
    elif task == "image-classification":
        lines += [
            f"inputs = {inputs}",
            "logits = model(**inputs).logits",
            "print(model.config.id2label[logits.argmax(-1).item()])",
        ]
        lines += ["", f'classify = pipeline("{task}", model=name{option})', 'print(classify("picture.png"))']
    else:
        lines += [f"inputs = {inputs}", "print(model(**inputs).last_hidden_state.shape)"]
    return "\n".join(lines)


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
