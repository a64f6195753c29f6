"""Reading the weights of a checkpoint: a directory, a repository of the Hub, or a single weight file."""

import os
import pickle  # nosec B403  # only for its exception; torch reads the files, with weights_only=True
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..loading import find_file
from ..reading import WeightsIndex, described, explained, read_json, shortened
from .errors import ConversionError


# The patch embedding under its names in timm and in transformers, behind the names of the modules around the ViT.
PATCH_EMBEDDING = re.compile(
    r"((?:[^.]+\.)*?)(?:patch_embed\.proj|(?:(?:vit|deit|dinov2)\.)?embeddings\.patch_embeddings\.projection)\.weight"
)
# Parts of names that wrappers add at any depth: DDP and AveragedModel (module), torch.compile (_orig_mod), FSDP
# (_fsdp_wrapped_module), activation checkpointing (_checkpoint_wrapped_module).
WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_[^.]+|module)\.")
AVERAGED = re.compile(r"(?<![a-z])(ema|swa)(?![a-z])|averag", re.IGNORECASE)
# Names that say the opposite, such as model_no_ema and before_swa.
NOT_AVERAGED = re.compile(r"(?<![a-z])(no|non|not|un|without|wo|before|pre|raw)[\W_]?(ema|swa|averag)", re.IGNORECASE)
COUNTER = re.compile(r"(?:.*\.)?(n_averaged|num_batches_tracked|num_updates|steps?)")  # of a wrapper
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ignored:
    """Takes the place of any class or function of a pickle, so that none of their code is run."""

    def __new__(cls, *args: Any) -> "Ignored":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def read_weights(source: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], str]:
    """Return all tensors of a checkpoint, memory-mapped, and the part of its files that they are, as dotted keys.

    Names of wrappers are removed, and so are the counters that wrappers store beside the weights. Of a checkpoint
    with weights and averaged weights, the averaged ones are read, as by timm.

    Raises:
        ConversionError: the weights are missing, damaged or not floating point, or it is not clear which to read.
    """
    name, tensors, parts, prefix = str(source), dict[str, torch.Tensor](), set(), ""
    for path in _weight_files(name):
        part, content = _read_weight_file(path)
        parts.add(part)
        for key, tensor in content.items():
            if tensors.setdefault(bare := WRAPPER.sub("", key), tensor) is not tensor:
                raise ConversionError(f"{name}: {bare} is in its weights twice")
    if prefixes := {match[1] for match in map(PATCH_EMBEDDING.fullmatch, tensors) if match}:
        prefix = _choose(name, prefixes)
        tensors = _inside(name, prefix, tuple(prefixes - {prefix}), tensors)
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
            raise ConversionError(f"{name}: {key} is {tensor.dtype}; weights must be one of {dtypes}")
    return tensors, ".".join(filter(None, [*sorted(parts), prefix.rstrip(".")]))


