"""Write model_cards/: a table of all recipes in configs/ with the paper's score and that of our run, and a card for
each recipe that was run, model_cards/GROUP/RECIPE.md.

    python scripts/write_model_cards.py
    python scripts/write_model_cards.py --keep examples/bytes_aft_local=outputs/bytes-aft-local

The second command first copies the files that the card of that run needs into model_cards/results/GROUP/RECIPE.
"""

import json
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedConfig

from aft_hf.analysis import plot_position_biases
from aft_hf.configuration_aft import AFTConfig
from aft_hf.conversion import POSITION_BIAS_MULTIPLIER
from aft_hf.modeling_aft import AFTForCausalLM, AFTForImageClassification
from aft_hf.publishing.card import PICTURE, PICTURES, fill_card
from aft_hf.publishing.errors import PublishError
from aft_hf.publishing.facts import RESULTS, Facts, Results, add_results, read_json
from aft_hf.publishing.licenses import DEFAULT
from aft_hf.reading import ModelConfig, reported
from aft_hf.reading import read_json as read_document
from aft_hf.training.recipe import Recipe, load_recipe
from aft_hf.training.setup import check_same_run
from aft_hf.training.tasks import TASKS


ROOT = Path(__file__).resolve().parents[1]
MARKER = "<!-- Written by scripts/write_model_cards.py from the recipe and the results of its run. -->"


@dataclass(frozen=True)
class Data:
    """The data of a recipe: their public name, and the overrides of the command that select them."""

    name: str
    dataset: str  # on the Hub
    overrides: str = ""
    about: str = ""
    classes: int | None = None


SHAKESPEARE = Data(
    "Tiny Shakespeare",
    "karpathy/tiny_shakespeare",
    "data.train=tinyshakespeare.txt",
    "a file of 1,115,394 bytes: nine tenths for training, then one twentieth each for validation and test.",
)
HUB_CIFAR10 = "data.dataset=uoft-cs/cifar10 data.image_column=img"  # the example recipes also work with files
CIFAR10 = Data("CIFAR-10", "uoft-cs/cifar10", classes=10)
# By folder, or by recipe.
DATA = {
    "cifar10": CIFAR10,
    "enwik8": Data(
        "enwik8",
        "LTCB/enwik8",
        "data.train=enwik8",
        "a file of 10^8 bytes: the first 90 million for training, then 5 million each for validation and test.",
    ),
    "imagenet": Data("ImageNet-1k", "ILSVRC/imagenet-1k", classes=1000),
    "examples/bytes_aft_local": SHAKESPEARE,
    "examples/bytes_gpt2": SHAKESPEARE,
    "examples/images_aft_conv": replace(CIFAR10, overrides=HUB_CIFAR10),
    "examples/pixels_aft_local": replace(
        CIFAR10,
        overrides=HUB_CIFAR10,
        about="the run had 45,000 images for training and 1,000 others for validation, stored as JPEG: its bits per "
        "dimension do not compare with those on the published images.",
    ),
}
# Config fields that `aft-hf convert` reads from the source of a recipe that begins with a converted model.
CONVERTED = {"facebook/deit-base-patch16-384": {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 16}}

# The metric of each task, by its name in results.json.
SCORES = {"bytes": "bits_per_byte", "pixels": "bits_per_dim", "images": "accuracy"}
# The paper's other rows: (where, model, score on the test data).
QUOTED = (
    ("Table 2", "PixelCNN", "3.14 bits per dim"),
    ("Table 2", "PixelCNN++", "2.92 bits per dim"),
    ("Table 2", "PixelSNAIL", "2.85 bits per dim"),
    ("Table 2", "Sparse Transformer strided, L = 128, d = 256, h = 2", "2.80 bits per dim"),
    ("Table 2", "Image Transformer local2d, L = 12, d = 512, h = 4", "2.90 bits per dim"),
    ("Table 8", "DeiT base at 384 px: `aft-hf evaluate facebook/deit-base-patch16-384`", "0.829 accuracy"),
    ("Section 5.3", "AFT-conv small 15/384 at 384 px: `aft-hf evaluate --image-size 384`", "0.816 accuracy"),
)


