"""DeiT -> AFT: what the paper transfers from a trained vision transformer (its Table 8), from any dialect of it; and
labml's AFT-local -> ours."""

from .deit import (
    KERNEL_SIZE,
    LOCAL_WINDOW_SIZE,
    NUM_HEADS,
    POSITION_BIAS_DIM,
    POSITION_BIAS_MULTIPLIER,
    convert_deit,
)
from .errors import ConversionError
from .images import ImagesOnDisk, read_images
from .labml import convert_labml
from .report import REPORT_NAME, ConversionReport, TensorRecord
from .saving import save_converted
from .source import VisionTransformerSource, read_source
from .verification import verify_conversion


__all__ = [
    "KERNEL_SIZE",
    "LOCAL_WINDOW_SIZE",
    "NUM_HEADS",
    "POSITION_BIAS_DIM",
    "POSITION_BIAS_MULTIPLIER",
    "REPORT_NAME",
    "ConversionError",
    "ConversionReport",
    "ImagesOnDisk",
    "TensorRecord",
    "VisionTransformerSource",
    "convert_deit",
    "convert_labml",
    "read_images",
    "read_source",
    "save_converted",
    "verify_conversion",
]
