"""What a run leaves behind: its losses, its results, and a picture of them."""

import importlib.metadata
import json
import math
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .manifest import RecordState
from .recipe import Recipe


# What a nat of the training loss is measured in when evaluated.
NATS = {"loss": 1.0, "bits_per_byte": math.log(2), "bits_per_dim": math.log(2)}

UNFINISHED = ".unfinished"  # files that are still being written

PACKAGES = ("aft-hf", "torch", "transformers", "accelerate", "datasets", "evaluate", "kornia", "numpy")


class Record:
    """The losses, evaluations and seconds of a run, which its checkpoints carry on.

    Losses stay on the device until they are asked for. What is kept is the mean over each `every` steps, counted from
    the first step of the run, so a run that was interrupted keeps what the uninterrupted one does.
    """

    def __init__(self, accelerator: Accelerator, every: int):
        self.accelerator, self.every = accelerator, every
        self.losses: list[tuple[int, float, float]] = []  # (steps done, mean loss, learning rate)
        self.evaluations: list[dict[str, float]] = []
        self.seconds = 0.0  # of training: without evaluations and checkpoints
        self.steps_per_second = 0.0  # of late
        self._pending: list[tuple[int, float, float]] = []  # of the steps since then
        self._on_device: list[tuple[int, torch.Tensor, float]] = []
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, learning_rate: float) -> None:
        """The loss of this process in a step (1, 2 ...), and the rate of the update made with it."""
        self._on_device.append((step, loss, learning_rate))

    def collect(self) -> None:
        """Fetch the losses of all processes.

        Raises:
            ValueError: one is not finite; the message has the step and the learning rate.
        """
        if not self._on_device:
            return
        losses = self.accelerator.reduce(torch.stack([loss for _, loss, _ in self._on_device]), "mean").tolist()
        seconds = self.lap()  # after the losses, for which a GPU has to finish
        self.seconds, self.steps_per_second = self.seconds + seconds, len(losses) / seconds
        for (step, _, rate), loss in zip(self._on_device, losses):
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {step}, with learning rate {rate:.3g}: training stops; "
                    "a smaller rate, a longer warm-up or max_grad_norm may help"
                )
            self._pending.append((step, loss, rate))
            if step % self.every == 0:
                self.losses, self._pending = self.curve(), []
        self._on_device.clear()

    def curve(self) -> list[tuple[int, float, float]]:
        """What is kept, and the mean of the steps since."""
        if not self._pending:
            return self.losses
        step, _, rate = self._pending[-1]
        return [*self.losses, (step, sum(loss for _, loss, _ in self._pending) / len(self._pending), rate)]

    def lap(self) -> float:
        """Seconds since the last call; what came before is then not counted as training."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "pending": self._pending,
        }

    def restore(self, state: RecordState) -> None:
        self.losses, self.evaluations = list(state.losses), list(state.evaluations)
        self.seconds, self._pending = state.seconds, list(state.pending)


def peak_memory(device: torch.device) -> float:
    """The most memory this process has had in use, in GiB: on the GPU if it computes there, else its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def versions() -> dict[str, str]:
    """Versions of Python and of what decides a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(directory: Path, recipe: Recipe, record: Record, **more: Any) -> dict[str, Any]:
    """`results.json`: the recipe, the losses and evaluations, `more`, and the versions. Returns what it holds.

    It is published with the model, so files are named without the directories they lie in.
    """
    results = {
        **more,
        "seconds": round(record.seconds, 1),
        "losses": [{"step": step, "loss": loss, "learning_rate": rate} for step, loss, rate in record.curve()],
        "evaluations": record.evaluations,
        "recipe": portable(recipe.model_dump()),
        "versions": versions(),
    }
    with move_into(directory) as aside:
        (aside / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def portable(values: Any) -> Any:
    """Nested values with the names of files in place of paths, which say nothing to anybody elsewhere.

    A relative path is one if there is something: `name/model` may as well be on the Hub.
    """
    if isinstance(values, dict):
        return {key: portable(value) for key, value in values.items()}
    if isinstance(values, str) and (Path(values).is_absolute() or ("/" in values and Path(values).exists())):
        return Path(values).name
    return values


def plot_losses(path: Path, record: Record) -> None:
    """A picture of the losses and of the metrics over the steps; none where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        record.accelerator.print("matplotlib is not installed: no picture of the losses")
        return
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {
        "loss (nats)": {"training": [(step, loss) for step, loss, _ in record.curve()]}
    }
    for row in record.evaluations:
        for name, value in row.items():
            if name in NATS:
                panels["loss (nats)"].setdefault("validation", []).append((row["step"], value * NATS[name]))
            for kind in ("accuracy", "bits"):
                if kind in name:
                    curves = panels.setdefault(kind, {})
                    curves.setdefault(name.replace("_", " "), []).append((row["step"], value))
    figure = Figure(figsize=(7, 3 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (kind, curves) in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels.items()):
        for name, points in curves.items():
            axes.plot(*zip(*points), marker="." if len(points) < 50 else None, label=name)
        axes.set(ylabel=kind if kind == "loss (nats)" else f"validation {kind}", xlabel="step")
        axes.legend()
        axes.grid(alpha=0.3)
    with move_into(path.parent) as aside:
        figure.savefig(aside / path.name, dpi=120)


@contextmanager
def move_into(directory: Path) -> Iterator[Path]:
    """A new directory to write into, whose files then move to `directory`: each is there as a whole, or not at all.
    None moves, and none stays, if one cannot be written."""
    remove_unfinished(directory)
    aside = directory / UNFINISHED
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.iterdir():
            os.replace(file, directory / file.name)
    finally:
        remove_unfinished(directory)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left in `move_into`."""
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
