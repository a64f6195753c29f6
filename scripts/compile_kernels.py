"""Compile every variant of the Triton kernels for GPUs that need not be present, and print the resources of each.

The variants are recorded from the kernel launches, which run on meta tensors here, so only Triton is needed. The
resources of a variant are registers and bytes of spilled registers per thread, bytes of shared memory per program, and
what its longest loop issues: instructions, bytes that threads load and store, and barriers. For kernels that pass
through the tokens, instructions and bytes are per token and feature, beside the bytes of all tensors once. The script
fails if a variant does not compile, spills more than `--spills` bytes, or needs more shared memory than the GPU has.

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
from aft_hf.kernels.triton import causal_launch, options, product_launch
from aft_hf.kernels.triton.options import CHUNK
from aft_hf.mixing_aft import Mixing, Visibility
from aft_hf.position_biases_aft import Dense, GridKernel, LagKernel, LinearDecay, NoBias, Window


# Bytes of shared memory that one program can use, by compute capability.
KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
SHARED_MEMORY = {architecture: 1024 * size for architecture, size in KIB.items()}

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",  # flags
    torch.float64: "*fp64",  # sums of a state
}
BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2}
DTYPES = torch.bfloat16, torch.float32, torch.float16

# Tokens that an iteration of the longest loop passes, by kernel, and the arguments with an entry for each token and
# feature.
TOKENS = {"walk_kernel": 4, "walk_backward_kernel": 2, "sweep_kernel": CHUNK, "sweep_backward_kernel": CHUNK}
TOKENS |= {"window_gradient_kernel": CHUNK}
OF_TOKENS = {f"{name}_ptr" for name in ("q", "k", "v", "g", "y", "c", "l", "dq", "dk", "dv")}

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
    limit: int | None  # of registers per thread
    stages: int | None


class Compiled(NamedTuple):
    problem: str
    variant: Variant
    architecture: int
    error: str = ""
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instructions: float = 0.0
    moved: float = 0.0
    floor: int = 0
    barriers: int = 0


# ----------------------------------------------------------------------------------------------------- kernel variants


def problems() -> Iterator[tuple[str, Mixing]]:
    """One problem for each structure of w, dtype and option that a kernel is specialized for, on meta tensors."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    factors = tensor(1, LENGTH, 64), tensor(1, LENGTH, 64)
    meta = torch.device("meta")
    structures = {
        "simple": (1, WIDTH, NoBias(1, torch.empty(0, device=meta))),
        "alibi": (HEADS, WIDTH, LinearDecay(tensor(HEADS))),
        "local": (1, WIDTH, Window(*factors, size=32)),
        "local, wide": (1, WIDTH, Window(*factors, size=100)),
        "local, window alone": (1, WIDTH, Window(*factors, size=32, global_connectivity=False)),
        "conv": (HEADS, HEADS, LagKernel(tensor(HEADS, 11), causal=True)),
        "full": (1, WIDTH, Dense(*factors)),
    }
    index = tensor(BATCH, LENGTH, dtype=torch.int64)
    documents = Visibility(tensor(BATCH, LENGTH, dtype=torch.bool), index, index, index, True, None, None)
    for (name, (heads, key_width, biases)), dtype, packed in product(structures.items(), DTYPES, (False, True)):
        if packed and name == "full":
            continue  # not computed by a kernel
        value = tensor(BATCH, LENGTH, WIDTH, dtype=dtype)
        key = tensor(BATCH, LENGTH, key_width, dtype=dtype)
        options = {"visibility": documents} if packed else {}
        label = f"{name}, {str(dtype).removeprefix('torch.')}{', documents' if packed else ''}"
        yield label, Mixing(key, value, heads, biases, causal=True, query=value, **options)
    images = {
        "image, full": (1, WIDTH, Dense(*factors)),
        "image, conv": (HEADS, HEADS, GridKernel(tensor(HEADS, 11, 11), GRID)),
        "image, conv of 1 feature": (WIDTH, WIDTH, GridKernel(tensor(WIDTH, 11, 11), GRID)),
        "image, conv, window alone": (HEADS, HEADS, GridKernel(tensor(HEADS, 11, 11), GRID, False)),
        "image, conv, large": (HEADS, HEADS, GridKernel(tensor(HEADS, 25, 25), (64, 64))),
    }
    for (name, (heads, key_width, biases)), dtype in product(images.items(), DTYPES):
        rows, columns = getattr(biases, "grid_size", GRID)
        value, key = (tensor(BATCH, rows * columns, x, dtype=dtype) for x in (WIDTH, key_width))
        yield f"{name}, {str(dtype).removeprefix('torch.')}", Mixing(key, value, heads, biases, query=value)


