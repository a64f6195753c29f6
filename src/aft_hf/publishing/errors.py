"""The error of this package."""


class PublishError(ValueError):
    """A model that cannot be published, said in one line: what is wrong where, and what to do."""
