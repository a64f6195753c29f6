"""Cards of recipes: model_cards/GROUP/RECIPE.md for each configs/GROUP/RECIPE.yaml, with what its run has measured.

Of a run, model_cards/results/GROUP/RECIPE keeps what its card needs (`keep_run`). A recipe without one has a card that
says so.
"""

import json
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..analysis import plot_position_biases
from ..configuration_aft import AFTConfig
from ..modeling_aft import AFTForCausalLM, AFTForImageClassification
from ..reading import ModelConfig
from ..reading import read_json as read_document
from ..training.recipe import Recipe, load_recipe
from ..training.setup import check_same_run
from ..training.tasks import TASKS
from .card import PICTURE, PICTURES, fill_card
from .errors import PublishError
from .facts import RESULTS, Facts, Results, add_results, measured, read_json


MARKER = "<!-- Written by scripts/write_model_cards.py from the recipe and the results of its run. -->"


@dataclass(frozen=True)
class Data:
    """What a recipe is for: the data by their public name, and how the command says it."""

    name: str
    dataset: str  # on the Hub
    overrides: str = ""
    about: str = ""
    classes: int | None = None


SHAKESPEARE = Data(
    "Tiny Shakespeare",
    "karpathy/tiny_shakespeare",
    "data.train=tinyshakespeare.txt",
    "the file of 1,115,394 bytes, nine tenths to train, then a twentieth to validate and one to test.",
)
CIFAR10 = Data("CIFAR-10", "uoft-cs/cifar10", "data.dataset=uoft-cs/cifar10 data.image_column=img", classes=10)
# By folder, or by recipe.
DATA = {
    "cifar10": CIFAR10,
    "enwik8": Data(
        "enwik8",
        "LTCB/enwik8",
        "data.train=enwik8",
        "the file of 10^8 bytes, the first 90 million to train, then 5 to validate and 5 to test.",
    ),
    "imagenet": Data("ImageNet-1k", "ILSVRC/imagenet-1k", classes=1000),
    "examples/bytes_aft_local": SHAKESPEARE,
    "examples/bytes_gpt2": SHAKESPEARE,
    "examples/images_aft_conv": CIFAR10,
    "examples/pixels_aft_local": replace(
        CIFAR10,
        about="the run had 45,000 images to train on and 1,000 others to validate, stored as JPEG: its bits per "
        "dimension do not compare with those on the images as published.",
    ),
}
# What `aft-hf convert` finds in the sources of recipes that begin with a converted model.
CONVERTED = {"facebook/deit-base-patch16-384": {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 16}}


def write_recipe_cards(root: Path) -> list[Path]:
    """Write the cards of all recipes below `root`/configs, and a table of them; the paths.

    Raises:
        ValueError: a recipe that is wrong, without data in `DATA`, or whose run was another.
    """
    contents = {root / "model_cards" / f"{name}.md": text for name, text in recipe_cards(root).items()}
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(contents)


def recipe_cards(root: Path) -> dict[str, str]:
    """What `write_recipe_cards` writes, by the name of the card without its suffix."""
    facts = {name: recipe_facts(root, name) for name in recipe_names(root)}
    return {name: _card(root, name, each) for name, each in facts.items()} | {"README": _index(facts)}


def recipe_names(root: Path) -> list[str]:
    """GROUP/RECIPE of all recipes; files that only serve others begin with an underscore."""
    configs = root / "configs"
    names = [path.relative_to(configs).with_suffix("").as_posix() for path in configs.glob("*/[!_]*.yaml")]
    return sorted(name for name in names if not name.startswith("accelerate/"))


def recipe_facts(root: Path, name: str) -> Facts:
    """All that is known of the model of a recipe; arguments as `keep_run`."""
    path = _recipe_path(root, name)
    recipe, data = load_recipe(path), _data(name)
    config, architecture, parameters = _build(path, data)
    facts = Facts(config, architecture, parameters, config_file=f"configs/{name}.yaml")
    results = read_json(_kept(root, name) / RESULTS, Results)
    if results is None:
        add_results(facts, Results.model_validate({"recipe": recipe.model_dump()}), facts.config_file)
    else:
        check_same_run(recipe, results.recipe.model_dump(exclude_unset=True), _kept(root, name) / RESULTS)
        add_results(facts, results, f"model_cards/results/{name}/{RESULTS}")
    facts.dataset, facts.dataset_name, facts.dataset_on_hub = data.dataset, data.name, True
    _, source = _about(path)
    facts.base_model = source[0] if source else None
    return facts


