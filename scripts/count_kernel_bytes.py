"""Count the bytes that the Triton kernels load and store per element of a layer, in the interpreter: no GPU is needed.

An element is one feature of one position. "Issued" counts each load and store of a kernel. "Distinct" counts each
address once per kernel, which is the memory traffic if caches serve all repeated accesses of a kernel.

    python scripts/count_kernel_bytes.py --length 128 --width 256 --side 8 --rows 8
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator


os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import nn
from triton.runtime import interpreter

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf.caching_aft import AFTStaticLayerState
from aft_hf.kernels.triton import bidirectional_launch as bidirectional
from aft_hf.kernels.triton import launch as launches
from aft_hf.kernels.triton.causal import Geometry, Inputs, problem_tensors
from aft_hf.kernels.triton.decoding import STATE
from aft_hf.mixing_aft import Mixing


class Traffic:
    """Counter of the bytes that interpreted kernels load and store, by kernel."""

    def __init__(self):
        self.issued, self.addresses, self.kernel = defaultdict(int), defaultdict(list), ""
        builder = interpreter.interpreter_builder
        for name in ("create_masked_load", "create_masked_store"):
            setattr(builder, name, self._counting(getattr(builder, name), name))
        for module in (launches, bidirectional):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                setattr(module, name, self._named(name, getattr(module, name)))

    def _counting(self, access, name: str):
        def counted(pointers, *arguments):
            mask = arguments[0 if name.endswith("load") else 1]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            places = pointers.data[mask.data.astype(bool)]  # a mask may hold integers
            self.issued[self.kernel] += places.size * size
            # One number for each address and its number of bytes, which is at most 8.
            self.addresses[self.kernel].append(np.unique(places // size) * size * 16 + size)
            return access(pointers, *arguments)

        return counted

    def _named(self, name: str, kernel):
        traffic = self

        class Named:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    traffic.kernel = name.removesuffix("_kernel")
                    return kernel[grid](*arguments, **options)

                return launch

        return Named()

    def take(self) -> dict[str, tuple[int, int]]:
        """Issued and distinct bytes by kernel since the last call."""
        found = {}
        for kernel, issued in self.issued.items():
            distinct = np.unique(np.concatenate(self.addresses[kernel]))
            found[kernel] = issued, int((distinct % 16).sum())
        self.issued.clear()
        self.addresses.clear()
        return found


def causal_problems(length: int, width: int) -> Iterator[tuple[str, nn.Module, Mixing]]:
    """Name, mixer and a problem of one row, for each causal type."""
    for name, mixer in {
        "simple": AFTSimple(width, causal=True),
        "alibi": AFTAlibi(width, 4),
        "local, s = 32": AFTLocal(width, length, 32, position_bias_dim=8, causal=True),
        "conv, s = 11": AFTConv(width, 4, 11, spatial_dims=1, causal=True),
        "full": AFTFull(width, length, position_bias_dim=8, causal=True),
    }.items():
        yield name, mixer, problem_of(mixer, torch.randn(1, length, width).bfloat16(), causal=True)


def image_problems(side: int, width: int, rows: int) -> Iterator[tuple[str, nn.Module, Mixing]]:
    """Name, mixer and a problem of several rows that share the table of w, for each image type with Triton kernels."""
    for name, mixer in {
        "full, images": AFTFull(width, side**2, position_bias_dim=8),
        "conv, images, s = 11": AFTConv(width, 4, 11),
        "conv, images, s = 11, a head per feature": AFTConv(width, width, 11),
    }.items():
        yield name, mixer, problem_of(mixer, torch.randn(rows, side**2, width).bfloat16(), causal=False, side=side)


def problem_of(mixer: nn.Module, value: torch.Tensor, *, causal: bool, side: int | None = None) -> Mixing:
    key = torch.randn(*value.shape[:2], mixer.k_proj.out_features).bfloat16()
    biases = mixer.biases(value, (side, side)) if side else mixer.biases(value)
    return Mixing(key, value, mixer.num_heads, biases, causal, query=value + 1)


def count_causal(problem: Mixing, mixer: nn.Module, traffic: Traffic) -> dict[str, dict]:
    """Bytes of each pass by kernel. Bytes of a decoded token are multiplied by the length: `main` divides by it."""
    inputs, geometry = Inputs(*(detached(x) for x in problem_tensors(problem))), Geometry.of(problem)
    passes = {}
    launches.forward(inputs, geometry, keep=False)
    passes["inference"] = traffic.take()
    _, kept, _ = launches.forward(inputs, geometry, keep=True)
    passes["training, forward"] = traffic.take()
    launches.backward(problem.value + 2, inputs, kept, geometry, of_table=inputs.table is not None)
    passes["training, backward"] = traffic.take()
    if problem.biases.reach is not None:
        state = AFTStaticLayerState(mixer.state_window, problem.length)
        state.lazy_initialization(*(x.float() for x in problem.by_head()))
        bias, token = detached(state.next_bias(problem.biases)), [x[:, :1] for x in inputs[:3]]
        bias = bias if bias is None else bias.contiguous()
        tensors = [getattr(state, name) for name in STATE]
        options = {"alone": problem.biases.hides_outside}
        launches.decode(*token, bias, inputs.slopes, tensors, state.cumulative_length, mixer.num_heads, **options)
        counts = traffic.take()
        passes["a decoded token"] = {x: tuple(y * problem.length for y in both) for x, both in counts.items()}
    return passes


def count_images(problem: Mixing, mixer: nn.Module, traffic: Traffic) -> dict[str, dict]:
    """Bytes of each pass by kernel."""
    table = detached(problem.biases.dense(problem.length)).float()
    inputs = problem.query, problem.key, problem.value, table
    passes = {}
    bidirectional.forward(*inputs, problem.num_heads, keep=False)
    passes["inference"] = traffic.take()
    _, kept = bidirectional.forward(*inputs, problem.num_heads, keep=True)
    passes["training, forward"] = traffic.take()
    bidirectional.backward(problem.value + 2, *inputs, kept, problem.num_heads, of_table=True)
    passes["training, backward"] = traffic.take()
    return passes


def detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None else x.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128, help="tokens of the causal types")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--side", type=int, default=8, help="patches per side of an image")
    parser.add_argument("--rows", type=int, default=8, help="number of images")
    parser.add_argument("--only", default="", help="count only types whose names contain this")
    given = parser.parse_args()
    traffic = Traffic()
    print(f"bytes per element, bfloat16: texts of 1 x {given.length} x {given.width}, ", end="")
    print(f"images of {given.rows} x {given.side}^2 x {given.width}")
    print("| type | pass | kernel | issued | distinct |\n|---|---|---|---|---|")
    counted = [(count_causal, *x) for x in causal_problems(given.length, given.width)]
    counted += [(count_images, *x) for x in image_problems(given.side, given.width, given.rows)]
    for count, name, mixer, problem in counted:
        if given.only not in name:
            continue
        for label, kernels in count(problem, mixer, traffic).items():
            for kernel, counts in (*kernels.items(), ("all", tuple(map(sum, zip(*kernels.values()))))):
                issued, distinct = (x / problem.value.numel() for x in counts)
                print(f"| {name} | {label} | {kernel} | {issued:.1f} | {distinct:.1f} |", flush=True)


if __name__ == "__main__":
    main()
