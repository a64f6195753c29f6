"""The commands `aft-hf train`, `finetune` and `evaluate`. Slow imports are inside the functions, to start quickly."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import typer

from ..console import refuse_unused


def train_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe in YAML; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, as in optimizer.learning_rate=1e-3.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Apply the recipe's section smoke, for a short run.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the resolved recipe, and stop.")] = False,
) -> None:
    """Train a model from a recipe, or resume an interrupted run.

    For several processes: accelerate launch -m aft_hf train RECIPE ...
    """
    from ..training.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or (), smoke=smoke)
    if print_config:
        print(resolved.to_yaml(), end="")
        return
    from ..training.loop import train  # slow to import; errors in a recipe should not wait for it

    train(resolved)


OF_DISTILLATION = ("distillation", "distillation_weight", "distillation_temperature")
# Options of `finetune_command`, by the panel of its help.
in_model, in_data, in_training, in_distillation = (
    partial(typer.Option, rich_help_panel=name) for name in ("Model", "Data", "Training", "Distillation")
)


def finetune_command(
    context: typer.Context,
    model_name_or_path: Annotated[str, in_model(help="Directory or Hub id: an AFT, a ViT ...")],
    revision: Annotated[str, in_model(help="Branch, tag or commit on the Hub.")] = "main",
    trust_remote_code: Annotated[bool, in_model("--trust-remote-code", help="Run code of the model.")] = False,
    attn_implementation: Annotated[str | None, in_model(help="Attention of a ViT: sdpa, eager ...")] = None,
    train: Annotated[str | None, in_data(help="Training data: a folder of images, or a parquet file.")] = None,
    validation: Annotated[str | None, in_data(help="Validation data, as for --train.")] = None,
    validation_share: Annotated[float, in_data(min=0, max=0.99, help="Share held out without --validation.")] = 0.05,
    dataset_name: Annotated[str | None, in_data(help="In place of --train: a dataset on the Hub or here.")] = None,
    dataset_config_name: Annotated[str | None, in_data(help="Configuration of the dataset.")] = None,
    max_train_samples: Annotated[int | None, in_data(min=1, help="Train on at most this many random images.")] = None,
    max_eval_samples: Annotated[int | None, in_data(min=1, help="The same for evaluation.")] = None,
    image_column: Annotated[str, in_data(help="Column of the images.")] = "image",
    label_column: Annotated[str, in_data(help="Column of the labels.")] = "label",
    augmentation: Annotated[str, in_data(help="none, shift, crop or resized_crop.")] = "none",
    position_bias_scale: Annotated[float, in_training(help="Factor on the learning rate of position biases.")] = 1.0,
    teacher: Annotated[str | None, in_distillation(help="ViT or DeiT of the same classes and normalization.")] = None,
    distillation: Annotated[Literal["soft", "hard"], in_distillation(help="Loss, as in DeiT.")] = "soft",
    distillation_weight: Annotated[float, in_distillation(help="Weight of the teacher in the loss.")] = 0.5,
    distillation_temperature: Annotated[float, in_distillation(help="Temperature of soft distillation.")] = 3.0,
) -> dict[str, float]:
    """Fine-tune an AFT, or any image classifier of transformers, on labeled images.

    All options of TrainingArguments of transformers work, too: --do-train,
    --do-eval, --output-dir (default: trainer_output), --num-train-epochs (3),
    --max-steps, --learning-rate (5e-5), --per-device-train-batch-size (8),
    --resume-from-checkpoint (a checkpoint; true: the newest), --bf16 ...
    """
    from ..tuning.fine_tuning import finetune, parse_arguments

    refuse_unused(context, {} if teacher else dict.fromkeys(OF_DISTILLATION, "--teacher"))
    return finetune(SimpleNamespace(**context.params), parse_arguments(context.args))


# Options of `evaluate_command`, by the panel of its help.
of_images, of_text = (partial(typer.Option, rich_help_panel=name) for name in ("Images", "Text"))


def evaluate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a model: AFT, ViT, DeiT, GPT-2 ...")],
    data: Annotated[Path, typer.Argument(help="A folder of images by class, or a parquet, csv, json or text file.")],
    image_size: Annotated[list[int] | None, of_images(min=1, help="Side in pixels; may be repeated.")] = None,
    enlarge_patches: Annotated[
        bool, of_images("--enlarge-patches/--keep-patches", help="Resize patches of AFT-conv for --image-size.")
    ] = True,
    image_column: Annotated[str, of_images(help="Column of the images.")] = "image",
    label_column: Annotated[str, of_images(help="Column of the labels.")] = "label",
    block_size: Annotated[int | None, of_text(min=1, help="Tokens per block. Default: the model's, or 1024.")] = None,
    stride: Annotated[int | None, of_text(min=1, help="New tokens per block; others are context.")] = None,
    text_column: Annotated[str, of_text(help="Column of the texts.")] = "text",
    batch_size: Annotated[int, typer.Option(min=1, help="Images or blocks per forward pass.")] = 64,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Only this many random images or first rows.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps ... Default: the accelerator.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the metrics to this JSON file.")] = None,
) -> None:
    """Evaluate a saved transformers model: accuracy and loss on images, or bits per byte and token on text."""
    from ..tuning.evaluation import evaluate

    evaluate(SimpleNamespace(context=context, **context.params))
