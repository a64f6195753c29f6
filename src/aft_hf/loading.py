"""Load models, configs, tokenizers and processors from a directory or the Hub: files are checked first, no code of the
source is executed, and errors are one line.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, IMAGE_PROCESSOR_NAME, cached_file

from .reading import ImageProcessorConfig, ModelConfig, TokenizerConfig, UnreadableError, explained, read_json


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")

# Options that replace names of attention and experts in a config.json, also in its nested configs, by the default of
# transformers: the name can be a kernel on the Hub, which transformers would download and run.
OWN_KERNELS: dict[str, Any] = {"_attn_implementation": None, "_experts_implementation": None}
# Keys of a config.json, at any depth, with which libraries load other files: kernels on the Hub, pickles (timm), and
# the config of another model. The `auto_map` of the whole model is not among them: it is used only if the source is
# trusted, whereas transformers asks the user about nested ones.
ELSEWHERE = ("auto_map", "quantization_config", "checkpoint_path", "backbone")


def find_file(source: str, filename: str, error: type[ValueError] = UnreadableError, **hub: Any) -> Path | None:
    """Return the path of a file in a directory or in a repository on the Hub, downloading it if needed.

    Args:
        source: a directory or a Hub id.
        filename: the name of the file in it.
        error: the class of the error to raise.
        **hub: options of `transformers.utils.cached_file`, such as `revision`.

    Returns:
        The path; None if `source` has no such file.

    Raises:
        UnreadableError, or the given `error`: the file cannot be downloaded, or is not a regular file.
    """
    local = Path(source) / filename
    if local.exists() and not local.is_file():
        raise error(f"{local}: is not a regular file")
    with explained(f"{source}: {filename} cannot be read", error):
        path = cached_file(source, filename, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path is None else Path(path)


def read_config(
    source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, *, trusted: bool = False, **hub: Any
) -> ModelConfig:
    """Read the config.json of a saved model of any type, and refuse it if a value is impossible for any model.

    The arguments are those of `find_file`, and `trusted`: whether code that the config names may be executed.

    Raises:
        UnreadableError, or the given `error`: there is no such model, or its config.json cannot be used.
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
        raise error(f"{name}: the directory contains no {CONFIG_NAME}")
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
) -> bool:
    """Check the preprocessor_config.json of a saved model, and return whether there is one.

    The arguments are those of `find_file`.

    Raises:
        UnreadableError, or the given `error`: the file cannot be used.
    """
    path = find_file(str(source), IMAGE_PROCESSOR_NAME, error, **hub)
    if path is not None:
        read_json(path, ImageProcessorConfig, error)
    return path is not None


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

    Raises:
        UnreadableError, or the given `error`: the source cannot be loaded.
    """
    options = {"trust_remote_code": False, **options}
    trusted = options["trust_remote_code"]
    hub = {key: options[key] for key in ("revision", "token") if key in options}
    optional = hub | {"_raise_exceptions_for_connection_errors": False}
    read_config(source, error, trusted=trusted, **hub)
    if auto_class is AutoImageProcessor:
        read_image_processor(source, error, **hub)
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
    with explained(f"{source}: cannot be loaded by {auto_class.__name__}", error):
        loaded = auto_class.from_pretrained(source, **options)
        if auto_class is AutoTokenizer:
            loaded("a")  # raises for invalid values, which from_pretrained accepts
        elif auto_class is AutoImageProcessor:
            pixels = loaded(Image.new("RGB", (32, 32)))["pixel_values"]
            if not all(np.isfinite(image).all() for image in pixels):
                raise ValueError("its pixel values are not finite")
    return loaded


def load_trained(auto_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model like `load`, and refuse it if weights are missing in the source.

    transformers initializes missing weights randomly, so measurements of such a model would be meaningless.

    Raises:
        UnreadableError: the source cannot be loaded, or weights are missing.
    """
    model, info = load(auto_class, source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnreadableError(
            f"{source}: weights are missing for {missing[0]}{more} of the {type(model).__name__} that {CONFIG_NAME} "
            "describes: use a checkpoint that contains them, or train the model first"
        )
    return model
