"""Reading a trained vision transformer in any supported format: its config, tensors and image processor."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoImageProcessor,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.utils import CONFIG_NAME, logging

from ..configuration_aft import pair
from ..loading import OWN_KERNELS, load, named_checkpoints, read_config, read_image_processor
from ..reading import Document, explained, read_json, shown
from .canonical import DISTILLED_HEADS, HEAD, canonical_shapes, grid_of, is_optional
from .checkpoint_formats import timm_derivations, transformers_derivations
from .derivation import Derivation, cast
from .errors import ConversionError
from .files import read_weights
from .image_processing import timm_image_processor, vit_image_processor
from .supported_models import CONFIG_CLASSES, IMAGENET_NORMALIZED, as_vit_config, check_config, check_tensors
from .timm_config import PretrainedConfig, TimmConfig, infer_config, read_timm_config, usual_heads


logger = logging.get_logger(__name__)

# Model classes of transformers, by model type and heads.
MODEL_CLASSES = {
    ("vit", ()): ViTModel,
    ("vit", HEAD): ViTForImageClassification,
    ("deit", ()): DeiTModel,
    ("deit", HEAD): DeiTForImageClassification,
    ("deit", DISTILLED_HEADS): DeiTForImageClassificationWithTeacher,
}


@dataclass(frozen=True)
class VisionTransformerSource:
    """A ViT or DeiT checkpoint, read from any supported format.

    Attributes:
        name: path, Hub id or model name that the checkpoint was read from.
        config: config of transformers: a `DeiTConfig` if there is a distillation token, else a `ViTConfig`.
        tensors: the tensors of the checkpoint, by their names in its files without those of wrappers.
        derivations: how each tensor of the network is derived from `tensors`, by canonical name.
        image_processor: the image processor of the checkpoint, or the default of its format.
        own_image_processor: whether the checkpoint has an image processor of its own.
        part: the part of its files that the weights were read from, such as "state_dict_ema"; empty for all of them.
        num_heads_known: whether the number of attention heads in `config` is known, or a placeholder. Only
            `to_transformers`, for fits to the attention of the source and for distillation, needs the number.
    """

    name: str
    config: ViTConfig | DeiTConfig
    tensors: dict[str, torch.Tensor]
    derivations: dict[str, Derivation]
    image_processor: BaseImageProcessor
    own_image_processor: bool
    part: str = ""
    num_heads_known: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; if they differ, the smallest dtype that can represent all of them."""
        return reduce(torch.promote_types, {tensor.dtype for tensor in self.tensors.values()})

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return grid_of(self.config)

    @property
    def heads(self) -> tuple[str, ...]:
        """The canonical names of the classifier heads: none, one, or the two of a distilled DeiT."""
        return tuple(head for head in (*HEAD, *DISTILLED_HEADS) if f"{head}.weight" in self.derivations)

    def to_transformers(self) -> PreTrainedModel:
        """Return the model of transformers that is equivalent to this checkpoint, in evaluation mode.

        Returns:
            A `DeiTForImageClassificationWithTeacher` for two heads, a `DeiTForImageClassification` or
            `ViTForImageClassification` for one head, or a `DeiTModel` or `ViTModel` (without pooler) for a backbone.

        Raises:
            ConversionError: the number of attention heads is unknown.
        """
        if not self.num_heads_known:
            raise ConversionError(
                f"{self.name}: the number of attention heads cannot be inferred from the width of "
                f"{self.config.hidden_size}; give source_num_heads (--source-num-heads)"
            )
        model_class: type[Any] = MODEL_CLASSES[self.config.model_type, self.heads]
        prefix = f"{model_class.base_model_prefix}." if self.heads else ""
        state = {
            name if name.startswith(self.heads) else prefix + name: derivation.compute(self.tensors)
            for name, derivation in self.derivations.items()
            if not is_optional(name)
        }
        options = {} if self.heads else {"add_pooling_layer": False}
        return model_class.from_pretrained(
            None, config=self.config, state_dict=state, dtype=self.dtype, **options
        ).eval()


