"""Saving a conversion: all files, verified, or none. A manifest lists them, so that no others are overwritten."""

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
from ..data.checksums import sha256
from ..data.image_size import resized_processor
from ..data.json_files import write_json
from ..modeling_aft import AFTForImageClassification
from ..reading import Document, first_line, read_json
from .deit import convert_deit
from .errors import ConversionError
from .report import REPORT_NAME, ConversionReport, verify_conversion
from .source import VisionTransformerSource, read_source


MANIFEST_NAME = "conversion_manifest.json"


class Manifest(Document):
    """SHA-256 of each file that a conversion wrote, by file name."""

    files: dict[str, str]


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
        source, source_image_size, source_num_heads: as for `read_source`, but no model in memory, which has no files
            to verify against.
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
            conversion, or cannot be written.
    """
    directory = Path(os.path.realpath(directory))
    _check_target(directory, source, overwrite)
    lock: AbstractContextManager[bool] = nullcontext(True)
    advice = ""
    if distillation is not None:
        from .distillation import locked_checkpoints  # needs the libraries of training

        seed = distillation.get("seed", 0) if seed is None else seed
        checkpoints = directory.with_name(f".{directory.name}-distillation")
        distillation = {**distillation, "checkpoints": checkpoints}
        lock, advice = locked_checkpoints(checkpoints), f"; run again to resume from {checkpoints}"
    reading: dict[str, Any] = {"source_image_size": source_image_size, "source_num_heads": source_num_heads}
    with lock as writes:
        model, processor, report = _convert(read_source(source, **reading), seed, options, distillation)
        try:
            if writes:
                _write(directory, source, overwrite, model, processor, report)
        except ConversionError as error:
            raise ConversionError(f"{error}{advice}") from error
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"{directory}: cannot be written ({first_line(error)}){advice}") from error
    return model, report


def _convert(
    source: VisionTransformerSource,
    seed: int | None,
    options: Mapping[str, Any],
    distillation: Mapping[str, Any] | None,
) -> tuple[AFTForImageClassification, BaseImageProcessor, ConversionReport]:
    """Return the model, its image processor and the report."""
    if distillation is not None:
        from .distillation import check_distillable, distill

        check_distillable(source, **distillation)  # before the fit to the attention, which may take minutes
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        model, report = convert_deit(source, **options)
    if seed is not None:
        report.options["seed"] = seed
    if distillation is not None:
        fitted = sorted({record.note for record in report.with_status("fitted")})  # notes contain the number of images
        conversion = {**report.options, "fitted": fitted}
        report.add_distillation(distill(model, source, conversion=conversion, lock=False, **distillation))
    processor, size = source.image_processor, pair(model.config.image_size)
    return model, processor if size == pair(source.config.image_size) else resized_processor(processor, size), report


def _write(
    directory: Path,
    source: str | os.PathLike[str],
    overwrite: bool,
    model: AFTForImageClassification,
    processor: BaseImageProcessor,
    report: ConversionReport,
) -> None:
    """Write a conversion to a temporary directory, verify it, and replace `directory` by it, or change nothing."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as aside:
        finished, earlier = Path(aside, "finished"), Path(f"{aside}-earlier")
        model.save_pretrained(finished)
        processor.save_pretrained(finished)
        (finished / REPORT_NAME).write_text(report.model_dump_json(indent=1) + "\n")
        verify_conversion(source, finished)
        sums = {name: sha256(finished / name) for name in _names(finished)}
        write_json(finished / MANIFEST_NAME, Manifest(files=sums).model_dump())
        _check_target(directory, source, overwrite)  # again, since another process may have written there
        if directory.exists() and any(directory.iterdir()):
            _keep_other_files(directory, finished)
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
        _written_files(directory)


def _written_files(directory: Path) -> set[str]:
    """Return the names of the files that the conversion in `directory` wrote and that still exist.

    Raises:
        ConversionError: the manifest is missing or not readable, or a file was changed since the conversion.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise ConversionError(
            f"{directory}: only an earlier conversion is overwritten, and there is no {MANIFEST_NAME} in the "
            "directory that lists its files; delete the directory yourself, or give another one"
        )
    files = read_json(path, Manifest, ConversionError).files
    present = files.keys() & _names(directory)
    for name in sorted(present):
        if (directory / name).is_symlink() or sha256(directory / name) != files[name]:
            raise ConversionError(
                f"{directory}: {name} was changed since the conversion that wrote it, and would be lost; move it, or "
                "give another directory"
            )
    return present | {MANIFEST_NAME}


def _keep_other_files(earlier: Path, later: Path) -> None:
    """Add the files in `earlier` that its conversion did not write to the conversion in `later`, as hard links."""
    written = _written_files(earlier)
    if taken := sorted((_names(earlier) - written) & _names(later)):
        raise ConversionError(
            f"{earlier}: holds {taken[0]}, which the earlier conversion did not write and the new one does; move it, "
            "or give another directory"
        )

    def leave(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder, name).relative_to(earlier).as_posix() in written}

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # the file system has no hard links
            shutil.copy2(source, target, follow_symlinks=False)

    shutil.copytree(earlier, later, symlinks=True, ignore=leave, copy_function=link, dirs_exist_ok=True)


def _names(directory: Path) -> set[str]:
    """Return the names of all files and links at any depth in a directory, relative to it."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(directory).as_posix() for path in paths}
