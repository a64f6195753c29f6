"""Conversion of a trained ViT or DeiT to an AFT of any image type."""

import math
import os
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel

from .._version import __version__
from ..configuration_aft import AFTConfig
from ..errors import InputError, explained
from ..loading import check_finite
from ..modeling_aft import AFTForImageClassification
from ..position_biases_aft import widen
from .attention import fit_to_attention
from .names import POSITIONS, Part, renamed
from .report import ConversionReport, TensorRecord
from .source import VisionTransformerSource, read_source


# The kernel size of the paper's AFT-conv small 11/16, and its rank of factorized biases.
KERNEL_SIZE = 11
POSITION_BIAS_DIM = 128
WINDOW_SIZE = 32
# With it, Adam moves new position biases at the pace of the copied weights (measured: docs/conversion.md).
POSITION_BIAS_MULTIPLIER = 2000.0

# Config fields that the AFT takes over from its source, and those that it takes over with a classifier.
KEPT_FIELDS: tuple[str, ...] = ("patch_size", "num_channels", "hidden_size", "num_hidden_layers", "intermediate_size")
KEPT_FIELDS += ("hidden_act", "hidden_dropout_prob", "layer_norm_eps", "initializer_range", "qkv_bias")
CLASSES = ("id2label", "label2id", "problem_type")


def convert_deit(
    source: str | os.PathLike[str] | PreTrainedModel | VisionTransformerSource,
    *,
    aft_type: str | Sequence[str] = "conv",
    kernel_size: int = KERNEL_SIZE,
    num_heads: int | None = None,
    window_size: int = WINDOW_SIZE,
    position_bias_dim: int | None = POSITION_BIAS_DIM,
    position_bias_multiplier: float = POSITION_BIAS_MULTIPLIER,
    image_size: int | tuple[int, int] | None = None,
    num_labels: int | None = None,
    init: str = "paper",
    images: Iterable[Image.Image] | None = None,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert a trained ViT or DeiT image classifier to an AFT, as the paper does for its Table 8.

    The patch embedding, layer norms, value and output projections, MLPs and classifier are copied; the class token
    too if no layer is `conv`, and the position embeddings if not all layers are. The query and key projections and
    the position biases are new, unless `init="attention"` fits some of them. The model has to be fine-tuned or
    distilled.

    Args:
        source: anything that `read_source` accepts, or the `VisionTransformerSource` that it returns.
        aft_type: "conv", "full", "local" or "simple", or a list with one type for each layer.
        kernel_size, num_heads, window_size, position_bias_dim: as for `AFTConfig`.
        position_bias_multiplier: as for `AFTConfig`. 1 is the value of the paper, to be used with
            `position_bias_scale` of `build_optimizer`.
        image_size: image size in pixels, (height, width) or one number for both, multiples of the patch size.
            Default: the image size of the source. Copied position embeddings are interpolated as ViT does.
        num_labels: number of classes of the new classifier, for a source without one, and only then.
        init: "paper" for new position biases and keys, or "attention" to fit those of `conv` to the attention of the
            source on `images` (`fit_to_attention`).
        images: for `init="attention"`: PIL images, a few hundred of the kind that the source was trained on.
        source_image_size, source_num_heads: as for `read_source`.

    Returns:
        The model, in the dtype of the source, and a report on every tensor.

    Raises:
        InputError: the source cannot be read, is not a ViT or DeiT, or holds NaN or infinity.
        TypeError: the source is neither a path nor a model.
        ValueError: an option is invalid, or does not fit this source.
    """
    if init not in ("paper", "attention"):
        raise ValueError(f'init must be "paper" or "attention", got {init!r}')
    if (init == "attention") != (images is not None):
        raise ValueError('init="attention" needs images, a few hundred of the same kind; init="paper" uses none')
    if not isinstance(source, VisionTransformerSource):
        source = read_source(source, source_image_size=source_image_size, source_num_heads=source_num_heads)
    if source.heads and num_labels is not None:
        raise InputError(f"{source.name}: has a classifier; leave out num_labels (--num-labels)")
    if not source.heads and not num_labels:
        raise InputError(f"{source.name}: has no classifier; give num_labels (--num-labels) for a new one")
    options: dict[str, Any] = {
        "aft_type": aft_type if isinstance(aft_type, str) else list(aft_type),
        "kernel_size": kernel_size,
        "num_heads": num_heads,
        "window_size": window_size,
        "position_bias_dim": position_bias_dim,
        "position_bias_multiplier": position_bias_multiplier,
        "image_size": source.config.image_size if image_size is None else image_size,
        **({} if num_labels is None else {"num_labels": num_labels}),
    }
    kept = KEPT_FIELDS + (CLASSES if source.heads else ())
    with explained(f"{source.name}: cannot be converted with these options"):
        config = AFTConfig(modality="image", **{name: getattr(source.config, name) for name in kept}, **options)
        model = AFTForImageClassification(config).to(source.dtype)  # type: ignore[arg-type]  # the wrapper of transformers hides torch's types
        target = model.state_dict()
        copies = copied_parts(source, config, target)
        for name, copy in copies.items():
            target[name].copy_(copy.tensor)
    if init == "attention" and "conv" not in config.layer_aft_types:
        raise ValueError('init="attention" fits layers of aft_type "conv", and there are none; give init="paper"')
    fitted, num_images = (set(), 0) if images is None else fit_to_attention(model, source, images)
    check_finite(f"{source.name}, after the conversion", target.items())

    records = [
        TensorRecord(
            status="copied" if name in copies else "fitted" if name in fitted else "new",
            target=name,
            shape=tensor.shape,
            sources=copies[name].sources if name in copies else (),
        )
        for name, tensor in target.items()
    ]
    dropped = [part for name, part in source.parts.items() if renamed(name) not in copies]
    records += [TensorRecord(status="dropped", shape=part.tensor.shape, sources=part.sources) for part in dropped]
    options |= {
        "num_heads": config.num_heads,
        "init": init,
        "images": num_images,
        "source_image_size": source.config.image_size,
        "source_num_heads": source.config.num_attention_heads,
        "image_processor": "of the source" if source.own_image_processor else "assumed: the source has none",
        "source_weights": source.part or "all",
    }
    report = ConversionReport(
        # The report is published with the model, so it names a local source without its directory.
        source=os.path.basename(os.path.abspath(source.name)) if Path(source.name).exists() else source.name,
        options=options,
        versions={"aft_hf": __version__} | {name: version(name) for name in ("transformers", "torch", "safetensors")},
        tensors=records,
    )
    report.check(source.names, target)
    return model.eval(), report


def copied_parts(source: VisionTransformerSource, config: AFTConfig, target: Collection[str]) -> dict[str, Part]:
    """Return what an AFT with the tensors `target` copies from a source, by its names: of two heads, their mean."""
    copies: dict[str, Part] = {}
    if renamed(POSITIONS) in target:
        source = source.resized(config.image_size)
    for name, part in source.parts.items():
        if (copied := renamed(name)) not in target:
            continue
        if copied in copies:
            first = copies[copied]
            both = torch.stack([widen(first.tensor), widen(part.tensor)])
            part = Part(both.mean(0).to(part.tensor.dtype), first.sources + part.sources)
        elif name == POSITIONS:
            kept, patches = part.tensor[:, : int(bool(config.use_cls_token))], math.prod(config.grid_size)
            part = part._replace(tensor=torch.cat([kept, part.tensor[:, -patches:]], 1))
        copies[copied] = part
    return copies
