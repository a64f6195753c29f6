"""Load models, configs, tokenizers and processors from a directory or the Hub: files are checked first, no code of the
source is executed, and errors are one line.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn
from torch.nn.modules import module as modules
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from .reading import (
    ImageProcessorConfig,
    ModelConfig,
    ProcessorConfig,
    TokenizerConfig,
    UnreadableError,
    WeightsIndex,
    explained,
    read_json,
    shortened,
)


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".tar", ".ckpt")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FREE_TENSORS, FREE_ELEMENTS = 2**11, 2**27  # that take a second and half a gigabyte, for weights of any size

# Options that replace names of attention and experts in a config.json, also in its nested configs, by the default of
# transformers: the name can be a kernel on the Hub, which transformers would download and run.
OWN_KERNELS: dict[str, Any] = {"_attn_implementation": None, "_experts_implementation": None}
# Keys of a config.json, at any depth, with which libraries load other files: kernels on the Hub, pickles (timm),
# weights of another name, and the config of another model. The `auto_map` of the whole model is not among them: it is
# used only if the source is trusted, whereas transformers asks the user about nested ones.
ELSEWHERE = ("auto_map", "quantization_config", "checkpoint_path", "transformers_weights", "backbone")


def find_file(source: str, filename: str, error: type[ValueError] = UnreadableError, **hub: Any) -> Path | None:
    """Return the path of a file in a directory or in a repository on the Hub, or None if there is no such file.

    It is downloaded if needed, with options of `transformers.utils.cached_file`, such as `revision`. If it cannot be
    downloaded, or is not a regular file, `error` is raised.
    """
    local = Path(source) / filename
    if local.exists() and not local.is_file():
        raise error(f"{local}: is not a regular file")
    with explained(f"{source}: {filename} cannot be read", error):
        path = cached_file(source, filename, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path is None else Path(path)


def weight_files(source: str, error: type[ValueError] = UnreadableError) -> list[Path]:
    """Return the weight files that transformers reads from a directory or a repository on the Hub."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if path := find_file(source, name, error):
            if name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
                return [path]
            shards = sorted(set(read_json(path, WeightsIndex, error).weight_map.values()))
            found = {shard: find_file(source, shard, error) for shard in shards}
            if missing := [shard for shard, path in found.items() if path is None]:
                raise error(f"{source}: {missing[0]} is missing, although the weight index lists it")
            return [path for path in found.values() if path is not None]
    return []


def read_config(
    source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, *, trusted: bool = False, **hub: Any
) -> ModelConfig:
    """Read the config.json of a saved model of any type, and refuse it if a value is impossible for any model.

    The arguments are those of `find_file`, and `trusted`: whether code that the config names may be executed.
    """
    name = str(source)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(WEIGHT_SUFFIXES)
    if looks_local and not Path(name).exists():
        raise error(f"{name}: no such directory or file")
    if Path(name).is_file():
        raise error(f"{name}: is a file; give the directory that contains {CONFIG_NAME} and the weights")
    try:
        path = find_file(name, CONFIG_NAME, error, **hub)
    except error as problem:
        if Path(name).exists():
            raise
        raise error(f"{name}: {NOWHERE} ({problem.__cause__ or problem})") from problem
    if path is None and Path(name).is_dir():
        saved = [path.parent for path in Path(name).glob(f"checkpoint-*/{CONFIG_NAME}")]  # in the output of a Trainer
        saved.sort(key=lambda path: (len(path.name), path.name), reverse=True)  # by the number of steps
        instead = f"; give one of its checkpoints: {shortened(', '.join(map(str, saved)))}" if saved else ""
        raise error(f"{name}: the directory contains no {CONFIG_NAME}{instead}")
    if path is None:
        raise error(f"{name}: {NOWHERE}")
    config = read_json(path, ModelConfig, error)
    if not trusted and (found := next(_elsewhere(config.model_dump(exclude={"auto_map"})), None)):
        raise error(
            f"{path}: {found} can load code or files from elsewhere, which needs trust_remote_code=True; give an "
            "unquantized model of a class of transformers"
        )
    return config


