"""Fast forms of the AFT operation, which come with the package and not with a checkpoint."""

import os
from importlib.util import find_spec

import torch
from transformers.utils import logging

from . import operators
from .triton.operators import register


logger = logging.get_logger(__name__)


def uses_triton() -> bool:
    """Whether to register the Triton kernels, where PyTorch supports NVIDIA GPUs and Triton is installed.

    The environment variable AFT_HF_TRITON turns them off (0), or also on for AMD GPUs (1), on which they were not
    tested.
    """
    setting = os.environ.get("AFT_HF_TRITON", "")
    if setting not in ("", "0", "1"):
        logger.warning_once(f"AFT_HF_TRITON={setting} is ignored; use 0 or 1")
    for_gpus = torch.version.cuda is not None or (torch.version.hip is not None and setting == "1")
    if setting == "0" or not for_gpus:
        return False
    is_installed = find_spec("triton") is not None
    if setting == "1" and not is_installed:
        logger.warning_once("AFT_HF_TRITON is 1, but Triton is not installed: pip install triton")
    return is_installed


if uses_triton() and not operators.REGISTERED:
    TRITON = register()

__all__ = ["operators"]
