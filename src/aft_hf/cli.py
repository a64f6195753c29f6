"""The command line interface `aft-hf`. Every sub-command is a thin call into the package."""

import sys
from contextlib import nullcontext
from importlib.metadata import version
from platform import python_version
from typing import Annotated

import typer

from .benchmarking import benchmark_command, keep_freed_memory
from .commands.conversion import convert_command
from .commands.publishing import publish_command
from .commands.training import evaluate_command, finetune_command, train_command
from .commands.visualization import visualize_command
from .console import no_bars_in_logs, plain_output, reported


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_versions(wanted: bool) -> None:
    if wanted:
        packages = ("aft-hf", "torch", "transformers")
        print(", ".join(f"{name} {version(name)}" for name in packages), f"Python {python_version()}", sep=", ")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print the versions, and exit.")
    ] = False,
) -> None:
    """Attention Free Transformer for the Hugging Face ecosystem."""


app.command("convert")(convert_command)
app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("benchmark")(benchmark_command)
app.command("visualize")(visualize_command)
app.command("publish")(publish_command)
# The options of transformers' `TrainingArguments` have underscores; those of this command may be written so, too.
unknown = {"ignore_unknown_options": True, "allow_extra_args": True}
hyphens = {**unknown, "token_normalize_func": lambda name: name.replace("_", "-")}
app.command("finetune", context_settings=hyphens)(finetune_command)


@app.command("transformers", add_help_option=False, context_settings=unknown)
def transformers_command(context: typer.Context) -> None:
    """Run a command of transformers with AFT registered, for example `aft-hf transformers serve MODEL` or `chat`."""
    from transformers.cli.transformers import app as others  # slow to import

    others(args=context.args, prog_name="aft-hf transformers")


def main() -> None:
    """Run the command line. Errors are printed as one line, without a traceback."""
    no_bars_in_logs()
    if sys.argv[1:2] != ["transformers"]:  # the requests of a server differ in size: kept memory would fragment
        keep_freed_memory()
    # The help, which is not from files, has colors; `transformers chat` moves the cursor.
    own = "--help" in sys.argv or sys.argv[1:2] == ["transformers"]
    with nullcontext() if own else plain_output(), reported("aft-hf"):
        app(prog_name="aft-hf")


if __name__ == "__main__":
    main()
