"""Triton kernels for GPUs."""

from .operators import register


__all__ = ["register"]
