"""Cases of the benchmark: what is measured, and the record of a measurement."""

import hashlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import aft_hf
from aft_hf.benchmarking import ON_GPU, Call, keep_freed_memory, machine, model_call
from aft_hf.benchmarking import seconds_in_turns as take_turns
from aft_hf.kernels.library import runnable_variants

from .memory import in_new_process, peak_bytes
from .models import Images, Text, without_mixing


TASKS = ("inference", "training")
# The rows of the table, with the batch size on a CPU.
TABLE: list[tuple[Images | Text, int]] = [
    (Images("tiny", "conv", 11, 32), 8),
    (Images("small", "conv", 11, 16), 8),
    (Images("small", "conv", 11, 384), 8),
    (Images("tiny", "full"), 8),
    (Images("small", "full"), 8),
    (Images("base", "conv", 25, 32, 384), 2),
    (Images("base", "conv", 25, 32, 1024), 1),
    (Text("local", 1024), 4),
    (Text("local", 4096), 1),
    (Text("alibi", 4096), 1),
    (Text("local", 16_384), 1),
]
DECODING = Text("local", 4096)  # tokens in the cache
DECODED = 64  # tokens of a call: as in generation, a model finds its weights in the caches of the CPU
# On a GPU: models of 12 layers and width 768 (images: of the named size), most important first, with task and batch.
ON_GPUS: list[tuple[Images | Text, str, int]] = [
    (Text("local", 1024, 12, 768), "training", 32),
    (Images("small", "conv", 11, 16), "training", 128),
    (Text("local", 4096, 12, 768), "decoding", 1),
    (Text("local", 4096, 12, 768), "decoding", 64),
    (Text("local", 1024, 12, 768), "inference", 32),
    (Text("local", 4096, 12, 768), "training", 8),
    (Text("local", 16_384, 12, 768), "training", 2),
    (Text("simple", 4096, 12, 768), "training", 8),
    (Text("alibi", 4096, 12, 768), "training", 8),
    (Text("conv", 4096, 12, 768), "training", 8),
    (Images("small", "conv", 11, 16), "inference", 128),
    (Images("small", "conv", 11, 384), "training", 128),
    (Images("base", "conv", 25, 32, 384), "training", 32),
    (Images("base", "conv", 25, 32, 1024), "training", 8),
    (Images("small", "full"), "training", 128),
]
# The points of the pictures: two blocks of a model.
GROWTH: list[Images | Text] = [
    *(Text(name, 1024 * 2**i, 2) for name in ("local", "alibi") for i in range(5)),
    *(Images("base", "conv", 25, 32, pixels, 2) for pixels in (224, 384, 512, 768, 1024)),
]


