"""The proof of a conversion: what was copied is in the saved files, bit for bit."""

import os
from pathlib import Path

import torch

from ..reading import explained, read_json
from .errors import ConversionError
from .files import read_tensors
from .report import REPORT_NAME, ConversionReport, SavedReport


def verify_conversion(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> int:
    """Compare a saved conversion with its source, both read anew, by nothing but the saved report.

    The report must account for all tensors of both. Every copied tensor is made again of the source's, as the report
    says, and must have the dtype, the shape and the bits of the one that was saved.

    Args:
        source: what was converted: a directory, a repository of the Hub, or a file of weights.
        directory: what `save_converted` wrote.

    Returns:
        The number of copied tensors, all equal.

    Raises:
        ConversionError: something cannot be read, is not accounted for, or differs.
    """
    tensors, saved = read_tensors(source), read_tensors(directory)
    path = Path(directory) / REPORT_NAME
    report = ConversionReport.from_saved(read_json(path, SavedReport, ConversionError))
    report.check(tensors, saved)
    copied = report.with_status("copied")
    for record in copied:
        assert record.target is not None  # what was copied, was copied to somewhere
        with explained(f"{path}: {record.target} cannot be made again", ConversionError):
            expected = record.derivation.of(tensors)
        if not _equal_bits(expected, saved[record.target]):
            raise ConversionError(f"{directory}: {record.target} is not what {path.name} says was copied to it")
    return len(copied)


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # As integers: -0.0 is not 0.0 here, and NaN is NaN.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))