def read_source(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
) -> VisionTransformerSource:
    """Read a ViT or DeiT checkpoint of transformers, timm or the original DeiT, or a model of transformers in memory.

    DINOv2 (without registers) and ViT-MAE are read as ViTs without a classifier.

    Args:
        source: a model of transformers in memory; or a directory or a Hub repository with the config.json of
            transformers or timm; or a weight file in the format of timm and the original DeiT. Weights are
            safetensors, or pickles, of which only tensors are loaded.
        source_image_size: image size in pixels that the checkpoint was trained at, (height, width) or one number for
            both. Needed if neither a config nor a square number of positions determines it.
        source_num_heads: number of attention heads. Needed if no config contains it and it is not the usual number at
            the width of the checkpoint.

    Raises:
        ConversionError: the checkpoint does not exist, is damaged, or is not a ViT or DeiT; or an option is given that
            its config determines.
        TypeError: `source` is neither a path nor a model.
    """
    if isinstance(source, PreTrainedModel):
        _refuse_known(type(source).__name__, source_image_size, source_num_heads)
        return _checked(_in_one_dtype(_of_model(source)))
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "source must be a directory, a weight file, a Hub id, or a ViT or DeiT of transformers in "
            f"memory, got {type(source).__name__}"
        )
    name = str(source)
    config = _without_config(name) if Path(name).is_file() else _read_config(name)
    if config.get("model_type") is not None:
        _refuse_known(name, source_image_size, source_num_heads)
        return _checked(_in_one_dtype(_read_transformers(name, config)))
    return _checked(_in_one_dtype(_read_timm(name, config, source_image_size, source_num_heads)))


def _refuse_known(name: str, image_size: int | tuple[int, int] | None, num_heads: int | None) -> None:
    """Refuse an image size and a number of heads for a source whose config has them."""
    if image_size is not None or num_heads is not None:
        raise ConversionError(
            f"{name}: its config has the image size and the heads; leave out source_image_size and source_num_heads "
            "(--source-image-size, --source-num-heads)"
        )


def _of_model(model: PreTrainedModel) -> VisionTransformerSource:
    """Read a model in memory; it has no image processor, so that the default of its type is used."""
    model_type, name = model.config.model_type, model.name_or_path or type(model).__name__
    check_config(name, model.config.to_dict())
    config = as_vit_config(model.config)
    tensors = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    check_tensors(name, tensors)
    usual = _usual_image_processor(name, model_type, pair(config.image_size))
    return VisionTransformerSource(name, config, tensors, transformers_derivations(config, tensors), usual, False)


def _usual_image_processor(name: str, model_type: str, size: tuple[int, int]) -> BaseImageProcessor:
    """Return the default image processor for a checkpoint of this type without one."""
    normalized = model_type in IMAGENET_NORMALIZED
    return timm_image_processor(name, PretrainedConfig(), size) if normalized else vit_image_processor(size)


def _without_config(name: str) -> dict[str, Any]:
    """Return the empty config of a weight file; refuse the file if a config of transformers or timm lies beside it."""
    if (beside := Path(name).parent / CONFIG_NAME).is_file():
        stated = read_json(beside, Document, ConversionError).model_extra or {}
        if key := next((key for key in ("model_type", "architecture") if stated.get(key) is not None), None):
            raise ConversionError(
                f"{name}: {beside} ({key}={shown(stated[key])}) would not be read; give the directory, or move a file "
                "that this config does not describe out of it"
            )
    return {}


def _read_config(name: str) -> dict[str, Any]:
    if Path(name).is_dir() and not Path(name, CONFIG_NAME).exists():
        advice = named_checkpoints(name) or "; without a config, give the weight file itself"
        raise ConversionError(f"{name}: no {CONFIG_NAME} in it{advice}")
    config = read_config(name, ConversionError).model_dump(exclude_unset=True)
    if config.get("model_type") is None and config.get("architecture") is None:
        raise ConversionError(
            f"{name}: neither a {CONFIG_NAME} of transformers (model_type) nor of timm (architecture) is in it"
        )
    return config


def load_image_processor(source: str, config: PreTrainedConfig, *, revision: str = "main", **options: Any) -> Any:
    """Load the image processor of a model by `load`; for a ViT without one, return the default, with a warning."""
    if config.model_type not in CONFIG_CLASSES or read_image_processor(source, revision=revision):
        return load(AutoImageProcessor, source, revision=revision, **options)
    usual: Any = _usual_image_processor(source, config.model_type, pair(config.image_size))
    logger.warning(
        f"{source}: has no image processor, so the default of its type is used, with mean {usual.image_mean} and std "
        f"{usual.image_std}; if it was trained with others, save its image processor beside it"
    )
    return usual


