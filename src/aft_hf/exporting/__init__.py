"""Export of AFT models to other runtimes."""

from .onnx_step import empty_state, export_step


__all__ = ["empty_state", "export_step"]
