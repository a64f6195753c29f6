"""What others saved for transformers: found in a directory or on the Hub, checked, and loaded; errors are one line."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, cached_file

from .reading import ImageProcessorConfig, ModelConfig, UnreadableError, explained, read_json


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")


def find_file(source: str, filename: str, error: type[ValueError] = UnreadableError, **hub: Any) -> Path | None:
    """A file of a directory or a repository of the Hub (downloaded if need be); None where there is none.

    Args:
        source: directory or Hub id.
        filename: name in it.
        error: what to raise.
        **hub: revision and the like, as `cached_file` of transformers takes them.

    Raises:
        UnreadableError, or the `error` given: the Hub does not give it.
    """
    local = Path(source) / filename
    if local.exists() and not local.is_file():
        raise error(f"{local}: is not a regular file")
    with explained(f"{source}: {filename} cannot be read", error):
        path = cached_file(source, filename, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path is None else Path(path)


def read_config(source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **hub: Any) -> ModelConfig:
    """config.json of a saved model, of which only what no model has is refused; arguments as for `find_file`.

    Raises:
        UnreadableError, or the `error` given: there is no such model, or its config.json cannot be used.
    """
    name = str(source)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(WEIGHT_SUFFIXES)
    if looks_local and not Path(name).exists():
        raise error(f"{name}: no such directory or file")
    if Path(name).is_file():
        raise error(f"{name}: is a file; give the directory with {CONFIG_NAME} and weights")
    try:
        path = find_file(name, CONFIG_NAME, error, **hub)
    except error as problem:
        if Path(name).exists():
            raise
        raise error(f"{name}: {NOWHERE} ({problem.__cause__ or problem})") from problem
    if path is None and Path(name).is_dir():
        raise error(f"{name}: no {CONFIG_NAME} in it")
    if path is None:
        raise error(f"{name}: {NOWHERE}")
    return read_json(path, ModelConfig, error)


def read_image_processor(
    source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **hub: Any
) -> bool:
    """Whether there is a preprocessor_config.json; arguments as for `find_file`.

    Raises:
        UnreadableError, or the `error` given: it cannot be used.
    """
    path = find_file(str(source), IMAGE_PROCESSOR_NAME, error, **hub)
    if path is not None:
        read_json(path, ImageProcessorConfig, error)
    return path is not None


NOWHERE = (
    "no directory or file here, and the Hub does not give it: check the name, download it before going offline, or go "
    "online (without HF_HUB_OFFLINE)"
)


def load(
    auto_class: Any, source: str | os.PathLike[str], error: type[ValueError] = UnreadableError, **options: Any
) -> Any:
    """`auto_class.from_pretrained(source, **options)` of a config, model, tokenizer or processor.

    No code of the source runs, and nobody is asked whether it may, unless `trust_remote_code=True` is given.

    Raises:
        UnreadableError, or the `error` given: it cannot be loaded.
    """
    hub = {key: options[key] for key in ("revision", "token") if key in options}
    read_config(source, error, **hub)
    if auto_class is AutoImageProcessor:
        read_image_processor(source, error, **hub)
    with explained(f"{source}: cannot be loaded by {auto_class.__name__}", error):
        return auto_class.from_pretrained(source, **{"trust_remote_code": False, **options})


def load_trained(auto_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """`load` of a model that has all of its weights in the source. Of what is missing there, transformers makes new
    weights, and whatever is measured with these says nothing.

    Raises:
        UnreadableError: it cannot be loaded, or lacks weights.
    """
    model, info = load(auto_class, source, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnreadableError(
            f"{source}: there are no weights for {missing[0]}{more} of the {type(model).__name__} that {CONFIG_NAME} "
            "describes: take a checkpoint that has them, or train it first"
        )
    return model
