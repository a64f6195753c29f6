"""The command `aft-hf convert`."""

import re
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..console import plain_console, refuse_unused
from ..conversion import REPORT_NAME, ImagesOnDisk, read_images, save_converted
from ..conversion.deit import KERNEL_SIZE, POSITION_BIAS_DIM, POSITION_BIAS_MULTIPLIER, WINDOW_SIZE
from ..data.classes import chooses_a_class, other_task


MINUTES = 15.0  # default budget of --distill
# Options of `save_converted` by the same name.
PASSED_ON: tuple[str, ...] = ("kernel_size", "num_heads", "window_size", "position_bias_multiplier", "num_labels")
PASSED_ON += ("source_num_heads", "seed")
OF_DISTILLATION = ("steps", "minutes", "batch_size", "learning_rate", "augmentation", "augmentation_probability")

# Options of `convert`, by the panel of its help.
in_model, in_source, in_start, in_distillation = (
    partial(typer.Option, rich_help_panel=name) for name in ("AFT", "Source", "Initial weights", "Distillation")
)


def convert_command(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="ViT or DeiT of transformers or timm: directory, file or Hub id.")],
    out: Annotated[Path, typer.Argument(help="Directory to write the converted AFT model to.")],
    aft_type: Annotated[
        list[str] | None,
        in_model(help="conv (default), full, local or simple; for one per layer, repeat it or separate by commas."),
    ] = None,
    kernel_size: Annotated[int, in_model(help="Kernel size s of conv; an odd number.")] = KERNEL_SIZE,
    num_heads: Annotated[int | None, in_model(help="Position-bias heads. Default: 1; conv: up to width / 24.")] = None,
    window_size: Annotated[int, in_model(help="Window size s of local.")] = WINDOW_SIZE,
    position_bias_dim: Annotated[
        int, in_model(help="Rank d' of the position biases of full and local; 0 for an unfactorized table.")
    ] = POSITION_BIAS_DIM,
    position_bias_multiplier: Annotated[
        float, in_model(help="Factor on position biases, so that they train faster; 1 in the paper.")
    ] = POSITION_BIAS_MULTIPLIER,
    image_size: Annotated[str | None, in_model(help="224, or 224x384, height x width. Default: the source's.")] = None,
    num_labels: Annotated[int | None, in_model(min=1, metavar="<int>", help="Classes if the source has none.")] = None,
    init: Annotated[
        str | None,
        in_start(
            help="Initial position biases and keys: paper (those of a new model) or, for conv, attention (fitted to "
            "the source's on --images). Default: attention with --distill if all layers are conv; otherwise paper."
        ),
    ] = None,
    images: Annotated[Path | None, in_start(help="Unlabeled images: a folder, a file or parquet files.")] = None,
    num_images: Annotated[int, in_start(help="Number of images that --init attention uses.")] = 256,
    distill: Annotated[bool, in_distillation("--distill", help="Train on the source's outputs for --images.")] = False,
    minutes: Annotated[float | None, in_distillation(help=f"Budget in minutes, {MINUTES:g} by default.")] = None,
    steps: Annotated[int | None, in_distillation(help="Budget in steps, in place of --minutes; reproducible.")] = None,
    batch_size: Annotated[int, in_distillation(help="Images per step.")] = 32,
    learning_rate: Annotated[float, in_distillation(help="Maximum learning rate.")] = 1e-3,
    augmentation: Annotated[str, in_distillation(help="none, shift, crop, resized_crop; crops also flip.")] = "shift",
    augmentation_probability: Annotated[
        float, in_distillation(help="Probability of the augmentation. Give 1 if the source was trained with it.")
    ] = 0.5,
    seed: Annotated[int, in_start(min=0, max=2**32 - 1, metavar="<int>", help="Seed of weights and --distill.")] = 0,
    source_image_size: Annotated[str | None, in_source(help="Image size, if the checkpoint does not tell.")] = None,
    source_num_heads: Annotated[
        int | None, in_source(help="Heads, if the checkpoint does not tell. Default: width / 64; 16 if huge.")
    ] = None,
) -> None:
    """Convert a trained ViT or DeiT into an AFT.

    Fine-tune the result, or use --distill for a model that is ready to use.
    """
    types = [name.strip() for names in aft_type or ["conv"] for name in names.split(",")]
    if init is None:
        init = "attention" if distill and set(types) == {"conv"} else "paper"
    needs = {} if distill else dict.fromkeys(OF_DISTILLATION, "--distill")  # of options that have no effect
    if init == "paper":
        needs["num_images"] = "--init attention"
        if not distill:
            needs["images"] = "--distill or --init attention"
    of_types = {"kernel_size": {"conv"}, "window_size": {"local"}, "position_bias_dim": {"full", "local"}}
    for option, allowed in of_types.items():
        if not allowed & {*types}:
            needs[option] = f"--aft-type {' or '.join(sorted(allowed))}"
    refuse_unused(context, needs)
    distillation = None
    if distill:
        if images is None:
            raise ValueError("--distill needs --images: a few thousand images of the target domain, without labels")
        distillation = {name: context.params[name] for name in OF_DISTILLATION} | {"images": ImagesOnDisk(images)}
        if minutes is None and steps is None:
            distillation["minutes"] = MINUTES
    model, report = save_converted(
        source,
        out,
        aft_type=types[0] if len(types) == 1 else types,
        position_bias_dim=position_bias_dim or None,
        image_size=_parse_size("--image-size", image_size),
        init=init,
        images=read_images(images, num_images) if images and init == "attention" else None,
        source_image_size=_parse_size("--source-image-size", source_image_size),
        distillation=distillation,
        **{name: context.params[name] for name in PASSED_ON},
    )
    name = f"AFT-{'/'.join(sorted(set(model.config.layer_aft_types)))}"  # as in the paper
    if "conv" in name:
        name += f" {model.config.kernel_size}/{model.config.num_heads} (kernel size/position-bias heads)"
    proof = f"{len(report.with_status('copied'))} copied tensors verified bit for bit"
    if done := report.options.get("distillation"):
        proof = (
            f"distilled on {done['images']} images: {done['steps']} steps in {done['minutes']:.1f} minutes; AFT and "
            f"source agree on {done['agreement']:.1%} of the images of the last steps "
            f"(KL {done['divergence']:.3f} nats)"
        )
    lines = [
        f"{report.summary()}; {REPORT_NAME} names them",
        proof,
        f"weights of the source: {report.options['source_weights']}",
        f"image processor (size, mean, standard deviation): {report.options['image_processor']}",
        f"{out}: {name}, {model.num_parameters() / 1e6:.2f} M parameters",
    ]
    if chooses_a_class(model.config):
        given = ["--model_name_or_path", str(out), "--train", "DATA"]
        # A source without classes teaches none, and finetune has no options to read a source with.
        if num_labels is None and source_image_size is None and source_num_heads is None:
            given += ["--teacher", source]
        given += ["--learning_rate", "1e-3", "--num_train_epochs", "6", "--output_dir", f"{out}-tuned"]
        lines.append("Next step, with labeled images (DATA: a folder with a folder for each class, or parquet files):")
        lines.append(f"  aft-hf finetune --do_train --do_eval {shlex.join(given)}")
        if not distill and num_labels is None:
            lines.append("or with unlabeled images: this command for another OUT with --distill --images IMAGES")
    else:
        lines.append(f"{out}: {other_task(model.config)}")
    plain_console().print("\n".join(lines), soft_wrap=True)


def _parse_size(option: str, text: str | None) -> int | tuple[int, int] | None:
    """Parse an image size: "224" for a square, "224x384" for height x width."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise ValueError(f"{option} {text!r} is not a size in pixels: give 224, or 224x384 for height x width")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
