"""DeiT -> AFT-conv: what the paper transfers from a trained vision transformer (its Table 8)."""

from .deit import KERNEL_SIZE, NUM_HEADS, REPORT_NAME, convert_deit, save_converted
from .report import ConversionReport, TensorRecord
from .source import ConversionError, VisionTransformerSource, read_source


__all__ = [
    "KERNEL_SIZE",
    "NUM_HEADS",
    "REPORT_NAME",
    "ConversionError",
    "ConversionReport",
    "TensorRecord",
    "VisionTransformerSource",
    "convert_deit",
    "read_source",
    "save_converted",
]
