"""Conversion of ViT and DeiT checkpoints to AFT, as in Table 8 of the paper."""

from .deit import convert_deit
from .images import ImagesOnDisk, read_images
from .report import REPORT_NAME, ConversionReport
from .resizing import adapt_to_image_size
from .saving import save_converted, verify_conversion
from .source import VisionTransformerSource, read_source


__all__ = [
    "REPORT_NAME",
    "ConversionReport",
    "ImagesOnDisk",
    "VisionTransformerSource",
    "adapt_to_image_size",
    "convert_deit",
    "read_images",
    "read_source",
    "save_converted",
    "verify_conversion",
]
