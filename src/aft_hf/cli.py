"""The `aft-hf` command: every sub-command is a thin call into the package."""

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Annotated, Any

import typer
from rich.console import Console

from .analysis.command import visualize_command
from .benchmarking.command import benchmark_command
from .configuration_aft import AFTConfig
from .conversion import (
    KERNEL_SIZE,
    LOCAL_WINDOW_SIZE,
    POSITION_BIAS_DIM,
    POSITION_BIAS_MULTIPLIER,
    ConversionReport,
    ImagesOnDisk,
    read_images,
    save_converted,
)
from .progress import no_bars_in_logs
from .publishing.command import publish_command
from .reading import printable
from .training.command import evaluate_command, train_command


# Budget of a distillation where none is given.
DISTILLATION_MINUTES = 15.0

app = typer.Typer(
    help="Attention Free Transformer for the Hugging Face ecosystem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        packages = ("aft-hf", "torch", "transformers")
        print(", ".join(f"{name} {version(name)}" for name in packages), f"Python {python_version()}", sep=", ")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_versions, is_eager=True, help="Print the versions, as bug reports need them."
        ),
    ] = False,
) -> None:
    # No docstring: it would replace the help of the application.
    pass


app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("publish")(publish_command)
app.command("benchmark")(benchmark_command)
app.command("visualize")(visualize_command)


