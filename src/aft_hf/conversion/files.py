"""Reading the weights of a checkpoint: a directory, a repository of the Hub, or a single weight file."""

import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..errors import InputError, explained, shortened
from ..loading import FLOAT_DTYPES, weight_files


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


class Ignored:
    """Takes the place of any class or function of a pickle, so that none of their code is run."""

    def __new__(cls, *args: Any) -> "Ignored":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def read_weights(source: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of the ViT in a checkpoint, and the part of its files that they are, as dotted keys.

    The state dict may be at any depth of a dictionary, and the ViT at any depth of a model. Names of wrappers are
    removed, and so are the counters that wrappers store beside the weights. Of a checkpoint with weights and averaged
    weights, the averaged ones are read, as by timm.

    Raises:
        InputError: the weights are missing, damaged or not floating point, or it is not clear which to read.
    """
    name, states = str(source), dict[str, dict[str, torch.Tensor]]()  # tensors by the keys of their dictionary
    files = [Path(name)] if Path(name).is_file() else weight_files(name)
    if not files:
        raise InputError(f"{name}: no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} in it; give a directory with weights")
    for path in files:
        for keys, entries in _read_weight_file(path):
            for key, tensor in entries.items():
                bare = WRAPPER.sub("", str(key))
                if states.setdefault(keys, {}).setdefault(bare, tensor) is not tensor:
                    raise InputError(f"{name}: two weights are named {bare}; save the state dict of one model")
    models = {
        f"{keys}.{match[1]}".strip("."): (keys, match[1])
        for keys, tensors in states.items()
        for match in filter(None, map(PATCH_EMBEDDING.fullmatch, tensors))
    }
    if not models:
        raise InputError(f"{name}: contains no state dict of a ViT or DeiT; save model.state_dict()")
    averaged = [part for part in models if AVERAGED.search(part) and not NOT_AVERAGED.search(part)]
    if len(chosen := averaged or list(models)) != 1:
        parts = shortened(", ".join(sorted(part or "(top level)" for part in chosen)))
        raise InputError(f"{name}: contains {len(chosen)} models ({parts}); save the state dict of one of them")
    (part,) = chosen
    keys, prefix = models[part]
    others = tuple(other for place, other in models.values() if place == keys and other != prefix)
    weights = {}
    for key, tensor in states[keys].items():
        # Counters and whole numbers; other scalars may be weights.
        if tensor.dim() == 0 and (COUNTER.fullmatch(key) or not tensor.is_floating_point()):
            continue
        if key.startswith(prefix):
            if tensor.dtype not in FLOAT_DTYPES:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
                raise InputError(f"{name}: {key} has the dtype {tensor.dtype}; give weights in {dtypes}")
            if tensor.nbytes > tensor.untyped_storage().nbytes():  # a pickle of a kilobyte may describe any size
                raise InputError(f"{name}: {key} has more elements than are stored; save contiguous tensors")
            weights[key.removeprefix(prefix)] = tensor.detach()
        elif not key.startswith(others):
            raise InputError(
                f"{name}: {key} is not a tensor of the ViT, whose names begin with {prefix!r}; save the ViT alone"
            )
    return weights, part


def _read_weight_file(path: Path) -> Iterator[tuple[str, dict[Any, torch.Tensor]]]:
    """Yield the tensors of each dictionary in a file by its dotted keys. The content of a file tells its format."""
    with path.open("rb") as opened:
        is_safetensors = opened.read(9)[8:] == b"{"  # 8 bytes with the length of the header, which is JSON
    with explained(f"{path}: damaged or truncated safetensors file"):
        content = load_file(path) if is_safetensors else _read_pickle(path)
    rest, seen = [("", content)], set()
    for keys, value in rest:  # which grows
        if isinstance(value, dict) and id(value) not in seen:  # pickles can be cyclic
            seen.add(id(value))
            yield keys, {key: each for key, each in value.items() if isinstance(each, torch.Tensor)}
            rest += [(f"{keys}.{key}".lstrip("."), each) for key, each in value.items()]


def _read_pickle(path: Path) -> Any:
    """Read a pickle; nothing is executed, and objects other than tensors, such as a `Namespace`, are `Ignored`."""
    # Files in the format of torch < 1.6 are not zip archives: neither can be memory-mapped nor their classes listed.
    zipped = zipfile.is_zipfile(path)
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else ["argparse.Namespace"]
        with warnings.catch_warnings(), torch.serialization.safe_globals([(Ignored, name) for name in others]):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # reading an arbitrary file as a pickle can raise anything
        raise InputError(  # without torch's message, which advises to run the code of the file
            f"{path}: is neither a safetensors file nor a checkpoint of PyTorch, is damaged or truncated, or holds "
            "objects other than tensors, which are not loaded, since a pickle can run code; save the state dict "
            "alone, preferably as safetensors"
        ) from error
