"""Conversion of a trained ViT or DeiT to an AFT of any image type."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel

from .._version import __version__
from ..configuration_aft import AFTConfig
from ..modeling_aft import AFTForImageClassification
from .attention import fit_to_attention
from .derivation import MEAN, Derivation, drop_position, resize_positions
from .errors import ConversionError
from .report import ConversionReport, TensorRecord
from .source import VisionTransformerSource, read_source


# The kernel size of the paper's AFT-conv small 11/16, and its rank of factorized biases.
KERNEL_SIZE = 11
POSITION_BIAS_DIM = 128
WINDOW_SIZE = 32
# With it, Adam moves new position biases at the pace of the copied weights (measured: docs/conversion.md).
POSITION_BIAS_MULTIPLIER = 2000.0

INITS = ("paper", "attention")

# Canonical tensors and modules of a ViT or DeiT, and their names in the AFT. {i} is the layer.
COPIED = {
    "embeddings.cls_token": "aft.embeddings.cls_token",
    "embeddings.position_embeddings": "aft.embeddings.position_embeddings",
    "embeddings.patch_embeddings.projection": "aft.embeddings.patch_embeddings",
    "encoder.layer.{i}.layernorm_before": "aft.layers.{i}.layernorm_before",
    "encoder.layer.{i}.attention.attention.value": "aft.layers.{i}.mixer.v_proj",
    "encoder.layer.{i}.attention.output.dense": "aft.layers.{i}.mixer.o_proj",
    "encoder.layer.{i}.layernorm_after": "aft.layers.{i}.layernorm_after",
    "encoder.layer.{i}.intermediate.dense": "aft.layers.{i}.mlp.fc1",
    "encoder.layer.{i}.output.dense": "aft.layers.{i}.mlp.fc2",
    "layernorm": "aft.layernorm",
    "classifier": "classifier",
    # A distilled DeiT predicts the mean of its heads.
    "cls_classifier": "classifier",
    "distillation_classifier": "classifier",
}

# Tensors without a counterpart in the AFT or that the paper does not transfer, with the reason for the report.
DROPPED = {
    r"embeddings\.cls_token": "AFT-conv has no class token",
    r"embeddings\.distillation_token": "AFT has no distillation token",
    r"embeddings\.position_embeddings": "AFT-conv needs no position embeddings",
    r"embeddings\.mask_token|decoder\..+": "for pre-training only",
    r"encoder\.layer\.\d+\.attention\.attention\.(query|key)\.(weight|bias)": "not copied, as in the paper",
    r"pooler\.dense\.(weight|bias)": "the classifier does not use it",
}


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
    images: Iterable[torch.Tensor | Image.Image] | None = None,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
) -> tuple[AFTForImageClassification, ConversionReport]:
    """Convert a trained ViT or DeiT image classifier to an AFT, as the paper does for its Table 8.

    The patch embedding, layer norms, value and output projections, MLPs and classifier are copied. The class token is
    copied if no layer is `conv`, and the position embeddings are copied if not all layers are `conv`. The query and
    key projections and the position biases are newly initialized, unless `init="attention"` fits some of them. The
    model has to be fine-tuned or distilled.

    Args:
        source: anything that `read_source` accepts, or the `VisionTransformerSource` that it returns.
        aft_type: "conv", "full", "local" or "simple", or a list with one type for each layer.
        kernel_size: kernel size s of `conv`, odd.
        num_heads: number of position-bias heads h; must divide the width of the source. Default: that of
            `AFTConfig` for this type and width.
        window_size: window size s of `local`.
        position_bias_dim: rank d' of the factorized biases of `full` and `local`; None for an unfactorized table.
        position_bias_multiplier: the constant that w is multiplied by, so that any optimizer moves it fast enough. 1
            is the value of the paper, to be used with `position_bias_scale` of `build_optimizer`.
        image_size: image size in pixels, (height, width) or one number for both, multiples of the patch size.
            Default: the image size of the source. Copied position embeddings are interpolated as ViT does.
        num_labels: number of classes of the new classifier, for a source without one, and only then.
        init: "paper" for new position biases and keys, or "attention" to fit the position biases, and the keys of
            `conv`, to the attention of the source on `images` (`fit_to_attention`).
        images: for `init="attention"`: PIL images, or tensors of pixel values of one image or of a batch.
        source_image_size, source_num_heads: as for `read_source`.

    Returns:
        The model, in the dtype of the source, and a report on every tensor.

    Raises:
        ConversionError: the source cannot be read, is not a ViT or DeiT, or holds NaN or infinity.
        TypeError: the source is neither a path nor a model.
        ValueError: an option is invalid, or does not fit this source.
    """
    if not isinstance(source, VisionTransformerSource):
        source = read_source(source, source_image_size=source_image_size, source_num_heads=source_num_heads)
    _check_finite(source.name, source.tensors)
    options = {
        "aft_type": aft_type if isinstance(aft_type, str) else list(aft_type),
        "kernel_size": kernel_size,
        "num_heads": num_heads,
        "window_size": window_size,
        "position_bias_dim": position_bias_dim,
        "position_bias_multiplier": position_bias_multiplier,
        "image_size": source.config.image_size if image_size is None else image_size,
        **_num_labels(source, num_labels),
    }
    config = _target_config(source, options)
    _check_init(init, images, source, config)
    model = AFTForImageClassification(config).to(source.dtype)  # type: ignore[arg-type]  # the wrapper of transformers hides torch's types
    target = model.state_dict()
    counterparts = _counterparts(source.derivations, target)
    copies = {name: _copy(source, config, canonical) for name, canonical in counterparts.items()}
    for name, copy in copies.items():
        target[name].copy_(copy.compute(source.tensors))
    fitted = {} if images is None else fit_to_attention(model, source, images)
    _check_finite(f"{source.name}, after the conversion", target)

    # The report is published with the model, so it names a local source without its directory.
    name = Path(source.name).name if Path(source.name).exists() else source.name
    report = ConversionReport(
        name, {**options, "num_heads": config.num_heads, "init": init, **_reading(source)}, _versions()
    )
    report.records += _target_records(target, copies, fitted)
    report.records += _source_records(source, {name for names in counterparts.values() for name in names})
    report.check(source.tensors, target)
    return model.eval(), report


def _check_finite(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not finite, with which a model outputs only NaN.

    Raises:
        ConversionError: a tensor holds NaN or infinity; the message names the first one.
    """
    for tensor_name, tensor in tensors.items():
        if wrong := int((~tensor.isfinite()).sum()):
            raise ConversionError(
                f"{name}: {tensor_name} holds NaN or infinity ({wrong} of {tensor.numel()} values); the checkpoint is "
                "damaged, or its training diverged; give an earlier checkpoint"
            )


