"""Checks of a saved model before it is uploaded to the Hub."""

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME

from ..configuration_aft import AFTConfig, pair
from ..errors import InputError, explained
from ..loading import load, read_config, read_image_processor, refuse_adapter, weight_files
from ..modeling_aft import HEADS, AFTModel, AFTPreTrainedModel
from .card import card_of_user, card_problems
from .facts import RESULTS, pixel_side, read_object
from .folder import files_to_upload, misplaced_files


PACKAGE = Path(__file__).parents[1]
CODE = sorted(path.name for path in PACKAGE.glob("*_aft.py"))  # the modules that are saved with the weights
ARCHITECTURES = {each.__name__: each for each in (AFTModel, *HEADS)}
PICKLE_SUFFIXES = (".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth")

SECRETS = {
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{20,}",
    "a Hugging Face organization key": rb"\bapi_org_[A-Za-z0-9]{20,}",
    "an AWS key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": rb"\b(?:gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Google key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": rb"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an OpenAI or Anthropic key": rb"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    "a password in an address": rb"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>]+:[^\s/@\"'<>]+@",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----",
    "a Weights & Biases key": rb"(?i)wandb[\w\"' ]{0,20}[:=][\"' ]*[0-9a-f]{40}\b",
}


def find_problems(directory: str | os.PathLike[str]) -> list[str]:
    """Return the problems that prevent publishing a saved model, one line each; an empty list if there are none.

    The checks are: all files lie in the directory (otherwise the other checks are skipped); the model loads from its
    weights alone and gives finite outputs; code beside it is that of this package; a card that the user wrote has the
    metadata that the Hub requires; no file is a pickle or holds a key. `publish` writes a missing card or code.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return [f"{directory}: no such directory"]
    if problems := misplaced_files(directory):
        return problems
    files, _ = files_to_upload(directory)
    for name, path in files.items():
        with explained(f"{name}: cannot be read"):
            problems += [f"{name}: {problem}" for problem in _file_problems(path)]
    problems += _model_problems(directory, files)
    if (text := card_of_user(directory)) is not None:
        problems += card_problems(text, directory)
    return problems


def _file_problems(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        # The length of the header, with which a file of safetensors begins, may look like the start of a pickle.
        is_safetensors = path.suffix == ".safetensors" and file.peek(9)[8:9] == b"{"
        if (
            path.suffix.lower() in PICKLE_SUFFIXES
            or (not is_safetensors and re.match(rb"\x80[\x02-\x05]", file.peek(2)))
            # The format of torch.save.
            or (zipfile.is_zipfile(path) and any(name.endswith(".pkl") for name in zipfile.ZipFile(path).namelist()))
        ):
            yield "is a pickle, which can run any code when it is loaded; save tensors as safetensors"
            return
        content = file.read(2**24 if path.suffix == ".safetensors" else -1)  # of weights, the header
    narrow = content.replace(b"\0", b"")  # UTF-16 text has a zero beside each byte of ASCII
    for kind, pattern in SECRETS.items():
        if match := re.search(pattern, content) or re.search(pattern, narrow):
            line = match.string.count(b"\n", 0, match.start()) + 1
            yield f"holds {kind} (line {line}); remove it, and revoke it"


def _model_problems(directory: Path, files: dict[str, Path]) -> Iterator[str]:
    try:
        refuse_adapter(directory)
        config = read_config(directory)
        if config.model_type != AFTConfig.model_type:
            raise InputError(f'{CONFIG_NAME}: model_type is {config.model_type!r}, not "aft"')
        again = "load the model and save it again (`save_pretrained`)"
        if not config.auto_map:
            yield f"{CONFIG_NAME}: has no auto_map, so the model does not load without aft_hf; {again}"
        for name, place in (config.auto_map or {}).items():
            if "--" in str(place):
                yield f"{CONFIG_NAME}: auto_map loads {name} from another repository, {place}; {again}"
        for name in CODE:
            if (directory / name).exists() and (directory / name).read_bytes() != (PACKAGE / name).read_bytes():
                yield f"{name}: differs from the installed aft_hf, with which the model was checked; {again}"
        name = (config.architectures or [""])[0]
        if name not in ARCHITECTURES:
            raise InputError(f"{CONFIG_NAME}: architectures is {name!r}, not one of {', '.join(ARCHITECTURES)}")
        if left_out := [path for path in weight_files(str(directory)) if path not in files.values()]:
            raise InputError(f"{left_out[0]}: the weight index lists it, but it is not uploaded")
        check_model(directory, ARCHITECTURES[name])
    except InputError as error:
        yield str(error)


@torch.no_grad()
def check_model(directory: Path, model_class: type[AFTPreTrainedModel]) -> None:
    """Raise an InputError unless the model loads, fits its tokenizer or image processor, and gives finite outputs."""
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = load(model_class, directory, dtype="auto", **options)
    for kind, what in (("missing", "missing"), ("unexpected", "unexpected"), ("mismatched", "of another shape")):
        if names := sorted(str(key if isinstance(key, str) else key[0]) for key in info[f"{kind}_keys"]):
            raise InputError(f"the model does not load: {len(names)} tensors are {what}, such as {names[0]}")
    config, failure = model.config, "the model does not run"
    if config.modality == "image":
        if not read_image_processor(directory):
            raise InputError(f"{IMAGE_PROCESSOR_NAME}: is missing; save the image processor beside the model")
        processor, picture = load(AutoImageProcessor, directory), Image.new("RGB", pair(config.image_size)[::-1])
        failure += " on the output of its image processor; save that with which it was trained beside it"
        with explained(failure):
            inputs = {"pixel_values": processor(picture, return_tensors="pt")["pixel_values"].to(model.dtype)}
    else:
        length = min(8, getattr(config, "max_position_embeddings", 8))
        inputs = {"input_ids": torch.arange(length).unsqueeze(0) % config.vocab_size}
        if not pixel_side(read_object(directory / RESULTS), config):  # sub-pixels are token ids already
            if not (directory / TOKENIZER_CONFIG_FILE).is_file():
                raise InputError(f"{TOKENIZER_CONFIG_FILE}: is missing; save the tokenizer beside the model")
            if (count := len(load(AutoTokenizer, directory))) > config.vocab_size:
                raise InputError(f"{TOKENIZER_CONFIG_FILE}: has {count} tokens, the model {config.vocab_size}")
    with explained(failure):
        outputs = model.eval()(**inputs)
    if not outputs[0].float().isfinite().all():
        raise InputError("the model does not run: its outputs are not finite")
    if model.can_generate() and (directory / GENERATION_CONFIG_NAME).is_file():
        with explained(f"{GENERATION_CONFIG_NAME}: does not load"):
            GenerationConfig.from_pretrained(directory)
