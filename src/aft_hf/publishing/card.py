"""The model card, README.md with metadata for the Hub, generated from the files beside the model."""

import html
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..atomic_files import write_atomic
from ..configuration_aft import AFTConfig, pair
from ..errors import InputError, described, explained, printable
from ..loading import MARKER, license_terms, read_license
from ..reading import parse_header
from .facts import RESULTS, Facts, is_hub_id, read_facts, section
from .folder import misplaced_files


TEMPLATE = Path(__file__).with_name("template.md")
README = "README.md"
PICTURES = ("position_biases.png", "losses.png")  # that the card shows if they lie beside it
# A card with one of them may be replaced: it was generated here or by Trainer.
GENERATED = (
    MARKER,
    "This model card has been generated automatically according to the information the Trainer had access to",
)
# So may the template of huggingface_hub that nobody has filled in. transformers adds the description.
TEMPLATE_TITLE = "# Model Card for Model ID"
DESCRIPTION = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
DESCRIPTION += "This model card has been automatically generated."
NO_LICENSE = "No license is given for the weights: ask their authors before you use them."
PIXELS = "unconditional-image-generation"  # the task of a causal language model of sub-pixels
# Tasks on the Hub by architecture and modality. All but those of backbones are pipelines of transformers.
TASKS = {
    ("AFTForCausalLM", "text"): "text-generation",
    ("AFTForImageClassification", "image"): "image-classification",
    ("AFTForSequenceClassification", "text"): "text-classification",
    ("AFTForTokenClassification", "text"): "token-classification",
    ("AFTModel", "text"): "feature-extraction",
    ("AFTModel", "image"): "image-feature-extraction",
}
# Fields of the config whose defaults depend on other fields.
DERIVED = ("intermediate_size", "num_heads", "use_position_embeddings", "use_cls_token", "pooling")
# Characters with a meaning inside a line of Markdown, including tables, strikethrough, formulas and bare links.
SPECIAL = re.compile(r"[\\`*_\[\]|~$@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def write_card(directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write README.md into the directory of a saved model.

    A README.md without the line that marks generated cards is the user's and stays as it is.

    Args:
        directory: the directory that `save_pretrained` wrote, with the files of training and conversion.
        repo_id: "name/model" on the Hub. Default: the name of the directory.
        license: license of the weights by its name on the Hub, which checks it. Default: the license in README.md, or
            that of the model that this one was converted from; if there is none, the card says so.

    Raises:
        InputError: a file is a symlink, config.json is not that of an AFT model, a file with results cannot be read,
            or a license is given for a card of the user.
    """
    directory = Path(directory)
    if problems := misplaced_files(directory):
        raise InputError(f"{directory}: no card is written: {'; '.join(problems)}")
    if (text := new_text(directory, repo_id=repo_id, license=license)) is not None:
        with write_atomic(directory / README) as file:
            file.write(text.encode())
    return directory / README


def build_card(
    directory: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None
) -> ModelCard:
    """Build the card of a saved model without writing it. Arguments and errors are those of `write_card`."""
    directory = Path(directory)
    facts = read_facts(directory)
    config, source = facts.config, repo_id or directory.resolve().name
    if (kind := (facts.architecture, config.modality)) not in TASKS:
        raise InputError(
            f"config.json: an {kind[0]} for the modality {kind[1]} has no task on the Hub; load it as an AFTModel "
            f"(`AFTModel.from_pretrained({str(directory)!r})`) and save that"
        )
    name, task = source.split("/")[-1], PIXELS if facts.pixel_side else TASKS[kind]
    hidden = {"losses.png"} if RESULTS in facts.outdated else set()
    pictures = [name for name in PICTURES if (directory / name).is_file() and name not in hidden]
    with explained(f"{directory}: no card can be made of the files beside it"):
        return ModelCard.from_template(  # which also passes the metadata on, such as the license
            _metadata(facts, name, task, _license(directory, license, facts)),
            template_path=str(TEMPLATE),
            marker=MARKER,
            name=name,
            source_literal=json.dumps(printable(source), ensure_ascii=False),
            no_license=NO_LICENSE,
            facts=facts,
            architecture=_architecture(facts),
            size=" x ".join(map(str, pair(config.image_size))),
            pictures=pictures,
            hub_link=_hub_link,
            escaped=_escaped,
            code=_code,
        )


def new_text(directory: Path, *, repo_id: str | None = None, license: str | None = None) -> str | None:
    """Return the text of README.md that `write_card` writes, None if README.md stays as it is."""
    if card_of_user(directory) is None:
        return str(build_card(directory, repo_id=repo_id, license=license))
    if license is not None:
        raise InputError(f"{README}: was not written by aft-hf, so it stays as it is; write the license into it")
    return None


def card_of_user(directory: Path) -> str | None:
    """Return the README.md that the user wrote or completed, None if there is none."""
    path = directory / README
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else MARKER
    return None if is_generated(text) else text


def is_generated(text: str) -> bool:
    """Return whether a program wrote a card, and nobody removed its line from it or filled in its template."""
    data: Any = ModelCardData()
    with suppress(Exception):  # as in `card_problems`
        data = ModelCard(text.removeprefix("\ufeff")).data  # the template repeats some of them
    unfilled = ModelCard.from_template(data, model_description=DESCRIPTION).text
    written, template = ({*filter(None, map(str.strip, each.splitlines()))} for each in (body_of(text), unfilled))
    return any(mark in text for mark in GENERATED) or {TEMPLATE_TITLE} <= written <= template


def body_of(text: str) -> str:
    """Return a card without its metadata."""
    return REGEX_YAML_BLOCK.sub("", text.removeprefix("\ufeff"))


def card_problems(text: str, directory: Path) -> list[str]:
    """Return the problems of a card, one line each: missing or wrong metadata, and missing files."""
    try:
        parse_header(text, README)
        card = ModelCard(text)
    except Exception as error:  # the YAML parser and the card classes can raise any exception
        return [f"{README}: the metadata cannot be read ({described(error)})"]
    required = ["library_name", "pipeline_tag", "tags"] + ([] if NO_LICENSE in text else ["license"])
    problems = [f"{README}: the metadata lacks {name}" for name in required if not card.data.get(name)]
    for file in [*re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", card.text), card.data.get("license_link")]:
        if file and "://" not in str(file) and not (directory / str(file)).is_file():
            problems.append(f"{README}: names {file}, which does not exist; add the file")
    return problems


def _license(directory: Path, license: str | None, facts: Facts) -> dict[str, Any]:
    """Return the metadata of the license: a given one, that in README.md, or that of the source of a conversion."""
    if license is None:
        of_source = section(facts.conversion.options, "source_license") if facts.conversion else {}
        return read_license(directory) or license_terms(of_source)
    if (license := license.strip().lower()) != "other":
        return {"license": license}
    if not (directory / "LICENSE").is_file():
        raise InputError(f"license other: put the text of the license into {directory / 'LICENSE'}")
    return {"license": license, "license_name": "other", "license_link": "LICENSE"}


def _metadata(facts: Facts, name: str, task: str, terms: dict[str, Any]) -> ModelCardData:
    results = [
        EvalResult(
            task_type=task,
            dataset_type=_plain(fact.dataset),
            dataset_name=_plain(fact.dataset.split("/")[-1]),
            dataset_split=fact.split,
            metric_type=_plain(fact.name),
            metric_name=_plain(fact.name.replace("_", " ")),
            metric_value=fact.value,
        )
        for fact in facts.results
        if fact.dataset
    ]
    types = sorted({*facts.config.layer_aft_types})
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=["aft", "attention-free-transformer", *(f"aft-{each}" for each in types)],
        datasets=[facts.dataset] if facts.dataset and is_hub_id(facts.dataset) else None,
        base_model=facts.base_model,
        base_model_relation="finetune" if facts.base_model else None,
        metrics=sorted({_plain(fact.name) for fact in facts.results}) or None,
        model_name=_plain(name) if results else None,
        eval_results=results or None,
        **terms,
    )


def _plain(text: str) -> str:
    """Return `text` without brackets, quotes and backslashes, for metadata that others display in their own ways."""
    return printable(re.sub(r"[<>\[\](){}`\"'\\]", " ", text)) or "unnamed"


def _architecture(facts: Facts) -> dict[str, Any]:
    """Return the rows of the card's table of the architecture: the fields of the config that are not the default."""
    names = (name for name in AFTConfig.__annotations__ if name not in ("id2label", "dtype") and name[0] != "_")
    given = {name: getattr(facts.config, name) for name in names if hasattr(facts.config, name)}
    default, usual = AFTConfig(), AFTConfig(**{name: given[name] for name in given if name not in DERIVED})
    rows = {"parameters": facts.parameters}
    for name, value in given.items():
        if value != getattr(usual if name in DERIVED else default, name):
            rows[name.replace("_", " ")] = value
    return rows


def _escaped(text: str) -> str:
    """Return Markdown that shows `text` literally, inside a line or a table cell."""
    return html.escape(SPECIAL.sub(r"\\\g<0>", printable(text)), quote=False)


def _code(text: str) -> str:
    """Return Markdown that shows `text` as code, or escaped if it would end the code or a table cell."""
    return _escaped(text) if {"`", "|"} & {*text} else f"`{printable(text)}`"


def _hub_link(source: str) -> str:
    """Return a link to a source on the Hub, or the name of a directory as code."""
    if is_hub_id(source):
        return f"[{_escaped(source)}](https://huggingface.co/{source})"
    return "`" + printable(Path(source).name).replace("`", "'") + "`"
