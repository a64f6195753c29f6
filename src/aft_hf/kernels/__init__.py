"""Fast forms of the AFT operation, which come with the package and not with a checkpoint."""

from ..mixing_aft import register_backend
from . import operators, table
from .triton import TritonBackend


register_backend(TritonBackend)

__all__ = ["operators", "table"]
