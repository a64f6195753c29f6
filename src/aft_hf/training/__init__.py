"""Training from recipes: a loop on Accelerate for bytes, tokens, sub-pixels and images.

Unlike transformers' Trainer, which `aft_hf.tuning` uses, it gives the same result for any number of processes.
"""

from .optimization import build_optimizer


__all__ = ["build_optimizer"]
