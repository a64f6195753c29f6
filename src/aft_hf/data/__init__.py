"""Data for AFT models."""

from .byte_tokenizer import build_byte_tokenizer


__all__ = ["build_byte_tokenizer"]