def _num_labels(source: VisionTransformerSource, num_labels: int | None) -> dict[str, Any]:
    """Return the number of classes as an option of the target, if no classifier of the source determines it."""
    if source.heads and num_labels is not None:
        raise ConversionError(f"{source.name}: has a classifier; leave out num_labels (--num-labels)")
    if not source.heads and not num_labels:
        raise ConversionError(
            f"{source.name}: has no classifier; give num_labels (--num-labels), the number of classes that the new "
            "one is to be fine-tuned for"
        )
    return {} if source.heads else {"num_labels": num_labels}


def _target_config(source: VisionTransformerSource, options: Mapping[str, Any]) -> AFTConfig:
    names: tuple[str, ...] = (
        "patch_size",
        "num_channels",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "hidden_act",
    )
    names += ("hidden_dropout_prob", "layer_norm_eps", "initializer_range", "qkv_bias")
    if source.heads:
        names += ("id2label", "label2id", "problem_type")
    return AFTConfig(modality="image", **{name: getattr(source.config, name) for name in names}, **options)


def _check_init(init: str, images: Iterable[Any] | None, source: VisionTransformerSource, config: AFTConfig) -> None:
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(map(repr, INITS))}, got {init!r}")
    if init == "paper":
        if images is not None:
            raise ValueError('images are used only with init="attention"; give both or neither')
        return
    if images is None:
        raise ValueError(
            'init="attention" needs images; give a few hundred of the images that the source was trained on'
        )
    types = set(config.layer_aft_types)
    if types == {"simple"}:
        raise ValueError('init="attention" sets position biases, and aft_type="simple" has none; give init="paper"')
    if types & {"full", "local"} and config.grid_size != source.grid_size:
        raise ValueError(
            "init='attention' fits the biases of 'full' and 'local' for each pair of patches, which works only at "
            f"image_size={source.config.image_size} of the source, not at {config.image_size}; leave out image_size, "
            "or give aft_type='conv'"
        )


