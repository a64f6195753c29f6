"""`aft-hf visualize` and the arrays behind its pictures."""

import re
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from transformers import BeitConfig, BeitForImageClassification, ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from typer.testing import CliRunner

from aft_hf import build_byte_tokenizer
from aft_hf.analysis import (
    bias_maps,
    draw_losses,
    key_features,
    on_patches,
    pictures,
    plot_position_biases,
)
from aft_hf.analysis.maps import VALUES
from aft_hf.cli import app


SMALL = {"hidden_size": 8, "num_heads": 2}
image_model = partial(tiny_models.image_model, image_size=(8, 12), patch_size=2, num_labels=3, kernel_size=3, **SMALL)
text_model = partial(tiny_models.language_model, max_position_embeddings=16, window_size=4, kernel_size=3, **SMALL)


def test_keys_are_those_of_the_projection():
    model, pixels = image_model(), torch.randn(1, 3, 8, 12)
    hidden = model(pixels, output_hidden_states=True).hidden_states
    keys = key_features(model, pixel_values=pixels)
    for layer, x, key in zip(model.aft.layers, hidden, keys):
        expected = layer.mixer.k_proj(layer.layernorm_before(x))[0].T
        torch.testing.assert_close(key, expected)
        torch.testing.assert_close(on_patches(key, (4, 6))[1, 2, 3], expected[1, 2 * 6 + 3])
    (key, _) = key_features(image_model("full"), pixel_values=pixels)  # whose class token is no patch
    torch.testing.assert_close(on_patches(key, (4, 6))[:, 0, 0], key[:, 1])


def test_bias_maps_are_kernels_or_tables():
    model = image_model()
    for layer, w, factor in zip(model.aft.layers, bias_maps(model), bias_maps(model, "expm1")):
        assert torch.equal(w, layer.mixer.kernel_bias()) and w.shape == (2, 3, 3)
        torch.testing.assert_close(factor, w.exp() - 1)
    assert [w.shape for w in bias_maps(text_model("conv"))] == [(2, 1, 3)] * 2
    table = bias_maps(text_model("local"), "exp")[0]
    assert table.shape == (2, 16, 16) and (table[:, 9, 2] == 1).all()  # outside the window


@pytest.mark.parametrize("values", pictures.BIASES)
def test_the_future_of_a_text_model_is_neither_drawn_nor_part_of_the_color_scale(values):
    model = text_model()
    past = torch.ones(16, 16, dtype=torch.bool).tril()
    for w, layer in zip(bias_maps(model, values), model.aft.layers):
        torch.testing.assert_close(w[:, past], VALUES[values](layer.mixer.position_bias(16))[:, past])
        assert w[:, ~past].isnan().all()
    figure = pictures.draw_maps([w[:1]], scale="own signed")
    (image,) = figure.axes[0].images
    assert (image.get_array().mask == ~past.numpy()).all() and image.norm.vmax <= w[:, past].abs().max()


def test_a_picture_of_one_map_shows_its_whole_title():
    figure = pictures.draw_maps([torch.randn(1, 5, 5)], scale="own", label="attention by offset")
    figure.draw_without_rendering()
    (box,) = [text.get_window_extent() for text in figure.texts]
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    (axis,) = figure.axes
    assert axis.title.get_window_extent().y1 <= box.y0  # which is not over the map


def test_pictures_have_no_background_and_the_ink_of_both_pages(tmp_path):
    plot_position_biases(image_model(), tmp_path / "w.png")
    pixels = np.asarray(Image.open(tmp_path / "w.png").convert("RGBA")).reshape(-1, 4)
    assert (pixels[:, 3] == 0).mean() > 0.2
    opaque = {tuple(pixel[:3]) for pixel in pixels[pixels[:, 3] == 255]}
    assert tuple(int(pictures.INK[i : i + 2], 16) for i in (1, 3, 5)) in opaque and (0, 0, 0) not in opaque
    red_minus_blue = [int(pixel[0]) - int(pixel[2]) for pixel in opaque]
    assert max(red_minus_blue) > 60 and min(red_minus_blue) < -60  # biases of both signs


