"""The groups of candidates that take turns on a GPU. AFT with its Triton kernels comes first in each group."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product

import torch
from transformers import PreTrainedModel

from ..mixers_aft import AFTAlibi, AFTConv, AFTLocal, AFTMixer, AFTSimple
from ..mixing_aft import Mixing, mix
from .cases import DTYPES, Builder, model_builder, random_images, random_tokens
from .models import TextRow, VisionRow


TYPES = ("local", "simple", "alibi", "conv")

# Bytes per element that the kernels load and store in bfloat16, counting each address once per kernel, as (inference,
# training), from scripts/count_kernel_bytes.py.
COUNTED_BYTES = {"local": (13.9, 58.4), "simple": (13.3, 51.8), "alibi": (13.3, 51.8), "conv": (10.0, 52.0)}


@dataclass(frozen=True)
class Group:
    """Candidates that are compared at one task.

    Attributes:
        section: "mixing", "text", "images" or "decoding".
        name: name of the comparison.
        task: "inference", "training" or "decoding".
        dtype: "fp32" or "bf16" (autocast in training of models).
        items, unit: how many tokens or images one call processes.
        builders: the builder of each candidate by name.
        moved: the bytes that one call of a candidate loads and stores, for candidates whose bytes are counted.
        shortened: for a candidate, the name of the candidate whose time is subtracted: its work before the items.
    """

    section: str
    name: str
    task: str
    dtype: str
    items: int
    unit: str
    builders: dict[str, Builder]
    moved: dict[str, float] = field(default_factory=dict)
    shortened: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuSizes:
    """Sizes of the groups."""

    tokens: int = 65_536  # per call, where the batch size follows from the length
    layers: int = 24
    width: int = 256
    lengths: tuple[int, ...] = (1024, 4096, 16_384, 65_536, 262_144)
    longest_fp32: int = 4096
    mixing_length: int = 4096
    images: tuple[tuple[VisionRow, int], ...] = (  # with their batch sizes
        (VisionRow("tiny", "conv", 11, 32, 224), 256),
        (VisionRow("small", "conv", 11, 16, 384), 64),
        (VisionRow("small", "full", image_size=224), 128),
        (VisionRow("base", "conv", 25, 32, 1024), 4),
    )
    contexts: tuple[int, ...] = (1, 4096)
    decoded: int = 64
    decoding_batches: tuple[int, ...] = (1, 64)


# Sizes at which every group runs within seconds, as a test; the numbers say nothing.
SMALLEST = GpuSizes(64, 1, 64, (32, 64), 32, 32, ((VisionRow("tiny", "conv", 3, 3, 32, 1), 2),), (1, 4), 2, (1, 2))


def mixing_groups(sizes: GpuSizes) -> Iterator[Group]:
    """The operation alone, whose counted bytes give the share of the memory bandwidth that it reaches."""
    rows, length = max(1, sizes.tokens // sizes.mixing_length), sizes.mixing_length
    elements = rows * length * sizes.width
    for name in TYPES:
        for dtype in ("bf16", "fp32"):
            for task, counted in zip(("inference", "training"), COUNTED_BYTES[name]):
                builders = {
                    backend: _mixing(name, backend, (rows, length, sizes.width), task, DTYPES[dtype])
                    for backend in ("triton", "portable")
                }
                moved = {"triton": counted * elements} if dtype == "bf16" else {}
                yield Group("mixing", f"{name} T={length}", task, dtype, rows * length, "tokens", builders, moved)


def _mixing(name: str, backend: str, shape: tuple[int, int, int], task: str, dtype: torch.dtype) -> Builder:
    """Eq. 2 with its gate; training adds the gradients of query, key, value and position biases."""

    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        mixer = _mixer(name, shape[-1], shape[1]).to(device)
        widths = shape[-1], mixer.k_proj.out_features, shape[-1]
        query, key, value = (torch.randn(*shape[:2], width, device=device, dtype=dtype) for width in widths)
        gradient = torch.randn_like(value)
        learned = [x for name, x in mixer.named_parameters() if "_proj" not in name]
        asked = [x.requires_grad_() for x in (query, key, value, *learned)]

        def forward() -> torch.Tensor:
            problem = Mixing(key, value, mixer.num_heads, mixer.biases(value), causal=True, query=query)
            return mix(problem, backend)

        def infer() -> torch.Tensor:
            with torch.inference_mode():
                return forward()

        return infer if task == "inference" else lambda: torch.autograd.grad(forward(), asked, gradient)

    return build


def _mixer(name: str, width: int, length: int) -> AFTMixer:
    if name == "local":
        return AFTLocal(width, length, 32, causal=True)
    if name == "conv":
        return AFTConv(width, 4, 11, spatial_dims=1, causal=True)
    return AFTAlibi(width, 4) if name == "alibi" else AFTSimple(width, causal=True)


def text_groups(sizes: GpuSizes) -> Iterator[Group]:
    """Language models, compared with GPT-2 with PyTorch's attention and, if fla is installed, with its HGRN."""
    wanted = [("bf16", x) for x in sizes.lengths] + [("fp32", x) for x in sizes.lengths if x <= sizes.longest_fp32]
    text = {name: TextRow(name, sizes.layers, sizes.width) for name in TYPES}
    for (dtype, length), task in product(wanted, ("training", "inference")):
        makes = {f"{name}, triton": partial(row.aft, length, "triton") for name, row in text.items()}
        makes["GPT-2"] = partial(text["local"].gpt2, length)
        makes["local, portable"] = partial(text["local"].aft, length, "portable")
        if find_spec("fla") is not None:
            makes["HGRN (fla)"] = partial(_hgrn, sizes)
        rows = max(1, sizes.tokens // length)
        inputs = random_tokens(rows, length, task)
        builders = {name: model_builder(make, inputs, task, DTYPES[dtype]) for name, make in makes.items()}
        yield Group("text", f"T={length}", task, dtype, rows * length, "tokens", builders)
    length = sizes.lengths[0]
    rows = max(1, sizes.tokens // length)
    for dtype, task in product(("bf16", "fp32"), ("training", "inference")):  # last, because compilation takes long
        inputs = random_tokens(rows, length, task)
        fused, portable = (partial(text["local"].aft, length, backend) for backend in ("triton", "portable"))
        builders = {
            "local, triton": model_builder(fused, inputs, task, DTYPES[dtype]),
            "local, portable, compiled": model_builder(portable, inputs, task, DTYPES[dtype], compiled=True),
        }
        yield Group("text", f"T={length}, compiled", task, dtype, rows * length, "tokens", builders)


def _hgrn(sizes: GpuSizes) -> PreTrainedModel:
    """The model of flash-linear-attention nearest to AFT: a separate recurrence for each feature, with a gate."""
    from fla.models import HGRNConfig, HGRNForCausalLM  # type: ignore[import-not-found]  # is not a requirement

    config = HGRNConfig(
        vocab_size=256, hidden_size=sizes.width, num_hidden_layers=sizes.layers, bos_token_id=None, eos_token_id=None
    )
    return HGRNForCausalLM(config)


def image_groups(sizes: GpuSizes) -> Iterator[Group]:
    """Image classifiers, compared with ViT."""
    for dtype in ("bf16", "fp32"):
        for row, batch in sizes.images:
            for task in ("inference", "training"):
                makes = {backend: partial(row.aft, backend) for backend in ("triton", "portable")} | {"ViT": row.vit}
                inputs = random_images(batch, row.image_size, task)
                builders = {name: model_builder(make, inputs, task, DTYPES[dtype]) for name, make in makes.items()}
                yield Group("images", row.name, task, dtype, batch, "images", builders)


def decoding_groups(sizes: GpuSizes) -> Iterator[Group]:
    """`generate` after a prompt, without the time of the prompt and the first token.

    With a static cache, `generate` compiles the step and replays it as a CUDA graph.
    """
    for dtype, batch, context in product(("bf16", "fp32"), sizes.decoding_batches, sizes.contexts):
        longest = context + 1 + sizes.decoded
        local, simple = (TextRow(name, sizes.layers, sizes.width) for name in ("local", "simple"))
        makes = {
            "local, triton": partial(local.aft, longest, "triton"),
            "simple, triton": partial(simple.aft, longest, "triton"),
            "local, portable": partial(local.aft, longest, "portable"),
            "GPT-2": partial(local.gpt2, longest),
        }
        builders, shortened = {}, {}
        for (name, make), cache in product(makes.items(), (None, "static")):
            label = f"{name}, CUDA graph" if cache else name
            shortened[label] = f"{label}, first token"
            for key, count in ((label, 1 + sizes.decoded), (shortened[label], 1)):
                builders[key] = _generation(make, batch, context, count, DTYPES[dtype], cache)
        name, items = f"after {context}, batch {batch}", batch * sizes.decoded
        yield Group("decoding", name, "decoding", dtype, items, "tokens", builders, shortened=shortened)


def _generation(
    make: Callable[[], PreTrainedModel], batch: int, context: int, count: int, dtype: torch.dtype, cache: str | None
) -> Builder:
    def build(device: torch.device) -> Callable[[], object]:
        torch.manual_seed(0)
        model = make().eval()
        model.to(device=device, dtype=dtype)
        prompt = torch.randint(256, (batch, context), device=device)
        options: dict[str, object] = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
        options |= {} if cache is None else {"cache_implementation": cache}
        mask = torch.ones_like(prompt)

        def call() -> object:
            return model.generate(prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **options)

        return call

    return build


# The most important sections come first, and so do the most important groups of a section.
SECTIONS: dict[str, Callable[[GpuSizes], Iterator[Group]]] = {
    "mixing": mixing_groups,
    "text": text_groups,
    "images": image_groups,
    "decoding": decoding_groups,
}
