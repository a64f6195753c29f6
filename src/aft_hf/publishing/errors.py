"""The error of this package."""


class PublishError(ValueError):
    """A model that cannot be published, said in one line: what is wrong where, and what to do."""


def first_line(error: BaseException) -> str:
    """What a library said, as far as it fits into a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
