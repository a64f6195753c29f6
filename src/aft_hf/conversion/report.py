"""Report of a conversion: what became of every tensor."""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import ConfigDict, Field, model_validator

from ..reading import Document, explained, read_json
from .derivation import PARTS, Derivation, Step
from .errors import ConversionError
from .files import read_weights


REPORT_NAME = "conversion_report.json"
Status = Literal["copied", "fitted", "new", "distilled", "dropped", "folded"]


class TensorRecord(Document):
    """Record of one tensor of the target or the source, and what became of it.

    Attributes:
        status: "copied" from the source to `target` by `sources` and `steps`; "fitted" to the attention of the source;
            "new", initialized in the target; "distilled", any of these and then trained on the outputs of the source;
            "dropped" from the source; or "folded", multiplied into a copied tensor.
        target: name of the tensor in the target; None if the target does not have it.
        shape: shape in the target, or else in the source after `steps`.
        sources, steps: as for `Derivation`.
        note: the reason for the status, as text.
    """

    status: Status
    target: str | None = None
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
    sources: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    note: str = ""

    @model_validator(mode="after")
    def _check_status(self) -> "TensorRecord":
        if (self.target is None) != (self.status in ("dropped", "folded")):
            raise ValueError(f"{self.target or self.sources} has the status {self.status!r}, which it cannot have")
        return self

    @property
    def derivation(self) -> Derivation:
        """The derivation of the tensor from tensors of the source."""
        return Derivation(self.sources, self.steps)


class ConversionReport(Document):
    """Report of a conversion: every part of each source tensor and every target tensor, each exactly once.

    Attributes:
        source: name of the converted checkpoint.
        options: options of `convert_deit` with defaults filled in, how the source was read, and the seed if one was
            given.
        versions: versions of the libraries.
        tensors: a record for each tensor of the target, and for each dropped or folded tensor of the source.
    """

    model_config = ConfigDict(frozen=False)

    source: str
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}
    tensors: list[TensorRecord] = []

    def with_status(self, status: Status) -> list[TensorRecord]:
        """Return the records with a given status."""
        return [record for record in self.tensors if record.status == status]

    def add_distillation(self, done: dict[str, Any]) -> None:
        """Mark all tensors of the target as distilled, and add the record of the distillation to the options.

        Args:
            done: the record that `distill` returns.
        """
        self.options["distillation"] = done
        for i, record in enumerate(self.tensors):
            if record.target is not None:
                note = f"first {record.status} {record.note}".strip()
                self.tensors[i] = record.model_copy(update={"status": "distilled", "note": note})

    def check(self, source: Iterable[str], target: Collection[str]) -> None:
        """Raise a ConversionError unless the report lists all tensors of source and target exactly once."""
        listed: Counter[tuple[str, int | None]] = Counter(
            (name, part) for each in self.tensors for name in each.sources for part in each.derivation.parts
        )
        listed.update((record.target, None) for record in self.tensors if record.target is not None)
        expected: Counter[tuple[str, int | None]] = Counter((name, part) for name in source for part in range(PARTS))
        expected.update((name, None) for name in target)
        if wrong := {name for name, part in listed.keys() | expected if listed[name, part] != expected[name, part]}:
            raise ConversionError(
                f"{self.source}: the conversion does not account for these tensors exactly once: "
                f"{', '.join(sorted(wrong))}"
            )

    def summary(self) -> str:
        """Return one line with the number of tensors and parameters of each status."""
        sizes = {status: [math.prod(x.shape) for x in self.with_status(status)] for status in get_args(Status)}
        return ", ".join(f"{len(x)} tensors ({sum(x) / 1e6:.2f} M) {status}" for status, x in sizes.items() if x)


def verify_conversion(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> int:
    """Verify a saved conversion against its source by the saved report.

    Source and conversion are read again from their files. The report must list all tensors of both. Every copied
    tensor is derived again from the source, as the report says, and must have the dtype, the shape and the bits of the
    saved tensor.

    Args:
        source: the converted checkpoint: a directory, a Hub repository, or a weight file.
        directory: the directory that `save_converted` wrote.

    Returns:
        The number of copied tensors, all of which are equal.

    Raises:
        ConversionError: a file cannot be read, the report does not list a tensor, or a copied tensor differs.
    """
    (tensors, _), (saved, _) = read_weights(source), read_weights(directory)
    path = Path(directory) / REPORT_NAME
    report = read_json(path, ConversionReport, ConversionError)
    report.check(tensors, saved)
    copied = report.with_status("copied")
    for record in copied:
        with explained(f"{path}: {record.target} cannot be derived again from the source", ConversionError):
            expected = record.derivation.compute(tensors)
        if not _equal_bits(expected, saved[str(record.target)]):
            raise ConversionError(f"{directory}: {record.target} is not what {path.name} says was copied")
    return len(copied)


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors have the same dtype, shape and bits: -0.0 differs from 0.0, and NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (first, second)))
