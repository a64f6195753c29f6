"""The files of a checkpoint: a directory, a repository of the Hub, or a single file of weights."""

import argparse
import os
import pickle  # nosec B403  # for its class of errors: torch reads the files, with weights_only=True
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..loading import WEIGHT_SUFFIXES, find_file
from ..reading import WeightsIndex, explained, read_json
from .errors import ConversionError


PICKLE_SUFFIXES = (".bin", ".pth", ".pt")
# Under which training scripts put the weights, beside optimizers and the like.
WEIGHT_KEYS = ("model", "state_dict")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_tensors(source: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their names in its files, mapped into memory: pages are read when looked at.

    Raises:
        ConversionError: there are no weights, they are damaged, or they are not tensors alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(str(source)):
        for name, tensor in _read_weight_file(path).items():
            if name in tensors:
                raise ConversionError(f"{source}: {name} is in two of its weight files")
            if tensor.dtype not in FLOAT_DTYPES:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
                raise ConversionError(f"{path}: {name} is {tensor.dtype}; weights must be one of {dtypes}")
            tensors[name] = tensor
    return tensors


def _weight_files(source: str) -> list[Path]:
    if Path(source).is_file():
        return [Path(source)]
    for filename in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if path := find_file(source, filename, ConversionError):
            return [path]
    for filename in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if index := find_file(source, filename, ConversionError):
            shards = sorted(set(read_json(index, WeightsIndex, ConversionError).weight_map.values()))
            return [_shard(source, shard) for shard in shards]
    raise ConversionError(f"{source}: no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} in it; give a directory with one")


def _shard(source: str, filename: str) -> Path:
    path = find_file(source, filename, ConversionError)
    if path is None:
        raise ConversionError(f"{source}: {filename} is missing, though its index of weights names it")
    return path


def _read_weight_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in PICKLE_SUFFIXES:
        return _read_pickle(path)
    known = ", ".join(WEIGHT_SUFFIXES)
    raise ConversionError(f"{path}: no file of weights by its name; give one that ends in one of {known}")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    damaged = f"{path}: damaged or truncated safetensors file"
    with explained(damaged, ConversionError), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Only tensors, and the harmless record of its options that a training script leaves; nothing is executed."""
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            # Files in the format of torch < 1.6 are no archives, and cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # there is no telling what reading an arbitrary file as a pickle raises
        if isinstance(error, pickle.UnpicklingError):
            raise ConversionError(
                f"{path}: holds not tensors alone; anything else in a pickle is not loaded, since it can run code; "
                "save its state dict, best as safetensors"
            ) from error
        raise ConversionError(f"{path}: damaged, truncated, or no checkpoint of PyTorch; get it again") from error
    for key in WEIGHT_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConversionError(f"{path}: holds no state dict, neither at the top nor as {' or '.join(WEIGHT_KEYS)}")
    return {str(name): tensor.detach() for name, tensor in content.items()}
