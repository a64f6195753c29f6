"""Report of a conversion: what became of every tensor."""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from rich.table import Table
from rich.text import Text

from ..reading import Document, parse_json
from .derivation import Derivation, row_range
from .errors import ConversionError


REPORT_NAME = "conversion_report.json"
Status = Literal["copied", "fitted", "new", "distilled", "dropped", "folded"]
STATUSES = get_args(Status)


@dataclass(frozen=True)
class TensorRecord:
    """Record of one tensor of the target or the source, and what became of it.

    Attributes:
        status: "copied" from the source to `target` by `sources`, `steps` and `factor`; "fitted" to the attention of
            the source; "new", initialized in the target; "distilled", any of these and then trained on the outputs of
            the source; "dropped" from the source; or "folded", multiplied into a copied tensor.
        target: name of the tensor in the target; None if the target does not have it.
        shape: shape in the target, or else in the source after `steps`.
        sources, steps, factor: as for `Derivation`.
        note: the reason for the status, as text.
    """

    status: str
    target: str | None
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    factor: str | None = None
    note: str = ""

    @property
    def derivation(self) -> Derivation:
        """The derivation of the tensor from tensors of the source."""
        return Derivation(self.sources, self.steps, self.factor)


@dataclass
class ConversionReport:
    """Report of a conversion: every row of each source tensor and every target tensor, each exactly once.

    Attributes:
        source: name of the converted checkpoint.
        options: options of `convert_deit` with defaults filled in, how the source was read, and the seed if one was
            given.
        versions: versions of the libraries.
        records: a record for each tensor of the target, and for each dropped or folded tensor of the source.
    """

    source: str
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    records: list[TensorRecord] = field(default_factory=list)

    def with_status(self, status: str) -> list[TensorRecord]:
        """Return the records with a given status."""
        return [record for record in self.records if record.status == status]

    def add_distillation(self, done: dict[str, Any]) -> None:
        """Mark all tensors of the target as distilled, and add the record of the distillation to the options.

        Args:
            done: the record that `distill` returns.
        """
        self.options["distillation"] = done
        self.records = [
            replace(record, status="distilled", note=f"first {record.status} {record.note}".strip())
            if record.target is not None
            else record
            for record in self.records
        ]

    def check(self, source: Mapping[str, torch.Tensor], target: Collection[str]) -> None:
        """Check that the report lists all tensors of the source and the target.

        Raises:
            ConversionError: the report does not list a tensor exactly once, or a record has a wrong status.
        """
        rows = Counter(
            (name, row)
            for record in self.records
            for name in record.sources
            for row in row_range(record.steps, _length(source.get(name)))
        )
        expected = {(name, row) for name, tensor in source.items() for row in range(_length(tensor))}
        wrong = {name for name, row in rows.keys() ^ expected} | {name for (name, _), n in rows.items() if n != 1}
        in_target = {"copied", "fitted", "new", "distilled"}
        for record in self.records:
            if record.status not in STATUSES or (record.target is not None) != (record.status in in_target):
                raise ConversionError(
                    f"{self.source}: {record.target or record.sources} has the status {record.status!r}, "
                    "which it cannot have"
                )
        targets = Counter(record.target for record in self.records if record.target is not None)
        wrong |= targets.keys() ^ set(target) | {name for name, n in targets.items() if n != 1}
        if wrong:
            raise ConversionError(
                f"{self.source}: the conversion does not account for these tensors exactly once: "
                f"{', '.join(sorted(wrong))}"
            )

    def summary(self) -> str:
        """Return one line with the number of tensors and parameters of each status."""
        parts = []
        for status in STATUSES:
            if records := self.with_status(status):
                parameters = sum(math.prod(record.shape) for record in records)
                parts.append(f"{len(records)} tensors ({parameters / 1e6:.2f} M) {status}")
        return ", ".join(parts)

    def table(self) -> Table:
        """Return a table for a terminal or a log: a row for each module and status, with all layers in one row."""
        rows = Counter(
            (
                record.status,
                _module(record.target or ""),
                " + ".join(map(_module, record.sources)),
                "; ".join([*record.steps, *filter(None, [record.note])]),
            )
            for record in self.records
        )
        table = Table(title=f"Conversion of {self.source}", title_justify="left", box=None)
        table.add_column("status", no_wrap=True)
        table.add_column("tensors", justify="right", no_wrap=True)
        table.add_column("what", overflow="fold")
        for (status, target, source, why), count in rows.items():
            lines = [target or source]
            if target and source:
                lines.append(f"  from {source}")
            if why:
                lines.append(f"  {why}")
            table.add_row(status, str(count), Text("\n".join(lines)))
        return table

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        head = {"source": self.source, "options": self.options, "versions": self.versions}
        return json.dumps(head | {"tensors": [asdict(record) for record in self.records]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ConversionReport":
        """Read a report from the output of `to_json`.

        Raises:
            ConversionError: the text is not a valid report.
        """
        return cls.from_saved(parse_json(text, SavedReport, REPORT_NAME, ConversionError))

    @classmethod
    def from_saved(cls, saved: "SavedReport") -> "ConversionReport":
        """Create a report from the validated content of its file."""
        records = [TensorRecord(**{key: getattr(each, key) for key in RECORD_FIELDS}) for each in saved.tensors]
        return cls(saved.source, saved.options, saved.versions, records)


RECORD_FIELDS = [each.name for each in fields(TensorRecord)]


class SavedRecord(Document):
    """Schema of a `TensorRecord` in a file."""

    status: Status
    target: str | None = None
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
    sources: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    factor: str | None = None
    note: str = ""


class SavedReport(Document):
    """Schema of conversion_report.json, as `ConversionReport.to_json` writes it."""

    source: str
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}
    tensors: list[SavedRecord]


def _length(tensor: torch.Tensor | None) -> int:
    """Return the number of rows that a report lists of a tensor: at least 1, also for a scalar or an empty tensor."""
    return 1 if tensor is None or tensor.dim() == 0 else max(len(tensor), 1)


def _module(name: str) -> str:
    """Return the name of the module of a parameter, with N in place of layer numbers."""
    return ".".join(
        "N" if part.isdigit() else part for part in name.removesuffix(".weight").removesuffix(".bias").split(".")
    )
