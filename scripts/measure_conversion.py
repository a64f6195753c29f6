"""Measure the accuracy that a conversion keeps: by initialization, before and after fine-tuning, and by image size.

    python scripts/measure_conversion.py cifar10/train.parquet cifar10/validation.parquet --out outputs/conversion

A ViT is trained once. The following models are then fine-tuned with labels, each with three seeds: AFT-convs converted
from it as in the paper, with position biases and keys from its attention, and by distillation without labels for 2, 5
and 15 minutes; an AFT-conv with random weights; and the ViT itself. Distillations and random weights also differ by
seed.

Every step is a separate command, which is printed before it runs. Finished steps are not repeated, so the command
resumes after an interruption. Once the first seed has begun, others can run in parallel (`--seed`); the command
without that option then writes the tables. Minutes of distillation are comparable only if nothing else runs on the
machine.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, set_seed
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTForImageClassification
from aft_hf.data.json_files import write_json


SCRIPTS = Path(__file__).parent
SIZES = ["--kernel-size", 7, "--num-heads", 32]  # of the AFT-convs
CLI = ["-m", "aft_hf.cli"]
REPORTED = (0, 1, 2, 5)  # epochs
EPOCHS = max(REPORTED)
IMAGE_SIZES = (24, 32, 40, 48, 64)
FORMATS = {"steps": ",.0f", "KL (nats)": ".3f"}  # of columns that are not in percent
console = Console()


def run(*command: object) -> None:
    """Print and run a command of this project."""
    words = [str(word) for word in command]
    console.print("python", *words, markup=False, highlight=False, soft_wrap=True)
    subprocess.run([sys.executable, *words], check=True)


def fine_tune(model: Path, out: Path, *options: object) -> None:
    """Run finetune.py, which resumes after an interruption."""
    if (out / "all_results.json").exists():
        return
    common = ["--do_train", "--do_eval", "--augmentation", "crop", "--report_to", "none", "--disable_tqdm", "true"]
    common += ["--per_device_train_batch_size", 128, "--per_device_eval_batch_size", 250, "--logging_steps", 50]
    common += ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.05, "--weight_decay", 0.05]
    common += ["--eval_strategy", "epoch", "--eval_on_start", "true"]
    common += ["--save_strategy", "epoch", "--save_total_limit", 1, "--resume_from_checkpoint", "true"]
    run(SCRIPTS / "finetune.py", "--model_name_or_path", model, "--output_dir", out, *common, *options)


def new_vit(out: Path) -> None:
    """Save a ViT with random weights and its image processor; the model is small enough for two cores."""
    if (out / "preprocessor_config.json").exists():
        return
    set_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=10,
    )
    ViTForImageClassification(config).save_pretrained(out)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(out)


def new_aft(like: Path, out: Path, seed: int) -> None:
    """Save an AFT-conv with random weights and the config of a converted model."""
    if (out / "preprocessor_config.json").exists():
        return
    set_seed(seed)
    AFTForImageClassification(AFTForImageClassification.from_pretrained(like).config).save_pretrained(out)
    AutoImageProcessor.from_pretrained(like).save_pretrained(out)


def convert(vit: Path, out: Path, *options: object, bf16: bool = False) -> None:
    """Run `aft-hf convert`; Accelerate launches a distillation in bf16."""
    if (out / "conversion_report.json").exists():
        return
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "--mixed_precision", "bf16"]
    words = [*CLI, "convert", vit, out, *SIZES, *options]
    run(*(launch + words if bf16 else words))


def keep_to_options(path: Path, options: dict[str, object]) -> None:
    """Raise a ValueError if the directory was begun with other options."""
    if path.exists() and json.loads(path.read_text()) != options:
        raise ValueError(f"{path.parent} was begun with {path.read_text().strip()}; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(options) + "\n")


def accuracies(out: Path) -> dict[int, float]:
    """Accuracy by number of finished epochs, from the log of Trainer."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {round(entry["epoch"]): entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}


def accuracies_by_size(model: Path, data: Path, out: Path) -> dict[int, float]:
    """Accuracy at each of `IMAGE_SIZES`."""
    if not out.exists():
        sizes = [word for size in IMAGE_SIZES for word in ("--image-size", size)]
        run(*CLI, "evaluate", model, data, *sizes, "--batch-size", 250, "--out", out)
    metrics = json.loads(out.read_text())
    return {size: metrics[f"{size} px"]["accuracy"] for size in IMAGE_SIZES}


def distillation_losses(out: Path) -> dict[str, float]:
    """Steps of a distillation, and the running means of its losses at the end, by column."""
    record = json.loads((out / "conversion_report.json").read_text())["options"]["distillation"]
    errors = record["hidden_state_errors"]
    columns = ["embeddings", *(f"layer {number}" for number in range(1, len(errors)))]
    losses = {"steps": record["steps"], "KL (nats)": record["divergence"], "agreement": record["agreement"]}
    return losses | dict(zip(columns, errors, strict=True))


