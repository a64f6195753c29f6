"""Fast forms of the AFT operation, which come with the package and not with a checkpoint."""

import os

from . import operators


if os.environ.get("AFT_HF_TRITON") == "1":
    from .triton.operators import register

    TRITON = register()

__all__ = ["operators"]
