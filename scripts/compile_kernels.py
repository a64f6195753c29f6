"""Compile every variant of the Triton kernels for GPUs that need not be present, and print the resources of each.

The variants are recorded from the kernel launches, which run on meta tensors here, so only Triton is needed. The
resources of a variant are registers and bytes of spilled registers per thread, bytes of shared memory per program, all
instructions, and matrix-multiply instructions. The script fails if a variant does not compile, spills more than
`--spills` bytes, or needs more shared memory than the GPU has.

    python scripts/compile_kernels.py --architectures 80 90 --out kernels.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple


os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from aft_hf.caching_aft import AFTLayerState
from aft_hf.kernels.triton import operators, product_launch
from aft_hf.mixing_aft import Documents, Mixing
from aft_hf.position_biases_aft import Dense, GridKernel, LagKernel, LinearDecay, NoBias, Window


# Bytes of shared memory that one program can use, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",  # averages that are kept for the backward pass
    torch.int32: "*i32",
    torch.int64: "*i64",
}

# Sizes of an ordinary call: rows, positions, features, heads.
BATCH, LENGTH, WIDTH, HEADS = 8, 4096, 256, 4

# Rows and columns of the patches of an image.
GRID = 14, 14


class Variant(NamedTuple):
    """A kernel as specialized for a launch. Arguments are (name, type, value of a constant, divisible by 16)."""

    module: str
    kernel: str
    arguments: tuple[tuple[str, str, Any, bool], ...]
    warps: int
    stages: int | None


class Compiled(NamedTuple):
    problem: str
    variant: Variant
    architecture: int
    error: str = ""
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instructions: int = 0
    products: str = ""


# ----------------------------------------------------------------------------------------------------- kernel variants


def problems() -> Iterator[tuple[str, Mixing]]:
    """One problem for each structure of w, dtype and option that a kernel is specialized for, on meta tensors."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    factors = tensor(1, LENGTH, 64), tensor(1, LENGTH, 64)
    meta = torch.device("meta")
    structures = {
        "simple": (1, WIDTH, NoBias(1, meta, torch.float32)),
        "alibi": (HEADS, WIDTH, LinearDecay(tensor(HEADS))),
        "local": (1, WIDTH, Window(*factors, size=32)),
        "local, wide": (1, WIDTH, Window(*factors, size=100)),
        "local, window alone": (1, WIDTH, Window(*factors, size=32, hides_outside=True)),
        "conv": (HEADS, HEADS, LagKernel(tensor(HEADS, 11), causal=True)),
        "full": (1, WIDTH, Dense(*factors)),
    }
    documents = Documents(tensor(BATCH, LENGTH, dtype=torch.bool))
    for (name, (heads, key_width, biases)), dtype, packed in product(
        structures.items(), (torch.bfloat16, torch.float32), (False, True)
    ):
        if packed and name in ("full", "local, wide"):
            continue  # not computed by a kernel, or as without documents
        value = tensor(BATCH, LENGTH, WIDTH, dtype=dtype)
        key = tensor(BATCH, LENGTH, key_width, dtype=dtype)
        options = {"documents": documents} if packed else {}
        label = f"{name}, {str(dtype).removeprefix('torch.')}{', documents' if packed else ''}"
        yield label, Mixing(key, value, heads, biases, causal=True, query=value, **options)
    images = {
        "image, full": (1, WIDTH, Dense(*factors)),
        "image, conv": (HEADS, HEADS, GridKernel(tensor(HEADS, 11, 11), GRID)),
        "image, conv of 1 feature": (WIDTH, WIDTH, GridKernel(tensor(WIDTH, 11, 11), GRID)),
        "image, conv, large": (HEADS, HEADS, GridKernel(tensor(HEADS, 25, 25), (64, 64))),
    }
    for (name, (heads, key_width, biases)), dtype in product(images.items(), (torch.bfloat16, torch.float32)):
        rows, columns = getattr(biases, "grid_size", GRID)
        value, key = (tensor(BATCH, rows * columns, x, dtype=dtype) for x in (WIDTH, key_width))
        yield f"{name}, {str(dtype).removeprefix('torch.')}", Mixing(key, value, heads, biases, query=value)


def launched(problem: Mixing) -> list[Variant]:
    """The variants that a forward and backward pass, a forward pass without gradients, and generation launch."""
    variants, run = [], JITFunction.run

    def record(kernel, *arguments, grid, warmup, **options) -> None:
        variants.append(_variant(kernel, arguments, options))

    JITFunction.run = record
    try:
        if not problem.causal or problem.biases.reach is None:
            _all_pairs(problem)
        else:
            _causal(problem)
    finally:
        JITFunction.run = run
    return variants


def _all_pairs(problem: Mixing) -> None:
    biases, given = problem.biases, (problem.query, problem.key, problem.value)
    if isinstance(biases, GridKernel):
        arguments = *given, biases.kernels, *biases.grid_size, biases.hides_outside
        forward, backward = product_launch.grid, product_launch.grid_backward
    else:
        arguments = *given, biases.dense(problem.length), problem.causal
        forward, backward = product_launch.table, product_launch.table_backward
    forward(*arguments, False)
    backward(problem.value, *arguments, *forward(*arguments, True)[1:], True)


