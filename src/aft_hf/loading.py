"""Load models, configs, tokenizers and processors from a directory or the Hub: files are checked first, and errors are
one line.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from torch.nn.modules import module as modules
from transformers import AutoImageProcessor
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, cached_file

from .reading import ImageProcessorConfig, ModelConfig, UnreadableError, explained, read_json, shortened


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".tar", ".ckpt")
FREE_TENSORS, FREE_ELEMENTS = 2**11, 2**27  # that take a second and half a gigabyte, for weights of any size


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


def read_config(source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **hub: Any) -> ModelConfig:
    """Read the config.json of a saved model of any type, and refuse it if a value is impossible for any model.

    The arguments are those of `find_file`.

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
        raise error(f"{name}: the directory contains no {CONFIG_NAME}{named_checkpoints(name)}")
    if path is None:
        raise error(f"{name}: {NOWHERE}")
    return read_json(path, ModelConfig, error)


def named_checkpoints(directory: str) -> str:
    """Return '; give one of its checkpoints: ...' for the output directory of a Trainer, the newest first, else ''."""
    found = [path.parent for path in Path(directory).glob(f"checkpoint-*/{CONFIG_NAME}")]
    found.sort(key=lambda path: (len(path.name), path.name), reverse=True)  # by the number of steps
    return f"; give one of its checkpoints: {shortened(', '.join(map(str, found)))}" if found else ""


def read_image_processor(
    source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **hub: Any
) -> dict[str, Any] | None:
    """Check the preprocessor_config.json of a saved model, and return its content, or None if there is none.

    The arguments are those of `find_file`.

    Raises:
        UnreadableError, or the given `error`: the file cannot be used.
    """
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

    Code of the source is not executed, and the user is not asked to allow it, unless `trust_remote_code=True` is set.

    Raises:
        UnreadableError, or the given `error`: the source cannot be loaded.
    """
    hub = {key: options[key] for key in ("revision", "token") if key in options}
    read_config(source, error, **hub)
    config = find_file(str(source), CONFIG_NAME, error, **hub)
    assert config is not None  # `read_config` requires it
    options = {"trust_remote_code": False, **options}
    processor = read_image_processor(source, error, **hub) if auto_class is AutoImageProcessor else None
    what = f"{source}: cannot be loaded by {auto_class.__name__}"
    with explained(what, error), no_larger_than_weights(config.parent, error):
        if processor and str(processor.get("image_processor_type")).endswith("FeatureExtractor"):
            return _load_feature_extractor(processor, options)
        return auto_class.from_pretrained(source, **options)


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

    Args:
        directory: the directory of the config and the weights.
        error: the class of the error to raise.
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
