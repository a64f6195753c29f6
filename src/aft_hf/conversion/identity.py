"""Identity of a distillation: options, teacher, student and images, which must not change when a run is resumed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.fingerprint import sum_images, sum_samples
from ..reading import shortened
from .source import VisionTransformerSource


LISTED = 5  # changes in a message


def distillation_identity(
    options: Mapping[str, Any],
    model: PreTrainedModel,
    source: VisionTransformerSource,
    images: Sequence[Image.Image],
    conversion: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that determines the result of a distillation, as a JSON object.

    The initial weights of the student are not included, since a resumed run loads the weights of its checkpoint.

    Args:
        options: options of the distillation.
        model: the student.
        source: the teacher.
        images: the images to distill on.
        conversion: how the student was converted, as far as its config does not contain it.
    """
    identity = {
        **options,
        "images": len(images),
        "image_contents": sum_images(images),
        "image_processor": source.image_processor.to_dict(),
        "source": source.name,
        "source_config": _config(source.config),
        "source_tensors": _sum_tensors(source.tensors),
        "model": _config(model.config),
        "conversion": conversion,
    }
    # In the form in which a checkpoint is read back: lists for tuples, and strings for the keys of labels.
    return json.loads(json.dumps(identity, default=str))


def describe(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Describe changes in one line; of many, the first `LISTED`."""
    listed = [shortened(f"{name}: {old!r}, now {new!r}") for name, (old, new) in list(changes.items())[:LISTED]]
    rest = len(changes) - len(listed)
    return "; ".join(listed) + (f"; and {rest} more" if rest else "")


def _config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config as a JSON object, without the version of transformers."""
    values = json.loads(config.to_json_string(use_diff=False))
    values.pop("transformers_version", None)
    return values


def _sum_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of the bytes of all tensors; of bytes, since NumPy does not have all dtypes."""
    return sum_samples([{name: tensors[name].reshape(-1).view(torch.uint8)} for name in sorted(tensors)])
