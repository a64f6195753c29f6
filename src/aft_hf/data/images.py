"""Preprocessing of labeled images: the model's image processor, class numbers, and augmentation of batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import kornia.augmentation as augmentation
import torch
from datasets import ClassLabel, Dataset, Value
from PIL import Image
from torch import nn

from ..configuration_aft import MOST_LABELS
from .image_size import pixel_values
from .samples import Row, Sample, SampleKey, image_of


@dataclass
class ImagePipeline:
    """Maker of samples for evaluation and `Trainer`: pixel values, (channels, height, width), and class numbers."""

    processor: Any  # the model's image processor
    _: KW_ONLY
    image_column: str = "image"
    label_column: str = "label"
    # The class number of each label (see `class_numbers`). None: the labels are class numbers already.
    numbers: Mapping[Any, int] | None = None

    def __call__(self, row: Row, key: SampleKey | None = None) -> Sample:
        image, label = image_of(row, self.image_column), row[self.label_column]
        number = label if self.numbers is None else self.numbers[label]
        return {"pixel_values": self.pixels(image, key), "labels": torch.tensor(number)}

    def pixels(self, image: Image.Image, key: SampleKey | None) -> torch.Tensor:
        """Return the pixel values of an image; the key determines random numbers."""
        return pixel_values(self.processor, [image])[0]


def class_names(dataset: Dataset, column: str) -> list[str]:
    """Return the names of the classes, in the order of their numbers.

    A column of type `ClassLabel` declares them. Integer labels are class numbers already, and their text serves as the
    name. Other labels must be names, and are sorted.
    """
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return feature.names
    labels = dataset.unique(column) if isinstance(feature, Value) else [feature]
    # A larger number, such as a timestamp, would create as many class names.
    if all(type(label) is int and 0 <= label < MOST_LABELS for label in labels):
        return [str(number) for number in range(max(labels) + 1)]
    if all(isinstance(label, (str, bool)) for label in labels):
        return sorted(map(str, labels))
    allowed = f"class names or class numbers from 0 to {MOST_LABELS - 1}"
    raise ValueError(f"column {column!r} must hold {allowed}, got {str(labels[:5])[1:-1]}")


def class_numbers(dataset: Dataset, column: str, names: Sequence[str]) -> dict[Any, int]:
    """Return the index in `names` of each label that occurs in a column; raise a ValueError if it is not there.

    Labels are compared by name, so a `ClassLabel` may number the classes in another order.
    """
    feature, labels = dataset.features[column], dataset.unique(column)
    known = dict(enumerate(feature.names)) if isinstance(feature, ClassLabel) else {}  # a missing label is -1
    own = {label: known.get(label, str(label)) for label in labels}
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := [name for name in own.values() if name not in numbers]:
        raise ValueError(f"column {column!r} has labels that are not among the {len(names)} classes: {unknown[:5]}")
    counts = Counter(names)
    if doubled := [name for name in own.values() if counts[name] > 1]:
        raise ValueError(f"column {column!r} has labels that each name several classes: {doubled[:5]}; rename them")
    return {label: numbers[name] for label, name in own.items()}


def build_augmentation(name: str, size: tuple[int, int]) -> nn.Module | None:
    """Build the augmentation of batches of (height, width) images; None for "none".

    "shift" translates an image by up to a sixteenth of its sides, for digits and other images that must not be
    flipped. "crop" translates it by up to an eighth and flips it, as is usual for CIFAR-10. "resized_crop" cuts out 8
    to 100 % of the area and flips it, as is usual for ImageNet. Random numbers come from PyTorch's global generator.
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
