"""Reading a trained vision transformer in any supported format: its config, tensors and image processor."""

import math
import os
import re
from collections.abc import Mapping, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoImageProcessor, DeiTConfig, PreTrainedConfig, PreTrainedModel, ViTConfig
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.utils import CONFIG_NAME, logging

from ..analysis.maps import patch_grid
from ..configuration_aft import pair
from ..errors import InputError, explained
from ..loading import OWN_KERNELS, check_finite, load, read_config, read_image_processor, refuse_adapter
from ..position_biases_aft import widen
from .files import read_weights
from .names import OPTIONAL, POSITIONS, Part, vit_tensors
from .timm_config import PretrainedConfig, TimmConfig, image_processor, infer_config, read_timm_config


logger = logging.get_logger(__name__)

MODEL_TYPES = ("vit", "deit", "dinov2", "vit_mae")  # that can be converted
# Model classes of transformers, by model type and number of classifier heads.
MODEL_CLASSES: dict[tuple[str, int], type[PreTrainedModel]] = {
    ("vit", 0): transformers.ViTModel,
    ("vit", 1): transformers.ViTForImageClassification,
    ("deit", 0): transformers.DeiTModel,
    ("deit", 1): transformers.DeiTForImageClassification,
    ("deit", 2): transformers.DeiTForImageClassificationWithTeacher,
}


