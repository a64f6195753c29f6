"""Run arms and write a JSON record of each run.

A finished run is not repeated, and an interrupted run resumes from the last checkpoint of the training loop.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..benchmarking.rows import machine
from ..conversion import save_converted
from ..data.json_files import write_json
from ..training.recipe import Recipe, load_recipe
from ..training.records import portable, versions
from .arms import ARMS, SCALED, SMOKE, SMOKE_MODEL, Speed, Training
from .records import Records, digest


RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Settings:
    """The data, the output directory and the scale of the runs.

    Attributes:
        out: the directory of all runs.
        text: a text file, or "generated".
        images: a folder with train.parquet and validation.parquet, or "generated".
        image_column, label_column: the columns of these files.
        scale: the factor of the values in `SCALED`.
        smoke: whether to run tiny models for a few steps, to check that everything runs.
    """

    out: Path
    text: str | None = None
    images: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    scale: int = 1
    smoke: bool = False

    def record_path(self, arm: str, seed: int) -> Path:
        """Path of the JSON record of a run."""
        return self.out / "results" / f"{arm}-{seed}.json"

    def run_path(self, arm: str, seed: int) -> Path:
        """Output directory of the training loop."""
        return self.out / "runs" / f"{arm}-{seed}"


def with_starts(arms: Iterable[str]) -> list[str]:
    """The arms, each once and after the arm that it starts from."""
    found: dict[str, None] = {}
    for name in arms:
        start = getattr(ARMS[name], "start", None)
        found |= dict.fromkeys(filter(None, (start, name)))
    return list(found)


def runs_left(runs: Iterable[tuple[str, int]], settings: Settings, earlier: Records) -> list[tuple[str, int]]:
    """The runs that are still to be done, in the same order.

    Args:
        runs: arms and seeds; an arm that starts from another one comes after it.
        settings: the data, the output directory and the scale of the runs.
        earlier: records from the JSON file of a page. A run that has one with the same settings and data is skipped,
            unless a run that is left starts from its model, which is only in the output directory that trained it.
    """
    done = {(record["arm"], record["seed"]): record.get("settings_sha256") for record in earlier.all()}
    left: list[tuple[str, int]] = []
    for name, seed in reversed(list(runs)):
        if settings.record_path(name, seed).exists():
            continue
        is_start = any((getattr(ARMS[other], "start", None), its) == (name, seed) for other, its in left)
        if is_start or done.get((name, seed)) != digest(identify(name, seed, settings)):
            left.append((name, seed))
    return left[::-1]


def run_arm(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Run an arm unless it has a record, and return the record.

    Raises:
        ValueError: the record has other settings or data, an option with the data is missing, or the training fails.
        OSError: the data cannot be read.
    """
    path, identity = settings.record_path(name, seed), identify(name, seed, settings)
    if path.exists():
        record = json.loads(path.read_text())
        if record["settings"] != identity:
            raise ValueError(f"{path} was made with other settings or data: remove it, or give another --out")
        return record
    arm = ARMS[name]
    found = _measure_speed(name, settings) if isinstance(arm, Speed) else _train(name, arm, seed, settings)
    record = {
        "arm": name,
        "seed": seed,
        "scale": settings.scale,
        "smoke": settings.smoke,
        "device": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))["device"],
        "versions": versions(),
        **found,
        "settings": identity,
    }
    write_json(path, record)
    return record


def identify(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """The settings and data that determine the numbers of a run, as JSON values."""
    arm = ARMS[name]
    values: dict[str, Any]
    if isinstance(arm, Speed):
        values = {"ours": dict(arm.ours), "peer": dict(arm.peer), "task": arm.task}
        values |= {"batch": arm.batch, "length": arm.length, "smoke": settings.smoke}
    else:
        recipe = recipe_of(name, seed, settings).model_dump()
        values = {key: portable(value) for key, value in recipe.items() if key not in ("output_dir", "notes")}
        values["model"] = {key: value for key, value in values["model"].items() if key != "pretrained"}
        values |= {"start": arm.start, "convert": arm.convert and dict(arm.convert), "measures": list(arm.measures)}
    return json.loads(json.dumps(values))


def recipe_of(name: str, seed: int, settings: Settings) -> Recipe:
    """The recipe of a run.

    Raises:
        ValueError: the option with its data is missing.
    """
    arm = ARMS[name]
    assert isinstance(arm, Training)
    path = RECIPES / f"{arm.recipe}.yaml"
    overrides = [*arm.overrides, *_data(arm, settings), f"seed={seed}"]
    overrides.append(f"output_dir={json.dumps(str(settings.run_path(name, seed)))}")
    if arm.start is not None:
        source = settings.run_path(name, seed) / "start" if arm.convert else settings.run_path(arm.start, seed)
        overrides.append(f"model.pretrained={json.dumps(str(source))}")
    if settings.smoke:
        overrides += SMOKE if arm.start else (*SMOKE, SMOKE_MODEL)
    elif settings.scale != 1:
        values = load_recipe(path, overrides).model_dump()
        overrides += [f"{key}={settings.scale * value}" for key in SCALED[arm.recipe] if (value := _at(values, key))]
    return load_recipe(path, overrides)


def _at(values: dict[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        values = values[part]
    return values


def _data(arm: Training, settings: Settings) -> list[str]:
    """The overrides that name the data."""
    if arm.recipe.startswith("characters"):
        if settings.text is None:
            raise ValueError("the claim needs a text: give --text FILE")
        return [f"data.train={json.dumps(settings.text)}"]
    if settings.images is None:
        raise ValueError("the claim needs images: give --images FOLDER with train.parquet and validation.parquet")
    columns = [f"data.image_column={json.dumps(settings.image_column)}"]
    if arm.recipe.startswith("images"):
        columns.append(f"data.label_column={json.dumps(settings.label_column)}")
    if settings.images == "generated":
        return [*columns, "data.train=generated"]
    files = {split: Path(settings.images) / f"{split}.parquet" for split in ("train", "validation")}
    return [*columns, *(f"data.{split}={json.dumps(str(file))}" for split, file in files.items())]


def _train(name: str, arm: Training, seed: int, settings: Settings) -> dict[str, Any]:
    # Imported here because the import is slow and a finished run does not need it.
    from ..training.loop import train
    from .measures import MEASURES, scores

    if arm.convert is not None:
        assert arm.start is not None
        size = {"num_heads": arm.convert["num_heads"] * (1 if settings.smoke else settings.scale)}
        source, start = settings.run_path(arm.start, seed), settings.run_path(name, seed) / "start"
        torch.manual_seed(seed)  # for the parameters that the conversion adds
        save_converted(source, start, overwrite=True, **{**arm.convert, **size})
    recipe = recipe_of(name, seed, settings)
    results = train(recipe)
    metrics = scores(recipe, results)
    for measure in arm.measures:
        metrics |= MEASURES[measure](recipe)
    return {"metrics": metrics, "losses": [[row["step"], round(row["loss"], 4)] for row in results["losses"]]}


def _measure_speed(name: str, settings: Settings) -> dict[str, Any]:
    from .speed import measure_speed

    return {"metrics": measure_speed(name, settings.smoke), "losses": []}
