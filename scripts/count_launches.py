"""Count the kernels that a layer launches on a GPU, without one: those of Triton, and operations of PyTorch.

Models run on meta tensors, which have no data. What a layer launches is the difference between models of two layers
and of one; views and new memory launch nothing. A training step is without its optimizer.

    python scripts/count_launches.py
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch


os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels launch nothing

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from aft_hf import mixing_aft
from aft_hf.kernels import operators as schema
from aft_hf.kernels.triton.operators import FAILED, implementations
from scripts.benchmark.models import Images, Text


MODELS: list[Images | Text] = [Text(name, 4096, width=768) for name in ("local", "simple", "alibi", "conv")]
MODELS += [Images("small", "conv", 11, 16), Images("small", "conv", 11, 384), Images("small", "full")]
NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach")  # beginnings of names


class Launches(TorchDispatchMode):
    """Counts launches: "triton" and "pytorch". Operators of aft-hf are computed as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.counts = implementations(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == schema.NAMESPACE and name in self.kernels:
            with self:
                return self.kernels[name](*args)
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and not name.startswith(NO_LAUNCH):
            self.counts["pytorch"] += 1
        return func(*args, **(kwargs or {}))

    def count(self, call: Callable[[], Any]) -> Counter[str]:
        def launched(*_: Any, **__: Any) -> None:
            self.counts["triton"] += 1

        self.counts.clear()
        with (
            self,
            patch.object(JITFunction, "run", launched),
            patch.object(mixing_aft, "provides", lambda *_: True),
            patch.object(schema, "KEEPING", {"meta"}),
        ):
            call()
        assert not FAILED
        return Counter(self.counts)


def of_model(model: Images | Text, implementation: str, task: str) -> Counter[str]:
    """The launches of a task."""
    with torch.device("meta"):
        aft = model.aft(implementation).to(torch.bfloat16)
        inputs: Any = {name: x.to(aft.dtype) if x.is_floating_point() else x for name, x in model.inputs(2).items()}
    launches = Launches()
    if task == "training":
        options = {"use_cache": False} if isinstance(model, Text) else {}
        return launches.count(lambda: aft.train()(**inputs, **options)[0].sum().backward())
    with torch.no_grad():
        if task == "inference":
            return launches.count(lambda: aft.eval()(**inputs))
        cache, (prompt, token) = aft.eval().aft.new_cache(), inputs["input_ids"].split([model.length - 1, 1], 1)
        launches.count(lambda: aft(prompt, cache=cache))
        return launches.count(lambda: aft(token, cache=cache))


def of_layer(model: Images | Text, implementation: str, task: str) -> Counter[str]:
    """What one more layer adds to the launches of a task."""
    return of_model(replace(model, layers=2), implementation, task) - of_model(
        replace(model, layers=1), implementation, task
    )


def main() -> None:
    print("| layer | task | Triton | PyTorch | portable form |\n|---|---|---:|---:|---:|")
    for model in MODELS:
        for task in ("training", "inference", *["decoding"] * isinstance(model, Text)):
            ours, portable = (of_layer(model, name, task) for name in ("auto", "portable"))
            counts = ours["triton"], ours["pytorch"], portable["pytorch"]
            print(f"| {model.name.partition(',')[0]} | {task} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