def mean_and_spread(values: list[float], spec: str = ".1%") -> str:
    """The mean, and for several values also the smallest and the largest; percent signs only after the mean."""
    text = f"{sum(values) / len(values):{spec}}"
    low, high = (f"{value:{spec}}".removesuffix("%") for value in (min(values), max(values)))
    return text if len(values) == 1 else f"{text} ({low}-{high})"


def table(head: list[str], rows: dict[str, list[dict[Any, float]]], columns: Sequence[Any]) -> str:
    """A Markdown table with a row for each name, over its seeds."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * len(columns)]
    for name, runs in rows.items():
        cells = [mean_and_spread([each[key] for each in runs], FORMATS.get(key, ".1%")) for key in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main(
    train: Annotated[Path, typer.Argument(help="Training images: a parquet file or a folder.")],
    validation: Annotated[Path, typer.Argument(help="Validation images: a parquet file or a folder.")],
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/conversion"),
    source_epochs: Annotated[int, typer.Option(help="Epochs of the ViT.")] = 60,
    images: Annotated[int | None, typer.Option(help="Number of training images. Default: all.")] = None,
    minutes: Annotated[list[float], typer.Option(help="Minutes of distillation; may be repeated.")] = (2, 5, 15),
    seed: Annotated[list[int], typer.Option(help="Seeds of the students; may be repeated.")] = (0, 1, 2),
    bf16: Annotated[bool, typer.Option(help="Train in bfloat16, on machines that are fast at it.")] = False,
) -> None:
    """Train a ViT, convert it in every way, fine-tune, and write the tables to OUT/tables.md."""
    keep_to_options(
        out / "options.json",
        {"data": [train.name, validation.name], "source_epochs": source_epochs, "images": images, "bf16": bf16},
    )
    data = ["--train", train, "--validation", validation]
    data += ["--max_train_samples", images] if images else []
    # In bfloat16 on a CPU, eager attention trains this ViT 1.6 times as fast as scaled_dot_product_attention.
    data += ["--bf16", "--use_cpu", "--attn_implementation", "eager"] if bf16 else []
    vit, paper, attention = out / "vit", out / "paper", out / "attention"
    new_vit(out / "vit-new")
    options = ["--num_train_epochs", source_epochs, "--learning_rate", 1e-3, "--label_smoothing_factor", 0.1]
    fine_tune(out / "vit-new", vit, *data, *options)
    convert(vit, paper)
    convert(vit, attention, "--init", "attention", "--images", train, "--num-images", 256)

    results: dict[str, list[dict[int, float]]] = {}
    losses: dict[str, list[dict[str, float]]] = {}
    sizes = {"the ViT": [accuracies_by_size(vit, validation, out / "sizes" / "vit.json")]}
    for number in seed:
        new_aft(paper, out / f"random-{number}", number)
        starts = {"random weights": out / f"random-{number}", "`--init paper`": paper, "`--init attention`": attention}
        for budget in minutes:
            name = f"distilled for {budget:g} minutes"
            starts[name] = out / f"distilled-{budget:g}-{number}"
            options = ["--distill", "--images", train, "--minutes", budget, "--seed", number]
            options += ["--augmentation", "crop", "--augmentation-probability", 1]  # as the ViT was trained
            convert(vit, starts[name], *options, bf16=bf16)
            losses.setdefault(f"{budget:g} minutes", []).append(distillation_losses(starts[name]))
        for name, start in (starts | {"the ViT": vit}).items():
            tuned = out / "fine-tuned" / f"{start.name.removesuffix(f'-{number}')}-{number}"
            fine_tune(start, tuned, *data, "--num_train_epochs", EPOCHS, "--learning_rate", 5e-4, "--seed", number)
            results.setdefault(name, []).append(accuracies(tuned))
            by_size = accuracies_by_size(tuned, validation, out / "sizes" / f"{tuned.name}.json")
            sizes.setdefault(f"{name}, fine-tuned", []).append(by_size)
    write_json(out / "results.json", {"initialization": results, "distillation": losses, "image size": sizes})
    columns = [*next(iter(losses.values()))[0]]
    tables = [
        table(["start", *(f"epoch {epoch}" for epoch in REPORTED)], results, REPORTED),
        table(["distillation", *columns], losses, columns),
        table(["model", *(f"{size} px" for size in IMAGE_SIZES)], sizes, IMAGE_SIZES),
    ]
    text = "\n\n".join(tables)
    (out / "tables.md").write_text(f"{text}\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"measure_conversion.py: {error}")
