"""Quickstart: train, convert, save and reload small models on real data, offline.

    python scripts/quickstart.py image    # convert and fine-tune a ViT
    python scripts/quickstart.py text     # train a language model
    python scripts/quickstart.py pixels   # train a model of small images

`make quickstart`, `make quickstart-text` and `make quickstart-pixels` install the requirements first.
"""

import copy
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
    set_seed,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import AFTConfig, AFTForCausalLM, build_byte_tokenizer
from aft_hf.analysis import plot_position_biases
from aft_hf.configuration_aft import pair
from aft_hf.console import no_bars_in_logs, reported
from aft_hf.conversion import REPORT_NAME, ImagesOnDisk, adapt_to_image_size, read_images, save_converted
from aft_hf.running.checkpoints import remove_checkpoints
from aft_hf.running.ownership import join_processes, owned
from aft_hf.training import build_optimizer
from aft_hf.training.loop import train as train_recipe
from aft_hf.training.recipe import load_recipe


app = typer.Typer(add_completion=False, help=__doc__)
console = Console()

IMAGE_SIZE, LARGER_SIZE, PATCH_SIZE = 32, 40, 4
CONFIGS = Path(__file__).parents[1] / "configs"
DIGIT_SIZE = 8  # pixels of a side, as in scikit-learn
DISTILLATION_STEPS, DISTILLATION_RATE = 672, 2e-3  # 16 epochs
Short = Annotated[bool, typer.Option("--short", help="Only check that every step runs: the models learn nothing.")]
LABELS = {"id2label": {i: str(i) for i in range(10)}, "label2id": {str(i): i for i in range(10)}}


def _done(started: float, short: bool, closing: str = "") -> None:
    """Print how long the command took, and after `--short` that its numbers mean nothing."""
    if short:
        console.print(
            "[bold]--short only checks that every step runs: the models have hardly been trained, and the numbers "
            "above say nothing about AFT.[/] The same command without --short trains them."
        )
    console.print(f"Done in {time.perf_counter() - started:.0f} s.{closing}")


@app.callback()
def log_without_bars() -> None:
    # No docstring: on a callback of typer, it would replace the description in --help.
    no_bars_in_logs()


# ----------------------------------------------------------------------------------------------------------- images


