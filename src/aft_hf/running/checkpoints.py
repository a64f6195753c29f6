"""Atomic checkpoints of a training run: saving, detecting damage, and loading the newest complete checkpoint.

The manifest of a checkpoint holds the checksums of its files, and the state from which a run resumes. It is a file of
two lines, a checksum and the JSON object that it belongs to. Checksums detect damage, not tampering, so manifests are
validated against a schema here, and the other files are checked for code in `safe_loading`.
"""

import hashlib
import json
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate import Accelerator
from pydantic import Field
from torch.distributed.checkpoint import CheckpointException
from transformers.utils.generic import flatten_dict

from ..atomic_files import UNFINISHED, sha256, unfinished
from ..errors import InputError, described, explained, shortened
from ..reading import Document, FileName, parse_json
from .safe_loading import cause_of, data_only


STEP = re.compile("step-([0-9]{9,})")
ASIDE = "set-aside-"
MANIFEST = "checkpoint.json"
DATA = "training data"  # key of their fingerprint in `refuse_changes`

Count = Annotated[int, Field(ge=0)]
Losses = list[tuple[Count, float, float]]  # (steps done, mean loss, learning rate)


class Record(Document):
    """The losses, evaluations and training time of a run. Losses are means over `log_every` steps each, counted from
    the first step of the run, so an interrupted run records the same values as an uninterrupted run.
    """

    losses: Losses = []
    evaluations: list[dict[str, int | float]] = []
    seconds: float = 0.0  # training time, without evaluations and checkpoints
    pending: Losses = []  # of the steps since the last mean

    def curve(self) -> Losses:
        """Return the losses, followed by the mean of the pending ones."""
        if not self.pending:
            return self.losses
        step, _, rate = self.pending[-1]
        return [*self.losses, (step, sum(loss for _, loss, _ in self.pending) / len(self.pending), rate)]


class Manifest(Document):
    """Schema of checkpoint.json: the state of a run besides its weights, optimizer and random states."""

    step: Count
    record: Record
    recipe: dict[str, Any]
    data: str  # the fingerprint of the training data
    files: Annotated[dict[FileName, str], Field(min_length=1)]  # name to SHA-256


@dataclass
class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/step-000000123`.

    A checkpoint is written in a temporary directory and then renamed: however the process ends, a directory with the
    final name is complete. No checkpoint is removed or renamed before another one has been written or loaded.
    """

    accelerator: Accelerator  # saves and loads the model, the optimizer, the gradient scaler and all random states
    directory: Path  # shared by all processes
    keep: int  # how many of the newest checkpoints to keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save a checkpoint after `step` steps; `state` holds the fields of `Manifest` except `step` and `files`.

        If it cannot be written, an OSError is raised, and earlier checkpoints stay as they are.
        """
        target = self.directory / f"step-{step:09d}"
        aside = self.directory / UNFINISHED
        is_main = self.accelerator.is_main_process
        try:
            with unfinished(self.directory) if is_main else nullcontext():
                self.accelerator.wait_for_everyone()
                self.accelerator.save_state(str(aside))
                self.accelerator.wait_for_everyone()
                if is_main:
                    files = sorted(path for path in aside.rglob("*") if path.is_file())
                    sums = {str(path.relative_to(aside)): sha256(path) for path in files}
                    write_manifest(aside, Manifest(step=step, **state, files=sums))
                    for path in (*files, aside / MANIFEST):
                        _sync(path)
                    os.replace(aside, target)
                    _sync(self.directory)
                    for _, old in self.steps()[self.keep :]:
                        shutil.rmtree(old, ignore_errors=True)  # the new one is written
        # On a full disk, PyTorch and safetensors raise errors of their own types.
        except (Exception, CheckpointException) as error:
            earlier = self.steps()
            kept = f"the last complete checkpoint is {earlier[0][1]}" if earlier else "there is no earlier checkpoint"
            failed = f"cannot write the checkpoint of step {step} to {self.directory} ({described(cause_of(error))})"
            raise OSError(f"{failed}; {kept}") from error
        self.accelerator.wait_for_everyone()
        return target

    def steps(self) -> list[tuple[int, Path]]:
        """Return all checkpoints with their steps, the newest first."""
        matches = [(STEP.fullmatch(path.name), path) for path in self.directory.glob("step-*") if path.is_dir()]
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None; print which damaged checkpoints are skipped, and why."""
        for _, path in self.steps():
            if (damage := find_damage(path)) is None:
                return path
            self.accelerator.print(f"{path} is damaged ({damage}): skipped")
        return None

    def load(self, path: Path) -> None:
        """Load a checkpoint into the model and the optimizer that the accelerator has prepared, and print its path.

        A ValueError is raised if it does not fit them or the number of processes, or could run code.
        """
        with explained(f"{path} does not fit the model or the number of processes"), data_only(path):
            self.accelerator.load_state(str(path))
        # Reset the count of micro-batches: the run resumes with a new step, whose number of them may differ.
        self.accelerator.step = 0
        self.accelerator.print(f"resuming from {path}")

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints beyond `step`, from which the run resumes: they are damaged, or of an abandoned
        continuation, and would count as newer than the next checkpoints of the run.
        """
        self.accelerator.wait_for_everyone()  # other processes may still be reading these checkpoints
        if self.accelerator.is_main_process:
            for number, path in self.steps():
                if number > step:
                    aside = path.with_name(f"{ASIDE}{path.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(path, aside)
                    self.accelerator.print(f"{path} is renamed to {aside}: the run resumes before it")
        self.accelerator.wait_for_everyone()


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints, complete or not, from a directory; everything else stays."""
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
    for path in directory.glob("*step-*"):
        if STEP.fullmatch(path.name.removeprefix(ASIDE)):
            shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if it is complete."""
    try:
        manifest = read_manifest(path)
    except InputError as error:
        return str(error)
    for name, expected in manifest.files.items():
        if sha256(path / name) != expected:
            return f"{name} does not match its checksum" if (path / name).exists() else f"{name} is missing"
    return None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` into a checkpoint."""
    text = json.dumps(manifest.model_dump()).encode()
    (directory / MANIFEST).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint; the message of an `InputError` does not name the checkpoint."""
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(f"no {MANIFEST}")
    checksum, _, text = path.read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != checksum:
        raise InputError(f"{MANIFEST} does not match its checksum")
    return parse_json(text, Manifest, MANIFEST)


def refuse_changes(checkpoint: Path, then: dict[str, Any], now: dict[str, Any], instead: str) -> None:
    """Raise a ValueError if what determines the result of a run differs from the values saved in its checkpoint.

    The message names the first entry that differs, both values, and what to give `instead`. Data come first: the
    classes of other data change the model, too.
    """
    then, now = flatten_dict(then), flatten_dict(now)
    for key in sorted(then.keys() | now.keys(), key=lambda key: (key != DATA, key)):
        if then.get(key) != now.get(key):
            change = f"{key}={then.get(key)!r}, and this run has {now.get(key)!r}"
            change = shortened(f"other {DATA}" if key == DATA else change)
            raise ValueError(f"{checkpoint} was made with {change}: give the same, or {instead}")


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk, so that a renamed checkpoint survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
