"""Publishing models on the Hub: the card, the checks before an upload, the upload."""

from .card import build_card, write_card
from .checks import find_problems
from .errors import PublishError
from .upload import Publication, publish


__all__ = ["Publication", "PublishError", "build_card", "find_problems", "publish", "write_card"]
