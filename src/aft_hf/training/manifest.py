"""The manifest of a checkpoint: the checksums of its files, and the state from which a run resumes.

It is a file of two lines, a checksum and the JSON object that it belongs to, so a change to any byte is detected.
Checksums detect damage, not tampering: whoever can write a checkpoint can also write its checksums. Manifests are
therefore validated against a schema here, and the other files are checked for code in `safe_loading`.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from transformers.utils.generic import flatten_dict

from ..reading import Document, FileName, UnreadableError, parse_json


MANIFEST = "checkpoint.json"

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
    files: Annotated[dict[FileName, str], Field(min_length=1)]  # name to SHA-256


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` into a checkpoint."""
    text = json.dumps(manifest.model_dump()).encode()
    (directory / MANIFEST).write_bytes(sha256(text).hexdigest().encode() + b"\n" + text)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        UnreadableError: the manifest is missing or damaged; the message does not name the checkpoint.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UnreadableError(f"no {MANIFEST}")
    checksum, _, text = path.read_bytes().partition(b"\n")
    if sha256(text).hexdigest().encode() != checksum:
        raise UnreadableError(f"{MANIFEST} does not match its checksum")
    return parse_json(text, Manifest, MANIFEST)


def find_changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the earlier and the present value of all entries that differ, by name; `outer.inner` for a nested one."""
    then, now = flatten_dict(then), flatten_dict(now)
    pairs = {key: (then.get(key), now.get(key)) for key in sorted(then.keys() | now.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
