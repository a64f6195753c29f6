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
from ..data.checksums import sha256
from ..reading import UnreadableError, first_line
from .manifest import MANIFEST, Manifest, read_manifest, write_manifest
from .safe_loading import UnsafeCheckpointError, cause_of, data_only


STEP = re.compile("step-([0-9]{9,})")
ASIDE = "set-aside-"


class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/step-000000123`.

    A checkpoint is written in a temporary directory, with a manifest of the checksums of its files, and then
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
        target = self.directory / f"step-{step:09d}"
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
                    for _, old in self.steps()[self.keep :]:
                        shutil.rmtree(old)
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
        found = [(STEP.fullmatch(path.name), path) for path in self.directory.glob("step-*") if path.is_dir()]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

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
        except (Exception, CheckpointException) as error:
            reason = first_line(cause_of(error))
            raise ValueError(f"{path} does not fit the model or the processes: {reason}") from error

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
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(path, aside)
                    self.accelerator.print(f"{path} is renamed to {aside}: the run resumes before it")
        self.accelerator.wait_for_everyone()


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints, complete or not, from a directory; everything else stays."""
    remove_unfinished(directory)
    for path in directory.glob("*step-*"):
        if STEP.fullmatch(path.name.removeprefix(ASIDE)):
            shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, None if it is complete.

    The manifest must match its own checksum, and every other file the one recorded in the manifest.
    """
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return str(error)
    for name, expected in manifest.files.items():
        if sha256(path / name) != expected:
            return f"{name} does not match its checksum" if (path / name).exists() else f"{name} is missing"
    return None


def _seal(directory: Path, state: dict[str, Any]) -> None:
    """Flush all files of a checkpoint to the disk, then write its manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = {str(path.relative_to(directory)): sha256(path) for path in files}
    write_manifest(directory, Manifest(**state, files=sums))
    for path in (*files, directory / MANIFEST):
        _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or a directory to the disk, so that a renamed checkpoint survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
