"""Measure the accuracy that a conversion keeps: by initialization, before and after fine-tuning, and by image size.

    python scripts/measure_conversion.py cifar10/train.parquet cifar10/validation.parquet --out outputs/conversion

A ViT is trained once, or given (`--source`). The following models are then fine-tuned with labels, each with three
seeds: AFT-convs converted from it as in the paper, with position biases and keys from its attention, and by
distillation without labels for 2, 5 and 15 minutes; an AFT-conv with random weights; and the ViT itself.
Distillations and random weights also differ by seed. With seed 0, models are also evaluated at other image sizes.

Trainings and conversions are separate commands, which are printed before they run. Finished ones are not repeated, so
the command resumes after an interruption. tables.md and results.json contain all results so far. With `--source` and a
copy of results.json in OUT, another machine continues. Minutes of distillation are comparable only if nothing else
runs on the machine.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState
from rich.console import Console
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTForImageClassification
from aft_hf.atomic_files import write_json
from aft_hf.console import reported
from aft_hf.data.loading import load_local
from aft_hf.loading import load, load_trained
from aft_hf.reading import read_json
from aft_hf.tuning.evaluation import evaluate_classifier


SIZES = ["--kernel-size", 7, "--num-heads", 32]  # of the AFT-convs
CLI = ["-m", "aft_hf"]
VIT, RANDOM, PAPER, ATTENTION = "the ViT", "random weights", "`--init paper`", "`--init attention`"
REPORTED = (0, 1, 2, 5)  # epochs
IMAGE_SIZES = (24, 32, 40, 48, 64)
FORMATS = {"steps": ",.0f", "KL (nats)": ".3f"}  # of columns that are not in percent
console = Console()

# The scores of one model with one seed, before or after fine-tuning, as far as they were measured:
# {"model": "the ViT", "seed": 0, "fine-tuned": true, "by epoch": {"epoch 0": 0.765, ...},
# "by image size": {"24 px": 0.7, ...}, "distillation": {"steps": 740, ...}}.
Record = dict[str, Any]


def run(*command: object) -> None:
    """Print and run a command of this project."""
    words = [str(word) for word in command]
    console.print("python", *words, markup=False, highlight=False, soft_wrap=True)
    subprocess.run([sys.executable, *words], check=True)


def fine_tune(model: Path, out: Path, *options: object) -> None:
    """Run `aft-hf finetune`, which resumes after an interruption."""
    if (out / "all_results.json").exists():
        return
    common = ["--do_train", "--do_eval", "--augmentation", "crop", "--report_to", "none", "--disable_tqdm", "true"]
    common += ["--per_device_train_batch_size", 128, "--per_device_eval_batch_size", 250, "--logging_steps", 50]
    common += ["--lr_scheduler_type", "cosine", "--warmup_steps", 0.05, "--weight_decay", 0.05]
    common += ["--save_strategy", "epoch", "--save_total_limit", 1, "--resume_from_checkpoint", "true"]
    run("-m", "aft_hf", "finetune", "--model_name_or_path", model, "--output_dir", out, *common, *options)


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
    AFTForImageClassification(load(AFTForImageClassification, like).config).save_pretrained(out)
    load(AutoImageProcessor, like).save_pretrained(out)


def convert(vit: Path, out: Path, *options: object, bf16: bool = False) -> bool:
    """Run `aft-hf convert`, with Accelerate in bf16; return False if that has been done before."""
    if (out / "conversion_report.json").exists():
        return False
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "--mixed_precision", "bf16"]
    words = [*CLI, "convert", vit, out, *SIZES, *options]
    run(*(launch + words if bf16 else words))
    return True


def distilled_name(minutes: float) -> str:
    """Return the name of the model that is distilled for this time."""
    return f"distilled for {minutes:g} minutes"


def table_order(record: Record) -> tuple[bool, float, int]:
    """Sort key: models before fine-tuning first; then the ViT, random weights, `--init paper`, `--init attention`, and
    distillations by minutes; then by seed.
    """
    name, others = record["model"], [VIT, RANDOM, PAPER, ATTENTION]
    position = others.index(name) if name in others else len(others) + float(name.split()[2])
    return record["fine-tuned"], position, record["seed"]


class Records:
    """The scores that have been measured, in `out`/results.json, and their tables in `out`/tables.md.

    Raises:
        ValueError: the results are those of other options or of another ViT.
    """

    def __init__(self, out: Path, options: dict[str, Any]):
        self.out, self.options, path = out, options, out / "results.json"
        content = read_json(path, dict[str, Any]) if path.exists() else {"options": options, "records": []}
        if content["options"] != options:
            raise ValueError(f"{path} has results of {json.dumps(content['options'])}; give another --out")
        self.all: list[Record] = content["records"]

    def has(self, model: str, seed: int, fine_tuned: bool) -> bool:
        """Whether there is such a record."""
        return any((x["model"], x["seed"], x["fine-tuned"]) == (model, seed, fine_tuned) for x in self.all)

    def add(self, record: Record) -> None:
        """Add a record, or replace that of the same model and seed, and rewrite the files."""
        self.all = sorted([x for x in self.all if table_order(x) != table_order(record)] + [record], key=table_order)
        write_json(self.out / "results.json", {"options": self.options, "records": self.all})
        (self.out / "tables.md").write_text(tables(self.all) + "\n")


def by_epoch(out: Path) -> dict[str, float]:
    """Accuracy by number of finished epochs, from the log of Trainer."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {f"epoch {entry['epoch']:.0f}": entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}


