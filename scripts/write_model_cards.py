"""Write model_cards/ anew: a table of all recipes in configs/, and a card for each that was run.

    python scripts/write_model_cards.py
    python scripts/write_model_cards.py --keep examples/bytes_aft_local=outputs/bytes-aft-local

The second keeps what a run has measured in model_cards/results before.
"""

from pathlib import Path
from typing import Annotated

import typer

from aft_hf.publishing.recipes import keep_run, write_recipe_cards


ROOT = Path(__file__).resolve().parents[1]


def main(
    keep: Annotated[
        list[str] | None, typer.Option(help="GROUP/RECIPE=DIRECTORY of a run, as often as you like.")
    ] = None,
) -> None:
    """Write the table of all recipes, and the cards of those that were run."""
    for each in keep or ():
        name, _, directory = each.partition("=")
        print(f"kept {keep_run(ROOT, name, Path(directory)).relative_to(ROOT)}")
    print(f"{len(write_recipe_cards(ROOT))} files in model_cards")


if __name__ == "__main__":
    typer.run(main)