def launched(problem: Mixing) -> list[Variant]:
    """The variants that a forward and backward pass, a forward pass without gradients, and generation launch."""
    variants, run = [], JITFunction.run
    causal_launch.PROGRAMS = 10**6  # so that rows are in several segments

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
        arguments = *given, biases.kernels, *biases.grid_size, biases.global_connectivity
        forward, backward = product_launch.grid, product_launch.grid_backward
    else:
        arguments = *given, biases.dense(problem.length), problem.causal
        forward, backward = product_launch.table, product_launch.table_backward
    forward(*arguments, False)
    backward(problem.value, *arguments, *forward(*arguments, True)[1:], True)


def _causal(problem: Mixing) -> None:
    biases, length = problem.biases, problem.length
    first = None if problem.visibility is None else problem.visibility.first
    given = problem.query, problem.key, problem.value, biases.by_lag(length), biases.slopes
    arguments = *given, first, biases.global_connectivity
    causal_launch.causal(*arguments, keep=False)
    kept = causal_launch.causal(*arguments, keep=True)[1:]
    causal_launch.causal_backward(problem.value, *arguments, *kept, given[3] is not None)
    if isinstance(biases, Window):
        of_band = biases.query.to(problem.value.dtype), biases.key.to(problem.value.dtype), 0, length, biases.size
        causal_launch.band_backward(causal_launch.band(*of_band, None), *of_band, None)
        rows = torch.empty(BATCH, dtype=torch.int64, device="meta")
        causal_launch.band(*of_band[:3], 1, biases.size, rows)
    if problem.visibility is None:
        layer = AFTLayerState(biases.reach)
        layer.lazy_initialization(*(x.float() for x in problem.by_head()))
        state = layer.keys, layer.values, layer.numerator, layer.denominator, layer.maximum
        for padding in (None, torch.empty(BATCH, length, dtype=torch.int64, device="meta")):
            causal_launch.causal_state(*given, padding, biases.global_connectivity, *state)
        token = [None if x is None else x[:, :1] for x in given[:4]]
        causal_launch.causal_state(*token, biases.slopes, None, biases.global_connectivity, *state)


def _variant(kernel: JITFunction, arguments: tuple, options: dict) -> Variant:
    """The variant that Triton would compile for the arguments of a launch."""
    warps, limit, stages = options.pop("num_warps", 4), options.pop("maxnreg", None), options.pop("num_stages", None)
    values = dict(zip(kernel.arg_names, arguments)) | options
    given = []
    for parameter in kernel.params:
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            given.append((parameter.name, TYPES[value.dtype], None, True))
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            given.append((parameter.name, "constexpr", value, False))
        else:
            given.append((parameter.name, "i32", None, value % 16 == 0 and not parameter.do_not_specialize))
    return Variant(kernel.fn.__module__, kernel.__name__, tuple(given), warps, limit, stages)


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
        options = {"num_warps": variant.warps, "maxnreg": variant.limit, "num_stages": variant.stages}
        options = {name: x for name, x in options.items() if x is not None}
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        return Compiled(problem, variant, architecture, error=f"{type(error).__name__}: {error}"[:2000])
    return Compiled(problem, variant, architecture, "", *_inspect(compiled, variant))


def _inspect(compiled, variant: Variant) -> tuple[int | float, ...]:
    """The resources of a compiled variant, in the order of the fields of `Compiled`."""
    tools = Path(triton.knobs.nvidia.ptxas.path).parent
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", binary)
        code = _output(tools / "cuobjdump", "--dump-sass", binary)
    loop = _longest_loop(re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code))
    registers, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    constants = {name: value for name, kind, value, _ in variant.arguments if kind == "constexpr"}
    per = 32 * variant.warps / (TOKENS.get(variant.kernel, 0) * constants.get("BD", 1) or 32 * variant.warps)
    floor = sum(BYTES.get(kind, 0) for name, kind, *_ in variant.arguments if name in OF_TOKENS)
    moved = sum(_bytes_of(text) for text in loop)
    barriers = sum("BAR." in text for text in loop)
    of_tokens = floor if variant.kernel in TOKENS else 0
    return registers, local, compiled.metadata.shared, len(loop) * per, moved * per, of_tokens, barriers


