"""Training AFT models."""

from .optimization import build_optimizer


__all__ = ["build_optimizer"]
