"""Report of a conversion: what became of every tensor."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ..errors import InputError
from ..reading import Document


REPORT_NAME = "conversion_report.json"
Status = Literal["copied", "fitted", "new", "dropped"]


class TensorRecord(Document):
    """Record of one tensor of the target or the source, and what became of it.

    Attributes:
        status: "copied" from the source; "fitted" to its attention; "new"; or "dropped" from the source. A
            distillation then trains all tensors of the target.
        target: name of the tensor in the target; None if it is dropped.
        shape: shape in the target, or else in the source.
        sources: names of the tensors in the source that it is made of: two for the mean of two heads, or for a tensor
            that a layer scale is folded into.
    """

    status: Status
    target: str | None = None
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
    sources: tuple[str, ...] = ()


class ConversionReport(Document):
    """Report of a conversion: every tensor of the source, and every tensor of the target exactly once.

    Attributes:
        source: name of the converted checkpoint.
        options: options of `convert_deit` with defaults filled in and the number of images, how the source was read,
            and the seed, the license that the source states and the record of the distillation, if there were any.
        versions: versions of the libraries.
        tensors: a record for each tensor of the target, and for each dropped tensor of the source.
        files: SHA-256 of the files beside a saved report that the conversion wrote, by name.
    """

    source: str
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}
    tensors: list[TensorRecord] = []
    files: dict[str, str] = {}

    def with_status(self, status: Status) -> list[TensorRecord]:
        """Return the records with a given status."""
        return [record for record in self.tensors if record.status == status]

    def check(self, source: Iterable[str], target: Collection[str]) -> None:
        """Raise an InputError unless the report lists all tensors of the source, and those of the target once."""
        listed = Counter(record.target for record in self.tensors if record.target is not None)
        wrong = {name for name in listed.keys() | target if listed[name] != (name in target)}
        wrong |= {name for record in self.tensors for name in record.sources} ^ set(source)
        if wrong:
            raise InputError(
                f"{self.source}: the report does not list these tensors exactly once: {', '.join(sorted(wrong))}"
            )

    def summary(self) -> str:
        """Return one line with the number of tensors and parameters of each status."""
        sizes = {status: [math.prod(x.shape) for x in self.with_status(status)] for status in get_args(Status)}
        return ", ".join(f"{len(x)} tensors ({sum(x) / 1e6:.2f} M) {status}" for status, x in sizes.items() if x)