@app.command()
def image(
    source: Annotated[str | None, typer.Option(help="A ViT or DeiT to convert instead of training one.")] = None,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/quickstart"),
    short: Short = False,
) -> None:
    """Convert a ViT to AFT-conv on scikit-learn's 1,797 handwritten digits, with labels and by distillation."""
    started = time.perf_counter()
    set_seed(0)
    train, test = _digits()
    train = train[:256] if short else train
    processor = ViTImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    for split, pairs in (("train", train), ("test", test)):
        _save_images(pairs, out / "digits" / f"{split}.parquet")

    teacher, training = None, {}
    if source is None:
        console.rule("1. Training a ViT from random weights")
        teacher = ViTForImageClassification(_vit_config())
        source = str(out / "vit")
        training[Path(source)] = _fine_tune(teacher, _pixels(train, processor), epochs=2 if short else 25, out=out)
        teacher.save_pretrained(source)
        processor.save_pretrained(source)

    console.rule("2. Converting it to AFT-conv")
    converted_path, distilled_path, conversion = out / "converted", out / "aft-conv-distilled", {"kernel_size": 7}
    for earlier in (converted_path, distilled_path):
        if (earlier / REPORT_NAME).exists():
            shutil.rmtree(earlier)
    conversion |= {} if teacher is None else {"num_heads": 12}  # 12 divides the width of our ViT
    converted, report = save_converted(source, converted_path, **conversion)
    console.print(report.summary())
    processor = AutoImageProcessor.from_pretrained(converted_path)
    size, patch = pair(converted.config.image_size)[0], pair(converted.config.patch_size)[0]
    larger = size * LARGER_SIZE // IMAGE_SIZE // patch * patch
    converted = AutoModelForImageClassification.from_pretrained(converted_path, **LABELS, ignore_mismatched_sizes=True)

    console.rule("3. Fine-tuning with labels, and training from random weights")
    pixels, budget = _pixels(train, processor), {"epochs": 1 if short else 6, "out": out}
    tuned_path = out / "aft-conv"
    training[tuned_path] = _fine_tune(converted, pixels, **budget)
    converted.save_pretrained(tuned_path)
    processor.save_pretrained(tuned_path)
    shutil.copy(converted_path / REPORT_NAME, tuned_path)
    scratch = AutoModelForImageClassification.from_config(converted.config)
    scratch_path = out / "aft-conv-scratch"
    training[scratch_path] = _fine_tune(scratch, pixels, **budget)
    scratch.save_pretrained(scratch_path)
    processor.save_pretrained(scratch_path)
    rows = [("AFT-conv, fine-tuned", converted, tuned_path), ("AFT-conv, random", scratch, scratch_path)]
    if teacher is not None:  # another source has other classes
        console.rule("4. Distilling the ViT without labels")
        steps = 20 if short else DISTILLATION_STEPS
        unlabeled = out / "digits" / "train.parquet"
        distillation = {"images": ImagesOnDisk(unlabeled), "steps": steps, "learning_rate": DISTILLATION_RATE}
        conversion |= {"init": "attention", "images": read_images(unlabeled, 256), "distillation": distillation}
        distilled, report = save_converted(source, distilled_path, **conversion)
        done = report.options["distillation"]
        console.print(f"agrees with the ViT on {done['agreement']:.1%} of the images of the last steps")
        training[distilled_path] = {f"distillation_{name}": done[name] for name in ("steps", "minutes", "divergence")}
        rows = [("ViT, the source", teacher, Path(source)), ("AFT-conv, distilled", distilled, distilled_path), *rows]
    picture = out / "position_biases.png"
    plot_position_biases(converted, picture)

    console.rule("5. Evaluating on held-out images")
    table = Table(title=f"Accuracy on {len(test)} held-out digits", caption=f"saved in {out}")
    for column in ("model", "parameters", f"{size} px", f"{larger} px", "images/s", "directory"):
        table.add_column(column, justify="left" if column in ("model", "directory") else "right", overflow="fold")
    sizes = [_pixels(test, processor), _pixels(test, processor, larger)]
    expected = {}
    for name, model, path in rows:
        (accuracy, speed), (accuracy_larger, _) = (_evaluate(model, data) for data in sizes)
        numbers = f"{model.num_parameters() / 1e6:.2f} M", f"{accuracy:.1%}", f"{accuracy_larger:.1%}", f"{speed:.0f}"
        table.add_row(name, *numbers, str(path.relative_to(out) if path.is_relative_to(out) else path))
        expected[path] = accuracy
        _save_results(path, **training[path], eval_accuracy=accuracy, eval_samples=len(test))
    console.print(table)
    console.print(f"Learned position biases: {picture}")

    console.rule("6. Loading the model in a new process")
    check = [sys.executable, __file__, "check-image", str(tuned_path), str(expected[tuned_path])]
    subprocess.run(check, check=True)
    _done(started, short)


@app.command(hidden=True)
def check_image(path: Path, expected: float) -> None:
    """Load a saved classifier with the Auto classes and `pipeline`, and check its accuracy."""
    _, test = _digits()
    model = AutoModelForImageClassification.from_pretrained(path)
    accuracy, _ = _evaluate(model, _pixels(test, AutoImageProcessor.from_pretrained(path)))
    if abs(accuracy - expected) > 1e-6:
        sys.exit(f"the reloaded model has accuracy {accuracy}, not {expected}")
    answer = pipeline("image-classification", model=str(path))(test[0][0])[0]
    console.print(f"{type(model).__name__} from {path}: accuracy {accuracy:.1%}, as before")
    console.print(f"pipeline: a {test[0][1]} is classified as {answer['label']!r} (score {answer['score']:.2f})")