def _read_transformers(name: str, values: Mapping[str, Any]) -> VisionTransformerSource:
    model_type = values["model_type"]
    check_config(name, values)
    with explained(f"{name}: no readable {CONFIG_NAME}", ConversionError):
        config_class: type[PreTrainedConfig] = CONFIG_CLASSES[model_type]
        config = as_vit_config(config_class.from_dict(dict(values), **OWN_KERNELS))
        size = pair(config.image_size)
        grid_of(config)  # raises if the image or patch size is invalid
    (tensors, part), own = read_weights(name), _read_image_processor(name)
    check_tensors(name, tensors)
    usual = _usual_image_processor(name, model_type, size)
    derivations = transformers_derivations(config, tensors)
    return VisionTransformerSource(name, config, tensors, derivations, own or usual, own is not None, part)


def _read_timm(
    name: str, values: Mapping[str, Any], image_size: int | tuple[int, int] | None, num_heads: int | None
) -> VisionTransformerSource:
    with explained(f"{name}: no readable {CONFIG_NAME}", ConversionError):
        timm_config = read_timm_config(name, values) if values else TimmConfig()
        tensors, part = read_weights(name)
        check_tensors(name, tensors)
        config = infer_config(name, tensors, timm_config, image_size=image_size, num_heads=num_heads)
        processor = timm_image_processor(name, timm_config.pretrained_cfg, pair(config.image_size))
    derivations = timm_derivations(config, tensors)
    known = bool(num_heads or timm_config.model_args.num_heads or usual_heads(config.hidden_size))
    own = bool(timm_config.pretrained_cfg.model_fields_set & {"mean", "std", "crop_pct", "interpolation"})
    return VisionTransformerSource(name, config, tensors, derivations, processor, own, part, known)


def _read_image_processor(name: str) -> BaseImageProcessor | None:
    """Return the image processor of a checkpoint, or None. A damaged one is an error: its means and sizes matter."""
    if not read_image_processor(name, ConversionError):
        return None
    return load(AutoImageProcessor, name, ConversionError)


def _in_one_dtype(source: VisionTransformerSource) -> VisionTransformerSource:
    """Return the source with derivations that first cast to the dtype of the source, if dtypes differ."""
    if all(tensor.dtype == source.dtype for tensor in source.tensors.values()):
        return source
    to_dtype = cast(source.dtype)
    derivations = {name: replace(item, steps=(to_dtype, *item.steps)) for name, item in source.derivations.items()}
    return replace(source, derivations=derivations)


def _checked(source: VisionTransformerSource) -> VisionTransformerSource:
    """Return the source if it reads RGB, and has all tensors, with the right shapes, and no others."""
    if source.config.num_channels != 3:
        raise ConversionError(
            f"{source.name}: takes images of {source.config.num_channels} channels; image processors give 3 (RGB), so "
            "only models of 3 channels are converted"
        )
    used = [name for item in source.derivations.values() for name in (*item.sources, item.factor) if name is not None]
    if missing := [name for name in used if name not in source.tensors]:
        raise ConversionError(f"{source.name}: {missing[0]} is missing from the checkpoint")
    if unknown := sorted(source.tensors.keys() - set(used)):
        raise ConversionError(
            f"{source.name}: {unknown[0]} is no tensor of a {source.config.model_type}; only plain ViT and DeiT "
            "classifiers are converted"
        )
    without_data = {name: tensor.to("meta") for name, tensor in source.tensors.items()}
    for name, expected in canonical_shapes(source.config, source.heads).items():
        derivation = source.derivations[name]
        try:
            fits = tuple(derivation.compute(without_data).shape) == expected
        except (RuntimeError, IndexError):
            fits = False
        if not fits:
            steps = f" (after: {', '.join(derivation.steps)})" if derivation.steps else ""
            made_of = [*derivation.sources, *filter(None, [derivation.factor])]
            given = " and ".join(f"{name} is {tuple(source.tensors[name].shape)}" for name in made_of)
            raise ConversionError(
                f"{source.name}: {given}, which does not fit the rest: {expected} is expected{steps}"
            )
    return source
