"""Cases of single layers: our mixers, compared with layers of other packages, which are imported when built."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTAttention

from ..mixers_aft import AFTConv, AFTFull, AFTLocal
from .cases import FULL, Case, Sizes, layer_builder


TEXT_WIDTH, WINDOW = 256, 32  # of the paper's best character model, like the rank d' = 256 below
IMAGE_WIDTH, GRID = 384, 14  # of DeiT-small at 224 pixels


class LabmlLocal(nn.Module):
    """AFT-local of labml-nn with a causal mask; (T, B, d)."""

    mask: torch.Tensor

    def __init__(self, width: int, length: int, window: int):
        from labml_nn.transformers.aft import AFTLocal as Layer  # type: ignore[import-not-found]  # not required

        super().__init__()
        self.layer = Layer(width, length, window)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril().unsqueeze(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(query=x, key=x, value=x, mask=self.mask)


class SdpaAttention(nn.Module):
    """The attention layer of ViT with a head for each 64 features; (B, T, d)."""

    def __init__(self, width: int):
        super().__init__()
        config = ViTConfig(hidden_size=width, num_attention_heads=width // 64)
        config._attn_implementation = "sdpa"
        self.layer = ViTAttention(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def aft_pytorch_full(width: int, length: int) -> nn.Module:
    """AFT-full of aft-pytorch, with an unfactorized table; (B, T, d)."""
    from aft_pytorch import AFTFull as Layer  # type: ignore[import-not-found]  # is not a requirement

    return Layer(length, width, width)


def lambda_layer(width: int, side: int) -> nn.Module:
    """A lambda layer with position embeddings over the whole grid; (B, d, H, W)."""
    from lambda_networks import LambdaLayer  # type: ignore[import-not-found]  # is not a requirement

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning of torch.meshgrid, which the package calls without `indexing`
        return LambdaLayer(dim=width, dim_out=width, n=side, dim_k=16, heads=4, dim_u=1)


def mixer_cases(sizes: Sizes = FULL) -> Iterator[Case]:
    """Forward pass and training step of one layer in fp32."""
    length, batch, patches = sizes.mixer_length, sizes.largest_batch, GRID**2
    image = (batch, patches, IMAGE_WIDTH)

    def local() -> nn.Module:
        return AFTLocal(TEXT_WIDTH, length, WINDOW, causal=True, position_bias_dim=256)

    def full() -> nn.Module:
        return AFTFull(IMAGE_WIDTH, patches)

    def conv() -> nn.Module:
        return AFTConv(IMAGE_WIDTH, 16, 11)

    def case(
        name: str,
        ours: Callable[[], nn.Module],
        shape: tuple[int, ...],
        peer: str,
        theirs: Callable[[], nn.Module],
        their_shape: tuple[int, ...],
        task: str,
        **options: Any,
    ) -> Case:
        builders = {"ours": layer_builder(ours, shape, task), "peer": layer_builder(theirs, their_shape, task)}
        items, unit = (length, "tokens") if ours is local else (batch, "images")
        name = f"{name} beside {peer} {task} fp32"
        return Case(name, "mixer", task, "fp32", items, unit, builders, peer=peer, **options)

    for task in ("inference", "training"):
        training = task == "training"
        asked: dict[str, Any] = {"required": {"peer": 5.0}, "required_memory": {"peer": 0.1}} if training else {}
        yield case(
            f"AFT-local-32 layer T={length}",
            local,
            (1, length, TEXT_WIDTH),
            "labml-nn",
            lambda: LabmlLocal(TEXT_WIDTH, length, WINDOW),
            (length, 1, TEXT_WIDTH),
            task,
            package="labml-nn",
            **asked,
        )
        yield case(
            "AFT-full layer",
            full,
            image,
            "aft-pytorch",
            lambda: aft_pytorch_full(IMAGE_WIDTH, patches),
            image,
            task,
            package="aft-pytorch",
        )
        yield case(
            "AFT-conv 11/16 layer",
            conv,
            image,
            "lambda-networks",
            lambda: lambda_layer(IMAGE_WIDTH, GRID),
            (batch, IMAGE_WIDTH, GRID, GRID),
            task,
            package="lambda-networks",
        )
        for name, ours in {"AFT-conv 11/16 layer": conv, "AFT-full layer": full}.items():
            yield case(name, ours, image, "SDPA", lambda: SdpaAttention(IMAGE_WIDTH), image, task)
