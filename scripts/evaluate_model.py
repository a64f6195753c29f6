"""Accuracy, or bits per token, of any saved model of transformers on any data.

python scripts/evaluate_model.py outputs/quickstart/aft-conv test.parquet --image-size 32 --image-size 40
python scripts/evaluate_model.py outputs/quickstart-text test.txt --block-size 256

(Named evaluate.py, it would hide the library `evaluate` from all scripts beside it.)
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)

import aft_hf  # noqa: F401 (makes AFT known to the Auto classes)
from aft_hf.data.loading import load_local
from aft_hf.training.evaluation import evaluate_classifier, evaluate_language_model


def main(
    model: Annotated[str, typer.Argument(help="Directory or Hub id: AFT, ViT, DeiT, GPT-2 ...")],
    data: Annotated[Path, typer.Argument(help="A folder of images with a folder per class, or a file.")],
    image_size: Annotated[
        list[int] | None,
        typer.Option(help="Side of the images in pixels, as often as you like; by default as trained."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block of text.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Images or blocks per forward pass.")] = 64,
    max_samples: Annotated[int | None, typer.Option(help="Use the first rows only.")] = None,
    image_column: Annotated[str, typer.Option(help="Column of the images.")] = "image",
    label_column: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    text_column: Annotated[str, typer.Option(help="Column of the texts.")] = "text",
    out: Annotated[Path | None, typer.Option(help="Write the metrics here, too, as JSON.")] = None,
) -> None:
    """Print the metrics of a saved model."""
    dataset = load_local(data)
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    config = AutoConfig.from_pretrained(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, float]] = {}
    if getattr(config, "modality", None) != "text" and type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        classifier = AutoModelForImageClassification.from_pretrained(model).to(device)
        processor = AutoImageProcessor.from_pretrained(model)
        options = {"batch_size": batch_size, "image_column": image_column, "label_column": label_column}
        for side in image_size or [None]:
            size = None if side is None else (side, side)
            name = "as trained" if side is None else f"{side} px"
            results[name] = evaluate_classifier(classifier, processor, dataset, image_size=size, **options)
    else:
        language_model = AutoModelForCausalLM.from_pretrained(model).to(device)
        tokenizer = AutoTokenizer.from_pretrained(model)
        options = {"block_size": block_size, "batch_size": batch_size, "text_column": text_column}
        results[f"blocks of {block_size}"] = evaluate_language_model(language_model, tokenizer, dataset, **options)
    metrics = list(next(iter(results.values())))
    table = Table("", *metrics, title=f"{model} on {data}")
    for name, values in results.items():
        table.add_row(name, *(f"{values[metric]:.4f}" for metric in metrics))
    Console().print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_suffix(".tmp")
        aside.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(aside, out)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate_model.py: {' '.join(str(error).split())}")
