"""Options of the Triton kernels, in one table: block sizes and warps by kernel, dtype and GPU.

An entry is found by the name of a kernel and the dtype of the values; one that also names a compute capability holds
for GPUs of that capability. float16 has the entries of float32 where it has none of its own. An entry "... documents"
has the options that differ for packed documents or padding, "... window alone" those without global connectivity, and
"... wide" those for windows of more than 33 keys.
`scripts/tune_kernels.py` measures candidates for bfloat16 and float32, and prints the best.
"""

from typing import Any

import torch


# The number of tokens that share a reference of the log-denominators and a center of the averages, and of queries in a
# tile of the window.
CHUNK = 32

# Programs of a causal kernel to aim at per multiprocessor: rows are cut into segments until there are as many.
PROGRAMS = 16

# BD: features per program. BM, BN, BK: rows, columns and depth of matrix products. num_warps: warps per program.
# maxnreg: registers per thread, at most. PRECISION: of matrix products. With factors in bfloat16, gradients exceed the
# error that the contract of the forms allows: up to 3.6 times in sweeps, by 2 to 3 % in the other kernels.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "walk_kernel": {
        "bfloat16": {"BD": 128, "num_warps": 1, "maxnreg": 168},  # with 128, it spills registers on sm_80 and sm_89
        "bfloat16 sm_90": {"BD": 128, "num_warps": 1, "maxnreg": 128},
        "bfloat16 sm_100": {"BD": 128, "num_warps": 1, "maxnreg": 128},
        "float32": {"BD": 64, "num_warps": 1, "maxnreg": 128},
        "bfloat16 documents": {"maxnreg": None},
        "float32 documents": {"maxnreg": None},
    },
    "walk_backward_kernel": {
        "bfloat16": {"BD": 128, "num_warps": 1, "maxnreg": 128},
        "float32": {"BD": 64, "num_warps": 1, "maxnreg": 128},
        "bfloat16 documents": {"maxnreg": None},
        "float32 documents": {"maxnreg": None},
    },
    # One warp, which holds all factors of its products, so nothing passes through shared memory. With 8 features
    # instead of 16, a program takes fewer registers, and more instructions for each feature.
    "sweep_kernel": {
        "bfloat16": {"BD": 16, "num_warps": 1, "num_stages": 1, "maxnreg": 128, "PRECISION": "tf32"},
        # With fewer registers, some variants spill
        "bfloat16 sm_89": {"BD": 16, "num_warps": 1, "num_stages": 1, "maxnreg": 136, "PRECISION": "tf32"},
        "bfloat16 sm_100": {"BD": 16, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32"},
        "bfloat16 documents": {"maxnreg": 184},
        "bfloat16 sm_100 documents": {"maxnreg": 200},
        "bfloat16 wide": {"maxnreg": 168},
        "bfloat16 window alone": {"BD": 8},
        "bfloat16 sm_75": {"BD": 16, "num_warps": 4, "num_stages": 1, "PRECISION": "tf32"},
        "float32": {"BD": 8, "num_warps": 1, "num_stages": 1, "maxnreg": 128, "PRECISION": "tf32x3"},
        "float32 documents": {"maxnreg": None},
        "float32 wide": {"maxnreg": 200},
        "float32 window alone": {"BD": 16, "num_warps": 2, "maxnreg": 240},
        "float32 sm_100 window alone": {"num_warps": 2, "maxnreg": 200},
        "float32 sm_75": {"BD": 16, "num_warps": 2, "num_stages": 1, "PRECISION": "tf32x3"},
    },
    "sweep_backward_kernel": {
        "bfloat16": {"BD": 8, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32"},
        "bfloat16 sm_75": {"BD": 16, "num_warps": 4, "PRECISION": "tf32"},  # sm_75 has no tensor cores for it
        "float32": {"BD": 8, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32x3"},
        # With other maxima of registers, some variants spill
        "float32 documents": {"maxnreg": 248},
        "float32 window alone": {"maxnreg": 248},
        "float16": {"BD": 8, "num_warps": 1, "num_stages": 1, "maxnreg": 168, "PRECISION": "tf32x3"},
        "float16 sm_100": {"BD": 8, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32x3"},
        "float16 wide": {"maxnreg": 200},
        "float32 sm_75": {"BD": 16, "num_warps": 2, "PRECISION": "tf32x3"},
    },
    # These kernels, which sum key by key, have BD of the sweeps. Without a maximum, the compiler allows them 96
    # registers, and some variants spill.
    "repair_kernel": {
        "bfloat16": {"num_warps": 4, "maxnreg": 168},
        "float32": {"num_warps": 4, "maxnreg": 168},
    },
    # BW: keys of the window at once
    "step_kernel": {
        "bfloat16": {"BD": 32, "BW": 32, "num_warps": 1},
        "float32": {"BD": 32, "BW": 32, "num_warps": 1},
    },
    # KEYS: chunks of keys for which a program loads queries, 1 or 2. With fewer registers, some variants spill.
    "window_gradient_kernel": {
        "bfloat16": {"BD": 16, "KEYS": 2, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32"},
        "bfloat16 sm_90": {"BD": 16, "KEYS": 2, "num_warps": 1, "num_stages": 1, "maxnreg": 184, "PRECISION": "tf32"},
        "bfloat16 documents": {"maxnreg": None},
        "bfloat16 wide": {"maxnreg": None},
        "bfloat16 window alone": {"maxnreg": None},
        "bfloat16 sm_75": {"BD": 16, "KEYS": 2, "num_warps": 4, "PRECISION": "tf32"},
        "float32": {"BD": 16, "KEYS": 2, "num_warps": 2, "num_stages": 1, "maxnreg": 200, "PRECISION": "tf32x3"},
        "float32 documents": {"maxnreg": None},
        "float32 sm_100 documents": {"KEYS": 1, "num_warps": 1, "maxnreg": None},
        "float32 window alone": {"maxnreg": 240},
        "float32 sm_75": {"BD": 16, "KEYS": 2, "num_warps": 4, "PRECISION": "tf32x3"},
        "float16": {"BD": 16, "KEYS": 1, "num_warps": 1, "num_stages": 1, "PRECISION": "tf32x3"},
        "float16 sm_100 documents": {"num_warps": 2},
        "float16 window alone": {"maxnreg": None},
        "float16 sm_100 window alone": {"maxnreg": 240},
    },
    # w of a window from its factors, and their gradients. BF: features of the factors at once
    "band": {
        "bfloat16": {"BF": 32, "num_warps": 4},  # with 64, the backward kernel spills registers on some GPUs
        "float32": {"BF": 32, "num_warps": 4},
        "float32 sm_100": {"BF": 16, "num_warps": 4},  # with 32, it spills registers
        "float16 sm_100": {"BF": 16, "num_warps": 8},
    },
    # The products of grids and tables
    "product": {
        "bfloat16": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32"},
        "float32": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32x3"},
        # With a depth of 32, some variants spill registers
        "bfloat16 sm_80": {"BM": 64, "BN": 128, "BK": 16, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32"},
        "bfloat16 sm_89": {"BM": 64, "BN": 128, "BK": 16, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32"},
        # With 64 rows, Triton 3.7.1 does not compile the average, and computes "tf32x3" without tensor cores
        "bfloat16 sm_100": {"BM": 32, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 2, "PRECISION": "tf32"},
        "float16 sm_80": {"BM": 64, "BN": 64, "BK": 32, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32x3"},
        "float32 sm_100": {"BM": 32, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 2, "PRECISION": "tf32x3"},
    },
    "weight_gradient_kernel": {
        "bfloat16": {"BM": 64, "BK": 32, "num_warps": 8, "num_stages": 3},
        "bfloat16 sm_100": {"BM": 32, "BK": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
        "float32": {"BM": 64, "BK": 16, "num_warps": 8, "num_stages": 2},
        # With 64 rows, "tf32x3" is computed without tensor cores, and some variants spill
        "float32 sm_100": {"BM": 32, "BK": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 224},
    },
}

if torch.version.hip is not None:  # Triton does not know maxnreg on AMD GPUs
    for each in (each for entries in OPTIONS.values() for each in entries.values()):
        each.pop("maxnreg", None)


def card(x: torch.Tensor) -> str:
    """Return the compute capability by which the options of the GPU of a tensor are found."""
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    return named(10 * major + minor)


def named(capability: int) -> str:
    """Return the name of a compute capability in the table: sm_100 for all data center GPUs of that generation, and
    sm_89 for sm_86, whose limits are the same.
    """
    return f"sm_{100 if capability // 10 == 10 else 89 if capability == 86 else capability}"


def options(kernel: str, x: torch.Tensor, case: str = "") -> dict[str, Any]:
    """Return the options of a kernel for the dtype and the device of a tensor, and a case (see above)."""
    entries, own = OPTIONS[kernel], str(x.dtype).removeprefix("torch.")
    found: dict[str, Any] = {}
    dtype = "float32" if own == "float16" else own
    for suffix in ("", f" {case}"):
        names = (f"{own} {card(x)}{suffix}", f"{dtype} {card(x)}{suffix}", own + suffix, dtype + suffix)
        found |= next((entries[name] for name in names if name in entries), {})
    return found