def by_image_size(directory: Path, data: Path) -> dict[str, float]:
    """Accuracy at each of `IMAGE_SIZES`, as `aft-hf evaluate --image-size` measures it."""
    model = load_trained(AutoModelForImageClassification, str(directory), dtype="float32").to(PartialState().device)
    processor, rows = load(AutoImageProcessor, directory), load_local(data)
    scores = {}
    for side in IMAGE_SIZES:
        metrics = evaluate_classifier(model, processor, rows, image_size=(side, side), batch_size=250)
        scores[f"{side} px"] = metrics["accuracy"]
    return scores


def distillation_losses(out: Path) -> dict[str, float]:
    """Steps of a distillation, and the running means of its losses at the end, by column."""
    record = json.loads((out / "conversion_report.json").read_text())["options"]["distillation"]
    errors = record["hidden_state_errors"]
    columns = ["embeddings", *(f"layer {number}" for number in range(1, len(errors)))]
    losses = {"steps": record["steps"], "KL (nats)": record["divergence"], "agreement": record["agreement"]}
    return losses | dict(zip(columns, errors, strict=True))


def mean_and_spread(values: list[float], spec: str = ".1%") -> str:
    """The mean, and for several values also the smallest and the largest; percent signs only after the mean."""
    text = f"{sum(values) / len(values):{spec}}".replace("%", " %")
    low, high = (f"{value:{spec}}".removesuffix("%") for value in (min(values), max(values)))
    return text if len(values) == 1 else f"{text} ({low}-{high})"


