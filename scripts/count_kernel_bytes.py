"""Count the bytes that the Triton kernels load and store per element of a layer, in the interpreter: no GPU is needed.

An element is one feature of one position. "Issued" counts each load and store of a kernel, "distinct" each address
once per kernel: what memory has to move where caches hold what one kernel reads again.

    python scripts/count_kernel_bytes.py --length 128 --width 256
"""

import argparse
import os
from collections import defaultdict


os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter

from aft_hf import AFTAlibi, AFTConv, AFTFull, AFTLocal, AFTSimple
from aft_hf import mixing_triton_launch_aft as launches
from aft_hf.caching_aft import AFTStaticLayerState
from aft_hf.mixing_aft import Mixing
from aft_hf.mixing_triton_causal_aft import Geometry, Inputs, problem_tensors
from aft_hf.mixing_triton_decoding_aft import STATE


class Traffic:
    """Bytes of all loads and stores by kernel, while kernels are interpreted."""

    def __init__(self):
        self.issued, self.addresses, self.kernel = defaultdict(int), defaultdict(list), ""
        builder = interpreter.interpreter_builder
        for name in ("create_masked_load", "create_masked_store"):
            setattr(builder, name, self._counting(getattr(builder, name), name))
        for name in [name for name in vars(launches) if name.endswith("_kernel")]:
            setattr(launches, name, self._named(name, getattr(launches, name)))

    def _counting(self, access, name: str):
        def counted(pointers, *arguments):
            mask = arguments[0 if name.endswith("load") else 1]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            places = pointers.data[mask.data]
            self.issued[self.kernel] += places.size * size
            self.addresses[self.kernel].append(np.unique(places // size) * size * 8 + size)  # and how many bytes there
            return access(pointers, *arguments)

        return counted

    def _named(self, name: str, kernel):
        traffic = self

        class Named:
            def __getitem__(self, grid):
                def launch(*arguments, **options):
                    reduced = " (scan)" if name == "scan_kernel" else ""
                    traffic.kernel = name.removesuffix("_kernel") + reduced
                    return kernel[grid](*arguments, **options)

                return launch

        return Named()

    def take(self) -> dict[str, tuple[int, int]]:
        """Issued and distinct bytes by kernel since the last call."""
        found = {}
        for kernel, issued in self.issued.items():
            distinct = np.unique(np.concatenate(self.addresses[kernel]))
            found[kernel] = issued, int((distinct % 8).sum())
        self.issued.clear()
        self.addresses.clear()
        return found


def structures(width: int, length: int) -> dict:
    return {
        "simple": AFTSimple(width, causal=True),
        "alibi": AFTAlibi(width, 4),
        "local, s = 32": AFTLocal(width, length, 32, position_bias_dim=8, causal=True),
        "conv, s = 11": AFTConv(width, 4, 11, spatial_dims=1, causal=True),
        "full": AFTFull(width, length, position_bias_dim=8, causal=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", default="", help="a part of the names of structures")
    arguments = parser.parse_args()
    batch, length, width = arguments.batch, arguments.length, arguments.width
    traffic = Traffic()
    print(f"bytes per element, bfloat16, {batch} x {length} x {width}")
    print("| type | pass | kernel | issued | distinct |\n|---|---|---|---|---|")
    for name, mixer in structures(width, length).items():
        if arguments.only not in name:
            continue
        value = torch.randn(batch, length, width).bfloat16()
        key = torch.randn(batch, length, mixer.k_proj.out_features).bfloat16()
        problem = Mixing(key, value, mixer.num_heads, mixer.biases(value), True, query=value + 1)
        inputs, geometry = (None if x is None else x.detach() for x in problem_tensors(problem)), Geometry.of(problem)
        inputs = Inputs(*inputs)
        passes = {}
        launches.forward(inputs, geometry, keep=False)
        passes["inference"] = traffic.take()
        _, kept, _ = launches.forward(inputs, geometry, keep=True)
        passes["training, forward"] = traffic.take()
        launches.backward(value + 2, inputs, kept, geometry, of_table=inputs.table is not None)
        passes["training, backward"] = traffic.take()
        if problem.biases.reach is not None:  # per feature of one token
            state = AFTStaticLayerState(mixer.state_window, length)
            state.lazy_initialization(*(x.float() for x in problem.by_head()))
            bias, token = state.next_bias(problem.biases), [x[:, :1] for x in inputs[:3]]
            bias = None if bias is None else bias.detach().contiguous()
            tensors = [getattr(state, name) for name in STATE]
            options = {"alone": problem.biases.hides_outside}
            launches.decode(*token, bias, inputs.slopes, tensors, state.cumulative_length, mixer.num_heads, **options)
            passes["a decoded token"] = {x: tuple(y * length for y in both) for x, both in traffic.take().items()}
        for label, kernels in passes.items():
            for kernel, counts in (*kernels.items(), ("all", tuple(map(sum, zip(*kernels.values()))))):
                issued, distinct = (x / value.numel() for x in counts)
                print(f"| {name} | {label} | {kernel} | {issued:.1f} | {distinct:.1f} |", flush=True)


if __name__ == "__main__":
    main()
