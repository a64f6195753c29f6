"""Run arms. A finished run is not repeated, and an interrupted one resumes from its last checkpoint.

A run is finished if the records have one with its identity: a digest of everything that determines its numbers.
"""

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from aft_hf.benchmarking import machine
from aft_hf.conversion import save_converted
from aft_hf.conversion.deit import convert_deit
from aft_hf.training.recipe import Recipe, build_recipe
from scripts.benchmark.page import read_records, write_records

from . import baselines  # noqa: F401  (registers their architecture)
from .arms import ARMS, RATES, RECIPES, SEARCH_SHARES, SMOKE, Recall, Speed, Training, Widths


SEARCH_SEED = 1000  # of the runs that choose a learning rate
VERSIONS = ("aft-hf", "torch", "transformers")
# Keys of a recipe that change no number of a run.
WITHOUT_EFFECT = {"output_dir", "notes", "base", "paper", "resume", "tracker", "save_every", "keep_checkpoints"}


@dataclass(frozen=True)
class Run:
    """A run of an arm: its seed and learning rate (None for a measurement of speed, or if it is not chosen yet)."""

    arm: str
    seed: int = 0
    rate: float | None = None

    @property
    def name(self) -> str:
        """The name in records; runs that choose a learning rate are no runs of the arm itself."""
        return f"{self.arm}@{self.rate:g}" if self.seed == SEARCH_SEED else self.arm


