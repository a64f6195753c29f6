"""Soak test of resuming: training runs of each kind, killed (SIGKILL) 20 times, give the same bits as unkilled runs.

`make soak` runs it, `make test` does not. The environment variable KILLS sets the number of kills, KILL_SEED the seed
of their random moments.
"""

import os
from pathlib import Path

import pytest
from runs import assert_killing_changes_nothing, bytes_recipe, images_recipe, write_images


KILLS, SEED = int(os.environ.get("KILLS", "20")), int(os.environ.get("KILL_SEED", "0"))


def recipe(kind: str, directory: Path) -> dict:
    """Return the recipe of a run whose steps take a few milliseconds."""
    often = {"save_every": 2, "evaluate_every": 10, "ema_decay": None}
    if kind == "images":
        return images_recipe(directory, write_images(directory / "images.parquet"), **often)
    return bytes_recipe(directory, **often | ({"ema_decay": 0.8} if kind == "average" else {}))


@pytest.mark.parametrize("kind", ["text", "images", "average", "two processes"])
def test_a_killed_and_resumed_run_gives_the_same_result(tmp_path, kind):
    processes = 2 if kind == "two processes" else 1
    assert_killing_changes_nothing(recipe(kind, tmp_path), KILLS, SEED, processes)
