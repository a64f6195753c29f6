"""Reading the weights of a checkpoint: a directory, a repository of the Hub, or a single weight file."""

import argparse
import os
import pickle  # nosec B403  # only for its exception; torch reads the files, with weights_only=True
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
# Keys under which training scripts store the weights, next to optimizer states and the like.
WEIGHT_KEYS = ("model", "state_dict")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_tensors(source: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by their names in its files, memory-mapped: pages are loaded on access.

    Raises:
        ConversionError: the weights are missing, damaged or not floating point, or a file holds other objects.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(str(source)):
        for name, tensor in _read_weight_file(path).items():
            if name in tensors:
                raise ConversionError(f"{source}: {name} is in two of the weight files")
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
    raise ConversionError(f"{source}: no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} in it; give a directory with weights")


def _shard(source: str, filename: str) -> Path:
    path = find_file(source, filename, ConversionError)
    if path is None:
        raise ConversionError(f"{source}: {filename} is missing, although the weight index lists it")
    return path


def _read_weight_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in PICKLE_SUFFIXES:
        return _read_pickle(path)
    known = ", ".join(WEIGHT_SUFFIXES)
    raise ConversionError(f"{path}: is no weight file by its suffix; give a file that ends in one of {known}")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    damaged = f"{path}: damaged or truncated safetensors file"
    with explained(damaged, ConversionError), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a pickle; nothing is executed. Options of a training script (a `Namespace`) are ignored."""
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            # Files in the format of torch < 1.6 are not zip archives and cannot be memory-mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # reading an arbitrary file as a pickle can raise anything
        if isinstance(error, pickle.UnpicklingError):
            raise ConversionError(
                f"{path}: holds objects other than tensors, which are not loaded, since a pickle can run code; "
                "save the state dict alone, preferably as safetensors"
            ) from error
        raise ConversionError(f"{path}: damaged, truncated, or no checkpoint of PyTorch; download it again") from error
    for key in WEIGHT_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConversionError(
            f"{path}: holds no state dict, neither at the top level nor under {' or '.join(WEIGHT_KEYS)}"
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}
