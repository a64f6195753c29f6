"""The model card: README.md, with the metadata that the Hub reads, filled from the files beside the model."""

import importlib.util
import os
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..analysis import plot_position_biases
from ..configuration_aft import AFTConfig, pair
from ..conversion.errors import first_line
from ..modeling_aft import AFTForCausalLM, AFTForImageClassification, AFTModel
from .errors import PublishError
from .facts import MODEL_ID, RESULTS, Fact, Facts, read_facts


TEMPLATE = Path(__file__).with_name("template.md")
README, PICTURE = "README.md", "position_biases.png"
PICTURES = {
    PICTURE: "Position biases w of layers and heads: red where a position counts more, blue where it counts less",
    "losses.png": "The loss over the steps of the training",
}
MAX_POSITIONS_DRAWN = 1100  # tables of T x T numbers, for all layers and heads at once
# A card with this line is written anew whenever the model is published.
MARKER = "<!-- Written by aft-hf from the files beside it. Remove this line, and it stays as you change it. -->"
REQUIRED = ("library_name", "pipeline_tag", "license", "tags")
TASKS = {
    ("AFTForCausalLM", "text"): "text-generation",
    ("AFTForImageClassification", "image"): "image-classification",
    ("AFTModel", "text"): "feature-extraction",
    ("AFTModel", "image"): "image-feature-extraction",
}


def write_card(directory: str | os.PathLike, *, repo_id: str | None = None, license: str = "apache-2.0") -> Path:
    """Write README.md into the directory of a saved model, and a picture of its position biases if there is none.

    A README.md without the line that marks it as ours is the user's, and stays as it is.

    Args:
        directory: what `save_pretrained` wrote, and what training and conversion left beside it.
        repo_id: "name/model" on the Hub; by default the name of the directory.
        license: of the weights, as the Hub calls it.

    Raises:
        PublishError: config.json is not that of an AFT, or a file with results cannot be read.
    """
    directory = Path(directory)
    path = directory / README
    if path.is_file() and not is_ours(path.read_text(encoding="utf-8", errors="replace")):
        return path
    facts = read_facts(directory)
    _draw_position_biases(directory, facts)
    aside = path.with_name(f".{README}.tmp")
    build_card(directory, repo_id=repo_id, license=license).save(aside)
    aside.replace(path)
    return path


def is_ours(content: str) -> bool:
    """Whether a card may be replaced: it is ours, or one of transformers', which say nothing of the model."""
    return MARKER in content or "generated_from_trainer" in content or "# Model Card for Model ID" in content


def build_card(directory: str | os.PathLike, *, repo_id: str | None = None, license: str = "apache-2.0") -> ModelCard:
    """The card of a saved model, without writing anything. Arguments and errors are those of `write_card`."""
    directory = Path(directory)
    facts = read_facts(directory)
    name = repo_id or directory.resolve().name
    return ModelCard.from_template(
        _metadata(facts, name, license),
        template_path=str(TEMPLATE),
        marker=MARKER,
        model_name=name.split("/")[-1],
        summary=_summary(facts),
        was_trained=facts.was_trained,
        is_image=facts.config.modality == "image",
        load_remote=_code(facts, name, remote=True),
        load_local=_code(facts, name, remote=False),
        architecture=[{"name": label, "value": value} for label, value in _architecture(facts)],
        parameters=facts.parameters,
        conversion=facts.conversion,
        training=_rows(facts.training),
        results=[row | {"data": _data(facts, fact)} for row, fact in zip(_rows(facts.results), facts.results)],
        pictures=[{"file": file, "text": text} for file, text in PICTURES.items() if (directory / file).is_file()],
        limits=_limits(facts),
        cost=_rows(facts.cost),
    )


def card_problems(path: str | os.PathLike) -> list[str]:
    """What the Hub, or a reader, would miss in a card; an empty list if nothing. Needs no network."""
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
        if "://" not in picture and not (path.parent / picture).is_file():
            problems.append(f"shows {picture}, which is not there")
    return problems


# ----------------------------------------------------------------------------------------------------------- metadata


def _task(facts: Facts) -> str:
    task = TASKS.get((facts.architecture, facts.config.modality))
    if task is None:
        raise PublishError(f"architectures names {facts.architecture} for modality {facts.config.modality}")
    return task


def _metadata(facts: Facts, name: str, license: str) -> ModelCardData:
    task = _task(facts)
    results = None
    if facts.dataset:
        results = [
            EvalResult(
                task_type=task,
                dataset_type=facts.dataset,
                dataset_name=facts.dataset.split("/")[-1],
                dataset_split=fact.split,
                metric_type=fact.name,
                metric_name=fact.name.replace("_", " "),
                metric_value=fact.value,
            )
            for fact in facts.results
            if fact.file == RESULTS
        ]
    base = {} if facts.base_model is None else {"base_model_relation": "finetune"}
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        tags=[
            "aft",
            "attention-free-transformer",
            *sorted(f"aft-{each}" for each in set(facts.config.layer_aft_types)),
        ],
        datasets=[facts.dataset] if facts.dataset_on_hub else None,
        base_model=facts.base_model,
        metrics=sorted({fact.name for fact in facts.results}) or None,
        model_name=name.split("/")[-1] if results else None,
        eval_results=results or None,
        **base,
    )