def _inside(
    source: str, prefix: str, others: tuple[str, ...], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a ViT without the names of the modules around it, and without counters of wrappers."""
    inside = {}
    for name, tensor in tensors.items():
        is_fraction = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if tensor.dim() == 0 and (COUNTER.fullmatch(name) or not is_fraction):  # other scalars may be weights
            continue
        if name.startswith(prefix):
            inside[name.removeprefix(prefix)] = tensor
        elif not name.startswith(others):
            raise ConversionError(
                f"{source}: {name} is no tensor of the ViT, which is under {prefix.rstrip('.')!r}; save the state "
                "dict of the ViT alone"
            )
    return inside


def _is_averaged(name: str) -> bool:
    return AVERAGED.search(name) is not None and NOT_AVERAGED.search(name) is None


def _choose(source: str, names: Collection[str]) -> str:
    """Return the name of the only model, or of the only one with averaged weights."""
    averaged = [name for name in names if _is_averaged(name)]
    choice = averaged or list(names)
    if len(choice) != 1:
        found = shortened(", ".join(sorted(name.rstrip(".") or "(top level)" for name in choice)))
        raise ConversionError(
            f"{source}: holds {len(choice)} models ({found}); save the state dict of one of them alone"
        )
    return choice[0]


def _weight_files(source: str) -> list[Path]:
    if Path(source).is_file():
        return [Path(source)]
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if path := find_file(source, single, ConversionError):
            return [path]
        if path := find_file(source, index, ConversionError):
            shards = sorted(set(read_json(path, WeightsIndex, ConversionError).weight_map.values()))
            found = {shard: find_file(source, shard, ConversionError) for shard in shards}
            if missing := [shard for shard, path in found.items() if path is None]:
                raise ConversionError(f"{source}: {missing[0]} is missing, although the weight index lists it")
            return [path for path in found.values() if path is not None]
    raise ConversionError(f"{source}: no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} in it; give a directory with weights")


def _read_weight_file(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Read a file in the format that its content has, whatever its suffix; return the part that is read, too."""
    with path.open("rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":  # safetensors: 8 bytes with the length of the header, which is JSON
        with (
            explained(f"{path}: damaged or truncated safetensors file", ConversionError),
            safe_open(path, framework="pt") as file,
        ):
            return "", {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    content = _read_pickle(path, is_pickle=start[:2] == b"PK" or start[:1] == pickle.PROTO)
    found = {key: each for key, each in _containers(content) if _is_state_dict(each)}
    if isinstance(content, dict) and not found and all(isinstance(value, torch.Tensor) for value in content.values()):
        found = {"": content}  # a shard, or no ViT
    if not found:
        keys = f"; its keys are {shortened(', '.join(map(str, content)))}" if isinstance(content, dict) else ""
        raise ConversionError(f"{path}: holds no state dict of a ViT or DeiT{keys}; save model.state_dict()")
    part = _choose(str(path), found)
    if not _is_averaged(part):
        for key, entries in _containers(content):
            if (
                key not in found
                and _is_averaged(key)
                and any(isinstance(x, list | torch.Tensor) for x in entries.values())
            ):
                raise ConversionError(
                    f"{path}: holds averaged weights ({shortened(key)}) that are no state dict of a ViT, beside "
                    f"{part or 'others'}; save the wanted state dict alone"
                )
    return part, {str(name): value.detach() for name, value in found[part].items() if isinstance(value, torch.Tensor)}


def _read_pickle(path: Path, is_pickle: bool) -> Any:
    """Read a pickle; nothing is executed, and objects other than tensors, such as a `Namespace`, are `Ignored`."""
    # Files in the format of torch < 1.6 are not zip archives: neither can be memory-mapped nor their classes listed.
    zipped = zipfile.is_zipfile(path)
    mapped = zipped and path.suffix != ".safetensors"  # torch takes the format from this suffix
    others: list[str] = []
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else ["argparse.Namespace"]
        ignored = torch.serialization.safe_globals([(Ignored, name) for name in others])
        with warnings.catch_warnings(), ignored, path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # reading an arbitrary file as a pickle can raise anything
        unsafe = isinstance(error, pickle.UnpicklingError)  # torch's message advises to load it with its code
        if unsafe and is_pickle:
            names = f" ({shortened(', '.join(sorted(others)))})" if zipped else ""
            raise ConversionError(
                f"{path}: holds objects other than tensors{names}, which are not loaded, since a pickle can run code; "
                "save the state dict alone, preferably as safetensors"
            ) from error
        raise ConversionError(
            f"{path}: damaged or truncated, or neither a safetensors file nor a checkpoint of PyTorch"
            + ("" if unsafe else f" ({described(error)})")
        ) from error


def _containers(content: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dictionaries of a pickle at any depth by their dotted keys."""
    rest, seen = [("", content)], set()
    for key, value in rest:  # which grows
        if isinstance(value, dict) and id(value) not in seen:  # pickles can be cyclic
            seen.add(id(value))
            yield key, value
            rest += [(f"{key}.{name}".lstrip("."), each) for name, each in value.items()]


def _is_state_dict(entries: Mapping[Any, Any]) -> bool:
    """Whether these are the tensors of a ViT."""
    names = (str(name) for name, value in entries.items() if isinstance(value, torch.Tensor))
    return any(PATCH_EMBEDDING.fullmatch(WRAPPER.sub("", name)) for name in names)
