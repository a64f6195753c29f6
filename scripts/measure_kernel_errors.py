"""Measure the errors of the Triton kernels against float64, on the cases of their tests: no GPU is needed.

The error of an output or gradient is its largest absolute difference from the float64 result, divided by the largest
absolute value of that result.

    python scripts/measure_kernel_errors.py
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

import torch


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
for folder in ("tests", "tests/kernels"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

import test_backend_contract_aft as contract  # noqa: E402
import test_triton as kernels  # noqa: E402


def main() -> None:
    worst = defaultdict(lambda: defaultdict(float))  # by dtype and kind of result
    counts = defaultdict(int)
    for structure, dtype, batch, length in kernels.CASES:
        case, device = contract.case(structure, dtype, batch, length), kernels.DEVICE
        inputs = (x.to(device) for x in (case.key, case.value, case.weight))
        found = contract.results(case.mixer.to(device), *inputs, case.fields, "triton")
        case.mixer.cpu()
        counts[dtype] += 1
        for name, exact in case.exact.items():
            error = (found[name].detach().cpu().double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)
            kind = "output" if name == "output" else "gradients"
            worst[dtype][kind] = max(worst[dtype][kind], error.item())
    print("| dtype | problems | worst error of outputs | of gradients |\n|---|---|---|---|")
    for dtype, errors in worst.items():
        name = str(dtype).removeprefix("torch.")
        print(f"| {name} | {counts[dtype]} | {errors['output']:.1e} | {errors['gradients']:.1e} |")


if __name__ == "__main__":
    main()
