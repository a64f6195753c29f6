"""The error of this package, and the words of other libraries in its messages."""

from ..reading import first_line


class ConversionError(ValueError):
    """A conversion that cannot be made, said in one line: what is wrong with which file, and what to do."""


__all__ = ["ConversionError", "first_line"]