def _digits() -> tuple[list[tuple[Image.Image, int]], list[tuple[Image.Image, int]]]:
    """Training and held-out pairs of an 8 x 8 image and its digit, split as scikit-learn does."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = [Image.fromarray((pixels * 255 / 16).astype(np.uint8)).convert("RGB") for pixels in digits.images]
    pairs = list(zip(images, digits.target.tolist()))
    train, test = train_test_split(pairs, test_size=0.25, random_state=0, stratify=digits.target)
    return train, test


def _save_images(pairs: list[tuple[Image.Image, int]], path: Path) -> None:
    """Write a parquet file of images and named labels, as `datasets` and the other scripts read it."""
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(LABELS["label2id"]))})
    pictures, labels = zip(*pairs)
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict({"image": pictures, "label": labels}, features).to_parquet(str(path))


def _save_results(path: Path, **results: float) -> None:
    """Write the results file of Trainer, from which `aft-hf publish` fills the card."""
    (path / "all_results.json").write_text(json.dumps(results, indent=4, sort_keys=True) + "\n")


def _vit_config() -> ViTConfig:
    """A ViT that trains within minutes on two cores."""
    return ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=96,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=384,
        **LABELS,
    )


def _pixels(pairs, processor, size: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Samples for Trainer: pixel values from the processor, at another size if given, and labels."""
    options = {} if size is None else {"size": {"height": size, "width": size}, "do_center_crop": False}
    pixels = processor([picture for picture, _ in pairs], return_tensors="pt", **options)["pixel_values"]
    return [{"pixel_values": image, "labels": label} for image, (_, label) in zip(pixels, pairs)]


def _fine_tune(model: PreTrainedModel, data: list, *, epochs: int, out: Path) -> dict[str, float]:
    """Train with labels like any model of transformers, and return Trainer's metrics: seconds, loss, epochs."""
    options = {"learning_rate": 1e-3, "weight_decay": 0.05, "per_device_train_batch_size": 32}
    arguments = _arguments(out, num_train_epochs=epochs, logging_strategy="epoch", **options)
    return Trainer(model, arguments, train_dataset=data).train().metrics


def _arguments(out: Path, **options) -> TrainingArguments:
    """The arguments of Trainer that images and text have in common."""
    return TrainingArguments(
        output_dir=str(out / "trainer"),
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        use_cpu=True,  # the measurements are on the CPU
        save_strategy="no",
        disable_tqdm=not sys.stderr.isatty(),  # a log gets a line per report, not a bar per step
        report_to="none",
        seed=0,
        **options,
    )


@torch.inference_mode()
def _evaluate(model: PreTrainedModel, data: list, batch_size: int = 50) -> tuple[float, float]:
    """Accuracy, and images per second (median over batches)."""
    model.eval()
    options, size = {}, tuple(data[0]["pixel_values"].shape[1:])
    if size != pair(model.config.image_size):  # resize the position embeddings, or kernels and patches
        if isinstance(model, ViTForImageClassification):
            options["interpolate_pos_encoding"] = True
        else:
            model = copy.deepcopy(model)
            adapt_to_image_size(model, size)
    correct, seconds = 0, []
    for start in range(0, len(data), batch_size):
        batch = data[start : start + batch_size]
        pixels = torch.stack([row["pixel_values"] for row in batch])
        began = time.perf_counter()
        predictions = model(pixel_values=pixels, **options).logits.argmax(-1)
        seconds.append((time.perf_counter() - began) / len(batch))
        correct += sum(p == row["labels"] for p, row in zip(predictions.tolist(), batch))
    return correct / len(data), 1 / float(np.median(seconds))


# ------------------------------------------------------------------------------------------------------------- text


