"""Which files of a folder are published, and that they lie in that folder."""

import os
from fnmatch import fnmatch
from pathlib import Path

from ..conversion.manifest import MANIFEST_NAME
from .errors import PublishError


# What training and conversion leave behind and nobody loads stays where it is. Hidden files too, but for Git's own.
LEFT_OUT = ["checkpoint-*", "checkpoints", "step-*", "global_step*", "runs", "logs", "wandb", "mlruns", "__pycache__"]
LEFT_OUT += ["_run"]  # `training.ownership`: who trains there
LEFT_OUT += ["training_args.bin", "optimizer*", "scheduler*", "scaler*.pt", "rng_state*", "random_states*", "*.lock"]
LEFT_OUT += ["events.out.tfevents.*", "hparams.yml", "generated.txt", "*.tmp", "*.pyc"]
LEFT_OUT += [MANIFEST_NAME]


def files_to_upload(directory: Path) -> tuple[list[Path], list[Path]]:
    """(what belongs to the model, what is left out), sorted; of a folder that is left out only the folder."""
    kept, left_out = [], []
    for folder, folders, names in os.walk(directory):
        here = Path(folder)
        for name in [*folders, *names]:
            if _is_hidden(name) or any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                left_out.append(here / name)
            elif name in names or (here / name).is_symlink():
                kept.append(here / name)
        folders[:] = [name for name in folders if here / name not in left_out]
    return sorted(kept), sorted(left_out)


def files_by_name(*directories: Path) -> dict[str, Path]:
    """What is published, by its name there; files of later directories stand for those of earlier ones."""
    found = {path.relative_to(each).as_posix(): path for each in directories for path in files_to_upload(each)[0]}
    return dict(sorted(found.items()))


def misplaced_files(directory: Path) -> list[str]:
    """What would be published and is no regular file of the folder, a line each.

    A link could bring in any file of this machine, or have it written over, and reading a pipe never ends.
    """
    problems = {name: _misplacement(path, directory) for name, path in files_by_name(directory).items()}
    return [f"{name}: {problem}" for name, problem in problems.items() if problem is not None]


def refuse_misplaced_files(directory: Path) -> None:
    """Raise a PublishError that names `misplaced_files`, if there are any."""
    if problems := misplaced_files(directory):
        raise PublishError(f"{directory} is not fit to be published: {'; '.join(problems)}")


def _is_hidden(name: str) -> bool:
    """Whether a file or folder is to stay where it is: of hidden ones, all but Git's own."""
    return name.startswith(".") and name not in (".gitattributes", ".gitignore")


def _misplacement(path: Path, directory: Path) -> str | None:
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not target.exists():
            return f"is a link to nothing ({os.readlink(path)}); remove it"
        if not target.is_relative_to(os.path.realpath(directory)):
            return f"is a link out of the folder, to {target}; put a copy in its place if it is to be published"
        inside = target.relative_to(os.path.realpath(directory))
        if any(map(_is_hidden, inside.parts)):
            return (
                f"is a link to the hidden file {inside.as_posix()}; put a copy in its place if it is to be published"
            )
        if target.is_dir():
            return "is a link to a folder; put a copy in its place if it is to be published"
    return None if path.is_file() else "is no regular file; remove it"
