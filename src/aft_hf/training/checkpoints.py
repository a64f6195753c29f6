"""Checkpoints that are either complete or not there, and the way back from the newest one."""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from accelerate import Accelerator


MANIFEST = "checkpoint.json"  # written last: what the checkpoint consists of, and the state of the run
PREFIX, PARTIAL, ASIDE = "step-", ".partial-", "set-aside-"


class Checkpoints:
    """The checkpoints of one run, `DIRECTORY/step-000000123`.

    One is written under another name, with a manifest of the sizes and check sums of its files, and then renamed. So
    whatever ends the process, a directory of the right name is complete, and one that was damaged later is noticed.

    Args:
        accelerator: what to save: the model, the optimizer, the schedule, the scaler and all random states.
        directory: shared by all processes.
        keep: how many of the newest to keep.
    """

    def __init__(self, accelerator: Accelerator, directory: str | Path, *, keep: int):
        self.accelerator, self.directory, self.keep = accelerator, Path(directory), keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save after `step` steps; the manifest gets the entries of `state`, too.

        Raises:
            OSError: it cannot be written. Checkpoints that were there stay as they are.
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
                _write_manifest(partial, {"step": step, **state})
                if target.exists():  # of an earlier run that did not resume here
                    shutil.rmtree(target)
                os.replace(partial, target)
                _sync(self.directory)
                self._remove_old()
        except Exception as error:  # PyTorch and safetensors have errors of their own for a disk that is full
            last = next(iter(self.steps()), None)
            kept = "there is no earlier one" if last is None else f"the last complete one is {last[1]}"
            reason = (str(error).splitlines() or [type(error).__name__])[0]
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
                shutil.rmtree(path)

    def steps(self) -> list[tuple[int, Path]]:
        """All checkpoints with their steps, the newest first."""
        found = [path for path in self.directory.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
        return sorted(((int(path.name.removeprefix(PREFIX)), path) for path in found), reverse=True)

    def newest(self) -> Path | None:
        """The newest complete checkpoint; says which ones it passes over, and why."""
        for _, path in self.steps():
            damage = find_damage(path)
            if damage is None:
                return path
            self.accelerator.print(f"{path} is damaged ({damage}): skipped")
        return None

    def complete(self, path: str | Path) -> Path:
        """That checkpoint.

        Raises:
            ValueError: it is not complete.
        """
        damage = find_damage(Path(path))
        if damage is not None:
            raise ValueError(f"{path} is no complete checkpoint: {damage}")
        return Path(path)

    def load(self, path: Path) -> None:
        """Load a checkpoint into what the accelerator has prepared.

        Raises:
            ValueError: it does not fit that.
        """
        try:
            self.accelerator.load_state(str(path))
            # Its count of micro-batches: what goes on is a new step, which may have another number of them.
            self.accelerator.step = 0
        except Exception as error:  # DeepSpeed has errors of its own, such as for another number of processes
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path} does not fit the model or the processes: {reason}") from error

    def set_aside(self, step: int) -> None:
        """Rename what lies beyond `step`, from which a run goes on: damaged, or of a course that was given up.

        Among the checkpoints that are still to come they would count as the newest.
        """
        if self.accelerator.is_main_process:
            for number, path in self.steps():
                if number > step:
                    aside = path.with_name(f"{ASIDE}{path.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(path, aside)
                    self.accelerator.print(f"{path} is now {aside}")
        self.accelerator.wait_for_everyone()

    def _remove_old(self) -> None:
        for _, path in self.steps()[self.keep :]:
            # A directory that is half removed must not look like a checkpoint.
            aside = path.with_name(PARTIAL + path.name)
            os.replace(path, aside)
            shutil.rmtree(aside)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    return json.loads((Path(path) / MANIFEST).read_text())


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is: every file has to have the size and sum of its manifest."""
    try:
        files = read_manifest(path)["files"]
    except OSError:
        return f"no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _check_sum(path / name) != expected:
            return f"{name} is not what was written"
    return None


def _write_manifest(directory: Path, content: dict[str, Any]) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    content["files"] = {str(path.relative_to(directory)): _check_sum(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps(content))
    _sync(directory / MANIFEST)


def _check_sum(path: Path) -> str:
    """Size and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return f"{size}:{crc:08x}"


def _sync(path: Path) -> None:
    """Have the system write what it holds back, so that a renamed checkpoint outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
