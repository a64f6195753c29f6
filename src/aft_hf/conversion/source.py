"""Reading a trained vision transformer in any supported format: its config, tensors and image processor."""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoImageProcessor,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTModel,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.utils import CONFIG_NAME, logging

from ..configuration_aft import pair
from ..loading import OWN_KERNELS, load, named_checkpoints, read_config, read_image_processor
from ..reading import Document, explained, read_json
from .derivation import Derivation
from .errors import ConversionError
from .files import read_weights
from .names import DISTILLED_HEADS, HEAD, POSITIONS, check_tensors, derivations, is_optional
from .timm_config import PretrainedConfig, TimmConfig, image_processor, infer_config, read_timm_config, usual_heads


logger = logging.get_logger(__name__)

# Config classes of the models that can be converted, by `model_type`.
CONFIG_CLASSES = {"vit": ViTConfig, "deit": DeiTConfig, "dinov2": Dinov2Config, "vit_mae": ViTMAEConfig}
# Types whose images are normalized by the mean and standard deviation of ImageNet if there is no image processor.
IMAGENET_NORMALIZED = ("deit", "dinov2", "vit_mae")
# Model classes of transformers, by model type and heads.
MODEL_CLASSES: dict[tuple[str, tuple[str, ...]], type[PreTrainedModel]] = {
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
        derivations: how each tensor of the network is derived from `tensors`, by its name in transformers.
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
        sides = zip(pair(self.config.image_size), pair(self.config.patch_size))
        rows, columns = (side // patch for side, patch in sides)
        return rows, columns

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the classifier heads: none, one, or the two of a distilled DeiT."""
        present = (heads for heads in (HEAD, DISTILLED_HEADS) if f"{heads[-1]}.weight" in self.derivations)
        return next((heads for heads in present if (self.config.model_type, heads) in MODEL_CLASSES), ())

    @cached_property
    def empty_model(self) -> PreTrainedModel:
        """The model of transformers for this checkpoint, on the meta device."""
        options = {} if self.heads else {"add_pooling_layer": False}
        with torch.device("meta"):
            return MODEL_CLASSES[self.config.model_type, self.heads](self.config, **options)

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
        names = self.empty_model.state_dict()
        state = {name: self.derivations[self._without_prefix(name)].compute(self.tensors) for name in names}
        options = {} if self.heads else {"add_pooling_layer": False}
        model_class: Any = type(self.empty_model)
        return model_class.from_pretrained(
            None, config=self.config, state_dict=state, dtype=self.dtype, **options
        ).eval()

    def _without_prefix(self, name: str) -> str:
        return name.removeprefix(f"{self.empty_model.base_model_prefix}.")

    def check(self) -> None:
        """Check that the checkpoint reads RGB, and has all tensors, with the right shapes, and no others.

        Raises:
            ConversionError: it does not; the message names the tensor.
        """
        if self.config.num_channels != 3:
            raise ConversionError(
                f"{self.name}: takes images of {self.config.num_channels} channels; only models of RGB are converted"
            )
        layers = {name.split(".")[1] for name in self.derivations if name.startswith("layers.")}
        if len(layers) != self.config.num_hidden_layers:
            raise ConversionError(
                f"{self.name}: its config has {self.config.num_hidden_layers} layers, its weights have {len(layers)}"
            )
        kind = self.config.model_type
        with explained(f"{self.name}: no {kind} can have its config", ConversionError):
            expected = {self._without_prefix(name): x.shape for name, x in self.empty_model.state_dict().items()}
        if missing := sorted(expected.keys() - self.derivations.keys()):
            raise ConversionError(
                f"{self.name}: {missing[0]} (by its name in transformers) is missing from the checkpoint"
            )
        known = [item for name, item in self.derivations.items() if name in expected or is_optional(name)]
        used = {name for item in known for name in (*item.sources, *item.factors)}
        if unknown := sorted(self.tensors.keys() - used):
            raise ConversionError(
                f"{self.name}: {unknown[0]} is no tensor of a {kind}; only plain ViTs and DeiTs are converted"
            )
        without_data = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        for name, shape in expected.items():
            derivation = self.derivations[name]
            with suppress(RuntimeError, IndexError):  # of a step that does not fit the tensor
                if derivation.compute(without_data).shape == shape:
                    continue
            given = {each: tuple(self.tensors[each].shape) for each in (*derivation.sources, *derivation.factors)}
            told = " and ".join(f"{each} is {sizes}" for each, sizes in given.items())
            raise ConversionError(f"{self.name}: {told}, which does not fit the rest: {name} needs {tuple(shape)}")


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
    if not isinstance(source, (str, os.PathLike, PreTrainedModel)):
        raise TypeError(
            "source must be a directory, a weight file, a Hub id, or a ViT or DeiT of transformers in "
            f"memory, got {type(source).__name__}"
        )
    if isinstance(source, PreTrainedModel):
        name, values = source.name_or_path or type(source).__name__, source.config.to_dict()
    else:
        name = str(source)
        values = _without_config(name) if Path(name).is_file() else _read_config(name)
    if values.get("model_type") is None:
        found = _read_timm(name, values, source_image_size, source_num_heads)
    elif source_image_size is not None or source_num_heads is not None:
        raise ConversionError(
            f"{name}: its config has the image size and the heads; leave out source_image_size and "
            "source_num_heads (--source-image-size, --source-num-heads)"
        )
    else:
        found = _read_transformers(name, values, source if isinstance(source, PreTrainedModel) else None)
    if any(tensor.dtype != found.dtype for tensor in found.tensors.values()):
        cast = ("cast", str(found.dtype).removeprefix("torch."))
        in_one_dtype = {name: Derivation(x.sources, (cast, *x.steps)) for name, x in found.derivations.items()}
        found = replace(found, derivations=in_one_dtype)
    found.check()
    return found


def _read_transformers(name: str, values: Mapping[str, Any], model: PreTrainedModel | None) -> VisionTransformerSource:
    """Read a model in memory, or the files of one; without an image processor, the default of its type is used."""
    _check_config(name, values)
    with explained(f"{name}: no readable {CONFIG_NAME}", ConversionError):
        config_class: type[PreTrainedConfig] = CONFIG_CLASSES[values["model_type"]]
        config = config_class.from_dict(dict(values), **OWN_KERNELS)
    part, own = "", None
    if model is not None:
        tensors = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    else:
        tensors, part = read_weights(name)
        # A damaged image processor is an error: its means and sizes matter.
        own = load(AutoImageProcessor, name, ConversionError) if read_image_processor(name, ConversionError) else None
    check_tensors(name, tensors)
    with explained(f"{name}: no readable {CONFIG_NAME}", ConversionError):
        vit, used = _as_vit_config(config), own or _usual_image_processor(config)
    return VisionTransformerSource(name, vit, tensors, derivations(name, tensors), used, own is not None, part)


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise a ConversionError if a model is not equivalent to a ViT by its config.json."""
    if (model_type := config["model_type"]) not in CONFIG_CLASSES:
        raise ConversionError(
            f"{name}: a checkpoint of type {model_type!r} cannot be converted; "
            f"give one of {', '.join(map(repr, CONFIG_CLASSES))}"
        )
    if config.get("use_swiglu_ffn"):
        raise ConversionError(f"{name}: its MLPs have gates (SwiGLU), which an AFT lacks; take a smaller DINOv2")


def _as_vit_config(config: PreTrainedConfig) -> ViTConfig | DeiTConfig:
    """Return the config as that of a ViT or DeiT, for weights into which the layer scales are folded."""
    if isinstance(config, (ViTConfig, DeiTConfig)):
        return config
    shared = {name: value for name, value in config.to_dict().items() if name in ViTConfig.__annotations__}
    if config.model_type == "dinov2":
        shared["intermediate_size"] = int(config.hidden_size * config.mlp_ratio)
    return ViTConfig(**shared)


def _usual_image_processor(config: PreTrainedConfig) -> BaseImageProcessor:
    """Return the default image processor of a model type: ImageNet's mean and standard deviation, or 0.5 for a ViT."""
    height, width = pair(config.image_size)
    if config.model_type in IMAGENET_NORMALIZED:
        return image_processor(PretrainedConfig(), (height, width))
    return ViTImageProcessorPil(size={"height": height, "width": width})


def load_image_processor(source: str, config: PreTrainedConfig, *, revision: str = "main", **options: Any) -> Any:
    """Load the image processor of a model by `load`; for a ViT without one, return the default, with a warning."""
    if config.model_type not in CONFIG_CLASSES or read_image_processor(source, revision=revision):
        return load(AutoImageProcessor, source, revision=revision, **options)
    usual: Any = _usual_image_processor(config)
    logger.warning(
        f"{source}: has no image processor, so the default of its type is used, with mean {usual.image_mean} and std "
        f"{usual.image_std}; if it was trained with others, save its image processor beside it"
    )
    return usual


def _without_config(name: str) -> dict[str, Any]:
    """Return the empty config of a weight file; refuse the file if a config of transformers or timm lies beside it."""
    if (beside := Path(name).parent / CONFIG_NAME).is_file():
        stated = read_json(beside, Document, ConversionError).model_extra or {}
        if stated.get("model_type") is not None or stated.get("architecture") is not None:
            raise ConversionError(
                f"{name}: {beside} would not be read; give the directory, or move a file that this config does not "
                "describe out of it"
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


def _read_timm(
    name: str, values: Mapping[str, Any], image_size: int | tuple[int, int] | None, num_heads: int | None
) -> VisionTransformerSource:
    with explained(f"{name}: no readable {CONFIG_NAME}", ConversionError):
        timm_config = read_timm_config(name, values) if values else TimmConfig()
        tensors, part = read_weights(name)
        check_tensors(name, tensors)
        config = infer_config(name, tensors, timm_config, image_size=image_size, num_heads=num_heads)
        processor = image_processor(timm_config.pretrained_cfg, pair(config.image_size))
    known = bool(num_heads or timm_config.model_args.num_heads or usual_heads(config.hidden_size))
    own = bool(timm_config.pretrained_cfg.model_fields_set & {"mean", "std", "crop_pct", "interpolation"})
    items = derivations(name, tensors)
    source = VisionTransformerSource(name, config, tensors, items, processor, own, part, known)
    if tensors["pos_embed"].shape[1] == math.prod(source.grid_size):  # that of the class token is left out in DeiT-III
        items[POSITIONS] = items[POSITIONS].then(("prepend_position",))
    return source
