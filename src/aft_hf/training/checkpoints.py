"""Atomic checkpoints of a training run: saving, detecting damage, and loading the newest complete checkpoint."""

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.distributed.checkpoint import CheckpointException

from ..data.atomic_files import UNFINISHED, remove_unfinished, unfinished
from ..reading import UnreadableError, first_line
from .manifest import MANIFEST, Manifest, file_checksum, read_manifest, write_manifest
from .safe_loading import UnsafeCheckpointError, cause_of, data_only


PREFIX, ASIDE = "step-", "set-aside-"
STEP = re.compile(rf"({ASIDE})?{PREFIX}([0-9]{{9,}})")


class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/step-000000123`.

    A checkpoint is written in a temporary directory, with a manifest of the sizes and checksums of its files, and then
    renamed. However the process ends, a directory with the final name is complete; damage after that is detected.
    No checkpoint is removed or renamed before another one has been written or loaded.

    Args:
        accelerator: saves and loads the model, the optimizer, the gradient scaler and all random states.
        directory: the directory of the checkpoints, shared by all processes.
        keep: how many of the newest checkpoints to keep.
    """

    def __init__(self, accelerator: Accelerator, directory: str | Path, *, keep: int):
        self.accelerator, self.directory, self.keep = accelerator, Path(directory), keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save a checkpoint after `step` steps; `state` holds the fields of `Manifest` except `step` and `files`.

        Raises:
            OSError: the checkpoint cannot be written. It is then removed, and earlier checkpoints stay as they are.
        """
        target = self.directory / f"{PREFIX}{step:09d}"
        aside = self.directory / UNFINISHED
        is_main = self.accelerator.is_main_process
        try:
            with unfinished(self.directory) if is_main else nullcontext():
                self.accelerator.wait_for_everyone()
                self.accelerator.save_state(str(aside))
                self.accelerator.wait_for_everyone()
                if is_main:
                    _seal(aside, {"step": step, **state})
                    os.replace(aside, target)
                    _sync(self.directory)
                    self._remove_old()
        # On a full disk, PyTorch and safetensors raise errors of their own types.
        except (Exception, CheckpointException) as error:
            last = next(iter(self.steps()), None)
            kept = "there is no earlier checkpoint" if last is None else f"the last complete checkpoint is {last[1]}"
            reason = first_line(cause_of(error))
            raise OSError(
                f"cannot write the checkpoint of step {step} to {self.directory} ({reason}); {kept}"
            ) from error
        self.accelerator.wait_for_everyone()
        return target

    def steps(self) -> list[tuple[int, Path]]:
        """Return all checkpoints with their steps, the newest first."""
        found = [(step_of(path), path) for path in self.directory.glob(f"{PREFIX}*") if path.is_dir()]
        return sorted(((step, path) for step, path in found if step is not None), reverse=True)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None; print which damaged checkpoints are skipped, and why."""
        for _, path in self.steps():
            damage = find_damage(path)
            if damage is None:
                return path
            self.accelerator.print(f"{path} is damaged ({damage}): skipped")
        return None

    def load(self, path: Path) -> None:
        """Load a checkpoint into the model and the optimizer that the accelerator has prepared.

        Raises:
            ValueError: the checkpoint does not fit them or the number of processes, or could run code.
        """
        try:
            with data_only(path):
                self.accelerator.load_state(str(path))
            # Reset the count of micro-batches: the run resumes with a new step, whose number of them may differ.
            self.accelerator.step = 0
        except UnsafeCheckpointError:
            raise
        # DeepSpeed raises errors of its own types, for example for another number of processes.
        except (Exception, CheckpointException) as error:
            reason = first_line(cause_of(error))
            raise ValueError(f"{path} does not fit the model or the processes: {reason}") from error

    def remove_partial(self) -> None:
        """Remove what a killed process left of a checkpoint; only one run at a time writes to a directory."""
        if self.accelerator.is_main_process:
            remove_unfinished(self.directory)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints beyond `step`, the step from which the run resumes.

        They are damaged, or belong to a continuation that was abandoned. Under their old names they would count as
        newer than the next checkpoints of the run.
        """
        self.accelerator.wait_for_everyone()  # other processes may still be reading these checkpoints
        if self.accelerator.is_main_process:
            for number, path in self.steps():
                if number > step:
                    aside = path.with_name(f"{ASIDE}{path.name}")
                    if is_own(aside):
                        shutil.rmtree(aside)
                    os.replace(path, aside)
                    self.accelerator.print(f"{path} is renamed to {aside}: the run resumes before it")
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        for _, path in self.steps()[self.keep :]:
            if (path / MANIFEST).is_file() and is_own(path):  # otherwise, it may be something else
                # A partially removed directory must not look like a checkpoint.
                os.replace(path, self.directory / UNFINISHED)
                remove_unfinished(self.directory)


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, None if the name has none."""
    match = STEP.fullmatch(path.name)
    return None if match is None or match[1] else int(match[2])


def is_own(path: Path) -> bool:
    """Return whether a path is a directory, not a link, with the name of a checkpoint, complete or not."""
    named = STEP.fullmatch(path.name) is not None or path.name == UNFINISHED
    return named and path.is_dir() and not path.is_symlink()


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints, complete or not, from a directory; everything else stays."""
    for path in filter(is_own, directory.iterdir() if directory.is_dir() else ()):
        shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if it is complete.

    Every file must have the size and checksum recorded in the manifest. The manifest must match its own checksum, and
    its step that of the checkpoint's name.
    """
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return str(error)
    if step_of(path) not in (None, manifest.step):
        return f"{MANIFEST} belongs to step {manifest.step}"
    for name, expected in manifest.files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if file_checksum(path / name) != expected:
            return f"{name} does not match its checksum"
    return None


def _seal(directory: Path, state: dict[str, Any]) -> None:
    """Flush all files of a checkpoint to the disk, then write its manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    sums = {str(path.relative_to(directory)): file_checksum(path) for path in files}
    write_manifest(directory, Manifest(**state, files=sums))
    _sync(directory / MANIFEST)


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk, so that a renamed checkpoint survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