def table(records: list[Record], kind: str, columns: Sequence[str]) -> str:
    """A Markdown table of one kind of scores, with a row for each model, over its seeds."""
    lines = [f"| {' | '.join(['model', *columns])} |", "|---|" + "---:|" * len(columns)]
    rows: dict[str, list[dict[str, float]]] = {}
    for record in records:
        if kind in record:
            # By epoch, all models are fine-tuned, and epoch 0 is before it.
            suffix = ", fine-tuned" if record["fine-tuned"] and kind == "by image size" else ""
            rows.setdefault(record["model"] + suffix, []).append(record[kind])
    for name, scores in rows.items():
        cells = [mean_and_spread([each[key] for each in scores], FORMATS.get(key, ".1%")) for key in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def tables(records: list[Record]) -> str:
    """Tables of the accuracy by epoch and by image size, and of the losses of the distillations, if there are any."""
    columns = {
        "by epoch": [f"epoch {epoch}" for epoch in REPORTED],
        "distillation": next((list(record["distillation"]) for record in records if "distillation" in record), []),
        "by image size": [f"{side} px" for side in IMAGE_SIZES],
    }
    present = {kind: names for kind, names in columns.items() if any(kind in record for record in records)}
    return "\n\n".join(table(records, kind, names) for kind, names in present.items())


def main(
    train: Annotated[Path, typer.Argument(help="Training images: a parquet file or a folder.")],
    validation: Annotated[Path, typer.Argument(help="Validation images: a parquet file or a folder.")],
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/conversion"),
    source: Annotated[Path | None, typer.Option(help="Directory of a trained ViT. Default: train one.")] = None,
    source_epochs: Annotated[int, typer.Option(help="Epochs of the ViT without --source.")] = 60,
    images: Annotated[int | None, typer.Option(help="Number of training images. Default: all.")] = None,
    minutes: Annotated[list[float], typer.Option(help="Minutes of distillation; may be repeated.")] = (2, 5, 15),
    seed: Annotated[list[int], typer.Option(help="Seeds of the students; may be repeated.")] = (0, 1, 2),
    bf16: Annotated[bool, typer.Option(help="Train in bfloat16, on machines that are fast at it.")] = False,
) -> None:
    """Train a ViT, convert it in every way, fine-tune, and write OUT/tables.md and OUT/results.json."""
    data = ["--train", train, "--validation", validation]
    data += ["--max_train_samples", images] if images else []
    # In bfloat16 on a CPU, eager attention trains this ViT 1.6 times as fast as scaled_dot_product_attention.
    data += ["--bf16", "--use_cpu", "--attn_implementation", "eager"] if bf16 else []
    vit, paper, attention = source or out / "vit", out / "paper", out / "attention"
    if source is None:
        new_vit(out / "vit-new")
        recipe = ["--num_train_epochs", source_epochs, "--learning_rate", 1e-3, "--label_smoothing_factor", 0.1]
        fine_tune(out / "vit-new", vit, *data, *recipe)
    digest = hashlib.sha256((vit / "model.safetensors").read_bytes()).hexdigest()
    options = {"data": [train.name, validation.name], "images": images, "bf16": bf16, "ViT": digest}
    records = Records(out, options)
    if not records.has(VIT, 0, False):
        scores = by_image_size(vit, validation)
        records.add({"model": VIT, "seed": 0, "fine-tuned": False, "by image size": scores})

    budgets = {distilled_name(budget): budget for budget in minutes}
    for number in seed:
        left = [name for name in (VIT, RANDOM, PAPER, ATTENTION, *budgets) if not records.has(name, number, True)]
        starts = {VIT: vit, RANDOM: out / f"random-{number}", PAPER: paper, ATTENTION: attention}
        starts |= {name: out / f"distilled-{budget:g}-{number}" for name, budget in budgets.items()}
        if PAPER in left or RANDOM in left:
            convert(vit, paper)
        if RANDOM in left:
            new_aft(paper, starts[RANDOM], number)
        if ATTENTION in left:
            convert(vit, attention, "--init", "attention", "--images", train, "--num-images", 256)
        for name in [name for name in left if name in budgets]:
            distil = ["--distill", "--images", train, "--minutes", budgets[name], "--seed", number]
            distil += ["--augmentation", "crop", "--augmentation-probability", 1]  # as the ViT was trained
            if convert(vit, starts[name], *distil, bf16=bf16) or not records.has(name, number, False):
                losses = distillation_losses(starts[name])
                record = {"model": name, "seed": number, "fine-tuned": False, "distillation": losses}
                if number == 0:
                    record["by image size"] = by_image_size(starts[name], validation)
                records.add(record)
        for name in left:
            start = "vit" if name == VIT else starts[name].name.removesuffix(f"-{number}")
            tuned = out / "fine-tuned" / f"{start}-{number}"
            recipe = ["--num_train_epochs", max(REPORTED), "--learning_rate", 5e-4, "--seed", number]
            recipe += ["--eval_strategy", "epoch", "--eval_on_start", "true"]
            fine_tune(starts[name], tuned, *data, *recipe)
            record = {"model": name, "seed": number, "fine-tuned": True, "by epoch": by_epoch(tuned)}
            if number == 0:
                record["by image size"] = by_image_size(tuned, validation)
            records.add(record)
    console.print(tables(records.all), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    with reported("measure_conversion.py"):
        typer.run(main)