@dataclass(frozen=True)
class Case:
    """A measurement: a model, its peer of the same size, and (except for the pictures) the model without mixing.

    Attributes:
        part: "table", "growth" or "gpu".
        model: the models.
        task: "inference", "training" or "decoding".
        bf16: whether to compute in bfloat16 (autocast in training); else in float32.
        batch: images or texts of a call.
    """

    part: str
    model: Images | Text
    task: str
    bf16: bool
    batch: int

    @property
    def name(self) -> str:
        """The name for `--only`, unique."""
        batch = f", batch {self.batch}" if self.part == "gpu" else ""
        return f"{self.part}: {self.model.name}, {self.task}, {'bf16' if self.bf16 else 'fp32'}{batch}"

    @property
    def candidates(self) -> list[str]:
        """The names of the models that take turns."""
        # On a CPU, SDPA can take longer than eager attention, whose memory is quadratic in the length.
        eager = self.part == "table" and (self.bf16 or self.task == "decoding")
        eager = eager and getattr(self.model, "length", 0) <= 4096
        limit = ["limit"] if self.part != "growth" and self.task != "decoding" else []
        return ["ours", "peer", *["eager"] * eager, *limit, *(["portable"] if ON_GPU else [])]

    def call(self, candidate: str) -> Call:
        """Build a model and a call of it."""
        torch.manual_seed(0)
        decodes = self.task == "decoding"
        sizes = replace(self.model, length=self.model.length + 16 * DECODED) if decodes else self.model  # type: ignore[call-arg]
        with torch.device("cuda" if ON_GPU else "cpu"):
            if candidate in ("peer", "eager"):
                model = sizes.peer()
                model.set_attn_implementation("eager" if candidate == "eager" else "sdpa")
            else:
                model = sizes.aft("portable" if candidate == "portable" else "auto")
                model = without_mixing(model) if candidate == "limit" else model
        if isinstance(self.model, Text) and decodes:
            model.eval().to(torch.bfloat16 if self.bf16 else torch.float32)
            return decoding(model, fill_cache(model, self.model.length, self.batch), self.batch)
        inputs = {name: x.to(model.device) for name, x in self.model.inputs(self.batch).items()}
        options = {"use_cache": False} if isinstance(self.model, Text) else {}
        return model_call(model, inputs, self.task == "training", self.bf16, **options)

    def measure(self, turns: int) -> dict[str, Any]:
        """The record of this case: median seconds and peak bytes of each candidate, and ratios within turns."""
        keep_freed_memory()
        calls = {candidate: self.call(candidate) for candidate in self.candidates}
        seconds = take_turns(calls, turns)
        names = [name for name in self.candidates if name not in ("limit", "eager") and self.task != "decoding"]
        on_gpu = {name: peak_bytes(calls[name]) for name in names} if ON_GPU else {}
        del calls
        ratios = {name: statistics.median(b / a for a, b in zip(seconds["ours"], seconds[name])) for name in seconds}
        return self.key() | {
            "seconds": {name: float(f"{statistics.median(taken):.4g}") for name, taken in seconds.items()},
            "ratio": {name: round(value, 3) for name, value in ratios.items() if name != "ours"},
            "bytes": on_gpu or {name: in_new_process(_peak, self, name) for name in names},
            "weights": self.weights() if names else {},
            "turns": turns,
        }

    def weights(self) -> dict[str, int]:
        """Bytes of the weights of our model and of its peer."""
        size = 2 if self.bf16 and self.task == "inference" else 4
        with torch.device("meta"):
            models = {"ours": self.model.aft(), "peer": self.model.peer()}
        return {name: size * model.num_parameters() for name, model in models.items()}

    def key(self) -> dict[str, Any]:
        """What a record is valid for: the case, the machine, and the versions of the code."""
        return {"case": self.name, "batch": self.batch, "machine": machine(), "versions": versions()}


def _peak(case: Case, candidate: str) -> int:
    return peak_bytes(case.call(candidate))


@torch.inference_mode()
def fill_cache(model: PreTrainedModel, context: int, batch: int = 1) -> Any:
    """A cache of `context` tokens. Attention gets random keys and values."""
    first = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    cache = model(first, use_cache=True).cache
    if isinstance(cache, DynamicCache):
        for layer in cache.layers:
            shape = (*layer.keys.shape[:2], context - 1, layer.keys.shape[-1])
            layer.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)))
    else:
        for piece in torch.randint(256, (batch, context - 1), device=model.device).split(1024, 1):
            cache = model(piece, cache=cache, use_cache=True, logits_to_keep=1).cache
    return cache


def decoding(model: PreTrainedModel, cache: Any, batch: int = 1) -> Call:
    """A call that decodes `DECODED` tokens."""
    first = torch.zeros(batch, 1, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def call() -> None:
        for _ in range(DECODED):
            model(first, cache=cache, use_cache=True)

    return call


def all_cases() -> Iterator[Case]:
    """The cases of the table and of the pictures or, on a GPU, of `ON_GPUS`."""
    if ON_GPU:
        yield from (Case("gpu", model, task, True, batch) for model, task, batch in ON_GPUS)
        return
    for model, batch in TABLE:
        for task in TASKS:
            if task == "inference" or not (isinstance(model, Images) and model.pixels == 1024):
                for bf16 in (False, True):
                    yield Case("table", model, task, bf16, batch)
    for bf16 in (False, True):
        yield Case("table", DECODING, "decoding", bf16, 1)
    for model in GROWTH:
        yield Case("growth", model, "training" if isinstance(model, Text) else "inference", False, 1)


def versions() -> dict[str, str]:
    """Versions of the packages, with a hash of the code of aft-hf that runs in a model, and the CPU kernels in use."""
    package = Path(aft_hf.__file__).parent
    files = sorted([*package.glob("*_aft.py"), *package.glob("kernels/**/*.*")])
    code = b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".cpp", ".h"))
    packages = ("torch", "transformers", *(["triton"] if ON_GPU else []))
    versions = {"aft-hf": aft_hf.__version__} | {name: version(name) for name in packages}
    kernels = os.environ.get("AFT_HF_KERNELS") or next(iter(runnable_variants()), "none")
    return versions | {"code": hashlib.sha256(code).hexdigest()[:8], "kernels": kernels}