def _longest_loop(lines: list[tuple[str, str]]) -> list[str]:
    """The instructions of the longest stretch of code that a backward branch closes: of those with matrix products, if
    there are any, since what is computed key by key is rare. If most of it is another loop, as where a loop over
    chunks has one over tokens, those of the inner one.
    """
    places, loops = {int(address, 16): i for i, (address, _) in enumerate(lines)}, []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if target and places.get(int(target[1], 16), i) < i:
            loops.append(range(places[int(target[1], 16)], i + 1))
    # HFMA2.MMA is no matrix product
    with_products = [loop for loop in loops if any(re.search(r"(?<!\.)MMA", lines[i][1]) for i in loop)]
    longest = max(with_products or loops or [range(0)], key=len)
    inner = [x for x in loops if x.start >= longest.start and x.stop < longest.stop and 2 * len(x) > len(longest)]
    return [lines[i][1] for i in max(inner or [longest], key=len)]


def _bytes_of(instruction: str) -> int:
    """The bytes that a thread loads or stores by an instruction, outside shared memory."""
    if not re.search(r"\b(LDG|STG|LDGSTS)\b", instruction):
        return 0
    size = re.search(r"\.(128|64|U16|S16|16|U8|S8)\b", instruction)
    return {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}[size[1]] if size else 4


def _output(*command) -> str:
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True).stdout


# -------------------------------------------------------------------------------------------------------------- report


def failures(compiled: Compiled, spills: int) -> str:
    """The reason why a variant is rejected; empty if it is accepted."""
    if compiled.error:
        return compiled.error
    if compiled.spilled > spills:
        return f"spills {compiled.spilled} bytes per thread, more than {spills}"
    limit = SHARED_MEMORY.get(compiled.architecture, min(SHARED_MEMORY.values()))
    return f"needs {compiled.shared} bytes of shared memory, more than {limit}" if compiled.shared > limit else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 89, 90, 100], help="compute capabilities")
    parser.add_argument("--spills", type=int, default=0, help="maximum bytes of registers that a thread may spill")
    parser.add_argument("--only", default="", help="compile only problems and kernels that match this pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    arguments = parser.parse_args()

    variants: dict[tuple[int, Variant], str] = {}  # with the first problem that needs it
    for sm in arguments.architectures:
        options.card = lambda x, sm=sm: options.named(sm)
        for name, problem in problems():
            for variant in launched(problem):
                if re.search(arguments.only, f"{name} {variant.kernel}"):
                    variants.setdefault((sm, variant), name)
    wanted = [(name, variant, sm) for (sm, variant), name in variants.items()]
    if not variants:
        print(f"compile_kernels: no kernel or problem matches {arguments.only!r}", file=sys.stderr)
        return 1
    print(f"{len(variants)} variants for {' and '.join(f'sm_{sm}' for sm in arguments.architectures)}", flush=True)
    row = "{:6} {:26} {:38} {:>5} {:>9} {:>6} {:>7} {:>7} {:>6} {:>6} {:>8}"
    titles = ("GPU", "kernel", "first needed by", "warps", "registers", "spill", "shared")
    titles = (*titles, "instr.", "bytes", "floor", "barriers")
    print(row.format(*titles))
    failed, table = [], []
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for compiled in pool.map(compile_variant, *zip(*wanted)):
            sizes = (
                compiled.variant.warps,
                compiled.registers,
                compiled.spilled,
                compiled.shared,
                round(compiled.instructions),
            )
            sizes = (*sizes, round(compiled.moved, 1), compiled.floor, compiled.barriers)
            print(row.format(f"sm_{compiled.architecture}", compiled.variant.kernel, compiled.problem, *sizes))
            sys.stdout.flush()
            reason = failures(compiled, arguments.spills)
            if reason:
                failed.append(f"sm_{compiled.architecture} {compiled.variant.kernel}, {compiled.problem}: {reason}")
            entry = compiled._asdict() | {"kernel": compiled.variant.kernel, "warps": compiled.variant.warps}
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
