"""Training from recipes: a loop on Accelerate for bytes, tokens, sub-pixels and images.

Unlike transformers' Trainer, it gives the same result for any number of processes and after interruptions.
`aft_hf.tuning` fine-tunes by Trainer, with all its options; both share the optimizer, the metrics and `running`.
"""

from .optimization import build_optimizer


__all__ = ["build_optimizer"]