@dataclass(frozen=True)
class VisionTransformerSource:
    """A ViT or DeiT checkpoint, read from any supported format.

    Attributes:
        name: path, Hub id or model name that the checkpoint was read from.
        config: config of transformers: a `DeiTConfig` if there is a distillation token, else a `ViTConfig`.
        parts: the tensors of the network by their names in transformers, all of one dtype, each with the names of the
            tensors of the checkpoint that it is made of.
        names: the names of all tensors of the checkpoint.
        image_processor: the image processor of the checkpoint, or the default of its format.
        own_image_processor: whether the checkpoint has an image processor of its own.
        part: the part of its files that the weights were read from, such as "state_dict_ema"; empty for all of them.
    """

    name: str
    config: ViTConfig | DeiTConfig
    parts: dict[str, Part]
    names: Set[str]
    image_processor: BaseImageProcessor
    own_image_processor: bool
    part: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; if those of the checkpoint differ, the smallest that can represent all of them."""
        return next(iter(self.parts.values())).tensor.dtype

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return patch_grid(self.config)

    @property
    def heads(self) -> int:
        """The number of classifier heads: none, one, or the two of a distilled DeiT."""
        if "classifier.weight" in self.parts:
            return 1
        return 2 if self.config.model_type == "deit" and "distillation_classifier.weight" in self.parts else 0

    def to_transformers(self) -> PreTrainedModel:
        """Return the model of transformers that is equivalent to this checkpoint, in evaluation mode.

        A backbone has no pooler. The model shares the tensors of this object.
        """
        options = {} if self.heads else {"add_pooling_layer": False}
        with torch.device("meta"):
            model = MODEL_CLASSES[self.config.model_type, self.heads](self.config, **options)
        names = {name.removeprefix(f"{model.base_model_prefix}."): name for name in model.state_dict()}
        kept = {name: part for name, part in self.parts.items() if name in names or not re.fullmatch(OPTIONAL, name)}
        # Strict: missing and other tensors and shapes are an error, which names them.
        model.load_state_dict({names.get(name, name): part.tensor for name, part in kept.items()}, assign=True)
        return model.eval()

    def resized(self, image_size: Any) -> "VisionTransformerSource":
        """Return the source for images of another size, in pixels or (height, width).

        The grid of position embeddings is interpolated as ViT does: bicubic, corners not aligned, no antialiasing.
        """
        config: Any = copy(self.config)
        config.image_size = image_size
        other = replace(self, config=config, parts=dict(self.parts))
        if other.grid_size != self.grid_size:
            part, count = self.parts[POSITIONS], math.prod(self.grid_size)
            wide = widen(part.tensor[:, -count:]).unflatten(1, self.grid_size).permute(0, 3, 1, 2)  # (1, d, rows, ...)
            wide = nn.functional.interpolate(wide, size=other.grid_size, mode="bicubic", align_corners=False)
            grid = wide.flatten(2).mT.to(part.tensor.dtype)
            other.parts[POSITIONS] = part._replace(tensor=torch.cat([part.tensor[:, :-count], grid], 1))
        return other


def read_source(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    source_image_size: int | tuple[int, int] | None = None,
    source_num_heads: int | None = None,
) -> VisionTransformerSource:
    """Read a ViT or DeiT checkpoint of transformers, timm or the original DeiT, or a model of transformers in memory.

    DINOv2 (without registers) and ViT-MAE are read as ViTs without a classifier.

    Args:
        source: a model in memory; or a directory or a Hub repository with the config.json of transformers or timm; or
            a weight file with the names of timm; weights are safetensors, or pickles, of which only tensors are read.
        source_image_size: image size in pixels that the checkpoint was trained at, (height, width) or one number for
            both. Needed if neither a config nor a square number of positions determines it.
        source_num_heads: number of attention heads. Needed if no config contains it and it is not the usual number at
            the width of the checkpoint.

    Raises:
        InputError: the checkpoint does not exist, is damaged, holds NaN or infinity, is not a ViT or DeiT, or has
            an adapter; or an option contradicts its config.
        TypeError: `source` is neither a path nor a model.
    """
    if isinstance(source, PreTrainedModel):
        name, values = source.name_or_path or type(source).__name__, source.config.to_dict()
    elif isinstance(source, (str, os.PathLike)):
        name, values = str(source), _read_config(str(source))
    else:
        raise TypeError(f"source must be a path, Hub id, or ViT or DeiT of transformers, got {type(source).__name__}")
    with explained(f"{name}: no readable {CONFIG_NAME}"):
        read = _read_transformers_config if values.get("model_type") else read_timm_config
        stated: TimmConfig | ViTConfig | DeiTConfig = read(name, values) if values else TimmConfig()
    if isinstance(source, PreTrainedModel):
        tensors, part = {key: tensor.detach().cpu() for key, tensor in source.state_dict().items()}, ""
    else:
        tensors, part = read_weights(name)
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
    with explained(f"{name}: holds no weights of a ViT or DeiT"):
        parts = vit_tensors(name, {key: tensor.to(dtype) for key, tensor in tensors.items()})
    check_finite(name, ((part.sources[0], part.tensor) for part in parts.values()))
    with explained(f"{name}: no readable {CONFIG_NAME}"):
        if isinstance(stated, TimmConfig):
            config: Any = infer_config(name, parts, stated, source_image_size, source_num_heads)
            processor = image_processor(stated.pretrained_cfg, pair(config.image_size))
            is_own = bool(stated.pretrained_cfg.model_fields_set & {"mean", "std", "crop_pct", "interpolation"})
        else:
            config, processor = stated, _usual_image_processor(values["model_type"], stated.image_size)
            is_own = not isinstance(source, PreTrainedModel) and bool(read_image_processor(name))
            if is_own:  # a damaged image processor is an error: its means and sizes matter
                processor = load(AutoImageProcessor, name)
            other_size = source_image_size and pair(source_image_size) != pair(config.image_size)
            if other_size or source_num_heads not in (None, config.num_attention_heads):
                given = "source_image_size and source_num_heads (--source-image-size, --source-num-heads)"
                raise InputError(f"{name}: its config has the image size and the heads; leave out {given}")
    if config.num_channels != 3:
        raise InputError(f"{name}: its images have {config.num_channels} channels; give a model for RGB images")
    classifier = parts.get("classifier.weight")
    if classifier is not None and classifier.tensor.shape[1:] == (2 * config.hidden_size,):  # of DINOv2
        raise InputError(
            f"{name}: its classifier reads the class token and the mean of the patches, the classifier of an AFT only "
            "one of them: save the model without classifier (model.base_model.save_pretrained)"
        )
    transformer = VisionTransformerSource(name, config, parts, tensors.keys(), processor, is_own, part)
    with explained(f"{name}: its tensors are not those of a {config.model_type} with its config"):
        transformer.to_transformers()
    return transformer


def _read_transformers_config(name: str, values: Mapping[str, Any]) -> ViTConfig | DeiTConfig:
    """Return a config of transformers as that of a ViT or DeiT, for weights into which layer scales are folded.

    An InputError is raised unless it is that of a ViT or an equivalent model.
    """
    if (model_type := values["model_type"]) not in MODEL_TYPES:
        raise InputError(f"{name}: has the type {model_type!r}; give one of {', '.join(MODEL_TYPES)}")
    if values.get("use_swiglu_ffn"):
        raise InputError(f"{name}: its MLPs have gates (SwiGLU), and an AFT has none; give a smaller DINOv2")
    config = CONFIG_MAPPING[model_type].from_dict(dict(values), **OWN_KERNELS)
    if isinstance(config, (ViTConfig, DeiTConfig)):
        return config
    shared = {name: value for name, value in config.to_dict().items() if name in ViTConfig.__annotations__}
    if model_type == "dinov2":
        shared["intermediate_size"] = int(config.hidden_size * config.mlp_ratio)
    return ViTConfig(**shared)


def _usual_image_processor(model_type: str, image_size: Any) -> BaseImageProcessor:
    """Return the default image processor of a model type: ImageNet's mean and standard deviation, or 0.5 for a ViT."""
    height, width = pair(image_size)
    if model_type == "vit":
        return ViTImageProcessorPil(size={"height": height, "width": width})
    return image_processor(PretrainedConfig(), (height, width))


def load_image_processor(source: str, config: PreTrainedConfig, *, revision: str = "main", **options: Any) -> Any:
    """Load the image processor of a model by `load`; for a ViT without one, return the default, with a warning."""
    if config.model_type not in MODEL_TYPES or read_image_processor(source, revision=revision):
        return load(AutoImageProcessor, source, revision=revision, **options)
    usual: Any = _usual_image_processor(config.model_type, config.image_size)
    logger.warning(
        f"{source}: has no image processor, so the default of its type is used, with mean {usual.image_mean} and std "
        f"{usual.image_std}; if it was trained with others, save its image processor beside it"
    )
    return usual


def _read_config(name: str) -> dict[str, Any]:
    """Return the config of transformers or timm; that of a weight file is empty, and one beside it is refused."""
    if Path(name).is_file():
        beside = Path(name).parent / CONFIG_NAME
        if beside.exists():
            raise InputError(f"{name}: give the directory, or move the weights if {beside} is of another model")
        return {}
    config = read_config(name).model_dump(exclude_unset=True)
    refuse_adapter(name)
    if config.get("model_type") is None and config.get("architecture") is None:
        raise InputError(f"{name}: its {CONFIG_NAME} has no model_type (transformers) or architecture (timm)")
    return config