def _elsewhere(values: Any, prefix: str = "") -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if key in ELSEWHERE and value is not None:
            yield f"{prefix}{key}"
        if isinstance(value, (dict, list)):
            yield from _elsewhere(value, f"{prefix}{key}.")


def read_image_processor(
    source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **hub: Any
) -> dict[str, Any] | None:
    """Check the image processor of a saved model, and return its values, or None if there is none.

    As in transformers, an entry `image_processor` of processor_config.json replaces preprocessor_config.json.
    The arguments are those of `find_file`.
    """
    optional = hub | {"_raise_exceptions_for_connection_errors": False}
    if path := find_file(str(source), PROCESSOR_NAME, error, **optional):
        entry = read_json(path, ProcessorConfig, error).image_processor
        if entry is not None:
            return entry.model_dump(exclude_unset=True)
    path = find_file(str(source), IMAGE_PROCESSOR_NAME, error, **hub)
    return None if path is None else read_json(path, ImageProcessorConfig, error).model_dump(exclude_unset=True)


NOWHERE = (
    "no such directory or file, and the Hub does not provide it: check the name; when offline (HF_HUB_OFFLINE), go "
    "online or download it first"
)


def load(
    auto_class: Any, source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **options: Any
) -> Any:
    """Load a config, model, tokenizer or processor by `auto_class.from_pretrained(source, **options)`.

    Code of the source, or that its files name, is not executed, and the user is not asked to allow it, unless
    `trust_remote_code=True` is set. A `config` in `options` must be a result of this function. A tokenizer or image
    processor is tried on a small input.
    """
    options = {"trust_remote_code": False, **options}
    trusted = options["trust_remote_code"]
    hub = {key: options[key] for key in ("revision", "token") if key in options}
    optional = hub | {"_raise_exceptions_for_connection_errors": False}
    place, processor = Path(source), None
    # A tokenizer may be saved without a model.
    is_alone = (place / TOKENIZER_CONFIG_FILE).exists() and not (place / CONFIG_NAME).exists()
    if auto_class is not AutoTokenizer or not is_alone:
        read_config(source, error, trusted=trusted, **hub)
        config = find_file(str(source), CONFIG_NAME, error, **hub)
        assert config is not None  # `read_config` requires it
        place = config.parent
    if auto_class is AutoImageProcessor:
        processor = read_image_processor(source, error, **hub)
    elif auto_class is AutoTokenizer:
        if path := find_file(str(source), TOKENIZER_CONFIG_FILE, error, **optional):
            read_json(path, TokenizerConfig, error)
    elif not trusted:
        if find_file(str(source), ADAPTER_CONFIG_NAME, error, **optional):  # it names another model
            raise error(
                f"{source}: has an {ADAPTER_CONFIG_NAME}: merge the adapter into its model and save the result"
            )
        if "config" not in options:
            options = OWN_KERNELS | {"_attn_implementation": options.pop("attn_implementation", None)} | options
    what = f"{source}: cannot be loaded by {auto_class.__name__}"
    with explained(what, error), no_larger_than_weights(place, error):
        if processor and str(processor.get("image_processor_type")).endswith("FeatureExtractor"):
            loaded = _load_feature_extractor(processor, options)
        else:
            loaded = auto_class.from_pretrained(source, **options)
        if auto_class is AutoTokenizer:
            loaded("a")  # raises for invalid values, which from_pretrained accepts
        elif auto_class is AutoImageProcessor:
            pixels = loaded(Image.new("RGB", (32, 32)))["pixel_values"]
            if not all(np.isfinite(image).all() for image in pixels):
                raise ValueError("its pixel values are not finite")
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if isinstance(model, nn.Module):
            _check_weights(source, model, place, error)
    return loaded


