"""Saving a conversion: all files, verified, or none."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.image_processing_utils import BaseImageProcessor

from ..configuration_aft import pair
from ..data.image_size import resized_processor
from ..modeling_aft import AFTForImageClassification
from ..reading import first_line
from .deit import convert_deit
from .errors import ConversionError
from .manifest import keep_other_files, write_manifest, written_files
from .report import REPORT_NAME, ConversionReport, verify_conversion
from .source import VisionTransformerSource, read_source


def save_converted(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
    seed: int | None = None,
    distillation: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert a checkpoint, and save the model, its image processor, the report and the manifest.

    The files are verified before they are moved to `directory`. A distillation saves its checkpoints next to
    `directory`, in the hidden directory `.NAME-distillation`, until the model is saved; after an interruption, the
    same call resumes from them.

    Args:
        source, source_image_size, source_num_heads: as for `read_source`, but no model in memory.
        directory: output directory; must be missing or empty, unless `overwrite` is True.
        overwrite: whether to replace an earlier conversion in `directory`. The files that its manifest lists are
            deleted, and all other files stay.
        seed: seed of the new weights. Default: the seed of the distillation; without a distillation, new weights are
            drawn from PyTorch's global generator.
        distillation: `images` and the other arguments of `distill`, to train the converted model on the outputs of
            the source. It starts from the conversion with `options`; for AFT-conv, `init="attention"` measured best,
            and is the default of `aft-hf convert --distill`. Under `accelerate launch`, all processes train, and the
            main process saves.
        **options: the other arguments of `convert_deit`.

    Returns:
        The model and the report.

    Raises:
        ConversionError: as for `convert_deit` and `verify_conversion`; or `directory` holds anything but an earlier
            conversion, or cannot be written; or the directory of the checkpoints holds anything else.
        TypeError: the source is a model in memory, which has no files to verify against.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "a saved conversion is verified against the files of the source; give their directory or Hub id, or call "
            f"convert_deit on the {type(source).__name__} and save the model that it returns"
        )
    directory = Path(os.path.realpath(directory))
    _check_target(directory, source, overwrite)
    lock: AbstractContextManager[bool] = nullcontext(True)
    advice = ""
    if distillation is not None:
        from .distillation import locked_checkpoints  # needs the libraries of training

        seed = distillation.get("seed", 0) if seed is None else seed
        checkpoints = Path(distillation.get("checkpoints") or directory.with_name(f".{directory.name}-distillation"))
        distillation = {**distillation, "checkpoints": checkpoints, "lock": False}
        lock, advice = locked_checkpoints(checkpoints), f"; run again to resume from {checkpoints}"
    reading = {"source_image_size": source_image_size, "source_num_heads": source_num_heads}
    with lock as writes:
        model, processor, report = _convert(source, reading, seed, options, distillation)
        if writes:
            try:
                _write(directory, source, overwrite, model, processor, report)
            except ConversionError as error:
                raise ConversionError(f"{error}{advice}") from error
    return model, report


def _convert(
    source: str | os.PathLike[str],
    reading: Mapping[str, Any],
    seed: int | None,
    options: Mapping[str, Any],
    distillation: Mapping[str, Any] | None,
) -> tuple[AFTForImageClassification, BaseImageProcessor, ConversionReport]:
    """Return the model, its image processor and the report. The source is freed before anything is written."""
    checkpoint = read_source(source, **reading)
    if distillation is None:
        model, report = _seeded_conversion(checkpoint, seed, options)
    else:
        from .distillation import check_distillable, distill

        check_distillable(checkpoint, **distillation)  # before the fit to the attention, which may take minutes
        model, report = _seeded_conversion(checkpoint, seed, options)
        fitted = sorted({record.note for record in report.with_status("fitted")})  # notes contain the number of images
        conversion = {**report.options, "fitted": fitted}
        report.add_distillation(distill(model, checkpoint, conversion=conversion, **distillation))
    processor, size = checkpoint.image_processor, pair(model.config.image_size)
    if size != pair(checkpoint.config.image_size):
        processor = resized_processor(processor, size)
    return model, processor, report


def _seeded_conversion(
    source: VisionTransformerSource, seed: int | None, options: Mapping[str, Any]
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert a source, with new weights from this seed, or from PyTorch's global generator if it is None."""
    if seed is None:
        return convert_deit(source, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, report = convert_deit(source, **options)
    report.options["seed"] = seed
    return model, report


def _write(
    directory: Path,
    source: str | os.PathLike[str],
    overwrite: bool,
    model: AFTForImageClassification,
    processor: BaseImageProcessor,
    report: ConversionReport,
) -> None:
    """Write a conversion to a temporary directory, verify it, and move it to `directory`.

    Raises:
        ConversionError: as for `verify_conversion` and `keep_other_files`, or the directory cannot be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as aside:
            finished = Path(aside) / "finished"
            model.save_pretrained(finished)
            processor.save_pretrained(finished)
            (finished / REPORT_NAME).write_text(report.model_dump_json(indent=1) + "\n")
            verify_conversion(source, finished)
            write_manifest(finished)
            _check_target(directory, source, overwrite)  # again, since another process may have written there
            if directory.exists() and any(directory.iterdir()):
                keep_other_files(directory, finished)
            _put_in_place(finished, directory)
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{directory}: cannot be written ({first_line(error)})") from error


def _put_in_place(finished: Path, directory: Path) -> None:
    """Replace `directory` by `finished`; restore the earlier directory if that fails."""
    earlier = finished.parent.with_name(f"{finished.parent.name}-earlier")
    try:
        if directory.exists():
            directory.rename(earlier)
        finished.rename(directory)
    except BaseException:  # also Ctrl-C
        if earlier.exists():
            earlier.rename(directory)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _check_target(directory: Path, source: str | os.PathLike[str], overwrite: bool) -> None:
    """Check, before the work begins, that at most an earlier conversion is overwritten, and only with `overwrite`."""
    if directory.exists() and not directory.is_dir():
        raise ConversionError(f"{directory}: is a file; give a directory")
    for name, path in (("the source", Path(source).resolve()), ("the working directory", Path.cwd())):
        if path.exists() and path.is_relative_to(directory):
            raise ConversionError(f"{directory}: holds {name}; give another directory")
    if directory.exists() and any(directory.iterdir()):
        if not overwrite:
            raise ConversionError(f"{directory}: is not empty; give another directory, or overwrite it (--overwrite)")
        written_files(directory)
