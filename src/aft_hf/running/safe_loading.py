"""Loading of checkpoints without running code from them.

Accelerate and `torch.distributed.checkpoint` save optimizer states, random states and shard tables as pickles, which
can name any function to be called. Here they may contain only tensors, numbers and the few types that are needed.
"""

import pickle  # nosec B403  # for an unpickler that refuses every name but a few
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch.distributed.checkpoint import CheckpointException, metadata

from ..errors import InputError, explained


PICKLES = (".bin", ".pkl", ".pt", ".pth")  # written by `torch.save`
NEVER_READ = "training_args.bin"  # objects other than data, which Trainer writes for information only
SHARD_TABLE = ".metadata"  # plain pickle of `torch.distributed.checkpoint`; tables of single processes have a prefix

# All types in a shard table besides PyTorch's dtypes and the types that its module `metadata` defines.
TABLE_TYPES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "StorageMeta"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # in Python 3.13
}


@contextmanager
def data_only(checkpoint: Path) -> Iterator[None]:
    """Restrict `torch.load` to data within the context, even for callers that pass `weights_only=False`.

    An InputError is raised if a file of the checkpoint could run code when it is loaded, cannot be checked, or is a
    symlink. No code from it has then been run.
    """
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        for path in sorted(checkpoint.rglob("*")):
            if path.is_symlink():  # its target may change after the check
                raise InputError(f"{path} is not read: it is a symlink, which checkpoints never contain")
            if path.is_file():
                _check(path)
        try:
            with patch_environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="0"):
                yield
        except (CheckpointException, pickle.UnpicklingError) as error:
            if not isinstance(cause := cause_of(error), pickle.UnpicklingError):
                raise cause from None
            raise InputError(
                f"{checkpoint} is not read: it contains objects other than tensors and numbers, which could run code"
            ) from error


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the first failed process if `error` is a `CheckpointException`, else `error` itself."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _check(path: Path) -> None:
    """Raise an InputError if a file is a pickle that contains more than data."""
    # A damaged pickle can raise any error.
    with explained(f"{path} is not read: it may hold only tensors and numbers"):
        if path.name.endswith(SHARD_TABLE):
            with path.open("rb") as file:
                if not isinstance(_ShardTable(file).load(), metadata.Metadata):
                    raise ValueError("it is not a shard table")
        elif path.suffix in PICKLES and path.name != NEVER_READ:
            for name in sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
                raise _refusal(name)


def _refusal(name: str) -> ValueError:
    return ValueError(f"it names {name}, which could run code")


class _ShardTable(pickle.Unpickler):
    """Unpickler of a shard table that stops at the first name that is not among the types of such tables."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 pickles enum members as getattr(class, name)
            return _member
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        is_part = module == metadata.__name__ and getattr(vars(metadata).get(name), "__module__", None) == module
        if not (is_dtype or is_part or (module, name) in TABLE_TYPES):
            raise _refusal(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enum by its name. Any other attribute is refused."""
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise _refusal("builtins.getattr")
    return kind[name]
