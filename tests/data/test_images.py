"""Preprocessing of labelled images: pixel values, image size, class numbers, and augmentation."""

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.testing_utils import CaptureLogger

from aft_hf.data.image_size import resized_processor
from aft_hf.data.images import (
    ImagePipeline,
    build_augmentation,
    class_names,
    class_numbers,
    logger,
    match_classes,
    trained_classes,
)


def picture(size: tuple[int, int] = (20, 30), mode: str = "RGB") -> Image.Image:
    """Return an image of random pixels; `size` is (width, height), as in PIL."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def batch(count: int, height: int, width: int) -> torch.Tensor:
    """Images whose values are all different and not 0."""
    size = count * 3 * height * width
    return torch.arange(1.0, size + 1).reshape(count, 3, height, width)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "LA"])
def test_pixel_values_are_those_of_the_processor_for_images_of_any_mode(mode):
    processor = ViTImageProcessorPil(size={"height": 8, "width": 12}, image_mean=[0.1, 0.2, 0.3])
    make = ImagePipeline(processor, image_column="x", label_column="y", numbers={"a": 0, "b": 1})
    sample = make({"x": picture(mode=mode), "y": "b"})
    expected = processor([picture(mode=mode).convert("RGB")], return_tensors="pt")["pixel_values"][0]
    assert expected.shape == (3, 8, 12)
    assert torch.equal(sample["pixel_values"], expected) and sample["labels"] == 1


def dataset(labels: list, feature=None) -> Dataset:
    return Dataset.from_dict({"label": labels}, features=None if feature is None else Features(label=feature))


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (dataset([1, 0], ClassLabel(names=["z", "a"])), ["z", "a"]),
        (dataset(["z", "a", "z"]), ["a", "z"]),
        (dataset([True, False]), ["False", "True"]),
        (dataset([10, 2]), [str(number) for number in range(11)]),
        *((dataset(labels), None) for labels in ([0.5, 1.5], [-1, 0], [0, 2**40], [[0, 1], [1, 0]])),
    ],
)
def test_classes_have_the_names_of_the_labels_and_other_labels_are_refused(rows, names):
    if names is None:
        with pytest.raises(ValueError, match="'label' must hold class names or class numbers from 0"):
            class_names(rows, "label")
    else:
        assert class_names(rows, "label") == names


@pytest.mark.parametrize("labels", (["a", None], [1.0, None]))
def test_rows_without_a_label_are_said_to_have_none(labels):
    with pytest.raises(ValueError, match=r"'label' has no label in some rows \(in a CSV file: an empty cell"):
        class_names(dataset(labels), "label")


def test_class_numbers_that_do_not_occur_are_told():
    with CaptureLogger(logger) as log:
        trained_classes(dataset([0, 1, 2]), "label", [])
        assert not log.out
        trained_classes(dataset([1, 2, 3]), "label", [])
    assert "column 'label' has class numbers up to 3, of which 3 occur" in log.out


def test_data_of_a_single_class_are_not_trained_on():
    with pytest.raises(ValueError, match="'label' has the single class 'images'; give at least two"):
        trained_classes(dataset(["images"]), "label", [])


def test_numbers_are_matched_with_a_model_whose_classes_are_numbers_only_by_name():
    sorted_as_text = sorted(str(number) for number in range(1, 11))
    assert match_classes(dataset([10, 2]), "label", ["0", *sorted_as_text]) == {10: 2, 2: 3}
    with pytest.raises(ValueError, match=r"labels that are not among the 10 classes \['1', .*: \['0'\]"):
        match_classes(dataset([*range(10)]), "label", sorted_as_text)
    assert match_classes(dataset([10, 2]), "label", sorted_as_text) == {10: 1, 2: 2}
    assert match_classes(dataset([3, 1]), "label", ["002", "001", "003"]) == {3: 2, 1: 1}
    assert match_classes(dataset(["LABEL_1"]), "label", ["0", "1"]) == {"LABEL_1": 1}
    in_order_of_text, names = sorted(map(str, range(11))), [chr(ord("a") + i) for i in range(11)]
    named = match_classes(dataset([2, 10], ClassLabel(names=names)), "label", in_order_of_text)
    assert named == match_classes(dataset([2, 10]), "label", in_order_of_text) == {2: 3, 10: 2}


def test_labels_are_numbered_by_name():
    assert class_numbers(dataset(["b", "a"]), "label", ["a", "b"]) == {"b": 1, "a": 0}
    assert class_numbers(dataset([0, 1], ClassLabel(names=["b", "a"])), "label", ["a", "b"]) == {0: 1, 1: 0}
    assert class_numbers(dataset([7]), "label", [str(number) for number in range(10)]) == {7: 7}
    assert class_numbers(dataset([True], Value("bool")), "label", ["False", "True"]) == {True: 1}
    assert class_numbers(dataset(["a"]), "label", ["a", "crane", "crane"]) == {"a": 0}
    with pytest.raises(ValueError, match=r"column 'label' has labels that each name several classes: \['crane'\]"):
        class_numbers(dataset(["crane"]), "label", ["a", "crane", "crane"])


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (dataset(["a", "c"]), "'c'"),
        (dataset([0, 1], ClassLabel(names=["a", "c"])), "'c'"),
        (dataset(["a", None]), "'None'"),
        (dataset([0, -1], ClassLabel(names=["a"])), "'-1'"),  # a missing label
    ],
)
def test_labels_of_other_classes_are_named(rows, named):
    with pytest.raises(ValueError, match=rf"not among the 2 classes \['a', 'b'\]: \[{named}\]"):
        class_numbers(rows, "label", ["a", "b"])


@pytest.mark.parametrize("name", ["shift", "crop", "resized_crop"])
def test_augmentation_keeps_the_shape_and_follows_the_seed(name):
    augment, images = build_augmentation(name, (16, 24)), batch(4, 16, 24)
    torch.manual_seed(1)
    first, second = augment(images), augment(images)
    torch.manual_seed(1)
    assert torch.equal(augment(images), first)
    assert first.shape == images.shape and not torch.equal(first, second)
    assert build_augmentation("none", (8, 8)) is None
    with pytest.raises(ValueError, match="one of none, shift, crop, resized_crop, got 'flip'"):
        build_augmentation("flip", (8, 8))


def test_crop_moves_each_image_by_up_to_an_eighth_and_flips_half_of_them():
    height, width, count = 16, 24, 64
    images = batch(1, height, width).expand(count, -1, -1, -1)
    padded = torch.nn.functional.pad(images[0], (3, 3, 2, 2))
    moved = {(top, left): padded[:, top : top + height, left : left + width] for top in range(5) for left in range(7)}
    flips, offsets = 0, set()
    for image in build_augmentation("crop", (height, width))(images):
        matches = [
            (at, flip) for at in moved for flip in (0, 1) if torch.equal(image.flip(-1) if flip else image, moved[at])
        ]
        ((offset, flip),) = matches
        flips, offsets = flips + flip, offsets | {offset}
    assert 16 < flips < 48 and len(offsets) > 15


def test_shift_moves_each_image_by_up_to_a_sixteenth_and_repeats_its_edges():
    for height, margin in ((32, 2), (8, 1)):  # at least by one
        images = batch(1, height, 16).expand(64, -1, -1, -1)
        padded = torch.nn.functional.pad(images[0], (1, 1, margin, margin), mode="replicate")
        tops = range(2 * margin + 1)
        moved = {(top, left): padded[:, top : top + height, left : left + 16] for top in tops for left in range(3)}
        shown = build_augmentation("shift", (height, 16))(images)
        offsets = {next(at for at in moved if torch.equal(image, moved[at])) for image in shown}
        assert len(offsets) > 2 * len(tops)


def pixels_of(processor):
    return processor(picture(size=(60, 40)), return_tensors="pt")["pixel_values"][0]


@pytest.mark.parametrize(
    ("size", "expected"),
    [({"height": 256, "width": 256}, {"height": 438, "width": 438}), ({"shortest_edge": 256}, {"shortest_edge": 438})],
)
def test_the_margin_that_a_centre_crop_cuts_off_keeps_its_share(size, expected):
    processor = DeiTImageProcessorPil(size=size, crop_size={"height": 224, "width": 224})
    larger = resized_processor(processor, (384, 384))
    assert dict(larger.size) == expected
    assert dict(larger.crop_size) == {"height": 384, "width": 384}
    for height, width in ((32, 48), (48, 32)):
        longer = resized_processor(processor, (height, width))
        assert set(dict(longer.size).values()) == {54}  # 256 / 224 of the longer side, so no pixel is padding
        assert pixels_of(longer).shape == (3, height, width)


def test_a_processor_that_resizes_no_images_resizes_them_to_another_size():
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, do_resize=False)
    assert not resized_processor(processor, (8, 8)).do_resize
    assert resized_processor(ViTImageProcessorPil(do_resize=None), (6, 10)).do_resize
    assert pixels_of(resized_processor(processor, (6, 10))).shape == (3, 6, 10)


def test_the_processor_that_was_given_stays_as_it_is_and_its_own_size_changes_nothing():
    processor = DeiTImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16})
    before = pixels_of(processor)
    resized_processor(processor, (32, 32))
    assert (pixels_of(processor) == before).all()
    assert (pixels_of(resized_processor(processor, (16, 16))) == before).all()
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    assert pixels_of(resized_processor(processor, (6, 10))).shape == (3, 6, 10)