@app.command(
    "transformers",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def transformers_command(context: typer.Context) -> None:
    """The commands of transformers with AFT known to them: `aft-hf transformers serve MODEL`, `chat`."""
    from transformers.cli.transformers import app as commands  # slow to import

    commands(args=context.args, prog_name="aft-hf transformers")


@app.command()
def convert(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="ViT or DeiT of transformers, timm or the original DeiT: directory, Hub id or file.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write the AFT to.")],
    aft_type: Annotated[
        list[str] | None,
        typer.Option(help="conv (the default), full, local or simple; several, or a comma list, for one per layer."),
    ] = None,
    kernel_size: Annotated[
        int, typer.Option("--kernel-size", "--conv-kernel-size", help="Kernel size s of conv, odd.")
    ] = KERNEL_SIZE,
    num_heads: Annotated[
        int | None, typer.Option(help="Position-bias heads h; divides the width. By default 16 with conv, else 1.")
    ] = None,
    local_window_size: Annotated[int, typer.Option(help="Window s of local.")] = LOCAL_WINDOW_SIZE,
    position_bias_dim: Annotated[
        int, typer.Option(help="Rank d' of the biases of full and local; 0 for one unfactorized table.")
    ] = POSITION_BIAS_DIM,
    position_bias_multiplier: Annotated[
        float, typer.Option(help="The constant that position biases are multiplied by, to learn fast; 1: the paper's.")
    ] = POSITION_BIAS_MULTIPLIER,
    image_size: Annotated[
        str | None,
        typer.Option(help="Image size in pixels, 224 or 224x384 (height x width); by default the source's."),
    ] = None,
    init: Annotated[
        str,
        typer.Option(help="Position biases: paper (new), or attention (fitted to that of the source on --images)."),
    ] = "paper",
    images: Annotated[
        Path | None, typer.Option(help="For --init attention and --distill: a folder of images, or parquet files.")
    ] = None,
    num_images: Annotated[int, typer.Option(help="How many of these --init attention looks at.")] = 256,
    distill: Annotated[
        bool, typer.Option("--distill", help="Train the AFT on the outputs of the source for --images: no labels.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help=f"Budget of --distill in time; by default {DISTILLATION_MINUTES}.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Budget of --distill in updates, in place of --minutes: reproducible.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per update of --distill.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Largest learning rate of --distill.")] = 1e-3,
    augmentation: Annotated[
        str, typer.Option(help="Of the images of --distill: none, shift, crop or resized_crop; the last two flip.")
    ] = "shift",
    seed: Annotated[int, typer.Option(help="Of --distill: new weights, order and augmentation of the images.")] = 0,
    source_image_size: Annotated[
        str | None, typer.Option(help="Image size of a source that does not tell it, as --image-size.")
    ] = None,
    source_num_heads: Annotated[
        int | None, typer.Option(help="Attention heads of a source that does not tell them; by default width / 64.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier conversion in OUT; other files in it stay.")
    ] = False,
) -> None:
    """Convert a trained ViT or DeiT into an AFT, to be fine-tuned, or to be used as it is with --distill."""
    distillation: dict[str, Any] = {
        "steps": steps,
        "minutes": DISTILLATION_MINUTES if minutes is None and steps is None else minutes,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "augmentation": augmentation,
        "seed": seed,
    }
    if distill:
        if images is None:
            raise ValueError("--distill needs --images: some thousand of those that the model is for, without labels")
        distillation["images"] = ImagesOnDisk(images)
    elif minutes is not None or steps is not None:
        raise ValueError("--minutes and --steps are the budget of --distill: give it, too")
    types = [name.strip() for names in aft_type or ["conv"] for name in names.split(",")]
    model, report = save_converted(
        source,
        out,
        overwrite=overwrite,
        aft_type=types[0] if len(types) == 1 else types,
        kernel_size=kernel_size,
        num_heads=num_heads,
        local_window_size=local_window_size,
        position_bias_dim=position_bias_dim or None,
        position_bias_multiplier=position_bias_multiplier,
        image_size=_parse_size("--image-size", image_size),
        init=init,
        images=None if images is None or (distill and init == "paper") else read_images(images, num_images),
        source_image_size=_parse_size("--source-image-size", source_image_size),
        source_num_heads=source_num_heads,
        distillation=distillation if distill else None,
    )
    console = Console()
    console.print(report.table())
    for line in (
        report.summary(),
        _proof(report),
        f"image processor (size, mean, deviation): {report.options['image_processor']}",
        f"{out}: {_describe(model.config)}, {model.num_parameters() / 1e6:.2f} M parameters",
        "Next, with labels:",
        f"  python scripts/finetune.py --do_train --model_name_or_path {shlex.quote(str(out))} --train DATA "
        "--output_dir FINE_TUNED",
        *(() if distill else ("or without:", f"  {_distilling_command(context)}")),
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _distilling_command(context: typer.Context) -> str:
    """The command for the same conversion with a distillation: with all options that were given."""
    words = ["aft-hf", "convert", context.params["source"], str(context.params["out"])]
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if option.param_type_name != "option" or not given or option.name in ("overwrite", "images"):
            continue
        values = context.params[option.name]
        for value in values if option.multiple else [values]:
            words += [option.opts[0], str(value)]
    words += ["--overwrite", "--distill", "--images", str(context.params["images"] or "IMAGES")]
    return shlex.join(words)


def _proof(report: ConversionReport) -> str:
    """What was verified of a conversion, or how near a distillation has come."""
    if "distillation" not in report.options:
        return f"{len(report.with_status('copied'))} copied tensors verified bit for bit"
    done = report.options["distillation"]
    return (
        f"distilled on {done['images']} images: {done['steps']} steps in {done['minutes']:.1f} minutes; it agrees "
        f"with the source on {done['agreement']:.1%} of the last ones, as augmented (KL {done['divergence']:.3f} nats)"
    )


def _parse_size(option: str, text: str | None) -> int | tuple[int, int] | None:
    """224 for a square, 224x384 for (height, width)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise ValueError(f"{option} {text!r}: give pixels as 224, or as 224x384 for height x width")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def _describe(config: AFTConfig) -> str:
    """The name of a model as the paper writes it: AFT-conv 11/16."""
    types = sorted(set(config.layer_aft_types))
    sizes = f" {config.conv_kernel_size}/{config.num_heads}" if "conv" in types else ""
    return f"AFT-{'/'.join(types)}{sizes}"


def main(*command: str) -> None:
    """Run the command line; what a user can cause ends in one line, not in a traceback.

    Args:
        *command: of a script that is one command: what `aft-hf` would have before the other words.
    """
    no_bars_in_logs()
    try:
        app([*command, *sys.argv[1:]], prog_name="aft-hf" if command else None)
    except ModuleNotFoundError as error:
        print(f"aft-hf: {error.name} is not installed; pip install 'aft-hf[train]' has all it takes", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        print("aft-hf: the memory of this machine is full: take smaller sizes or batches", file=sys.stderr)
        sys.exit(1)
    except (ValueError, OSError) as error:
        message = printable(str(error)) or type(error).__name__
        print(f"aft-hf: {message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