def write_recipe_cards(root: Path) -> list[Path]:
    """Write a table of all recipes below `root`/configs and the cards of those that were run; remove outdated cards.

    Returns:
        The paths of the written files.

    Raises:
        ValueError: a recipe is invalid, has no entry in `DATA`, or is not the recipe of its run.
    """
    contents = {root / "model_cards" / f"{name}.md": text for name, text in recipe_cards(root).items()}
    for path in (root / "model_cards").rglob("*.md"):
        if path not in contents and MARKER in path.read_text(encoding="utf-8"):
            path.unlink()
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(contents)


def recipe_cards(root: Path) -> dict[str, str]:
    """The texts that `write_recipe_cards` writes, by the name of the card without its suffix."""
    facts = {name: recipe_facts(root, name) for name in recipe_names(root)}
    cards = {name: _card(root, name, each) for name, each in facts.items() if each.results}
    return cards | {"README": _index(root, facts)}


def recipe_names(root: Path) -> list[str]:
    """GROUP/RECIPE of all recipes; files whose name begins with an underscore are only bases of others."""
    configs = root / "configs"
    names = [path.relative_to(configs).with_suffix("").as_posix() for path in configs.glob("*/[!_]*.yaml")]
    # Numbers in names are sorted by value: 2 before 16.
    order = {name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)] for name in names}
    return sorted((name for name in names if not name.startswith("accelerate/")), key=lambda name: order[name])


def recipe_facts(root: Path, name: str) -> Facts:
    """The facts about the model of a recipe; the arguments are those of `keep_run`."""
    path = _recipe_path(root, name)
    recipe, data = load_recipe(path), _data(name)
    config, architecture, parameters = _build(path, data)
    facts = Facts(config, architecture, parameters, config_file=f"configs/{name}.yaml")
    results = read_json(_kept(root, name) / RESULTS, Results)
    if results is not None:
        check_same_run(recipe, results.recipe.model_dump(exclude_unset=True), _kept(root, name) / RESULTS)
        add_results(facts, results, f"model_cards/results/{name}/{RESULTS}")
        facts.paper = recipe.paper.model_dump() if recipe.paper else None
    facts.dataset, facts.dataset_name, facts.dataset_on_hub = data.dataset, data.name, True
    _, source = _about(path)
    facts.base_model = source[0] if source else None
    return facts


def keep_run(root: Path, name: str, directory: Path) -> Path:
    """Copy the files of a run that the card of its recipe needs, and return the directory of the copies.

    Args:
        root: root of the repository.
        name: GROUP/RECIPE.
        directory: the `output_dir` of the run.

    Raises:
        ValueError: the run is that of another recipe, or has no results.
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
    aft_type = (config.model_extra or {}).get("aft_type")
    if config.model_type == AFTConfig.model_type and aft_type not in ("simple", "alibi"):
        models = (AFTForCausalLM, AFTForImageClassification)
        model = next(each for each in models if each.__name__ in (config.architectures or ()))
        plot_position_biases(model.from_pretrained(directory), kept / PICTURE)
    return kept


def _kept(root: Path, name: str) -> Path:
    return root / "model_cards" / "results" / name


def _recipe_path(root: Path, name: str) -> Path:
    return root / "configs" / f"{name}.yaml"


def _data(name: str) -> Data:
    data = DATA.get(name) or DATA.get(name.split("/")[0])
    if data is None:
        raise PublishError(f"configs/{name}.yaml: add its data to DATA in scripts/write_model_cards.py")
    return data


def _build(path: Path, data: Data) -> tuple[PreTrainedConfig, str, int]:
    """(config, class, parameters) of a recipe's model, which is built as in training, but with generated data and on
    the meta device."""
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
    """Read the comment at the head of a recipe: (its text, the source and the fields of a conversion, if any)."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    text, _, command = " ".join(lines).partition(" First: ")
    text = re.sub(r":? data\.\w+=.*$", "", text)
    if not command:
        return text, None
    source, _, *words = command.partition("aft-hf convert ")[2].replace("\\", " ").split()
    values = dict(zip(words[::2], words[1::2]))  # the value of each option
    fields = {
        "aft_type": "conv",
        "kernel_size": int(values["--kernel-size"]),
        "num_heads": int(values["--num-heads"]),
        "position_bias_multiplier": float(values.get("--position-bias-multiplier", POSITION_BIAS_MULTIPLIER)),
    }
    return text, (source, fields | CONVERTED[source])


