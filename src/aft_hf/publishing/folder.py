"""Selection of the files of a folder to publish, and the check that they are regular files."""

import os
from fnmatch import fnmatch
from pathlib import Path


# Files of training and conversion that no model needs are not published. Neither are hidden files, except Git's own.
LEFT_OUT = ["checkpoint-*", "checkpoints", "step-*", "global_step*", "runs", "logs", "wandb", "mlruns", "__pycache__"]
LEFT_OUT += ["_run"]  # the lock of a training run: `running.ownership`
LEFT_OUT += ["training_args.bin", "optimizer*", "scheduler*", "scaler*.pt", "rng_state*", "random_states*", "*.lock"]
LEFT_OUT += ["events.out.tfevents.*", "hparams.yml", "generated.txt", "*.tmp", "*.pyc"]


def files_to_upload(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files of the model by their names on the Hub, and the names of what is left out, both sorted."""
    kept, left_out = {}, []
    for folder, folders, files in os.walk(directory):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if _is_left_out(name):
                left_out.append(path.relative_to(directory).as_posix())
            elif name in files or path.is_symlink():
                kept[path.relative_to(directory).as_posix()] = path
        folders[:] = [name for name in folders if not _is_left_out(name)]
    return dict(sorted(kept.items())), sorted(left_out)


def misplaced_files(directory: Path) -> list[str]:
    """Return a line for each file to publish that is not a regular file.

    A symlink could publish any file of the machine or overwrite it, and reading a pipe never ends.
    """
    problems = []
    for name, path in files_to_upload(directory)[0].items():
        if path.is_symlink():
            problems.append(f"{name}: is a link to {os.readlink(path)}; replace it with a copy to publish it")
        elif not path.is_file():
            problems.append(f"{name}: is not a regular file; remove it")
    return problems


def _is_left_out(name: str) -> bool:
    is_hidden = name.startswith(".") and name not in (".gitattributes", ".gitignore")
    return is_hidden or any(fnmatch(name, pattern) for pattern in LEFT_OUT)
