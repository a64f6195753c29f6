"""Untrusted image files: allowed formats, limited sizes, and an error that names the file."""

import io
import os
import stat
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_contents import BAD, EPS, encoded, strip, write_rows
from PIL import EpsImagePlugin, Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf.conversion import read_images
from aft_hf.data.image_files import FORMATS, MAX_PIXELS, ImageError, open_image
from aft_hf.data.images import ImagePipeline
from aft_hf.data.loading import load_local
from aft_hf.data.samples import RowSamples, SampleKey


pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A fake Ghostscript on the PATH that leaves a trace file when it is started."""
    trace, folder = tmp_path / "it-ran", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {trace}\n")
    (folder / "gs").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    yield trace
    assert not trace.exists(), "Ghostscript was started"


def test_the_trace_shows_what_pillow_alone_does(ghostscript):
    with pytest.raises(OSError), Image.open(io.BytesIO(EPS)) as image:
        image.load()
    assert ghostscript.exists()
    ghostscript.unlink()


@pytest.mark.parametrize("format", FORMATS)
def test_known_formats_are_read_as_files_and_from_memory(tmp_path, format):
    content = encoded(format)
    (tmp_path / "picture").write_bytes(content)
    for image in (open_image(tmp_path / "picture"), open_image(content)):
        assert image.mode == "RGB" and image.size == (4, 6)
        assert np.abs(np.array(image, dtype=int) - (200, 10, 10)).max() < 12  # JPEG and WebP are lossy


@pytest.mark.parametrize(("content", "told"), BAD.values(), ids=BAD)
def test_what_is_no_picture_of_a_reasonable_size_is_one_line_with_its_name(tmp_path, ghostscript, content, told):
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source, name in ((path, path), (content, "row 3")):
            with pytest.raises(ImageError) as error:
                open_image(source, str(name))
            assert str(error.value).startswith(f"{name}: ")
            assert told in str(error.value) and "\n" not in str(error.value)


@given(st.binary(max_size=60), st.sampled_from(FORMATS), st.integers(0, 200))
def test_any_bytes_and_any_cut_image_are_an_image_or_one_line(noise, format, size):
    for content in (noise, encoded(format)[:size], encoded(format)[:size] + noise):
        try:
            assert open_image(content, "name").mode == "RGB"
        except ImageError as error:
            assert str(error).startswith("name: ") and "\n" not in str(error)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_of_16_bits_per_pixel_the_upper_8_are_kept(format, dtype):
    values = np.array([[0, 255, 256], [32767, 54685, 65535]], dtype)
    content = encoded(format, Image.fromarray(values))
    np.testing.assert_array_equal(np.array(open_image(content))[..., 1], values >> 8)


@pytest.mark.parametrize(
    ("dtype", "tags"), [(np.int32, {}), (np.float32, {}), ("<u2", {262: 0})], ids=["int", "float", "0 for white"]
)
def test_pixels_whose_range_is_unknown_are_refused(dtype, tags):
    with pytest.raises(ImageError, match="save it with 8 bits per channel"):
        open_image(encoded("TIFF", Image.fromarray(np.full((4, 6), 300, dtype)), tiffinfo=tags))


def test_the_largest_image_is_read(monkeypatch):
    assert MAX_PIXELS == 8192 * 8192
    monkeypatch.setattr("aft_hf.data.image_files.MAX_PIXELS", 24)
    assert open_image(encoded("PNG")).size == (4, 6)
    with pytest.raises(ImageError, match="4 x 7 pixels"):
        open_image(encoded("PNG", Image.new("RGB", (4, 7))))
    monkeypatch.setattr("aft_hf.data.image_files.MAX_RATIO", 3)
    assert open_image(strip(1, 3)).size == (1, 3)
    for size in ((1, 4), (4, 1)):  # would be resized to a huge image
        with pytest.raises(ImageError, match=f"{size[0]} x {size[1]} pixels.* crop it"):
            open_image(strip(*size))


def test_images_stand_upright_as_their_exif_data_say():
    image = Image.new("RGB", (4, 6))
    image.putpixel((0, 0), (255, 0, 0))
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: rotate to the right
    upright = open_image(encoded("PNG", image, exif=exif))
    assert upright.size == (6, 4) and upright.getpixel((5, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("content", "told"), [BAD["an EPS"], BAD["169 million pixels"], (strip(1, 400_000), "1 x 400000 pixels")]
)
def test_an_unreadable_image_of_a_sample_is_refused_with_its_file_and_row(tmp_path, ghostscript, content, told):
    for name, each in (("a", encoded("PNG")), ("b", content)):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(each)
    table = write_rows(tmp_path / "1.parquet", [encoded("PNG"), content])
    for path, name in ((tmp_path / "images", "b/1.png: "), (table, "an image: ")):
        samples = RowSamples(load_local(path), ImagePipeline(ViTImageProcessorPil(), numbers={0: 0, 1: 1}))
        assert samples[SampleKey(0, 0)]
        for key in (1, SampleKey(0, 1)):
            with pytest.raises(ImageError, match=f"^row 1: .*{name}.*{told}"):
                samples[key]
        some = RowSamples(samples.rows.select([1, 0]).take(1), samples.make)  # as of rows that are held out
        with pytest.raises(ImageError, match=r"^row 1: "):
            some[0]


@pytest.mark.parametrize(("content", "told"), [*BAD.values(), (None, "has no image")], ids=[*BAD, "no image"])
def test_an_image_to_convert_with_is_named_by_file_or_row(tmp_path, ghostscript, content, told):
    write_rows(tmp_path / "1.parquet", [encoded("PNG")] * 3 + [content or None])
    with pytest.raises(ImageError, match=r"1\.parquet, row 3: ") as error:
        list(read_images(tmp_path / "1.parquet", 5))
    assert told in str(error.value) or not content
    if content is not None:
        (tmp_path / "images").mkdir()
        (tmp_path / "images" / "2.jpg").write_bytes(content)
        with pytest.raises(ImageError, match=r"2\.jpg: ") as error:
            list(read_images(tmp_path / "images", 5))
        assert told in str(error.value)
