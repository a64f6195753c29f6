"""Reading a trained vision transformer: its config, its tensors by their names on disk, its image processor."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.utils import IMAGE_PROCESSOR_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


MODEL_TYPES = ("vit", "deit")

# What the library raises for files that are missing, damaged, or JSON of another shape.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


class ConversionError(ValueError):
    """A source that cannot be converted, said in one line."""


@dataclass(frozen=True)
class VisionTransformerSource:
    """A ViT or DeiT checkpoint."""

    name: str
    config: PreTrainedConfig
    tensors: dict[str, torch.Tensor]
    image_processor: BaseImageProcessor | None  # None where the checkpoint has none

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next((tensor.dtype for tensor in self.tensors.values()), torch.float32)


def read_source(source: str | os.PathLike) -> VisionTransformerSource:
    """Read a directory that transformers saved, or a repository of the Hub.

    Raises:
        ConversionError: there is no such checkpoint, it is damaged, or it is not a ViT or DeiT.
    """
    name = str(source)
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConversionError(f"{name}: no such directory")
    config = _read_config(name)
    return VisionTransformerSource(name, config, _read_tensors(name), _read_image_processor(name))


def _read_config(name: str) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name)
    except UNREADABLE as error:
        raise ConversionError(f"{name}: no readable config.json ({_first_line(error)})") from error
    if config.model_type not in MODEL_TYPES:
        raise ConversionError(
            f"{name}: a checkpoint of type {config.model_type!r} cannot be converted; "
            f"give one of {' or '.join(map(repr, MODEL_TYPES))}"
        )
    return config


def _read_tensors(name: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(name):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"{path}: damaged or truncated safetensors file ({_first_line(error)})") from error
    return tensors


def _weight_files(name: str) -> list[str]:
    """The safetensors files of a checkpoint, one or several."""
    try:
        single = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if single is not None:
            return [single]
        index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            shards = json.loads(Path(index).read_text())["weight_map"].values()
            return [cached_file(name, shard) for shard in sorted(set(shards))]
    except UNREADABLE as error:
        raise ConversionError(f"{name}: its weights cannot be read ({_first_line(error)})") from error
    raise ConversionError(f"{name}: no {SAFE_WEIGHTS_NAME} in it")


def _read_image_processor(name: str) -> BaseImageProcessor | None:
    """The checkpoint's own; None where it has none. One that cannot be read is an error: means and sizes matter."""
    if cached_file(name, IMAGE_PROCESSOR_NAME, _raise_exceptions_for_missing_entries=False) is None:
        return None
    try:
        return AutoImageProcessor.from_pretrained(name)
    except UNREADABLE as error:
        raise ConversionError(f"{name}: no readable {IMAGE_PROCESSOR_NAME} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
