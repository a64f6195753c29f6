"""Adapting image processors to another image size."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf.data.image_size import resized_processor


def pixels_of(processor, size=(40, 60)):
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    return processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"][0]


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


def test_the_processor_that_was_given_stays_as_it_is_and_its_own_size_changes_nothing():
    processor = DeiTImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16})
    before = pixels_of(processor)
    resized_processor(processor, (32, 32))
    assert (pixels_of(processor) == before).all()
    assert (pixels_of(resized_processor(processor, (16, 16))) == before).all()
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    assert pixels_of(resized_processor(processor, (6, 10))).shape == (3, 6, 10)
