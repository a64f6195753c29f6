"""`aft-hf publish`."""

from pathlib import Path
from typing import Annotated

import typer

from .upload import publish


def publish_command(
    directory: Annotated[Path, typer.Argument(help="Saved model, with its tokenizer or image processor.")],
    repo_id: Annotated[str, typer.Argument(help="Where to on the Hub: name/model; made if it is not there.")],
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Of a new repository; by default as the account has it.", show_default=False
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to, by default main.")] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    license: Annotated[
        str | None,
        typer.Option(
            help="Of the weights, by its SPDX id: mit, cc-by-4.0; by default what the card says, or apache-2.0.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show what would be sent; write and send nothing.")
    ] = False,
) -> None:
    """Check a model, write its card, upload it to the Hub in one commit and verify what arrived."""
    publish(directory, repo_id, private=private, revision=revision, create_pr=pr, license=license, dry_run=dry_run)
