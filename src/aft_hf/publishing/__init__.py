"""Publishing models on the Hub: the model card, the checks before an upload, and the upload."""

from .card import build_card, write_card
from .checks import find_problems
from .upload import Publication, publish


__all__ = ["Publication", "build_card", "find_problems", "publish", "write_card"]
