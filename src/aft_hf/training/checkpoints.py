"""Checkpoints that are either complete or not there, and the way back from the newest one."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.distributed.checkpoint import CheckpointException

from ..reading import UnreadableError, first_line
from .manifest import MANIFEST, Manifest, file_check_sum, read_manifest, write_manifest
from .safe_loading import UnsafeCheckpointError, cause_of, data_only


PREFIX, PARTIAL, ASIDE = "step-", ".partial-", "set-aside-"


class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/step-000000123`.

    One is written under another name, with a manifest of the sizes and check sums of its files, and then renamed. So
    whatever ends the process, a directory of the right name is complete, and one that was damaged later is noticed.
    None is removed or renamed before another one has been written or loaded.

    Args:
        accelerator: what to save: the model, the optimizer, the scaler and all random states.
        directory: shared by all processes.
        keep: how many of the newest to keep.
    """

    def __init__(self, accelerator: Accelerator, directory: str | Path, *, keep: int):
        self.accelerator, self.directory, self.keep = accelerator, Path(directory), keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save after `step` steps; `state` has the other entries of `Manifest`.

        Raises:
            OSError: it cannot be written. Checkpoints that were there stay as they are, and nothing else is left.
        """
        target = self.directory / f"{PREFIX}{step:09d}"
        partial = self.directory / f"{PARTIAL}{step:09d}"
        try:
            if self.accelerator.is_main_process:
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(str(partial))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                _seal(partial, {"step": step, **state})
                if target.exists():  # of an earlier run that did not resume here
                    _remove(target)
                os.replace(partial, target)
                _sync(self.directory)
                self._remove_old()
        # PyTorch and safetensors have errors of their own for a disk that is full.
        except (Exception, CheckpointException) as error:
            if self.accelerator.is_main_process:
                shutil.rmtree(partial, ignore_errors=True)  # it would hold what is left of the disk
            last = next(iter(self.steps()), None)
            kept = "there is no earlier one" if last is None else f"the last complete one is {last[1]}"
            reason = first_line(cause_of(error))
            raise OSError(
                f"cannot write the checkpoint of step {step} to {self.directory} ({reason}); {kept}"
            ) from error
        self.accelerator.wait_for_everyone()
        return target

    def remove_partial(self) -> None:
        """Remove what a killed process left of a checkpoint that it was writing or removing. To be called once, before
        the first `save`: only one run writes to a directory, so what is there then belongs to no living process."""
        if self.accelerator.is_main_process:
            for path in self.directory.glob(f"{PARTIAL}*"):
                _remove(path)

    def steps(self) -> list[tuple[int, Path]]:
        """All checkpoints with their steps, the newest first."""
        found = [(step_of(path), path) for path in self.directory.glob(f"{PREFIX}*") if path.is_dir()]
        return sorted(((step, path) for step, path in found if step is not None), reverse=True)

    def newest(self) -> Path | None:
        """The newest complete checkpoint; says which ones it passes over, and why.

        Raises:
            ValueError: it is of an earlier version.
        """
        for _, path in self.steps():
            damage = find_damage(path)
            if damage is None:
                return path
            self.accelerator.print(f"{path} is damaged ({damage}): skipped")
        return None

    def complete(self, path: str | Path) -> Path:
        """That checkpoint.

        Raises:
            ValueError: it is not complete, or of an earlier version.
        """
        damage = find_damage(Path(path))
        if damage is not None:
            raise ValueError(f"{path} is no complete checkpoint: {damage}")
        return Path(path)

    def load(self, path: Path) -> None:
        """Load a checkpoint into what the accelerator has prepared.

        Raises:
            ValueError: it does not fit that, or could run code.
        """
        try:
            with data_only(path):
                self.accelerator.load_state(str(path))
            # Its count of micro-batches: what goes on is a new step, which may have another number of them.
            self.accelerator.step = 0
        except UnsafeCheckpointError:
            raise
        # DeepSpeed has errors of its own, such as for another number of processes.
        except (Exception, CheckpointException) as error:
            reason = first_line(cause_of(error))
            raise ValueError(f"{path} does not fit the model or the processes: {reason}") from error

    def set_aside(self, step: int) -> None:
        """Rename what lies beyond `step`, from which a run goes on: damaged, or of a course that was given up.

        Among the checkpoints that are still to come they would count as the newest.
        """
        self.accelerator.wait_for_everyone()  # others may still be reading what is now renamed
        if self.accelerator.is_main_process:
            for number, path in self.steps():
                if number > step:
                    aside = path.with_name(f"{ASIDE}{path.name}")
                    if aside.exists():
                        _remove(aside)
                    os.replace(path, aside)
                    self.accelerator.print(f"{path} is now {aside}")
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        for _, path in self.steps()[self.keep :]:
            # A directory that is half removed must not look like a checkpoint.
            aside = path.with_name(PARTIAL + path.name)
            os.replace(path, aside)
            _remove(aside)


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint tells, None where it tells none."""
    match = re.fullmatch(rf"{PREFIX}([0-9]+)", path.name)
    return None if match is None else int(match[1])


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is: every file has to have the size and sum of its manifest,
    and the manifest its own and the step of the checkpoint's name.

    Raises:
        ValueError: it is whole, but of an earlier version.
    """
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return str(error)
    if step_of(path) not in (None, manifest.step):
        return f"{MANIFEST} is that of step {manifest.step}"
    for name, expected in manifest.files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if file_check_sum(path / name) != expected:
            return f"{name} is not what was written"
    return None


def _seal(directory: Path, state: dict[str, Any]) -> None:
    """Write the manifest, when all other files of a checkpoint are on the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    sums = {str(path.relative_to(directory)): file_check_sum(path) for path in files}
    write_manifest(directory, Manifest(**state, files=sums))
    _sync(directory / MANIFEST)


def _remove(path: Path) -> None:
    """Remove a checkpoint, or the link to one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Have the system write what it holds back, so that a renamed checkpoint outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
