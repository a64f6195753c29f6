"""The records of a run: its losses and evaluations, `results.json`, and a plot of the losses."""

import importlib.metadata
import math
import platform
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..data.atomic_files import move_into
from ..data.json_files import write_json
from .manifest import RecordState
from .recipe import Recipe


PACKAGES = ("aft-hf", "torch", "transformers", "accelerate", "datasets", "kornia", "numpy")


class Record:
    """The losses, evaluations and training time of a run, which are saved in its checkpoints.

    Losses stay on the device until `collect`. The means over `every` steps each, counted from the first step of the
    run, are recorded, so an interrupted run records the same values as an uninterrupted run.
    """

    def __init__(self, accelerator: Accelerator, every: int):
        self.accelerator, self.every = accelerator, every
        self.losses: list[tuple[int, float, float]] = []  # (steps done, mean loss, learning rate)
        self.evaluations: list[dict[str, float]] = []
        self.seconds = 0.0  # training time, without evaluations and checkpoints
        self.steps_per_second = 0.0  # of the steps fetched by the last `collect`
        self._pending: list[tuple[int, float, float]] = []  # of the steps since the last record
        self._on_device: list[tuple[int, torch.Tensor, float]] = []
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, learning_rate: float) -> None:
        """Add the loss of this process in a step (1, 2 ...), and the learning rate of the step's update."""
        self._on_device.append((step, loss, learning_rate))

    def collect(self) -> None:
        """Fetch the losses from the device, averaged over all processes.

        Raises:
            ValueError: a loss is not finite; the message gives the step and the learning rate.
        """
        if not self._on_device:
            return
        losses = self.accelerator.reduce(torch.stack([loss for _, loss, _ in self._on_device]), "mean").tolist()
        seconds = self.lap()  # after fetching the losses, which waits for a GPU
        self.seconds, self.steps_per_second = self.seconds + seconds, len(losses) / seconds
        for (step, _, rate), loss in zip(self._on_device, losses):
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {step}, with learning rate {rate:.3g}: training stops; "
                    "a smaller learning rate, a longer warm-up or max_grad_norm may help"
                )
            self._pending.append((step, loss, rate))
            if step % self.every == 0:
                self.losses, self._pending = self.curve(), []
        self._on_device.clear()

    def curve(self) -> list[tuple[int, float, float]]:
        """Return the recorded losses, followed by the mean of the steps since the last record."""
        if not self._pending:
            return self.losses
        step, _, rate = self._pending[-1]
        return [*self.losses, (step, sum(loss for _, loss, _ in self._pending) / len(self._pending), rate)]

    def lap(self) -> float:
        """Return the seconds since the last call, and restart the clock of the training time."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    def state(self) -> dict[str, Any]:
        """Return the content of `RecordState`."""
        kept = {"losses": self.losses, "evaluations": self.evaluations, "seconds": self.seconds}
        return kept | {"pending": self._pending}

    def restore(self, state: RecordState) -> None:
        self.losses, self.evaluations = list(state.losses), list(state.evaluations)
        self.seconds, self._pending = state.seconds, list(state.pending)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: on the GPU if it computes there, else its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write_results(directory: Path, recipe: Recipe, record: Record, **more: Any) -> dict[str, Any]:
    """Write `results.json` with the recipe, losses, evaluations, versions and `more`; return its content.

    The file is published with the model, so paths in the recipe are reduced to file names (`portable`).
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
        write_json(aside / "results.json", results)
    return results


def portable(values: Any) -> Any:
    """Replace paths in nested values by file names, because directories of this machine mean nothing elsewhere.

    A relative path counts as a path only if it exists: `name/model` may also be an id on the Hub.
    """
    if isinstance(values, dict):
        return {key: portable(value) for key, value in values.items()}
    if isinstance(values, str) and (Path(values).is_absolute() or ("/" in values and Path(values).exists())):
        return Path(values).name
    return values
