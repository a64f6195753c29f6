"""Load models, configs, tokenizers and processors: files are checked first, and no code of the source is executed."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.modules import module as modules
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.import_utils import DummyObject

from .atomic_files import sha256
from .errors import InputError, explained, shortened
from .limits import limited
from .reading import (
    ImageProcessorConfig,
    ModelConfig,
    ProcessorConfig,
    TokenizerConfig,
    WeightsIndex,
    parse_header,
    read_json,
    read_text,
)


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".tar", ".ckpt")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FREE_TENSORS, FREE_ELEMENTS = 2**11, 2**27  # that take a second and half a gigabyte, for weights of any size

# Options that replace names of attention and experts in a config.json, also in nested configs, by the default of
# transformers: the name can be a kernel on the Hub, which transformers would download and run.
OWN_KERNELS: dict[str, Any] = {"_attn_implementation": None, "_experts_implementation": None}
# Keys of a config.json, at any depth, with which libraries load other files: kernels on the Hub, pickles (timm),
# weights of another name, and the config of another model. The outermost `auto_map` is used only if it is trusted.
ELSEWHERE = ("auto_map", "quantization_config", "checkpoint_path", "transformers_weights", "backbone")

# The image processors of image classifiers. Others cut images into any number of tiles, or open more files.
IMAGE_PROCESSORS = {
    name
    for model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    for name in IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {}).values()
}
IMAGES = ((32, 32), (1024, 32))  # sizes that they are tried on, as long as `open_image` allows


def find_file(source: str, filename: str, *, optional: bool = False, **hub: Any) -> Path | None:
    """Return the path of a file in a directory or, by `cached_file` of transformers, on the Hub, or None without it.

    An InputError is raised if it is not a regular file or, unless it is `optional`, cannot be downloaded.
    """
    local = Path(source) / filename
    if local.exists() and not local.is_file():
        raise InputError(f"{local}: is not a regular file")
    with explained(f"{source}: {filename} cannot be read"):
        hub["_raise_exceptions_for_connection_errors"] = not optional
        path = cached_file(source, filename, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path is None else Path(path)


def weight_files(source: str) -> list[Path]:
    """Return the weight files that transformers reads from a directory or a repository on the Hub."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if path := find_file(source, name):
            return [path]
        if index := find_file(source, f"{name}.index.json"):
            shards = []
            for shard in sorted(set(read_json(index, WeightsIndex).weight_map.values())):
                if (path := find_file(source, shard)) is None:
                    raise InputError(f"{source}: {shard} is missing, although the weight index lists it")
                shards.append(path)
            return shards
    return []


def weights_digest(directory: str | os.PathLike[str]) -> str | None:
    """Return one SHA-256 over the weight files that transformers loads from a directory, or None if there are none."""
    digests = [sha256(path) for path in weight_files(str(directory))]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def read_config(source: str | os.PathLike[str], *, trusted: bool = False, **hub: Any) -> ModelConfig:
    """Read the config.json of a saved model of any type, and refuse it if a value is impossible for any model.

    The arguments are those of `find_file`, and `trusted`: whether code that the config names may be executed.
    """
    name = str(source)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(WEIGHT_SUFFIXES)
    if looks_local and not Path(name).exists():
        raise InputError(f"{name}: no such directory or file")
    if Path(name).is_file():
        raise InputError(f"{name}: is a file; give the directory that contains {CONFIG_NAME} and the weights")
    path = find_file(name, CONFIG_NAME, **hub)
    if path is None and Path(name).is_dir():
        saved = [path.parent for path in Path(name).glob(f"checkpoint-*/{CONFIG_NAME}")]  # in the output of a Trainer
        saved.sort(key=lambda path: (len(path.name), path.name), reverse=True)  # by the number of steps
        instead = f"; give one of its checkpoints: {shortened(', '.join(map(str, saved)))}" if saved else ""
        raise InputError(f"{name}: the directory contains no {CONFIG_NAME}{instead}")
    if path is None:
        told = "check the name; when offline (HF_HUB_OFFLINE), go online or download it first"
        raise InputError(f"{name}: no such directory or file, and the Hub does not provide it: {told}")
    config = read_json(path, ModelConfig)
    entries = () if trusted else _entries(config.model_dump(exclude={"auto_map"}))
    if places := [place for place, key, value in entries if key in ELSEWHERE and value is not None]:
        told = f"{places[0]} can load code or files from elsewhere, which needs trust_remote_code=True"
        raise InputError(f"{path}: {told}; give an unquantized model of a class of transformers")
    return config