def keep_run(root: Path, name: str, directory: Path) -> Path:
    """Keep of the run in `directory` what the card of its recipe needs; where it is kept.

    Args:
        root: of the repository.
        name: GROUP/RECIPE.
        directory: the `output_dir` of the run.

    Raises:
        ValueError: it is the run of another recipe, or has no results.
    """
    results = read_json(directory / RESULTS, Results)
    if results is None:
        raise PublishError(f"{directory / RESULTS}: no such file")
    check_same_run(load_recipe(_recipe_path(root, name)), results.recipe.model_dump(exclude_unset=True), directory)
    kept = _kept(root, name)
    kept.mkdir(parents=True, exist_ok=True)
    trimmed = {
        key: value
        for key, value in results.model_dump(exclude_unset=True).items()
        if key not in ("losses", "evaluations")
    }
    (kept / RESULTS).write_text(json.dumps(trimmed, indent=1) + "\n")
    if (directory / "losses.png").is_file():
        shutil.copyfile(directory / "losses.png", kept / "losses.png")
    config = read_document(directory / "config.json", ModelConfig, PublishError)
    if config.model_type == AFTConfig.model_type and config.model_extra["aft_type"] not in ("simple", "alibi"):
        models = (AFTForCausalLM, AFTForImageClassification)
        model = next(each for each in models if each.__name__ in config.architectures)
        plot_position_biases(model.from_pretrained(directory), kept / PICTURE)
    return kept


def _kept(root: Path, name: str) -> Path:
    return root / "model_cards" / "results" / name


def _recipe_path(root: Path, name: str) -> Path:
    return root / "configs" / f"{name}.yaml"


def _data(name: str) -> Data:
    data = DATA.get(name) or DATA.get(name.split("/")[0])
    if data is None:
        raise PublishError(f"configs/{name}.yaml: say in `aft_hf.publishing.recipes.DATA` which data it is for")
    return data


def _build(path: Path, data: Data) -> tuple[PreTrainedConfig, str, int]:
    """(config, class, parameters) of a recipe's model, which takes no memory: it is built as for the training, but for
    the data that are made up."""
    _, source = _about(path)
    with tempfile.TemporaryDirectory() as directory:
        made_up = [f"output_dir={directory}", "data.dataset=null", "data.validation=null", "data.train=generated"]
        recipe = load_recipe(path, made_up)
        if source is not None:
            recipe.model = {"architecture": "aft", **source[1], **recipe.model}
            recipe.model.pop("pretrained")
        task = TASKS[recipe.task](recipe)
    if data.classes is not None and recipe.task == "images":
        task.config_values |= {"id2label": {i: f"class {i}" for i in range(data.classes)}}
        task.config_values |= {"label2id": {label: i for i, label in task.config_values["id2label"].items()}}
    with torch.device("meta"):
        model = task.build_model()
    return model.config, type(model).__name__, model.num_parameters()


def _about(path: Path) -> tuple[str, tuple[str, dict[str, Any]] | None]:
    """What the comment at the head of a recipe says: (its text, what the model is converted from and to, if it is)."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    text, _, command = " ".join(lines).partition(" First: ")
    text = re.sub(r":? data\.\w+=.*$", "", text)
    if not command:
        return text, None
    source = re.search(r"aft-hf convert (\S+)", command)[1]
    sizes = {key: int(re.search(rf"--{key} (\d+)", command)[1]) for key in ("kernel-size", "num-heads")}
    fields = {"aft_type": "conv", "conv_kernel_size": sizes["kernel-size"], "num_heads": sizes["num-heads"]}
    return text, (source, fields | CONVERTED[source])


def _commands(path: Path, name: str, data: Data) -> str:
    """What to type."""
    before = re.findall(r"^#\s+(aft-hf convert .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return "\n".join([*before, f"aft-hf train configs/{name}.yaml {data.overrides}".rstrip()])


def _card(root: Path, name: str, facts: Facts) -> str:
    path, data = _recipe_path(root, name), _data(name)
    recipe: Recipe = load_recipe(path)
    was_run = bool(facts.results)
    status = (
        "The weights are not on the Hub: the command below makes them."
        if was_run
        else "No trained weights exist yet: this recipe was not run, and nothing on this card was measured."
    )
    kept = _kept(root, name)
    link = f"[{data.name}](https://huggingface.co/datasets/{data.dataset})"
    card = fill_card(
        facts,
        path.stem,
        source=recipe.output_dir,
        marker=MARKER,
        pictures={f"../results/{name}/{file}": text for file, text in PICTURES.items() if (kept / file).is_file()},
        status=status,
        is_untrained_recipe=not was_run,
        recipe={
            "path": f"configs/{name}.yaml",
            "link": f"../../configs/{name}.yaml",
            "about": _about(path)[0].rstrip(".") + ".",
            "command": _commands(path, name, data),
            "data": f"{link}: {data.about}" if data.about else f"{link}.",
            "notes": recipe.notes.strip(),
        },
    )
    return str(card).rstrip() + "\n"


def _index(facts: dict[str, Facts]) -> str:
    """A table of the cards."""
    lines = [
        "# Cards of the recipes",
        "",
        "One for each recipe in `configs`, written by `scripts/write_model_cards.py`. A result is there where the",
        "recipe was run; `results` has the files that it comes from.",
        "",
        "| recipe | parameters | data | result |",
        "|---|---:|---|---|",
    ]
    for name, each in facts.items():
        best = [fact for fact in each.results if fact.split == each.results[-1].split][:1]
        result = ", ".join(f"{measured(f.value)} {f.name.replace('_', ' ')}, {f.split}" for f in best) or "not run"
        size = f"{each.parameters / 1e6:.2f} M"
        lines.append(f"| [{name}]({name}.md) | {size} | {each.dataset_name} | {result} |")
    return "\n".join(lines) + "\n"
