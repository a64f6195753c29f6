"""The manifest of a checkpoint: its files with their check sums, and where the run stands.

It is a JSON object that begins with the check sum of all that follows, so that a change to any byte of it is noticed.
Check sums find damage, no intent: whoever can write a checkpoint can also write its sums. What is read from one is
therefore checked for its types here, and for code in `safe_loading`.
"""

import json
import re
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..data.check_sums import crc32
from ..reading import Document, FileName, UnreadableError, parse_json


MANIFEST = "checkpoint.json"
SEAL = re.compile(rb'\{"sum":"([0-9a-f:]+)",')
FORMER_SCHEDULE = "custom_checkpoint_0.pkl"  # only checkpoints without a sum have it

Count = Annotated[int, Field(ge=0)]
Losses = list[tuple[Count, float, float]]  # (steps done, mean loss, learning rate)


class RecordState(Document):
    """`Record.state()`."""

    losses: Losses
    evaluations: list[dict[str, int | float]]
    seconds: float
    pending: Losses


class Manifest(Document):
    """What a run resumes from, beside the weights and the state of the optimizer."""

    format: Literal[2] = 2
    step: Count
    rates: list[float]  # the learning rates of the next step, of each parameter group
    record: RecordState
    recipe: dict[str, Any]
    data: str  # the fingerprint of the training data
    # Of the sampler: nothing, or where a stream goes on (`Block`).
    position: tuple[()] | tuple[Count, Count, Count, dict[str, Any] | None]
    files: Annotated[dict[FileName, str], Field(min_length=1)]  # with their check sums


class FormerFormatError(ValueError):
    """A checkpoint of a version that pickled the state of its schedule."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json` into a checkpoint."""
    (directory / MANIFEST).write_bytes(sealed(manifest.model_dump()))


def sealed(content: dict[str, Any]) -> bytes:
    """A JSON object behind the check sum of its text."""
    text = json.dumps(content, separators=(",", ":")).encode()[1:]
    return b'{"sum":"%s",%s' % (check_sum(text).encode(), text)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        UnreadableError: it is missing, or is not what was written; the message does not name the checkpoint.
        FormerFormatError: an earlier version of aft-hf wrote it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UnreadableError(f"no {MANIFEST}")
    content = path.read_bytes()
    seal = SEAL.match(content)
    if seal is None and (directory / FORMER_SCHEDULE).exists():
        raise FormerFormatError(
            f"{directory} is of an earlier version of aft-hf, which pickled what could run code when it is read: "
            "finish the run with that version, or give another output_dir"
        )
    if seal is None or check_sum(content[seal.end() :]) != seal[1].decode():
        raise UnreadableError(f"{MANIFEST} is not what was written")
    return parse_json(content, Manifest, MANIFEST)


def check_sum(content: bytes) -> str:
    """Size and CRC-32 of a few bytes."""
    return f"{len(content)}:{zlib.crc32(content):08x}"


def file_check_sum(path: Path) -> str:
    """Size and CRC-32 of a file."""
    size = path.stat().st_size
    return f"{size}:{crc32(path, [(0, size)]):08x}"
