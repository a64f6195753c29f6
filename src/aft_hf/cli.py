"""The `aft-hf` command: every sub-command is a thin call into the package."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .conversion import KERNEL_SIZE, NUM_HEADS, save_converted


app = typer.Typer(
    help="Attention Free Transformer for the Hugging Face ecosystem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _group() -> None:
    """Keeps `convert` a sub-command while it is the only one."""


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Directory or Hub id of a ViT or DeiT with safetensors weights.")],
    out: Annotated[Path, typer.Argument(help="Directory to write the AFT-conv to.")],
    kernel_size: Annotated[int, typer.Option(help="Kernel size s, odd.")] = KERNEL_SIZE,
    num_heads: Annotated[int, typer.Option(help="Position-bias heads h; divides the width.")] = NUM_HEADS,
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels; by default the source's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion in OUT.")] = False,
) -> None:
    """Convert a trained ViT or DeiT into an AFT-conv, to be fine-tuned."""
    options = {"kernel_size": kernel_size, "num_heads": num_heads, "image_size": image_size}
    model, report = save_converted(source, out, overwrite=overwrite, **options)
    console = Console()
    console.print(report.table())
    console.print(report.summary())
    console.print(f"{out}: AFT-conv {kernel_size}/{num_heads}, {model.num_parameters() / 1e6:.2f} M parameters")


def main() -> None:
    """Run the command line; what a user can cause ends in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"aft-hf: {message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
