"""The error of this package."""


class ConversionError(ValueError):
    """A conversion that cannot be made, said in one line: what is wrong with which file, and what to do."""


def first_line(error: BaseException) -> str:
    """What a library said, as far as it fits into a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
