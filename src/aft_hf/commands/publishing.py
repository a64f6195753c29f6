"""The command `aft-hf publish`."""

from pathlib import Path
from typing import Annotated

import typer

from ..publishing import publish


def publish_command(
    directory: Annotated[Path, typer.Argument(help="Saved model, with its tokenizer or image processor.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hub, name/model; created if it does not exist.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository. Default: the account's.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License by its name on the Hub. Default: that of the card or of the source.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show what would be uploaded; write and upload nothing.")
    ] = False,
) -> None:
    """Check a model, write its card, upload it to the Hub in one commit and verify the upload."""
    publish(directory, repo_id, private=private, license=license, dry_run=dry_run)
