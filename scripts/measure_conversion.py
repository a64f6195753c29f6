"""What a conversion keeps, by kind of initialization: accuracy right after it and after 1, 2 and 5 epochs.

    python scripts/measure_conversion.py cifar10/train.parquet cifar10/validation.parquet --out outputs/conversion

A ViT is trained on all training images. AFT-convs made from it are then fine-tuned on a part of them: converted as in
the paper, with position biases from the ViT's attention, the same with the ViT as a teacher, distilled without labels
on all images for 2, 5 and 15 minutes, and from random weights.
Every step is a command of its own, printed before it runs; what is done already is not done again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, set_seed
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTForImageClassification
from aft_hf.data.json_files import write_json


SCRIPTS = Path(__file__).parent
KERNEL_SIZE, NUM_HEADS = 7, 32
EPOCHS, REPORTED = 5, (0, 1, 2, 5)
console = Console()


def run(*command: object) -> None:
    """Run a command of this project, and show it."""
    words = [str(word) for word in command]
    console.print("python", *words, markup=False, highlight=False, soft_wrap=True)
    subprocess.run([sys.executable, *words], check=True)


def fine_tune(model: Path, out: Path, data: list[object], *options: object) -> None:
    """One run of finetune.py, gone on with where it was stopped."""
    if (out / "all_results.json").exists():
        return
    common = [
        "--do_train",
        "--do_eval",
        "--per_device_train_batch_size",
        128,
        "--per_device_eval_batch_size",
        250,
        "--augmentation",
        "crop",
    ]
    common += ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.05, "--weight_decay", 0.05, "--report_to", "none"]
    common += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--save_total_limit", 1, "--logging_steps", 50]
    common += ["--resume_from_checkpoint", "true", "--disable_tqdm", "true", "--eval_on_start", "true"]
    run(SCRIPTS / "finetune.py", "--model_name_or_path", model, "--output_dir", out, *data, *common, *options)


def new_vit(out: Path) -> None:
    """A ViT with random weights and its image processor: patches of 4, small enough for two cores."""
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


def new_aft(like: Path, out: Path) -> None:
    """The AFT-conv of a conversion with random weights."""
    set_seed(0)
    AFTForImageClassification(AFTForImageClassification.from_pretrained(like).config).save_pretrained(out)
    AutoImageProcessor.from_pretrained(like).save_pretrained(out)


def keep_to_options(path: Path, options: list[object]) -> None:
    """Refuse to go on with what was begun with other options."""
    if path.exists() and json.loads(path.read_text()) != options:
        raise ValueError(f"{path.parent} was begun with {path.read_text().strip()}; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(options) + "\n")


def accuracies(out: Path) -> dict[int, float]:
    """Accuracy after each epoch, 0 before the first, as Trainer recorded it."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {round(entry["epoch"]): entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}


def main(
    train: Annotated[Path, typer.Argument(help="Training images: a parquet file or a folder.")],
    validation: Annotated[Path, typer.Argument(help="The same to measure on.")],
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("outputs/conversion"),
    source_epochs: Annotated[int, typer.Option(help="Epochs of the ViT, on all images.")] = 12,
    images: Annotated[int, typer.Option(help="Training images of the AFT-convs.")] = 10_000,
    minutes: Annotated[list[float], typer.Option(help="Of distillation, on all images.")] = (2, 5, 15),
) -> None:
    """Train a ViT, convert it in every way, fine-tune, and print the table."""
    keep_to_options(out / "options.json", [train.name, validation.name, source_epochs, images])
    everything = ["--train", train, "--validation", validation]
    part = [*everything, "--max_train_samples", images, "--num_train_epochs", EPOCHS]
    part += ["--learning_rate", 1e-3]
    vit = out / "vit"
    if not (out / "vit-new" / "config.json").exists():
        new_vit(out / "vit-new")
    fine_tune(out / "vit-new", vit, everything, "--num_train_epochs", source_epochs, "--learning_rate", 1e-3)

    convert = ["-m", "aft_hf.cli", "convert", vit]
    sizes = ["--kernel-size", KERNEL_SIZE, "--num-heads", NUM_HEADS]
    if not (out / "paper").exists():
        run(*convert, out / "paper", *sizes)
    if not (out / "attention").exists():
        run(*convert, out / "attention", *sizes, "--init", "attention", "--images", train, "--num-images", 256)
    if not (out / "random" / "config.json").exists():
        new_aft(out / "paper", out / "random")

    for budget in minutes:
        if not (out / f"distilled-{budget:g}").exists():
            options = ["--distill", "--images", train, "--minutes", budget, "--augmentation", "crop"]
            run(*convert, out / f"distilled-{budget:g}", *sizes, *options)

    soft = ["--teacher", vit, "--distillation", "soft", "--distillation_weight", 0.5]
    hard = ["--teacher", vit, "--distillation", "hard", "--distillation_weight", 0.5]
    runs = {
        "random weights": ("random", []),
        "paper": ("paper", []),
        "attention": ("attention", []),
        "attention, soft distillation": ("attention", soft),
        "attention, hard distillation": ("attention", hard),
        **{f"distilled for {budget:g} minutes": (f"distilled-{budget:g}", []) for budget in minutes},
    }
    results = {}
    table = Table("initialization", *(f"epoch {epoch}" for epoch in REPORTED))
    for name, (start, options) in runs.items():
        directory = out / f"fine-tuned {name}".replace(", ", "-").replace(" ", "-")
        fine_tune(out / start, directory, part, *options)
        results[name] = accuracies(directory)
        table.add_row(name, *(f"{results[name][epoch]:.1%}" for epoch in REPORTED))
        write_json(out / "results.json", {"ViT": max(accuracies(vit).items())[1], **results})
    console.print(table)
    console.print(f"The ViT itself: {max(accuracies(vit).items())[1]:.1%}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        sys.exit(f"measure_conversion.py: {error}")