def test_the_same_picture_is_the_same_file(tmp_path):
    maps = bias_maps(image_model())
    for name in ("a.svg", "b.svg"):
        pictures.save(pictures.draw_maps(maps, scale="own"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 12})
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"image_size": 8, "patch_size": 2}
    for name, model in {
        "image": image_model(),
        "full": image_model("full"),
        "text": text_model(),
        "vit": ViTForImageClassification(ViTConfig(**sizes)),
        "beit": BeitForImageClassification(BeitConfig(**sizes, use_absolute_position_embeddings=True)),
    }.items():
        model.save_pretrained(root / name)
    for name in ("image", "full"):
        processor.save_pretrained(root / name)
    for name in ("vit", "beit"):
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(root / name)
    build_byte_tokenizer(model_max_length=16).save_pretrained(root / "text")
    (root / "images").mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
    return root


def visualize(*arguments):
    return CliRunner().invoke(app, ["visualize", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("image", "biases", ["--values", "expm1"]),
        ("full", "biases", ["--values", "exp", "--layers", "2"]),
        ("text", "biases", ["--values", "w"]),
        ("full", "keys", ["--images", "images", "--heads", "4"]),
        ("vit", "attention", ["--images", "images", "--num-images", "2"]),
        ("beit", "attention", ["--images", "images"]),
        ("image", "keys", ["--images", "images"]),
        ("text", "keys", ["--text", "to be or not"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_picture_is_drawn(checkpoints, tmp_path, name, kind, options):
    options = [checkpoints / "images" if option == "images" else option for option in options]
    out = [tmp_path / "new" / "p.png", tmp_path / "new" / "p.svg"]
    done = visualize(checkpoints / name, kind, *options, "--out", out[0], "--out", out[1])
    assert done.exit_code == 0 and done.stdout.split() == [str(path) for path in out], done.exception
    assert re.search(r"<svg.*</svg>", out[1].read_text(), re.DOTALL) and len(list(out[0].parent.iterdir())) == 2
    colours = np.unique(np.asarray(Image.open(out[0]).convert("RGBA")).reshape(-1, 4), axis=0)
    assert len(colours) > 20  # the picture is not empty


@pytest.mark.parametrize("evaluations", ([], [{"step": 10, "accuracy": 0.2}, {"step": 20, "accuracy": 0.5}]), ids=len)
def test_a_run_has_a_validation_score_in_the_picture_of_its_losses(evaluations):
    losses = [{"step": 10, "loss": 5.0}, {"step": 20, "loss": 4.0}]
    metrics = {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.25}}
    figure = draw_losses({"metrics": metrics, "losses": losses, "evaluations": evaluations})
    drawn = [list(zip(*axis.lines[0].get_data())) for axis in figure.axes]
    assert drawn == [[(10, 5.0), (20, 4.0)], [(10, 0.2), (20, 0.5)] if evaluations else [(20, 0.5)]]


@pytest.mark.parametrize(
    ("name", "kind", "options", "message"),
    [
        ("vit", "biases", [], "model_type='vit', not 'aft'; give another model"),
        ("image", "attention", [], "has the type 'aft'; give one of vit, deit"),
        ("image", "biases", ["--images", "images", "--text", "a"], "--images needs the kind attention or keys"),
        ("vit", "attention", ["--values", "w", "--text", "a"], "--values needs the kind biases, --text"),
        ("image", "keys", ["--images", "images", "--num-images", "2"], "--num-images needs the kind attention"),
        ("image", "keys", ["--images", "images", "--text", "a"], "--text needs a model of text"),
        ("text", "keys", ["--images", "images", "--text", "a"], "--images needs a model of images"),
        ("image", "keys", [], "give --images"),
        ("text", "keys", [], "give --text"),
        ("text", "keys", ["--text", ""], "give at least one token"),
        ("image", "biases", ["--layers", "3"], "give numbers from 1 to 2"),
        ("image", "biases", ["--values", "log"], "values must be one of"),
        ("image", "biases", ["--out", "w.pdf"], "must end in .png or .svg"),
    ],
)
def test_a_checkpoint_or_option_that_visualize_cannot_draw_ends_in_a_one_line_error(
    checkpoints, name, kind, options, message
):
    options = [checkpoints / "images" if option == "images" else option for option in options]
    done = visualize(checkpoints / name, kind, *options)
    assert done.exit_code == 1 and isinstance(done.exception, (ValueError, OSError))
    assert message in str(done.exception)
