"""Manifest of a conversion: the names and checksums of the files that it wrote. Overwriting deletes no others."""

import os
import shutil
from pathlib import Path

from ..data.checksums import sha256
from ..data.json_files import write_json
from ..reading import Document, read_json
from .errors import ConversionError


MANIFEST_NAME = "conversion_manifest.json"


class Manifest(Document):
    """SHA-256 of each file that a conversion wrote, by file name."""

    files: dict[str, str]


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in `directory`."""
    sums = {name: sha256(directory / name) for name in _names(directory)}
    write_json(directory / MANIFEST_NAME, Manifest(files=sums).model_dump())


def written_files(directory: Path) -> set[str]:
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


def keep_other_files(earlier: Path, later: Path) -> None:
    """Copy the files in `earlier` that its conversion did not write to the conversion in `later`.

    The copies are hard links where possible, and the files also stay in `earlier`.

    Raises:
        ConversionError: as for `written_files`, or `later` has a file of the same name.
    """
    written = written_files(earlier)
    if taken := sorted((_names(earlier) - written) & _names(later)):
        raise ConversionError(
            f"{earlier}: holds {taken[0]}, which the earlier conversion did not write and the new one does; move it, "
            "or give another directory"
        )

    def leave(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder, name).relative_to(earlier).as_posix() in written}

    shutil.copytree(earlier, later, symlinks=True, ignore=leave, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, which takes no space; copy it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _names(directory: Path) -> set[str]:
    """Return the names of all files and links at any depth in a directory, relative to it."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(directory).as_posix() for path in paths}