def _entries(values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of a JSON value at any depth: the path, the key and the value."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield f"{prefix}{key}", key, value
        if isinstance(value, (dict, list)):
            yield from _entries(value, f"{prefix}{key}.")


def read_image_processor(source: str | os.PathLike[str], **hub: Any) -> dict[str, Any] | None:
    """Check the image processor of a saved model, and return its values, or None if there is none.

    As in transformers, an entry `image_processor` of processor_config.json replaces preprocessor_config.json.
    """
    path = find_file(str(source), PROCESSOR_NAME, optional=True, **hub)
    entry = None if path is None else read_json(path, ProcessorConfig).image_processor
    if entry is None and (path := find_file(str(source), IMAGE_PROCESSOR_NAME, **hub)):
        entry = read_json(path, ImageProcessorConfig)
    return None if entry is None else entry.model_dump(exclude_unset=True)


# A card with this line is regenerated whenever the model is published.
MARKER = "<!-- Written by aft-hf from the files beside it. Remove this line, and it stays as you change it. -->"


def read_license(source: str | os.PathLike[str]) -> dict[str, str]:
    """Return the license that the card of a saved model states, as `license_terms` does."""
    try:  # a weight file has no card, and its path may have the form of an id on the Hub
        path = None if Path(source).is_file() else find_file(str(source), "README.md", optional=True)
        return {} if path is None else license_terms(parse_header(read_text(path), str(path)))
    except Exception:  # the card may be anything, and no command depends on it
        return {}


def license_terms(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries license, license_name and license_link of some values; none without a license."""
    given = {name: values.get(name) for name in ("license", "license_name", "license_link")}
    if isinstance(several := given["license"], list) and len(several) == 1:
        given["license"] = several[0]
    terms = {name: value for name, value in given.items() if isinstance(value, str) and value}
    return terms if "license" in terms else {}


def load(auto_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a config, model, tokenizer or processor by `auto_class.from_pretrained(source, **options)`.

    Code of the source, or that its files name, is not executed, and the user is not asked to allow it, unless
    `trust_remote_code=True` is set. A `config` in `options` must be a result of this function.
    """
    trusted = options.setdefault("trust_remote_code", False)
    hub = {key: options[key] for key in ("revision", "token") if key in options}
    place, config, build = Path(source), ModelConfig(), partial(auto_class.from_pretrained, source)
    # A tokenizer may be saved without a model.
    is_alone = (place / TOKENIZER_CONFIG_FILE).exists() and not (place / CONFIG_NAME).exists()
    if auto_class is not AutoTokenizer or not is_alone:
        config = read_config(source, trusted=trusted, **hub)
        place = Path(str(find_file(str(source), CONFIG_NAME, **hub))).parent
        wanted = getattr(auto_class, "model_type", None)  # of a class of configs
        if wanted and config.model_type not in (None, wanted):
            has = f"its config has model_type={config.model_type!r}, not {wanted!r}"
            raise InputError(f"{source}: {has}; give another model")
    with explained(f"{source}: cannot be loaded by {auto_class.__name__}"):
        if auto_class is AutoImageProcessor:
            values = read_image_processor(source, **hub)
            if not (trusted and "AutoImageProcessor" in str([values, config.auto_map])):
                kind = _image_processor_type(values or {}, config)
                if values is not None:
                    build = partial(_build_image_processor, values | {"image_processor_type": kind})
        elif auto_class is AutoTokenizer:
            path = find_file(str(source), TOKENIZER_CONFIG_FILE, optional=True, **hub)
            values = {} if path is None else read_json(path, TokenizerConfig).model_dump()
            if not trusted:
                _check_tokenizer_class([values, config.model_dump()])
        elif not trusted:
            refuse_adapter(source, **hub)
            if "config" not in options:
                options = OWN_KERNELS | {"_attn_implementation": options.pop("attn_implementation", None)} | options
        with no_larger_than_weights(place):
            limited(lambda: _try(auto_class, source, build, options), str(source), again=False)
            loaded = build(**options)
            _use(loaded, IMAGES[:1])
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            if isinstance(model, nn.Module):
                _check_weights(source, model, place)
    return loaded


def refuse_adapter(source: str | os.PathLike[str], **hub: Any) -> None:
    """Raise an error if a saved model has an adapter, which names another model."""
    if find_file(str(source), ADAPTER_CONFIG_NAME, optional=True, **hub):
        raise InputError(f"{source}: has an {ADAPTER_CONFIG_NAME}: merge the adapter into its model and save that")


def check_finite(name: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that are not finite, with which a model outputs only NaN."""
    for tensor_name, tensor in tensors:
        if tensor.dtype in FLOAT_DTYPES and (wrong := int((~tensor.isfinite()).sum())):
            held = f"{tensor_name} holds NaN or infinity ({wrong} of {tensor.numel()} values)"
            raise InputError(f"{name}: {held}; it is damaged, or its training diverged; give an earlier checkpoint")


def _check_weights(source: Any, model: Any, directory: Path) -> None:
    """Refuse a model whose weights are not finite, or are integers in its files, which transformers would cast."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    check_finite(source, weights.items())
    if getattr(model.config, "quantization_config", None) is not None:
        return
    prefix = f"{model.base_model_prefix}."
    floats = {name.removeprefix(prefix) for name, tensor in weights.items() if tensor.is_floating_point()}
    for path in weight_files(str(directory)):
        for name, tensor in load_state_dict(path, "meta").items():
            # Buffers may be integers. Names of modules differ in files of earlier versions.
            is_weight = name.endswith(".weight") or name.removeprefix(prefix) in floats
            if is_weight and not tensor.is_floating_point():
                raise InputError(f"{source}: {name} has the dtype {tensor.dtype}; give floating-point weights")


def _image_processor_type(values: dict[str, Any], config: ModelConfig) -> str:
    """Return the class of an image processor, which its file or config.json names, or the usual one of the model."""
    usual = next(iter(IMAGE_PROCESSOR_MAPPING_NAMES.get(str(config.model_type), {}).values()), "ViTImageProcessor")
    named = (values.get("image_processor_type"), values.get("feature_extractor_type"), config.image_processor_type)
    kind = next(filter(None, named), usual).replace("FeatureExtractor", "ImageProcessor")  # the former name
    if kind.removesuffix("Fast") not in IMAGE_PROCESSORS:
        wanted = "must be that of an image classifier, such as ViTImageProcessor"
        raise ValueError(f"image_processor_type={shown(kind)}: {wanted}")
    return kind


def _build_image_processor(values: dict[str, Any], **options: Any) -> Any:
    with TemporaryDirectory() as directory:
        Path(directory, IMAGE_PROCESSOR_NAME).write_text(json.dumps(values))
        return AutoImageProcessor.from_pretrained(directory, **options)


def _check_tokenizer_class(files: list[Any]) -> None:
    """Raise a ValueError unless the classes that transformers may take from files with these values are tokenizers."""
    for _, key, value in _entries(files):
        name = TOKENIZER_MAPPING_NAMES.get(str(value)) if key == "model_type" else value
        named = tokenizer_class_from_name(str(name)) if key in ("tokenizer_class", "model_type") and name else None
        # None: transformers takes PreTrainedTokenizerFast; DummyObject: its error names the package that it needs.
        bases = getattr(named, "__mro__", ())
        if named and not isinstance(named, DummyObject) and PreTrainedTokenizerBase not in bases:
            raise ValueError(f"tokenizer_class={shown(name)}: must be a tokenizer, such as PreTrainedTokenizerFast")


def _try(auto_class: Any, source: str | os.PathLike[str], build: Callable[..., Any], options: dict[str, Any]) -> None:
    """Load a config, load and use a tokenizer or image processor, or build a model without its weights."""
    is_model = issubclass(auto_class, PreTrainedModel)
    if is_model or hasattr(auto_class, "from_config"):
        config = options.get("config") or AutoConfig.from_pretrained(source, **options)
        code = {} if is_model else {"trust_remote_code": options["trust_remote_code"]}
        with torch.device("meta"):
            (auto_class if is_model else auto_class.from_config)(config, **code)
    else:
        _use(loaded := build(**options), IMAGES)
        if isinstance(loaded, PreTrainedTokenizerBase):
            loaded.decode(list(range(min(len(loaded), 1000))))


def _use(loaded: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Use a tokenizer or image processor, since some accept values that they cannot compute with."""
    if isinstance(loaded, PreTrainedTokenizerBase):
        loaded("a")
    elif isinstance(loaded, BaseImageProcessor):
        for size in sizes:
            pixels = loaded(Image.new("RGB", size))["pixel_values"]
            if not all(np.isfinite(image).all() for image in pixels):
                raise ValueError("its pixel values are not finite")


@contextmanager
def no_larger_than_weights(directory: Path) -> Iterator[None]:
    """Context manager that stops `from_pretrained` if the config describes a much larger model than the weights.

    The fields that determine the size depend on the model type, so the tensors are counted while transformers builds
    the model on the meta device. Missing weights would then be initialized, which takes time and memory.
    """
    weights = [path for path in directory.iterdir() if path.name.endswith(WEIGHT_SUFFIXES) and path.is_file()]
    size, tensors, elements = sum(path.stat().st_size for path in weights), 0, 0

    def count(module: nn.Module, name: str, tensor: Any) -> None:
        nonlocal tensors, elements
        if tensor is None or not tensor.is_meta:
            return
        tensors, elements = tensors + 1, elements + tensor.numel()
        # In files, a tensor takes about 256 bytes with its name and shape, and an element at least 2 bits.
        if tensors > FREE_TENSORS + size // 256 or elements > FREE_ELEMENTS + 4 * size:
            describes = f"describes a model of over {elements:,} elements in {tensors:,} tensors"
            beside = f"the weights beside it have only {size:,} bytes; use the config of these weights"
            raise InputError(f"{directory / CONFIG_NAME}: {describes}, but {beside}")

    with (
        modules.register_module_parameter_registration_hook(count),
        modules.register_module_buffer_registration_hook(count),
    ):
        yield


def load_trained(auto_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model like `load`, and refuse it if weights are missing in the source, which transformers initializes
    randomly, or if the source has more layers than the config, which it leaves out.
    """
    model, info = load(auto_class, source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        of_model = f"of the {type(model).__name__} that {CONFIG_NAME} describes"
        instead = "use a checkpoint that contains them, or train the model first"
        raise InputError(f"{source}: weights are missing for {missing[0]}{more} {of_model}: {instead}")
    if others := sorted(key for key in info["unexpected_keys"] if re.search(r"\.\d+\.", key)):
        raise InputError(f"{source}: {CONFIG_NAME} does not describe the layer of the weight {others[0]}")
    return model
