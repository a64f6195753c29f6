"""Untrusted image files: allowed formats, limited sizes, and an error that names the file."""

import io
import os
import stat
import struct
import warnings
import zlib

import datasets
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf.conversion import ConversionError, read_images
from aft_hf.conversion.distillation import _Images
from aft_hf.conversion.images import pixel_batches
from aft_hf.data import image_size
from aft_hf.data.classification import TrainingImages
from aft_hf.data.image_files import FORMATS, MAX_PIXELS, ImageError, open_image
from aft_hf.data.image_size import pixel_values
from aft_hf.data.images import ImagePipeline, ImageRows
from aft_hf.data.loading import load_local, load_splits
from aft_hf.data.order import SampleKey
from aft_hf.data.pixel_sequences import PixelSequences


pytestmark = pytest.mark.usefixtures("datasets_cache")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """Return a black PNG of one bit per pixel. Its data end after a million pixels: only its header is tested."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(min((width + 7) // 8 * height, 2**17)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def encoded(format: str, image: Image.Image | None = None) -> bytes:
    file = io.BytesIO()
    (image or Image.new("RGB", (4, 6), (200, 10, 10))).save(file, format)
    return file.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
BAD = {
    "an EPS": (EPS, "cannot be read as an image; give one of BMP, GIF, JPEG"),
    "an icon": (encoded("ICO", Image.new("RGB", (16, 16))), "cannot be read as an image"),
    "a text": (b"no picture", "cannot be read as an image"),
    "nothing": (b"", "cannot be read as an image"),
    "a truncated JPEG": (encoded("JPEG", Image.effect_noise((64, 64), 90).convert("RGB"))[:700], "truncated"),
    "169 million pixels": (png(13000, 13000), "13000 x 13000 pixels; at most 67 million"),
    "400 million pixels": (png(20000, 20000), "at most 67 million"),
    "4e18 pixels": (png(2**31 - 1, 2**31 - 1), "at most 67 million"),
}


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
@pytest.mark.parametrize("as_file", [True, False])
def test_what_is_no_picture_of_a_reasonable_size_is_one_line_with_its_name(
    tmp_path, ghostscript, content, told, as_file
):
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError) as error:
            open_image(path if as_file else content, None if as_file else "row 3")
    assert str(error.value).startswith(f"{path}: " if as_file else "row 3: ")
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_of_16_bits_per_pixel_the_upper_8_are_kept(format, dtype):
    values = np.array([[0, 255, 256], [32767, 54685, 65535]], dtype)
    image = open_image(encoded(format, Image.fromarray(values)))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.array(image)[..., 1], values >> 8)


def test_a_pgm_of_16_bits_is_read():
    values = np.array([[0, 256, 65535]], ">u2")
    image = open_image(b"P5\n3 1\n65535\n" + values.tobytes())
    np.testing.assert_array_equal(np.array(image)[..., 1], values >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(dtype):
    with pytest.raises(ImageError, match="save it with 8 bits per channel"):
        open_image(encoded("TIFF", Image.fromarray(np.full((4, 6), 300, dtype))))


def test_a_tiff_with_0_for_white_is_refused():
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6), 300, "<u2")).save(file, "TIFF", tiffinfo={262: 0})
    with pytest.raises(ImageError, match="save it with 8 bits per channel"):
        open_image(file.getvalue())


def test_the_largest_image_is_read(monkeypatch):
    assert MAX_PIXELS == 8192 * 8192
    monkeypatch.setattr("aft_hf.data.image_files.MAX_PIXELS", 24)
    assert open_image(encoded("PNG")).size == (4, 6)
    with pytest.raises(ImageError, match="4 x 7 pixels"):
        open_image(encoded("PNG", Image.new("RGB", (4, 7))))


def test_images_stand_upright_as_their_exif_data_say():
    image = Image.new("RGB", (4, 6))
    image.putpixel((0, 0), (255, 0, 0))
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: rotate to the right
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    upright = open_image(file.getvalue())
    assert upright.size == (6, 4) and upright.getpixel((5, 0)) == (255, 0, 0)


def test_a_missing_file_and_a_pipe_are_said_so(tmp_path):
    with pytest.raises(ImageError, match=r"nowhere\.png: no such file"):
        open_image(tmp_path / "nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"pipe\.png: is not a regular file"):
        open_image(tmp_path / "pipe.png")


# ------------------------------------------------------------------------------------------------------------ resizing


SHORTER = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}
PROCESSORS = {
    "shorter side": DeiTImageProcessorPil(**SHORTER),
    "of torchvision": ViTImageProcessorPil(
        size={"shortest_edge": 256}, do_center_crop=True, crop_size=SHORTER["crop_size"]
    ),
    "divided by crop_pct": ConvNextImageProcessorPil(size={"shortest_edge": 224}, crop_pct=0.875),
    "fixed size": ViTImageProcessorPil(size={"height": 224, "width": 224}),
}


def strip(width: int, height: int) -> bytes:
    return encoded("PNG", Image.new("1", (width, height)))


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("size", [(1, 400_000), (2, 600_000)])
def test_an_image_that_would_be_resized_to_too_many_pixels_is_named(processor, size):
    image = open_image(strip(*size), "photo.png")
    with pytest.raises(ImageError, match=f"photo.png: {size[0]} x {size[1]} pixels cannot be resized to .*67 million"):
        pixel_values(processor, [image])
    turned = image.transpose(Image.Transpose.ROTATE_90)
    if processor is not PROCESSORS["fixed size"]:  # which a row of pixels fits
        with pytest.raises(ImageError, match=f"photo.png: {size[1]} x {size[0]} pixels cannot be resized to"):
            pixel_values(processor, [turned])


@pytest.mark.parametrize("size", [{"shortest_edge": 64, "longest_edge": 96}, {"longest_edge": 96}])
def test_a_limit_of_the_longer_side_limits_the_image(size):
    image = open_image(strip(1, 50_000), "photo.png")
    processor = ViTImageProcessorPil(size=size)
    assert max(image_size._resized(processor, *image.size)) <= 96
    assert pixel_values(ViTImageProcessorPil(do_resize=False), [image]).shape == (1, 3, 50_000, 1)


def test_what_fits_the_limit_is_resized(monkeypatch):
    monkeypatch.setattr("aft_hf.data.image_files.MAX_PIXELS", 64 * 128)
    processor = DeiTImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56})
    assert pixel_values(processor, [Image.new("L", (10, 20))]).shape == (1, 3, 56, 56)
    with pytest.raises(ImageError, match="an image: 10 x 21 pixels cannot be resized to 64 x 134"):
        pixel_values(processor, [Image.new("L", (10, 21))])


@pytest.mark.parametrize("make", [TrainingImages, PixelSequences, ImagePipeline])
def test_an_image_to_train_or_evaluate_with_that_is_too_long_is_named(tmp_path, make):
    for name, content in (("a", encoded("PNG")), ("b", strip(1, 400_000))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(content)
    rows = load_local(tmp_path)
    if make is TrainingImages:
        samples = TrainingImages(rows, {0: 0, 1: 1}, size=224, crop_scale=None, seed=0)
    elif make is PixelSequences:
        samples = PixelSequences(rows, image_size=224)
    else:
        samples = ImageRows(rows.with_transform(ImagePipeline(PROCESSORS["shorter side"])))
    first, second = (SampleKey(0, 0), SampleKey(0, 1)) if make is TrainingImages else (0, 1)
    assert samples[first]
    with pytest.raises(ImageError, match=r"b/1\.png: 1 x 400000 pixels cannot be resized"):
        samples[second]


def test_an_image_to_convert_with_that_is_too_long_is_named(tmp_path):
    write_parquet(tmp_path / "1.parquet", [encoded("PNG"), strip(1, 50_000)])
    with pytest.raises(ImageError, match=r"1\.parquet, row 1: 1 x 50000 pixels cannot be resized to 256 x 12800000"):
        list(pixel_batches(read_images(tmp_path / "1.parquet", 5), PROCESSORS["shorter side"]))
    images = _Images(list(read_images(tmp_path / "1.parquet", 5)), PROCESSORS["shorter side"])
    with pytest.raises(ImageError, match=r"1\.parquet, row 1: 1 x 50000 pixels"):
        images.collate([images[SampleKey(0, i)] for i in range(2)])


# ------------------------------------------------------------------------------------------- folders and parquet files


FEW = {name: BAD[name] for name in ("an EPS", "a truncated JPEG", "169 million pixels")}


def write_parquet(path, contents):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    rows = [{"bytes": content, "path": None} for content in contents]
    table = datasets.Dataset.from_dict({"image": rows, "label": [0] * len(rows)}, features=features)
    table.to_parquet(path)
    return path


@pytest.mark.parametrize(("content", "told"), FEW.values(), ids=FEW)
def test_an_image_to_convert_with_is_named_by_file(tmp_path, ghostscript, content, told):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(encoded("PNG"))
    (tmp_path / "images" / "2.jpg").write_bytes(content)
    with pytest.raises(ConversionError, match=r"2\.jpg: ") as error:
        list(read_images(tmp_path / "images", 5))
    assert told in str(error.value)


@pytest.mark.parametrize(("content", "told"), FEW.values(), ids=FEW)
def test_an_image_to_convert_with_is_named_by_parquet_file_and_row(tmp_path, ghostscript, content, told):
    (tmp_path / "images").mkdir()
    write_parquet(tmp_path / "images" / "1.parquet", [encoded("PNG")] * 3)
    write_parquet(tmp_path / "images" / "2.parquet", [encoded("PNG"), content])
    with pytest.raises(ConversionError, match=r"2\.parquet, row 1: ") as error:
        list(read_images(tmp_path / "images", 5))
    assert told in str(error.value)


def test_a_row_without_an_image_is_named(tmp_path):
    features = datasets.Features(image=datasets.Image())
    datasets.Dataset.from_dict({"image": [None]}, features=features).to_parquet(tmp_path / "1.parquet")
    with pytest.raises(ConversionError, match=r"1\.parquet, row 0: has no image"):
        list(read_images(tmp_path / "1.parquet", 5))


@pytest.mark.parametrize(("content", "told"), FEW.values(), ids=FEW)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_image_to_train_or_evaluate_with_is_named(tmp_path, ghostscript, content, told, streaming):
    for folder in ("cat", "dog"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        (tmp_path / "images" / folder / "1.jpg").write_bytes(content)
    rows = load_local(tmp_path / "images", streaming=streaming)
    with pytest.raises(ImageError, match=r"1\.jpg: ") as error:
        next(iter(rows))
    assert told in str(error.value)


@pytest.mark.parametrize("make", [TrainingImages, PixelSequences])
def test_an_image_to_train_with_is_named_by_row(tmp_path, ghostscript, make):
    path = write_parquet(tmp_path / "1.parquet", [encoded("PNG"), EPS])
    rows = load_splits(train=str(path))["train"]
    if make is TrainingImages:
        samples = TrainingImages(rows, {0: 0, 1: 1}, size=8, crop_scale=None, seed=0)
    else:
        samples = PixelSequences(rows, image_size=8, seed=0)
    assert samples[SampleKey(0, 0)]
    with pytest.raises(ImageError, match=r"row 1: .*cannot be read as an image"):
        samples[SampleKey(0, 1)]
