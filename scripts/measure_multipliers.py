"""Measure which multiplier of the position biases suits a plain Trainer, by learning rate.

    make quickstart
    python scripts/measure_multipliers.py outputs/quickstart/vit outputs/quickstart/digits

The ViT is converted to AFT-conv with each multiplier and fine-tuned with labels by Trainer and its default optimizer,
with every learning rate and seed. The table has the accuracy on the test images. Results are written after each run,
and runs that the JSON file has are not repeated.
"""

import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import load_dataset
from transformers import AutoImageProcessor, Trainer, TrainingArguments, set_seed

from aft_hf.conversion import save_converted
from aft_hf.data.json_files import write_json


Samples = list[dict[str, Any]]


def read_samples(path: Path, processor: Any) -> Samples:
    """Pixel values and labels of a parquet file, as samples for Trainer."""
    data = load_dataset("parquet", data_files=str(path), split="train")
    pixels = processor(data["image"][:], return_tensors="pt")["pixel_values"]
    return [{"pixel_values": image, "labels": label} for image, label in zip(pixels, data["label"])]


def accuracy_of(source: Path, digits: Path, multiplier: float, rate: float, seed: int, epochs: int) -> float:
    """Convert the source, fine-tune the result, and return its accuracy on the test images."""
    set_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"kernel_size": 7, "num_heads": 12}
        model, _ = save_converted(source, Path(folder) / "model", position_bias_multiplier=multiplier, **sizes)
        processor = AutoImageProcessor.from_pretrained(Path(folder) / "model")
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            learning_rate=rate,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=50,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
        )
        train, test = (read_samples(digits / f"{split}.parquet", processor) for split in ("train", "test"))
        trainer = Trainer(
            model,
            arguments,
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=lambda found: {
                "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
            },
        )
        trainer.train()
        return trainer.evaluate()["eval_accuracy"]


def table(results: dict[str, float], multipliers: list[float], rates: list[float]) -> str:
    """A Markdown table of the mean over the seeds and, for several, the smallest and the largest."""
    lines = [f"| multiplier | {' | '.join(f'lr {rate:g}' for rate in rates)} |", "|---:|" + "---:|" * len(rates)]
    for multiplier in multipliers:
        cells = []
        for rate in rates:
            found = [value for key, value in results.items() if key.startswith(f"{multiplier:g} {rate:g} ")]
            spread = f" ({100 * min(found):.1f}-{100 * max(found):.1f})" if len(found) > 1 else ""
            cells.append(f"{100 * statistics.mean(found):.1f} %{spread}" if found else "")
        lines.append(f"| {multiplier:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    source: Annotated[Path, typer.Argument(help="A ViT that was trained on the images.")],
    digits: Annotated[Path, typer.Argument(help="Folder with train.parquet and test.parquet.")],
    multiplier: Annotated[list[float], typer.Option(help="May be repeated.")] = (1000, 2000, 3000, 5000),
    learning_rate: Annotated[list[float], typer.Option(help="May be repeated.")] = (1e-3, 3e-4, 1e-4),
    seed: Annotated[list[int], typer.Option(help="May be repeated.")] = (0, 1, 2),
    epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning.")] = 6,
    json_path: Annotated[Path, typer.Option("--json", help="Results.")] = Path("outputs/multipliers.json"),
) -> None:
    """Fine-tune with every multiplier, learning rate and seed, and print the table."""
    results: dict[str, float] = json.loads(json_path.read_text()) if json_path.exists() else {}
    for number, each, rate in itertools.product(seed, multiplier, learning_rate):
        key = f"{each:g} {rate:g} {number}"
        if key not in results:
            results[key] = accuracy_of(source, digits, each, rate, number, epochs)
            print(f"multiplier {each:g}, learning rate {rate:g}, seed {number}: {results[key]:.1%}", flush=True)
            write_json(json_path, results)
    print(f"\n{table(results, list(multiplier), list(learning_rate))}\n\ntorch {torch.__version__}")


if __name__ == "__main__":
    typer.run(main)
