"""The version, which packaging reads without importing torch."""

__version__ = "0.1.0.dev0"
