"""Triton kernels for GPUs."""

from .backend import TritonBackend


__all__ = ["TritonBackend"]
