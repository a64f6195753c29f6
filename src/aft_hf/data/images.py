"""Preprocessing of labeled images: the model's image processor, class numbers, and augmentation of batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from reprlib import repr as shown
from typing import Any

import kornia.augmentation as augmentation
import torch
from datasets import ClassLabel, Dataset, Value
from PIL import Image
from torch import nn
from transformers.utils import logging

from ..configuration_aft import MOST_LABELS
from ..errors import explained
from .classes import are_names, matched_places
from .image_size import pixel_values
from .samples import EMPTY, Row, Sample, SampleKey, image_of


logger = logging.get_logger(__name__)


@dataclass
class ImagePipeline:
    """Maker of samples for evaluation and `Trainer`: pixel values, (channels, height, width), and class numbers."""

    processor: Any  # the model's image processor
    _: KW_ONLY
    image_column: str = "image"
    label_column: str = "label"
    numbers: Mapping[Any, int]  # the class number of each label: `class_numbers`

    def __call__(self, row: Row, key: SampleKey | None = None) -> Sample:
        image, label = image_of(row, self.image_column), row[self.label_column]
        return {"pixel_values": self.pixels(image, key), "labels": torch.tensor(self.numbers[label])}

    def pixels(self, image: Image.Image, key: SampleKey | None) -> torch.Tensor:
        """Return the pixel values of an image; the key determines random numbers."""
        return pixel_values(self.processor, [image])[0]


def unique_labels(dataset: Dataset, column: str) -> list[Any]:
    """Return the labels that occur in a column, without a copy of the other columns."""
    return dataset.select_columns(column).unique(column)


def class_names(dataset: Dataset, column: str) -> list[str]:
    """Return the names of the classes in the order of their numbers; the names of integer labels are their texts."""
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return feature.names
    labels = unique_labels(dataset, column) if isinstance(feature, Value) else [feature]
    if None in labels:
        raise ValueError(f"column {column!r} has no label in some rows{EMPTY}; correct the rows or remove them")
    # A larger number, such as a timestamp, would create as many class names.
    if all(type(label) is int and 0 <= label < MOST_LABELS for label in labels):
        return [str(number) for number in range(max(labels) + 1)]
    if all(isinstance(label, (str, bool)) for label in labels):
        return sorted(map(str, labels))
    allowed = f"class names or class numbers from 0 to {MOST_LABELS - 1}"
    odd = [label for label in labels if type(label) is not int] or [min(labels), max(labels)]
    raise ValueError(f"column {column!r} must hold {allowed}, got {str(odd[:5])[1:-1]}")


def trained_classes(dataset: Dataset, column: str, of_model: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the class names of a model that is trained on a dataset, and the dataset's names of the same classes.

    A model with the same classes keeps their order. A model with as many classes keeps its names, with a warning, if
    the labels of the dataset are integers.
    """
    names, feature = class_names(dataset, column), dataset.features[column]
    if len(names) < 2:
        raise ValueError(
            f"column {column!r} has the single class {shown(names)[1:-1]}; give at least two (in a folder of images, "
            "the class of an image is the name of the folder that it is in)"
        )
    are_integers = isinstance(feature, Value) and "int" in feature.dtype
    occurring = len(unique_labels(dataset, column)) if are_integers else len(names)
    if occurring < len(names):  # the numbers may be ids, or begin at 1
        logger.warning(f"column {column!r} has class numbers up to {len(names) - 1}, of which {occurring} occur")
    if sorted(names) == sorted(of_model):
        return [*of_model], [*of_model]
    if not are_integers or len(names) != len(of_model) or not are_names(of_model):
        return names, names
    logger.warning(f"classes are matched by number: {_both(names, of_model)}; the model keeps its names")
    return [*of_model], names


def ordered_classes(id2label: Mapping[Any, Any], names: Sequence[str]) -> list[str]:
    """Return the names of the classes of a dataset in the order that `id2label` of a recipe gives them."""
    with explained("model.id2label: must map each class number to its name"):
        given = [str(id2label[number]) for number in sorted(id2label, key=int)]
    if sorted(given) != sorted(names):
        raise ValueError(f"model.id2label={shown(given)}: give all {len(names)} classes of the data: {shown(names)}")
    return given


def match_classes(dataset: Dataset, column: str, of_model: Sequence[str]) -> dict[Any, int]:
    """Return the number of each label of a column in a model: by name or, with a warning, as by `matched_places`."""
    given, feature, occurring = class_names(dataset, column), dataset.features[column], unique_labels(dataset, column)
    if isinstance(feature, ClassLabel):  # which may declare classes that do not occur
        numbers = sorted({*occurring} & {*range(len(given))})
        given, occurring = given[: numbers[-1] + 1] if numbers else given, [given[number] for number in numbers]
    if not (unknown := sorted({*map(str, occurring)} - {*of_model})):
        return class_numbers(dataset, column, of_model)
    if are_names(given) and are_names(of_model):
        raise ValueError(
            f"the data has classes that are not among the {len(of_model)} of the model: {shown(unknown)}; give data "
            f"with the model's classes ({shown(of_model)}) or, if only the names differ, set id2label of the model"
        )
    if len(given) > len(of_model) and (are_names(given) or are_names(of_model)):
        raise ValueError(_both(given, of_model))
    logger.warning(f"classes are matched by number: {_both(given, of_model)}")
    labels = [*given, ""]  # at -1, for classes without a label
    return class_numbers(dataset, column, [labels[place] for place in matched_places(given, of_model)])


def _both(given: Sequence[str], of_model: Sequence[str]) -> str:
    return f"the data has the {len(given)} classes {shown(given)}, the model {len(of_model)}: {shown(of_model)}"


def class_numbers(dataset: Dataset, column: str, names: Sequence[str]) -> dict[Any, int]:
    """Return the index in `names` of the name of each label that occurs in a column, which must be there once."""
    feature, labels = dataset.features[column], unique_labels(dataset, column)
    known = dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}  # a missing label is -1
    own = {label: known.get(label, str(label)) for label in labels}
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := [name for name in own.values() if name not in numbers]:
        classes = f"{len(names)} classes {shown([*filter(None, names)])}"
        raise ValueError(f"column {column!r} has labels that are not among the {classes}: {unknown[:5]}")
    counts = Counter(names)
    if doubled := [name for name in own.values() if counts[name] > 1]:
        raise ValueError(f"column {column!r} has labels that each name several classes: {doubled[:5]}; rename them")
    return {label: numbers[name] for label, name in own.items()}


def build_augmentation(name: str, size: tuple[int, int]) -> nn.Module | None:
    """Build the augmentation of batches of (height, width) images; None for "none".

    "shift" moves an image by up to a sixteenth of its sides, "crop" by up to an eighth, and flips it, "resized_crop"
    cuts out 8 to 100 % of the area, and flips it. Random numbers come from PyTorch's global generator.
    """
    height, width = size
    sixteenth = (max(width // 16, 1), max(height // 16, 1))  # kornia's order: left and right, top and bottom
    flip = augmentation.RandomHorizontalFlip()
    known = {
        "none": None,
        # Pixels at the edge are repeated: a model could see a border of another color.
        "shift": augmentation.RandomCrop(size, padding=sixteenth, padding_mode="replicate"),
        "crop": nn.Sequential(augmentation.RandomCrop(size, padding=(width // 8, height // 8)), flip),
        "resized_crop": nn.Sequential(augmentation.RandomResizedCrop(size, scale=(0.08, 1.0)), flip),
    }
    if name not in known:
        raise ValueError(f"augmentation must be one of {', '.join(known)}, got {name!r}")
    return known[name]
