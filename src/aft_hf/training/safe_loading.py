"""Reading checkpoints without running code from them.

Accelerate, `torch.distributed.checkpoint` and DeepSpeed keep optimizer states, random states and tables of shards as
pickles, which can name any function to be called while they are read. Here they may hold tensors, numbers and the few
types that these libraries need, and nothing else.
"""

import os
import pickle  # nosec B403  # for an unpickler that refuses every name but a few
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata


PICKLES = (".bin", ".pkl", ".pt", ".pth")  # by `torch.save`
NEVER_READ = ("training_args.bin",)  # which Trainer writes for people, as objects
SHARD_TABLE = ".metadata"  # of `torch.distributed.checkpoint`, a plain pickle; one of a process has its number before

FORCE, PREVENT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

# All that `torch.distributed.checkpoint` itself writes into such a table.
TABLE_TYPES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
TABLE_TYPES |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "StorageMeta"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
}
TABLE_TYPES |= {("torch", str(value)[6:]) for value in vars(torch).values() if isinstance(value, torch.dtype)}


class UnsafeCheckpointError(ValueError):
    """A file of a checkpoint that names what a checkpoint has no need of."""


@contextmanager
def data_only(checkpoint: Path) -> Iterator[None]:
    """Within, `torch.load` reads nothing but data, even for callers that ask for more. All files of the checkpoint
    that tell what they name without being read are looked through before.

    Raises:
        UnsafeCheckpointError: a file would call something, which it has not done.
    """
    with torch.serialization.safe_globals([*TORCH_SAFE_GLOBALS, *_deepspeed_types()]):
        for path in sorted(checkpoint.rglob("*")):
            if path.is_symlink():  # to what may change after the check
                raise UnsafeCheckpointError(f"{path} is not read: it is a link, which no checkpoint has")
            if path.is_file():
                _check(path)
        kept = {name: os.environ.pop(name, None) for name in (FORCE, PREVENT)}
        os.environ[FORCE] = "1"
        try:
            yield
        except (CheckpointException, pickle.UnpicklingError) as error:
            if not isinstance(cause_of(error), pickle.UnpicklingError):
                raise
            raise UnsafeCheckpointError(
                f"{checkpoint} is not read: it has objects other than tensors and numbers, which could run code"
            ) from error
        finally:
            del os.environ[FORCE]
            os.environ.update({name: value for name, value in kept.items() if value is not None})


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the first of the processes that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _check(path: Path) -> None:
    """Raise an UnsafeCheckpointError if a file is a pickle of something else than data."""
    named: list[str] = []
    try:
        if path.name.endswith(SHARD_TABLE):
            with path.open("rb") as file:
                if not isinstance(_ShardTable(file, named).load(), Metadata):
                    raise pickle.UnpicklingError("no table of shards")
        elif path.suffix in PICKLES and path.name not in NEVER_READ:
            named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except OSError:
        raise
    except Exception as error:  # of a damaged pickle there is no saying what is raised
        if not named:
            raise UnsafeCheckpointError(f"{path} is not read: it is no file of tensors and numbers") from error
    if named:
        raise UnsafeCheckpointError(
            f"{path} is not read: it names {min(named)}, which could run code; a checkpoint has tensors and numbers"
        )


class _ShardTable(pickle.Unpickler):
    """Reads the table of the shards up to the first name that belongs into none, which is added to `named`."""

    def __init__(self, file: BinaryIO, named: list[str]):
        super().__init__(file)
        self.named = named

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in TABLE_TYPES:
            self.named.append(f"{module}.{name}")
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _deepspeed_types() -> list[type]:
    """What DeepSpeed keeps beside tensors and numbers; nothing where it is not in use."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return [DynamicLossScaler, LossScaler, ZeroStageEnum]