def _commands(path: Path, name: str, data: Data) -> str:
    """The commands that train the recipe."""
    text = re.sub(r"\s*\\\n#\s*", " ", path.read_text(encoding="utf-8"))  # a command may span lines
    before = re.findall(r"^#\s+(aft-hf convert .*)$", text, re.MULTILINE)
    return "\n".join([*before, f"aft-hf train configs/{name}.yaml {data.overrides}".rstrip()])


def _card(root: Path, name: str, facts: Facts) -> str:
    path, data = _recipe_path(root, name), _data(name)
    recipe: Recipe = load_recipe(path)
    kept = _kept(root, name)
    link = f"[{data.name}](https://huggingface.co/datasets/{data.dataset})"
    card = fill_card(
        facts,
        path.stem,
        source=recipe.output_dir,
        marker=MARKER,
        license={"license": DEFAULT},
        pictures={f"../results/{name}/{file}": text for file, text in PICTURES.items() if (kept / file).is_file()},
        status="The weights are not on the Hub; the command below trains them.",
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


def _index(root: Path, facts: dict[str, Facts]) -> str:
    """Tables of all recipes, and the paper's other rows."""
    lines = [
        "# Recipes, the paper's scores and ours",
        "",
        MARKER,
        "",
        "The tables have every recipe in `configs`: the row of the paper that it repeats, the paper's score, and the",
        "score of our run. Scores are bits per byte, bits per dim or top-1 accuracy (0 to 1) on the test data, for",
        "ImageNet on the validation data. A recipe that was run has a card, and `results` has the files of its run.",
        "The paper's recipes take days on several GPUs and were not run.",
    ]
    for name, each in facts.items():
        group, _, title = name.partition("/")
        if f"## {group}" not in lines:
            lines += ["", f"## {group}", "", "| recipe | row of the paper | parameters | paper | ours |"]
            lines.append("|---|---|---:|---:|---:|")
        recipe = load_recipe(_recipe_path(root, name))
        last = [fact for fact in each.results if fact.split == each.results[-1].split]
        ours = [f"{fact.value:.3f} ({fact.split})" for fact in last if fact.name == SCORES[recipe.task]]
        rows, score = (recipe.paper.rows, f"{recipe.paper.score:.3f}") if recipe.paper else (["none, ours"], "")
        link = f"{name}.md" if each.results else f"../configs/{name}.yaml"
        size = f"{(each.parameters or 0) / 1e6:.2f} M"
        lines.append(f"| [{title}]({link}) | {'; '.join(rows)} | {size} | {score} | {(ours or ['not run'])[0]} |")
    lines += ["", "## Rows of the paper without a recipe", "", "| where | model | paper |", "|---|---|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in QUOTED]
    return "\n".join(lines) + "\n"


def main(
    keep: Annotated[list[str] | None, typer.Option(help="GROUP/RECIPE=DIRECTORY of a run; may be repeated.")] = None,
) -> None:
    """Write the table of all recipes and the cards of those that were run."""
    for each in keep or ():
        name, _, directory = each.partition("=")
        print(f"kept {keep_run(ROOT, name, Path(directory)).relative_to(ROOT)}")
    print(f"{len(write_recipe_cards(ROOT))} files in model_cards")


if __name__ == "__main__":
    with reported("write_model_cards.py"):
        typer.run(main)
