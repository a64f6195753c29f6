"""The error that publishing raises."""


class PublishError(ValueError):
    """Raised when a model cannot be published. The message says in one line what is wrong and what to do."""