def _causal(problem: Mixing) -> None:
    biases, length = problem.biases, problem.length
    first = None if problem.documents is None else problem.documents.first_positions()
    given = problem.query, problem.key, problem.value, biases.by_lag(length), biases.slopes
    operators.causal(*given, first, biases.hides_outside)
    operators.causal_backward(problem.value, *given, first, biases.hides_outside, given[3] is not None)
    if problem.documents is None:
        layer = AFTLayerState(biases.reach)
        layer.lazy_initialization(*(x.float() for x in problem.by_head()))
        state = layer.keys, layer.values, layer.numerator, layer.denominator, layer.maximum
        for padding in (None, torch.empty(BATCH, length, dtype=torch.int64, device="meta")):
            operators.causal_state(*given, padding, biases.hides_outside, *state)
        token = [None if x is None else x[:, :1] for x in given[:4]]
        operators.causal_state(*token, biases.slopes, None, biases.hides_outside, *state)


def _variant(kernel: JITFunction, arguments: tuple, options: dict) -> Variant:
    """The variant that Triton would compile for the arguments of a launch."""
    warps, stages = options.pop("num_warps", 4), options.pop("num_stages", None)
    values = dict(zip(kernel.arg_names, arguments)) | options
    given = []
    for parameter in kernel.params:
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            given.append((parameter.name, TYPES[value.dtype], None, True))
        elif parameter.is_constexpr or value is None or value == 1:
            given.append((parameter.name, "constexpr", value, False))
        else:
            given.append((parameter.name, "i32", None, value % 16 == 0))
    return Variant(kernel.fn.__module__, kernel.__name__, tuple(given), warps, stages)


# --------------------------------------------------------------------------------------------------------- compilation


def compile_variant(problem: str, variant: Variant, architecture: int) -> Compiled:
    names = [name for name, *_ in variant.arguments]
    source = ASTSource(
        fn=getattr(import_module(variant.module), variant.kernel),
        signature={name: kind for name, kind, *_ in variant.arguments},
        constexprs={(names.index(name),): value for name, kind, value, _ in variant.arguments if kind == "constexpr"},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, *_, even in variant.arguments if even},
    )
    try:
        target = GPUTarget("cuda", architecture, 32)
        options = {"num_warps": variant.warps} | ({} if variant.stages is None else {"num_stages": variant.stages})
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        return Compiled(problem, variant, architecture, error=f"{type(error).__name__}: {error}"[:2000])
    return Compiled(problem, variant, architecture, "", *_inspect(compiled))


def _inspect(compiled) -> tuple[int, int, int, int, str]:
    """Registers, spilled bytes, shared memory, instructions, and matrix-multiply instructions."""
    tools = Path(triton.knobs.nvidia.ptxas.path).parent
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", binary)
        code = _output(tools / "cuobjdump", "--dump-sass", binary)
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)", code)
    registers, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    counts = {name: operations.count(name) for name in ("HGMMA", "HMMA") if name in operations}
    products = " ".join(f"{name} {count}" for name, count in counts.items())
    return registers, local, compiled.metadata.shared, len(operations), products


def _output(*command) -> str:
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True).stdout


# -------------------------------------------------------------------------------------------------------------- report


def failures(found: Compiled, spills: int) -> str:
    """The reason why a variant is rejected; empty if it is accepted."""
    if found.error:
        return found.error
    if found.spilled > spills:
        return f"spills {found.spilled} bytes per thread, more than {spills}"
    limit = SHARED_MEMORY.get(found.architecture, min(SHARED_MEMORY.values()))
    return f"needs {found.shared} bytes of shared memory, more than {limit}" if found.shared > limit else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90], help="compute capabilities")
    parser.add_argument("--spills", type=int, default=64, help="maximum bytes of registers that a thread may spill")
    parser.add_argument("--only", default="", help="compile only problems and kernels whose names contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    arguments = parser.parse_args()

    variants: dict[Variant, str] = {}  # with the first problem that needs it
    for name, problem in problems():
        for variant in launched(problem):
            if arguments.only in f"{name} {variant.kernel}":
                variants.setdefault(variant, name)
    wanted = [(name, variant, sm) for sm in arguments.architectures for variant, name in variants.items()]
    if not variants:
        print(f"compile_kernels: no kernel or problem has {arguments.only!r} in its name", file=sys.stderr)
        return 1
    print(f"{len(variants)} variants for {' and '.join(f'sm_{sm}' for sm in arguments.architectures)}", flush=True)
    row = "{:6} {:32} {:42} {:>5} {:>9} {:>6} {:>7} {:>8}  {}"
    titles = ("GPU", "kernel", "first needed by", "warps", "registers", "spill", "shared", "instr.", "products")
    print(row.format(*titles))
    failed, table = [], []
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(compile_variant, *zip(*wanted)):
            sizes = found.variant.warps, found.registers, found.spilled, found.shared, found.instructions
            print(row.format(f"sm_{found.architecture}", found.variant.kernel, found.problem, *sizes, found.products))
            sys.stdout.flush()
            reason = failures(found, arguments.spills)
            if reason:
                failed.append(f"sm_{found.architecture} {found.variant.kernel}, {found.problem}: {reason}")
            entry = found._asdict() | {"kernel": found.variant.kernel, "warps": found.variant.warps}
            entry["constants"] = {
                name: value for name, kind, value, _ in entry.pop("variant").arguments if kind == "constexpr"
            }
            table.append(entry)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(table) - len(failed)} of {len(table)} accepted", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