@app.command()
def text(
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/quickstart-text"),
    short: Short = False,
) -> None:
    """Train a byte-level AFT-local on the documentation that comes with Python (465 kB)."""
    started = time.perf_counter()
    set_seed(0)
    length = 256
    train, test = _documentation()
    tokenizer = build_byte_tokenizer(model_max_length=length)
    config = AFTConfig(
        hidden_size=128,
        num_hidden_layers=4,
        max_position_embeddings=length,
        position_bias_dim=64,
        window_size=32,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AFTForCausalLM(config)

    console.rule("1. Training on the documentation of Python")
    steps = 20 if short else 300
    arguments = _arguments(out, max_steps=steps, per_device_train_batch_size=16, logging_steps=0.1)
    optimizer = build_optimizer(model, 3e-3, weight_decay=0.1)
    windows = [{"input_ids": window, "labels": window} for window in train.unfold(0, length, length // 2)]
    trainer = Trainer(model, arguments, train_dataset=windows, optimizers=(optimizer, None))
    training = trainer.train().metrics
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    console.rule("2. Evaluating on the held-out tenth")
    bits = _bits_per_byte(model, test, length)
    table = Table("model", "parameters", "bits per byte", "saved in")
    _save_results(out, **training, eval_bits_per_byte=bits)
    table.add_row("AFT-local-32", f"{model.num_parameters() / 1e6:.2f} M", f"{bits:.3f}", str(out))
    console.print(table)

    console.rule("3. Loading the model in a new process")
    subprocess.run([sys.executable, __file__, "check-text", str(out), str(bits)], check=True)
    _done(started, short)


@app.command(hidden=True)
def check_text(path: Path, expected: float) -> None:
    """Load a saved language model with the Auto classes, check its bits per byte, and generate a sample."""
    set_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    _, test = _documentation()
    bits = _bits_per_byte(model, test, model.config.max_position_embeddings)
    if abs(bits - expected) > 1e-5:
        sys.exit(f"the reloaded model has {bits} bits per byte, not {expected}")
    console.print(f"{type(model).__name__} from {path}: {bits:.3f} bits per byte, as before. A sample:\n")
    prompt = tokenizer("The ", return_tensors="pt")
    sample = model.generate(**prompt, max_new_tokens=200, do_sample=True, temperature=0.7)
    console.print(tokenizer.decode(sample[0]), markup=False, highlight=False, style="cyan")


def _documentation() -> tuple[torch.Tensor, torch.Tensor]:
    """The training bytes, and the last tenth as the held-out set."""
    from pydoc_data.topics import topics

    data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]


@torch.inference_mode()
def _bits_per_byte(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float:
    """Mean code length of every byte but the first of each window; windows do not overlap."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [model(input_ids=batch, labels=batch).loss.item() * len(batch) for batch in windows.split(32)]
    return sum(losses) / len(windows) / math.log(2)


# ----------------------------------------------------------------------------------------------------------- pixels


@app.command()
def pixels(
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("outputs/quickstart-pixels"),
    short: Short = False,
) -> None:
    """Train AFT-local from a recipe on handwritten digits as sequences of 192 sub-pixels."""
    started = time.perf_counter()
    files = []
    for split, pairs in zip(("train", "validation"), _digits()):
        files.append(f"data.{split}={out / 'digits' / split}.parquet")
        _save_images(pairs, out / "digits" / f"{split}.parquet")
    changes = {
        "model": {"hidden_size": 96, "num_hidden_layers": 4, "position_bias_dim": 32, "window_size": 48},
        "data": {"image_size": DIGIT_SIZE, "flip": "false"},
        "schedule": {"warmup_steps": 40},
    }
    steps = 20 if short else 300
    overrides = [f"{section}.{name}={value}" for section, values in changes.items() for name, value in values.items()]
    overrides += [f"steps={steps}", f"evaluate_every={steps}", f"save_every={steps}", "global_batch_size=16"]
    recipe = load_recipe(CONFIGS / "examples" / "pixels_aft_local.yaml", [*files, *overrides, f"output_dir={out}"])
    join_processes()
    with owned(out, out / "checkpoints"):  # no other run is using them
        remove_checkpoints(out / "checkpoints")  # do not resume an earlier run
    results = train_recipe(recipe)
    again = AutoModelForCausalLM.from_pretrained(out)
    if again.num_parameters() != results["parameters"]:
        sys.exit(f"the reloaded model has {again.num_parameters()} parameters, not {results['parameters']}")
    table = Table("model", "parameters", "bits per sub-pixel", "saved in")
    bits = results["metrics"]["validation"]["bits_per_dim"]
    table.add_row("AFT-local-48", f"{results['parameters'] / 1e6:.2f} M", f"{bits:.3f}", str(out))
    console.print(table)
    _done(started, short, f" To see it: make demo ARGS='--model {out}'")


if __name__ == "__main__":
    with reported("quickstart.py"):
        app()
