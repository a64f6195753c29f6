"""The exception of the conversion package."""


class ConversionError(ValueError):
    """A conversion is impossible. The message is one line: the file, the problem and the fix."""
