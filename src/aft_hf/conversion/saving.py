"""Saving a conversion to an empty directory: all files, verified, or none."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from ..atomic_files import UNFINISHED, move_into, sha256
from ..configuration_aft import AFTConfig, pair
from ..data.image_size import resized_processor
from ..errors import InputError, explained
from ..loading import load, read_license
from ..modeling_aft import AFTForImageClassification
from ..reading import read_json
from .deit import convert_deit, copied_parts
from .report import REPORT_NAME, ConversionReport
from .source import read_source


LOCK = ".aft-hf-lock"  # in the directory, while a conversion is written to it


def save_converted(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
    seed: int = 0,
    distillation: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert a checkpoint, and save the model, its image processor and the report.

    A distillation saves its checkpoints next to `directory`, in the hidden directory `.NAME-distillation`, until the
    model is saved; after an interruption, the same call resumes from them.

    Args:
        source, source_image_size, source_num_heads: as for `read_source`, but no model in memory, which has no files
            to verify against.
        directory: output directory; must be missing or empty.
        seed: seed of the new weights and, by default, of the distillation.
        distillation: `images` and the other arguments of `distill`, to train the converted model. Under `accelerate
            launch`, all processes train, and the main process saves.
        **options: the other arguments of `convert_deit`.

    Raises:
        InputError: as for `convert_deit` and `verify_conversion`; or `directory` is not empty, or cannot be written.
    """
    directory = Path(os.path.realpath(directory))
    _refuse_files(directory)  # before the work begins
    checkpoints, advice = directory.with_name(f".{directory.name}-distillation"), ""
    is_main = True
    if distillation is not None:
        from ..running.checkpoints import remove_checkpoints
        from ..running.ownership import join_processes, owned
        from .distillation import check_distillable, distill  # need the libraries of training

        distillation = {"seed": seed, **distillation}
        is_main, advice = join_processes().is_main_process, f"; run again to resume from {checkpoints}"
    with nullcontext() if distillation is None else owned(checkpoints, temporary=True):
        origin = read_source(source, source_image_size=source_image_size, source_num_heads=source_num_heads)
        if distillation is not None:
            check_distillable(origin, **distillation)  # before the fit to the attention, which may take minutes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, report = convert_deit(origin, **options)
        report.options["seed"] = seed
        # The config shares these, so that they follow the model through any later training.
        model.config.conversion = {"source": report.source, "options": report.options}
        if distillation is not None:
            report.options["distillation"] = distill(model, origin, **distillation, checkpoints=checkpoints)
        terms = read_license(origin.name)
        if terms.get("license", "other") != "other" or "://" in terms.get("license_link", ""):
            report.options["source_license"] = terms
        if is_main:
            processor = resized_processor(origin.image_processor, pair(model.config.image_size))
            try:
                _write(directory, source, model, processor, report)
            except (InputError, OSError) as error:
                raise InputError(f"{error}{advice}") from error
        if is_main and distillation is not None:
            remove_checkpoints(checkpoints)
    return model, report


def _write(directory: Path, source: Any, model: PreTrainedModel, processor: Any, report: ConversionReport) -> None:
    """Write a conversion aside, verify it, and move its files to `directory`."""
    lock = FileLock(directory / LOCK, timeout=0)
    with explained(f"cannot write to {directory}"):
        lock.acquire()
    try:
        with move_into(directory) as aside:
            model.save_pretrained(aside)
            processor.save_pretrained(aside)
            report.files.update({path.name: sha256(path) for path in sorted(aside.iterdir())})
            (aside / REPORT_NAME).write_text(report.model_dump_json(indent=1) + "\n")
            verify_conversion(source, aside)
            _refuse_files(directory)  # again: another process may have written there
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _refuse_files(directory: Path) -> None:
    """Raise an InputError if a directory holds anything but what a conversion that was killed has left."""
    if directory.exists() and {path.name for path in directory.iterdir()} - {UNFINISHED, LOCK}:
        raise InputError(f"{directory}: is not empty; give another directory, or delete it")


def verify_conversion(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> int:
    """Verify a saved conversion against its source.

    Source and conversion are read again from their files. The report must list all tensors of both. Every copied
    tensor is made again from the source, and must have the dtype, the shape and the bits of the saved tensor. The
    arguments are those of `save_converted`.

    Returns:
        The number of copied tensors, all of which are equal; 0 after a distillation.

    Raises:
        InputError: a file cannot be read, the report does not list a tensor, or a copied tensor differs.
    """
    directory = Path(directory)
    report = read_json(directory / REPORT_NAME, ConversionReport)
    with explained(f"{directory}: cannot be read"):
        saved = load_file(directory / SAFE_WEIGHTS_NAME)
        size, heads = report.options["source_image_size"], report.options["source_num_heads"]
    origin = read_source(source, source_image_size=size, source_num_heads=heads)
    report.check(origin.names, saved)
    if "distillation" in report.options:  # which changed all tensors
        return 0
    copies = copied_parts(origin, load(AFTConfig, directory), saved)
    if {record.target for record in report.with_status("copied")} != copies.keys():
        raise InputError(f"{directory}: {REPORT_NAME} does not list exactly the copied tensors")
    for name, copy in copies.items():
        # By their bits, -0.0 differs from 0.0, and NaN equals itself.
        first, second = (tensor.contiguous().view(torch.uint8) for tensor in (copy.tensor, saved[name]))
        if copy.tensor.dtype != saved[name].dtype or not torch.equal(first, second):
            raise InputError(f"{directory}: {name} differs from the source, but {REPORT_NAME} lists it as copied")
    return len(copies)