@dataclass
class Runner:
    """The data and the output directory of the runs.

    Attributes:
        out: the directory of the runs.
        text: a text file, or "generated".
        images: a folder with train.parquet and validation.parquet, or "generated".
        image_column, label_column: the columns of these files.
        smoke: whether to run tiny models for a few steps, to check that everything runs.
        records: the records of finished runs; those in `out` are added.
        digests: the digests of runs and of the runs that they start from, as far as they were needed.
    """

    out: Path
    text: str | None = None
    images: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    smoke: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[tuple[Run, Run | None], str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.records = [*self.records, *read_records(self.out / "records.json")]

    def left(self, arms: list[str], seeds: int) -> Iterator[Run]:
        """The runs that are not finished. Those of an arm without a learning rate follow when it is chosen."""
        for arm in arms:
            trained = ARMS[arm].data in RATES
            rate, searches = self.search(arm) if trained else (None, [])
            yield from searches
            if rate is not None or not trained:
                runs = (Run(arm, seed, rate) for seed in range(seeds if trained else 1))
                yield from (run for run in runs if not self.find(run))

    def search(self, arm: str) -> tuple[float | None, list[Run]]:
        """The learning rate with the lowest training loss, and the runs that are left to choose it.

        The grid is extended, by factors of two, until the best rate is not at its edge.
        """
        known = ARMS[arm]
        if isinstance(known, Recall) and known.rate_of != arm:
            return self.search(known.rate_of)
        rates = list(RATES[known.data])
        while True:
            records = {rate: self.find(Run(arm, SEARCH_SEED, rate)) for rate in rates}
            if left := [Run(arm, SEARCH_SEED, rate) for rate in rates if not records[rate]]:
                return None, left
            losses = {rate: record["metrics"]["train"] for rate, record in records.items() if record}
            best = min(rates, key=losses.__getitem__)
            if self.smoke or rates[0] < best < rates[-1]:
                return best, []
            rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]

    def rate_of(self, arm: str) -> float | None:
        """The learning rate of an arm; None if it is not chosen yet."""
        return self.search(arm)[0]

    def has_rate(self, arm: str) -> bool:
        """Whether an arm needs no learning rate, or it is chosen."""
        return ARMS[arm].data not in RATES or self.rate_of(arm) is not None

    def can_start(self, run: Run) -> bool:
        """Whether the run from whose model a run starts is finished, if there is one."""
        start = getattr(ARMS[run.arm], "start", None)
        return start is None or (self.has_rate(start) and self.find(self.start_of(run)) is not None)

    def find(self, run: Run) -> dict[str, Any] | None:
        """The record of a run, by its identity, which is computed once: it takes 10 ms."""
        key = run, self.start_of(run) if getattr(ARMS[run.arm], "start", None) else None
        if key not in self.digests:
            self.digests[key] = self.digest(run)
        return next((x for x in self.records if x["identity"] == self.digests[key]), None)

    def run(self, run: Run) -> dict[str, Any]:
        """Run an arm, and return its record.

        Raises:
            ValueError: an option with the data is missing, or the training fails.
            OSError: the data cannot be read.
        """
        arm = ARMS[run.arm]
        if isinstance(arm, Training):
            results = self._train(run, arm)
        elif isinstance(arm, Recall):
            results = _train_recall(run, arm, self.smoke)
        elif isinstance(arm, Widths):
            results = _measure_widths(arm, self.smoke)
        else:
            results = _measure_speed(run.arm, self.smoke)
        record = {"arm": run.name, "seed": run.seed, "rate": run.rate, "identity": self.digest(run)}
        return record | {"device": machine(), "versions": {name: version(name) for name in VERSIONS}} | results

    def add(self, record: dict[str, Any]) -> None:
        """Add a record to records.json."""
        self.records.append(record)
        write_records(self.out / "records.json", [*read_records(self.out / "records.json"), record])

    def digest(self, run: Run) -> str:
        """SHA-256 of the identity of a run."""
        return hashlib.sha256(json.dumps(self.identity(run), sort_keys=True).encode()).hexdigest()

    def identity(self, run: Run) -> dict[str, Any]:
        """What determines the numbers of a run: its data by content, and every value with its default.

        The version of the code is not part of it; a record names it.
        """
        arm = ARMS[run.arm]
        if isinstance(arm, Speed):
            models = {"ours": _config(arm.ours), "peer": _config(arm.peer)}
            return models | {"task": arm.task, "batch": arm.batch, "length": arm.length, "smoke": self.smoke}
        if isinstance(arm, Widths):
            return {"widths": list(arm.widths), "length": arm.length, "smoke": self.smoke}
        if isinstance(arm, Recall):
            values = {"model": _config(arm.model), "pairs": arm.pairs, "batch": arm.batch, "steps": arm.steps}
            return values | {"seed": run.seed, "rate": run.rate, "smoke": self.smoke}
        values = self.recipe(run).model_dump(exclude=WITHOUT_EFFECT)
        model = values.pop("model")
        for split in ("train", "validation"):
            path = values["data"].get(split)
            if path is not None and Path(path).exists():
                values["data"][split] = _sha256(path, Path(path).stat().st_mtime_ns)
        model = {key: value for key, value in model.items() if key != "pretrained"}
        values["model"] = _config(model) if "architecture" in model else model
        values |= {"measures": list(arm.measures), "start": None, "convert": None}
        if arm.start is not None:
            values["start"] = self.digest(self.start_of(run))
            values["convert"] = arm.convert and _with_defaults(arm.convert)
        return json.loads(json.dumps(values))

    def start_of(self, run: Run) -> Run:
        """The run whose model a run starts from; short runs start from that of seed 0."""
        start = getattr(ARMS[run.arm], "start", None)
        assert start is not None
        return Run(start, 0 if run.seed == SEARCH_SEED else run.seed, self.rate_of(start))

    def path(self, run: Run) -> Path:
        """Output directory of the training loop."""
        return self.out / "runs" / f"{run.name}-{run.seed}-{self.digest(run)[:8]}"

    def recipe(self, run: Run) -> Recipe:
        """The recipe of a run. `output_dir` is a placeholder, since it contains the digest of the recipe.

        Raises:
            ValueError: the option with its data is missing.
        """
        arm = ARMS[run.arm]
        assert isinstance(arm, Training)
        values = deepcopy(RECIPES[arm.data])
        values |= {"seed": run.seed, "output_dir": "run", "model": dict(arm.model)}
        if arm.start is not None:
            values["model"]["pretrained"] = "start"
        changes = {**self._data(arm), **arm.changes, "optimizer.learning_rate": run.rate or RATES[arm.data][0]}
        if run.seed == SEARCH_SEED:
            share = SEARCH_SHARES[arm.data]
            changes |= {"steps": arm.steps // share}
            values["schedule"]["warmup_steps"] //= share
        if self.smoke:
            changes |= SMOKE | ({"model.num_hidden_layers": 2} if "num_hidden_layers" in arm.model else {})
            if isinstance(types := arm.model.get("aft_type"), list):
                changes["model.aft_type"] = types[:2]
            values["schedule"]["warmup_steps"] = 1
        for key, value in changes.items():
            *parts, last = key.split(".")
            section = values
            for part in parts:
                section = section.setdefault(part, {})
            section[last] = value
        return build_recipe(values)

    def _data(self, arm: Training) -> dict[str, Any]:
        if arm.data == "characters":
            if self.text is None:
                raise ValueError("the claim needs a text: give --text FILE")
            return {"data.train": self.text}
        if self.images is None:
            raise ValueError("the claim needs images: give --images FOLDER with train.parquet and validation.parquet")
        columns = {"data.image_column": self.image_column}
        columns |= {"data.label_column": self.label_column} if arm.data != "pixels" else {}
        if self.images == "generated":
            return columns | {"data.train": "generated"}
        return columns | {f"data.{x}": str(Path(self.images) / f"{x}.parquet") for x in ("train", "validation")}

    def _train(self, run: Run, arm: Training) -> dict[str, Any]:
        from aft_hf.training.loop import train

        from .measures import MEASURES, scores

        path = self.path(run)
        values = self.recipe(run).model_dump() | {"output_dir": str(path)}
        if arm.start is not None:
            start = self.start_of(run)
            if not (self.path(start) / "config.json").exists():
                self._train(start, ARMS[arm.start])  # type: ignore[arg-type]  # a record alone has no model
            source = self.path(start)
            if arm.convert is not None:
                shutil.rmtree(path / "start", ignore_errors=True)
                save_converted(source, path / "start", seed=run.seed, **arm.convert)
                source = path / "start"
            values["model"] = {"pretrained": str(source)}
        recipe = build_recipe(values)
        results = train(recipe)
        metrics = scores(recipe, results)
        for measure in arm.measures:
            metrics |= MEASURES[measure](recipe)
        if not any(getattr(other, "start", None) == run.arm for other in ARMS.values()):
            shutil.rmtree(path)
        losses = [[row["step"], round(row["loss"], 3)] for row in results["losses"]]
        return {"metrics": metrics, "losses": losses[:: max(1, len(losses) // 50)]}


def share_cores(processes: int) -> None:
    """Give this process its share of the cores. Processes of a pool do not import `__main__`, so it is not there."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _config(fields: Any) -> dict[str, Any]:
    """All values of the config of a model, with its defaults."""
    fields = dict(fields)
    values = AutoConfig.for_model(architecture := fields.pop("architecture"), **fields).to_dict()
    if architecture.startswith("aft"):
        values.setdefault("max_position_embeddings", 1024)  # in configs of the first records, also without an effect
    return {key: value for key, value in values.items() if key != "transformers_version"}


def _with_defaults(options: Any) -> dict[str, Any]:
    """Options of a conversion with the defaults of the others."""
    parameters = inspect.signature(convert_deit).parameters.items()
    return {name: x.default for name, x in parameters if x.default is not inspect.Parameter.empty} | dict(options)


@lru_cache
def _sha256(path: str | os.PathLike[str], _: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _measure_speed(name: str, smoke: bool) -> dict[str, Any]:
    from .speed import measure_speed

    return {"metrics": measure_speed(name, smoke), "losses": []}


def _measure_widths(arm: Widths, smoke: bool) -> dict[str, Any]:
    from .speed import measure_widths

    return {"metrics": measure_widths(arm, smoke), "losses": []}


def _train_recall(run: Run, arm: Recall, smoke: bool) -> dict[str, Any]:
    from .recall import train_recall

    assert run.rate is not None
    return train_recall(arm, run.seed, run.rate, 4 if smoke else arm.steps)
