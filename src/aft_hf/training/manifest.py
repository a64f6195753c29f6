"""The manifest of a checkpoint: the checksums of its files, and the state from which a run resumes.

It is a JSON object that begins with the checksum of everything after it, so a change to any byte of it is detected.
Checksums detect damage, not tampering: whoever can write a checkpoint can also write its checksums. Manifests are
therefore validated against a schema here, and the other files are checked for code in `safe_loading`.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from transformers.utils.generic import flatten_dict

from ..data.checksums import crc32
from ..reading import Document, FileName, UnreadableError, parse_json


MANIFEST = "checkpoint.json"
SEAL = re.compile(rb'\{"sum":"([0-9a-f:]+)",')

Count = Annotated[int, Field(ge=0)]
Losses = list[tuple[Count, float, float]]  # (steps done, mean loss, learning rate)


class RecordState(Document):
    """Schema of `Record.state()`."""

    losses: Losses
    evaluations: list[dict[str, int | float]]
    seconds: float
    pending: Losses


class Manifest(Document):
    """Schema of checkpoint.json: the state of a run besides its weights, optimizer and random states."""

    step: Count
    record: RecordState
    recipe: dict[str, Any]
    data: str  # the fingerprint of the training data
    # Position of the sampler: empty, or for a stream the `Block` from which it resumes.
    position: tuple[()] | tuple[Count, Count, Count, dict[str, Any] | None]
    files: Annotated[dict[FileName, str], Field(min_length=1)]  # name to checksum


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` into a checkpoint."""
    (directory / MANIFEST).write_bytes(sealed(manifest.model_dump()))


def sealed(content: dict[str, Any]) -> bytes:
    """Serialize a JSON object, with the checksum of the rest of the text as its first entry."""
    text = json.dumps(content, separators=(",", ":")).encode()[1:]
    return b'{"sum":"%s",%s' % (checksum(text).encode(), text)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        UnreadableError: the manifest is missing or damaged; the message does not name the checkpoint.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UnreadableError(f"no {MANIFEST}")
    content = path.read_bytes()
    seal = SEAL.match(content)
    if seal is None or checksum(content[seal.end() :]) != seal[1].decode():
        raise UnreadableError(f"{MANIFEST} does not match its checksum")
    return parse_json(content, Manifest, MANIFEST)


def find_changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the earlier and the present value of all entries that differ, by name; `outer.inner` for a nested one."""
    then, now = flatten_dict(then), flatten_dict(now)
    pairs = {key: (then.get(key), now.get(key)) for key in sorted(then.keys() | now.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def checksum(content: bytes) -> str:
    """Return the checksum of `content`: its size and CRC-32."""
    return f"{len(content)}:{zlib.crc32(content):08x}"


def file_checksum(path: Path) -> str:
    """Return the checksum of a file: its size and CRC-32."""
    size = path.stat().st_size
    return f"{size}:{crc32(path, [(0, size)]):08x}"