def _counterparts(canonical_names: Iterable[str], target: Collection[str]) -> dict[str, list[str]]:
    """Return the canonical names of the source tensors that each target tensor is copied from, by its name."""
    counterparts: dict[str, list[str]] = {}
    for canonical in canonical_names:
        layer = re.search(r"\.(\d+)\.", canonical)
        name = canonical.replace(layer[0], ".{i}.") if layer else canonical
        module, _, kind = name.rpartition(".")
        became = COPIED.get(name) or f"{COPIED.get(module, '')}.{kind}"
        became = became.format(i=layer[1]) if layer else became
        if became in target:
            counterparts.setdefault(became, []).append(canonical)
    return counterparts


def _copy(source: VisionTransformerSource, config: AFTConfig, canonical: Sequence[str]) -> Derivation:
    """Return the derivation of a target tensor from its counterparts: one tensor, or the mean over two heads."""
    first, *others = (source.derivations[name] for name in canonical)
    derivation = first
    if others:
        sources = first.sources + tuple(name for other in others for name in other.sources)
        derivation = replace(first, sources=sources).then(MEAN)
    if canonical[0] == "embeddings.position_embeddings":
        derivation = derivation.then(*_position_steps(source, config))
    return derivation


def _position_steps(source: VisionTransformerSource, config: AFTConfig) -> Iterable[str]:
    """Yield the steps that drop the positions of tokens that the target lacks, and resize the rest to its grid."""
    if source.config.model_type == "deit":
        yield drop_position(1)
    if not config.use_cls_token:
        yield drop_position(0)
    if config.grid_size != source.grid_size:
        yield resize_positions(source.grid_size, config.grid_size)


def _target_records(
    target: Mapping[str, torch.Tensor], copies: Mapping[str, Derivation], fitted: Mapping[str, str]
) -> Iterable[TensorRecord]:
    for name, tensor in target.items():
        shape = tuple(tensor.shape)
        if name in copies:
            copy = copies[name]
            yield TensorRecord("copied", name, shape, copy.sources, copy.steps, copy.factor)
        elif name in fitted:
            yield TensorRecord("fitted", name, shape, note=fitted[name])
        else:
            yield TensorRecord("new", name, shape)


def _source_records(source: VisionTransformerSource, copied: Collection[str]) -> Iterable[TensorRecord]:
    """Yield the records of the dropped and folded source tensors; `copied` are the canonical names of all others."""
    for canonical, derivation in source.derivations.items():
        if canonical not in copied:
            reason = next(why for pattern, why in DROPPED.items() if re.fullmatch(pattern, canonical))
            shape = tuple(derivation.compute(source.tensors).shape)
            yield TensorRecord("dropped", None, shape, derivation.sources, derivation.steps, note=reason)
    factors = {derivation.factor: name for name, derivation in source.derivations.items() if derivation.factor}
    for factor, canonical in factors.items():
        note = f"into {source.derivations[canonical].sources[0].rpartition('.')[0]}"
        yield TensorRecord("folded", None, tuple(source.tensors[factor].shape), (factor,), note=note)


def _reading(source: VisionTransformerSource) -> dict[str, Any]:
    """Return how the source was read, as given by the caller or as inferred."""
    config = source.config
    processor = "of the source" if source.own_image_processor else "assumed: the source has none"
    return {
        "source_image_size": config.image_size,
        "source_num_heads": config.num_attention_heads if source.num_heads_known else None,
        "image_processor": processor,
        "source_weights": source.part or "all",
    }


def _versions() -> dict[str, str]:
    return {"aft_hf": __version__} | {name: version(name) for name in ("transformers", "torch", "safetensors")}