# --------------------------------------------------------------------------------------------------------------- body


def _summary(facts: Facts) -> str:
    config = facts.config
    what = {
        "text-generation": "A causal language model",
        "image-classification": f"An image classifier of {config.num_labels} classes",
        "feature-extraction": "A causal backbone for text",
        "image-feature-extraction": "A backbone for images",
    }[_task(facts)]
    types = "/".join(sorted(set(config.layer_aft_types)))
    return f"{what}: AFT-{types} with {config.num_hidden_layers} layers of width {config.hidden_size}."


def _architecture(facts: Facts) -> list[tuple[str, str]]:
    """The numbers of the config that matter for its types."""
    config, types = facts.config, set(facts.config.layer_aft_types)
    rows = [("parameters", facts.parameters)] if facts.parameters else []
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
    if config.modality == "text":
        rows += [("vocabulary", config.vocab_size), ("longest text", _longest(config))]
    else:
        size, patch = pair(config.image_size), pair(config.patch_size)
        rows += [("image size", f"{size[0]} x {size[1]}"), ("patch size", f"{patch[0]} x {patch[1]}")]
    return [(label, str(value)) for label, value in rows]


def _longest(config: AFTConfig) -> int | str:
    limited = config.use_position_embeddings or set(config.layer_aft_types) & {"full", "local"}
    return config.max_position_embeddings if limited else "no limit"


def _rows(facts: list[Fact]) -> list[dict[str, str]]:
    return [{"name": _label(fact.name), "value": _escaped(fact.text), "file": fact.file} for fact in facts]


def _label(name: str) -> str:
    return _escaped(name.replace("_", " ").replace(".", ": "))


def _escaped(text: str) -> str:
    """Text that stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _data(facts: Facts, fact: Fact) -> str:
    """The data and the part of it that a result is about, as far as its file tells."""
    dataset = facts.dataset if fact.file == RESULTS else None
    return ", ".join(part for part in (dataset, fact.split) if part) or "not recorded"


def _limits(facts: Facts) -> list[str]:
    config, types, limits = facts.config, set(facts.config.layer_aft_types), []
    if config.modality == "image":
        if types == {"conv"} and not config.use_position_embeddings:
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
        limits.append("Its state cannot give tokens back: no assisted decoding. It takes no `position_ids`.")
    limits.append("Repeats the biases of its training data. Test it on data like yours before anything depends on it.")
    if not facts.results:
        limits.append("Its quality is unknown: no evaluation is recorded here.")
    return limits


def _code(facts: Facts, name: str, *, remote: bool) -> str:
    """How to load and run the model; from the Hub's code or, with aft_hf imported, without it."""
    task, option = _task(facts), ", trust_remote_code=True" if remote else ""
    lines = [] if remote else ["import aft_hf  # makes the Auto classes know AFT"]
    auto = {
        "text-generation": "AutoModelForCausalLM",
        "image-classification": "AutoModelForImageClassification",
    }.get(task, "AutoModel")
    if facts.config.modality == "text":
        companion, variable, inputs = "AutoTokenizer", "tokenizer", 'tokenizer("Once", return_tensors="pt")'
    else:
        companion, variable = "AutoImageProcessor", "processor"
        inputs = 'processor(Image.open("picture.png").convert("RGB"), return_tensors="pt")'
        lines.append("from PIL import Image")
    piped = task in ("text-generation", "image-classification")
    lines.append(f"from transformers import {companion}, {auto}" + (", pipeline" if piped else ""))
    lines += [
        "",
        f'model = {auto}.from_pretrained("{name}"{option})',
        f'{variable} = {companion}.from_pretrained("{name}"{option})',
    ]
    if task == "text-generation":
        lines.append(f"print(tokenizer.decode(model.generate(**{inputs}, max_new_tokens=20)[0]))")
        lines += ["", f'write = pipeline("{task}", model="{name}"{option})', 'print(write("Once", max_new_tokens=20))']
    elif task == "image-classification":
        lines += [f"logits = model(**{inputs}).logits", "print(model.config.id2label[logits.argmax(-1).item()])"]
        lines += ["", f'classify = pipeline("{task}", model="{name}"{option})', 'print(classify("picture.png"))']
    else:
        lines.append(f"print(model(**{inputs}).last_hidden_state.shape)")
    return "\n".join(lines)


def _draw_position_biases(directory: Path, facts: Facts) -> None:
    """A picture, if there is none, the model learns position biases, and matplotlib is there to draw it."""
    learned = set(facts.config.layer_aft_types) & {"full", "local", "conv"}
    if (directory / PICTURE).exists() or not learned or not facts.parameters:
        return
    if importlib.util.find_spec("matplotlib") is None:
        return
    if facts.config.max_positions > MAX_POSITIONS_DRAWN and learned != {"conv"}:
        return
    classes = {each.__name__: each for each in (AFTModel, AFTForCausalLM, AFTForImageClassification)}
    try:
        model = classes[facts.architecture].from_pretrained(directory, dtype="auto")
    except Exception:  # the checks before an upload say why
        return
    aside = directory / f".{PICTURE}"
    plot_position_biases(model, aside)
    aside.replace(directory / PICTURE)
