"""What became of every tensor in a conversion."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.table import Table


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: copied from `sources` to `target`, new in the target, or dropped from the source."""

    status: str  # "copied", "new" or "dropped"
    target: str | None
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    note: str = ""


@dataclass
class ConversionReport:
    """The account of a conversion: each tensor of the source and of the target stands in it exactly once."""

    source: str
    records: list[TensorRecord] = field(default_factory=list)

    def with_status(self, status: str) -> list[TensorRecord]:
        """The records with one status."""
        return [record for record in self.records if record.status == status]

    def check(self, source_names: Iterable[str], target_names: Iterable[str]) -> None:
        """Compare with the tensors there are.

        Raises:
            ValueError: a tensor is missing from the account, or stands in it twice.
        """
        seen_sources = Counter(name for record in self.records for name in record.sources)
        seen_targets = Counter(record.target for record in self.records if record.target is not None)
        for kind, seen, names in (("source", seen_sources, source_names), ("target", seen_targets, target_names)):
            wrong = sorted(name for name in seen.keys() | set(names) if seen[name] != 1 or name not in set(names))
            if wrong:
                raise ValueError(f"the conversion does not account for these {kind} tensors exactly once: {wrong}")

    def summary(self) -> str:
        """One line: how many tensors and parameters were copied, are new, were dropped."""
        parts = []
        for status in ("copied", "new", "dropped"):
            records = self.with_status(status)
            parameters = sum(math.prod(record.shape) for record in records)
            parts.append(f"{len(records)} tensors ({parameters / 1e6:.2f} M) {status}")
        return ", ".join(parts)

    def table(self) -> Table:
        """For people: a row for each module, with the layers that share its fate counted."""
        rows = Counter(
            (
                record.status,
                _module(record.target or ""),
                " + ".join(map(_module, record.sources)),
                record.note,
            )
            for record in self.records
        )
        table = Table(title=f"Conversion of {self.source}")
        for column in ("status", "target", "source", "tensors", "note"):
            table.add_column(column, overflow="fold", justify="right" if column == "tensors" else "left")
        for (status, target, sources, note), count in rows.items():
            table.add_row(status, target, sources, str(count), note)
        return table

    def to_json(self) -> str:
        """For programs: everything, as JSON."""
        return json.dumps({"source": self.source, "tensors": [asdict(record) for record in self.records]}, indent=1)


def _module(name: str) -> str:
    """The name without its layer, and without what kind of parameter of its module it is."""
    return ".".join(
        "N" if part.isdigit() else part for part in name.removesuffix(".weight").removesuffix(".bias").split(".")
    )
