"""The error of this package."""


class ConversionError(ValueError):
    """A conversion that cannot be made, said in one line: what is wrong with which file, and what to do."""
