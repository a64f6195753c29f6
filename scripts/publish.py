"""Publish a saved model on the Hub: the same as `aft-hf publish`.

python scripts/publish.py outputs/quickstart/aft-conv name/aft-conv-digits --dry-run
"""

import sys

import typer

from aft_hf.publishing.command import publish_command


if __name__ == "__main__":
    try:
        typer.run(publish_command)
    except (ValueError, OSError) as error:
        sys.exit(f"publish.py: {' '.join(str(error).split())}")