def check_finite(name: Any, tensors: Iterable[tuple[str, torch.Tensor]], error: type[ValueError]) -> None:
    """Refuse weights that are not finite, with which a model outputs only NaN."""
    for tensor_name, tensor in tensors:
        if tensor.dtype in FLOAT_DTYPES and (wrong := int((~tensor.isfinite()).sum())):
            raise error(
                f"{name}: {tensor_name} holds NaN or infinity ({wrong} of {tensor.numel()} values); the checkpoint is "
                "damaged, or its training diverged; give an earlier checkpoint"
            )


def _check_weights(source: Any, model: Any, directory: Path, error: type[ValueError]) -> None:
    """Refuse a model whose weights are not finite, or are integers in its files, which transformers would cast."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    check_finite(source, weights.items(), error)
    if getattr(model.config, "quantization_config", None) is not None:
        return
    prefix = f"{model.base_model_prefix}."
    floats = {name.removeprefix(prefix) for name, tensor in weights.items() if tensor.is_floating_point()}
    for name, dtype in _stored_dtypes(weight_files(str(directory), error)):
        # Buffers may be integers. Names of modules differ in files of earlier versions.
        is_weight = name.endswith(".weight") or name.removeprefix(prefix) in floats
        if is_weight and not dtype.startswith(("F", "BF", "torch.float", "torch.bfloat")):
            raise error(f"{source}: {name} is stored as {dtype}; weights must be floating point: save the model again")


def _stored_dtypes(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and dtype of each tensor in weight files."""
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = file.keys()
                yield from ((name, file.get_slice(name).get_dtype()) for name in names)
        else:
            tensors = torch.load(path, map_location="meta", weights_only=True)
            yield from ((name, str(tensor.dtype)) for name, tensor in tensors.items())


def _load_feature_extractor(values: dict[str, Any], options: dict[str, Any]) -> Any:
    """Load an image processor under its former name, which transformers still accepts as `feature_extractor_type`."""
    with TemporaryDirectory() as directory:
        renamed = {**values, "image_processor_type": None, "feature_extractor_type": values["image_processor_type"]}
        Path(directory, IMAGE_PROCESSOR_NAME).write_text(json.dumps(renamed))
        return AutoImageProcessor.from_pretrained(directory, **options)


@contextmanager
def no_larger_than_weights(directory: Path, error: type[ValueError] = UnreadableError) -> Iterator[None]:
    """Context manager that stops `from_pretrained` if the config describes a much larger model than the weights.

    Weights that are missing would be initialized, which takes time and memory. The fields that determine the size
    depend on the model type, so the tensors are counted while transformers builds the model on the meta device.
    """
    tensors = elements = size = 0

    def count(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal tensors, elements, size
        if tensor is None or not tensor.is_meta:
            return
        tensors, elements = tensors + 1, elements + tensor.numel()
        if tensors <= FREE_TENSORS and elements <= FREE_ELEMENTS:
            return
        size = size or sum(path.stat().st_size for path in directory.iterdir() if path.name.endswith(WEIGHT_SUFFIXES))
        # In files, a tensor takes about 256 bytes with its name and shape, and an element at least 2 bits.
        if tensors > FREE_TENSORS + size // 256 or elements > FREE_ELEMENTS + 4 * size:
            raise error(
                f"{directory / CONFIG_NAME}: describes a model of over {elements:,} elements in {tensors:,} tensors, "
                f"but the weights beside it have only {size:,} bytes; use the config of these weights"
            )

    register = (modules.register_module_parameter_registration_hook, modules.register_module_buffer_registration_hook)
    hooks = [each(count) for each in register]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def load_trained(auto_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model like `load`, and refuse it if weights are missing in the source, or if it has more layers.

    transformers initializes missing weights randomly and leaves out layers that the config does not have, so
    measurements of such a model would be meaningless.
    """
    model, info = load(auto_class, source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnreadableError(
            f"{source}: weights are missing for {missing[0]}{more} of the {type(model).__name__} that {CONFIG_NAME} "
            "describes: use a checkpoint that contains them, or train the model first"
        )
    if others := sorted(key for key in info["unexpected_keys"] if re.search(r"\.\d+\.", key)):
        raise UnreadableError(f"{source}: {CONFIG_NAME} does not describe the layer of the weight {others[0]}")
    return model
