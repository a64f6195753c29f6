"""Load the compiled CPU kernels: the variant for the instruction set of this CPU.

The environment variable AFT_HF_KERNELS names the variant to load instead ("avx512", "avx2", "neon"), or is "none".
"""

import ctypes
import os
import platform
from pathlib import Path

import torch
from transformers.utils import logging

from . import build
from .build import SOURCES, library_path


logger = logging.get_logger(__name__)

NAMES = [f"{name}{end}" for name in ("causal", "grid", "table", "band") for end in ("", "_backward")] + ["causal_step"]


# For each instruction set that PyTorch reports, the variants that the CPU can run, the fastest first.
RUNNABLE = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",), "NEON": ("neon",), "SVE256": ("neon",)}


def runnable_variants() -> list[str]:
    """Return the variants that are compiled and that this CPU can run, the fastest first."""
    capability = torch.backends.cpu.get_cpu_capability()
    known = RUNNABLE.get(capability, ("neon",) if platform.machine() in ("aarch64", "arm64") else ())
    return [variant for variant in known if library_path(variant).is_file()]


def load_library() -> ctypes.CDLL | None:
    """Load the kernels, and give them the threads of PyTorch; None if there are none for this CPU."""
    setting, variants = os.environ.get("AFT_HF_KERNELS"), runnable_variants()
    if setting and setting not in ("none", *variants):
        allowed = ", ".join(["none", *variants])
        logger.warning_once(f"AFT_HF_KERNELS={setting} is not compiled, or not for this CPU; use one of {allowed}")
    elif not setting and not variants and any(SOURCES.glob("libaft_*.so")):
        logger.warning_once(f"the CPU kernels are not those of this version; compile them: python {build.__file__}")
    chosen = setting or next(iter(variants), "none")
    return load_from(library_path(chosen)) if chosen in variants else None


def load_from(path: Path) -> ctypes.CDLL | None:
    """Load one library; None, with a warning, if the system cannot load it."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning_once(f"the CPU kernels cannot be loaded, so the portable form is used: {error}")
        return None
    for kernel in (getattr(library, f"aft_{name}") for name in NAMES):
        kernel.argtypes, kernel.restype = [ctypes.c_char_p], ctypes.c_int
    # torch._C is linked with libtorch_cpu, so a function is also searched there. Both are part of PyTorch's stable
    # interface since 2.10.
    of_torch = ctypes.CDLL(torch._C.__file__)
    if hasattr(of_torch, "torch_parallel_for"):
        functions = (of_torch.torch_parallel_for, of_torch.torch_get_num_threads)
        library.aft_use_threads_of_torch(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return library


__all__ = ["SOURCES", "load_from", "load_library", "runnable_variants"]
