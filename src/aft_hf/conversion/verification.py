"""Verification of a conversion: the saved files hold all copied tensors, bit for bit."""

import os
from pathlib import Path

import torch

from ..reading import explained, read_json
from .errors import ConversionError
from .files import read_weights
from .report import REPORT_NAME, ConversionReport, SavedReport


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
    report = ConversionReport.from_saved(read_json(path, SavedReport, ConversionError))
    report.check(tensors, saved)
    copied = report.with_status("copied")
    for record in copied:
        assert record.target is not None  # `check` ensures that a copied tensor has a target
        with explained(f"{path}: {record.target} cannot be derived again from the source", ConversionError):
            expected = record.derivation.compute(tensors)
        if not _equal_bits(expected, saved[record.target]):
            raise ConversionError(f"{directory}: {record.target} is not what {path.name} says was copied")
    return len(copied)


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # As integers: -0.0 differs from 0.0, and NaN equals a NaN of the same bits.
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))
