"""The commands `aft-hf train` and `aft-hf evaluate`. Slow imports are inside the functions, to start quickly."""

from pathlib import Path
from typing import Annotated

import typer


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe in YAML; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides as key=value, such as optimizer.learning_rate=1e-3.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Apply the section smoke of the recipe, for a run of a few seconds.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved recipe, and stop.")] = False,
) -> None:
    """Train a model from a recipe, or resume an interrupted run."""
    from .recipe import load_recipe

    resolved = load_recipe(recipe, overrides or (), smoke=smoke)
    if print_config:
        print(resolved.to_yaml(), end="")
        return
    from .loop import train  # slow to import; errors in a recipe should not wait for it

    train(resolved)


def evaluate_command(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a model: AFT, ViT, DeiT, GPT-2 ...")],
    data: Annotated[Path, typer.Argument(help="A folder of images with a folder per class, or a data file.")],
    image_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Side of the images in pixels; may be repeated. Default: as trained."),
    ] = None,
    stretch_kernels: Annotated[
        bool,
        typer.Option(
            "--stretch-kernels/--keep-kernels",
            help="With --image-size: stretch the kernels of AFT-conv with the image, or keep them as trained.",
        ),
    ] = True,
    enlarge_patches: Annotated[
        bool,
        typer.Option(
            "--enlarge-patches/--keep-patches",
            help="With --image-size: enlarge the patches of AFT-conv with the image, so that they overlap, or keep "
            "them as trained.",
        ),
    ] = True,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block of text. Default: the maximum length of the model.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="New tokens per block; the others are context. Default: all tokens are new.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images or blocks per forward pass.")] = 64,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only this many rows, the first ones.")
    ] = None,
    image_column: Annotated[str, typer.Option(help="Column of the images.")] = "image",
    label_column: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    text_column: Annotated[str, typer.Option(help="Column of the texts.")] = "text",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps ... Default: the accelerator, else the CPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the metrics to this JSON file.")] = None,
) -> None:
    """Evaluate a saved transformers model: accuracy and loss on images, or bits per byte and token on text."""
    from datasets import DatasetDict
    from rich.table import Table
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoTokenizer,
    )

    from .. import baselines  # noqa: F401  (registers them with the Auto classes)
    from ..conversion.source import load_image_processor
    from ..data.json_files import write_json
    from ..data.loading import load_local, require_column
    from ..loading import load, load_trained
    from ..progress import plain_console
    from ..reading import explained
    from .evaluation import (
        evaluate_classifier,
        evaluate_language_model,
        is_image_classifier,
        own_block_size,
        usable_device,
    )

    place = usable_device(device)
    dataset = load_local(data)
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    config = load(AutoConfig, model)
    results: dict[str, dict[str, float]] = {}
    if is_image_classifier(config):
        classifier = load_trained(AutoModelForImageClassification, model, config=config).to(place)
        processor = load_image_processor(model, config)
        columns = {"image_column": image_column, "label_column": label_column}
        for column, name in columns.items():
            require_column(DatasetDict(given=dataset), name, f"--{column.replace('_', '-')}")
        sides: list[int | None] = [*image_size] if image_size else [None]
        for side in sides:
            size = None if side is None else (side, side)
            name = "as trained" if side is None else f"{side} px"
            with explained(f"{model}: cannot be evaluated on {data}"):
                results[name] = evaluate_classifier(
                    classifier,
                    processor,
                    dataset,
                    image_size=size,
                    stretch_kernels=stretch_kernels,
                    enlarge_patches=enlarge_patches,
                    batch_size=batch_size,
                    **columns,
                )
    else:
        language_model = load_trained(AutoModelForCausalLM, model, config=config).to(place)
        tokenizer = load(AutoTokenizer, model)
        require_column(DatasetDict(given=dataset), text_column, "--text-column")
        block_size = own_block_size(config, tokenizer) if block_size is None else block_size
        with explained(f"{model}: cannot be evaluated on {data}"):
            results[f"blocks of {block_size}"] = evaluate_language_model(
                language_model,
                tokenizer,
                dataset,
                block_size=block_size,
                stride=stride,
                batch_size=batch_size,
                text_column=text_column,
            )
    metrics = list(next(iter(results.values())))
    table = Table("", *metrics, title=f"{model} on {data}")
    for name, values in results.items():
        table.add_row(name, *(f"{values[metric]:.4f}" for metric in metrics))
    plain_console().print(table)
    if out is not None:
        write_json(out, results)
