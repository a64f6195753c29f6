"""Tests of the functions of the demo's tabs, without a browser."""

import configparser
import html
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from saved_models import changed
from tiny_models import image_model
from transformers import BloomConfig, BloomForCausalLM

from aft_hf.errors import InputError


gr = pytest.importorskip("gradio", reason="the demo needs gradio: pip install -c constraints.txt -e '.[demo]'")
ROOT = Path(__file__).parents[2]


def noise(width=20, height=12, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture
def image_demo(models):
    import image_tab
    from loading import load

    loaded = load(models["image"])
    return image_tab.ImageDemo(loaded.model, loaded.processor)


@pytest.fixture
def text_demo(models):
    import text_tab
    from loading import load

    loaded = load(models["text"])
    return text_tab.TextDemo(loaded.model, loaded.processor)


@pytest.fixture
def pixel_demo(models):
    import pixel_tab
    from loading import load

    return pixel_tab.PixelDemo(load(models["pixel"]).model)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_probabilities_of_any_kind_of_image(image_demo, mode):
    answer = image_demo.classify(noise(mode=mode))
    assert set(answer) == set("0123456789") and abs(sum(answer.values()) - 1) < 1e-5
    image = noise(16, 16)
    seen = image_demo.seen(image_demo.pixels(image))
    assert np.abs(np.asarray(seen, int) - np.asarray(image, int)).max() <= 1  # what the model sees is the image again
    assert image_demo.classify(None) is None and "Choose an image" in image_demo.look(None, 1, 1, None)[1]


def test_maps_change_with_layer_head_and_patch(image_demo):
    image = noise()
    choices = [(1, 1, None), (2, 1, None), (1, 2, None), (1, 1, (0, 0))]
    biases = [image_demo.look(image, *choice)[2] for choice in choices]
    assert len(set(biases)) == 4


def test_the_head_that_is_shown_first_moves_the_weights_in_a_pattern_and_leaves_several(image_demo):
    with torch.no_grad():
        for layer in image_demo.model.aft.layers:
            layer.mixer.kernel_scale.zero_(), layer.mixer.kernel_shift.zero_()
        image_demo.model.aft.layers[1].mixer.kernel_scale[2] = 1.0
        image_demo.model.aft.layers[0].mixer.kernel_scale[1] = 100.0  # one patch has all the weight
        image_demo.model.aft.layers[0].mixer.kernel_shift[0] = -9.0  # all of its kernel is hidden
    assert image_demo.most_telling(noise()) == (2, 3)


@pytest.mark.parametrize("layer, head", [(0, 1), (1, 5)])
def test_layers_and_heads_that_do_not_exist_are_refused(image_demo, layer, head):
    with pytest.raises(ValueError, match=r"layer must be|heads are"):
        image_demo.look(noise(), layer, head, None)


def test_biases_of_patches_that_are_not_seen_are_grey():
    from pictures import UNSEEN, bias_map

    pixels = np.asarray(bias_map(np.array([[-np.inf, 0.0]]), 1.0))
    assert (pixels[0, 0] == round(UNSEEN[0] * 255)).all() and pixels[0, 1].min() > 240


def text_of(page):
    return html.unescape(re.sub("<[^>]+>", "", page))


def test_a_text_goes_on_and_repeats(text_demo):
    first, again, other = (list(text_demo.complete("Hello <b>", 20, 1.0, seed)) for seed in (0, 0, 1))
    assert first == again and first[-1] != other[-1] and len(first) > 1
    assert text_of(first[-1]).startswith("Hello <b>") and "<b>" not in first[-1]
    prompt = text_demo.tokenizer("abc", return_tensors="pt")
    expected = text_demo.tokenizer.decode(text_demo.model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert text_of(list(text_demo.complete("abc", 12, 0, 0))[-1]) == expected  # at temperature 0


@pytest.mark.parametrize(
    "prompt, count, temperature, seed, message",
    [
        (" \n", 5, 1.0, 0, "prompt is empty"),
        (None, 5, 1.0, 0, "prompt is empty"),
        ("a", 10**9, 1.0, 0, "1 to 1000"),
        ("a", None, 1.0, 0, "1 to 1000"),
        ("a" * 60, 5, 1.0, 0, "at most 64 tokens, and the prompt has 60: ask for at most 4"),
        ("a" * 70, 5, 1.0, 0, "shorten the prompt"),
        ("a" * 20_001, 5, 1.0, 0, "has 20,001 characters, and this page takes 20,000"),
        ("a", 5, -1.0, 0, "temperature"),
        ("a", 5, 1.0, None, "seed"),
    ],
)
def test_what_a_writer_gets_wrong_is_said(text_demo, prompt, count, temperature, seed, message):
    with pytest.raises(ValueError, match=message):
        list(text_demo.complete(prompt, count, temperature, seed))


def test_the_upper_half_stays_and_the_lower_is_made_up(pixel_demo, monkeypatch):
    made, image = [], noise()
    page = list(pixel_demo.complete(image, 1.0, 0))[-1]
    assert all(title in page for title in ("Original", "Given", "Drawing 1", "Drawing 4"))
    with pytest.raises(ValueError, match="no image yet"):
        list(pixel_demo.complete(None, 1.0, 0))
    monkeypatch.setattr(type(pixel_demo), "_page", lambda self, original, tokens, given: made.append(tokens.clone()))
    pages = list(pixel_demo.complete(image, 1.0, 0))
    assert len(pages) == 3  # before, and after each of two rows
    list(pixel_demo.complete(image, 1.0, 0))
    small = torch.from_numpy(np.asarray(pixel_demo.small(image)).astype(np.int64)).flatten()
    first, second = made[len(made) // 2 - 1], made[-1]
    assert first.shape == (4, 48) and (first[:, :24] == small[:24]).all() and first.max() < 256
    assert (first == second).all() and not (first[0, 24:] == first[1, 24:]).all()


def test_the_models_of_the_repository_are_shown_unless_another_of_their_kind_is_given(models):
    import app
    from loading import IMAGE, PIXEL, SHIPPED, TEXT

    shipped = app.choose([])
    assert shipped.keys() == {IMAGE, TEXT, PIXEL} and all(Path(each).parent == SHIPPED for each in shipped.values())
    assert app.choose([models["text"]]) == shipped | {TEXT: models["text"]}


def test_the_page_says_what_a_model_is_and_how_good(models):
    from loading import SHIPPED, load

    about = load(str(SHIPPED / "cifar10-aft-conv")).about
    assert "ten classes of CIFAR-10" in about and re.search(r"Measured: accuracy 0\.\d+ on CIFAR-10", about)
    assert "million parameters" in about
    assert "No results are recorded" in load(models["text"]).about


@pytest.mark.parametrize("header", ["a: [", "a: !!python/tuple [1]", "[" * 3000, "tags: 5", "- a", "a: &a [*a]"])
def test_a_card_that_cannot_be_read_leaves_the_model_in_its_tab(models, tmp_path, header):
    from loading import load

    shutil.copytree(models["text"], tmp_path / "text")
    (tmp_path / "text" / "README.md").write_text(f"---\n{header}\n---\nIt writes.\n")
    assert "No results are recorded" in load(str(tmp_path / "text")).about


def test_pictures_beside_a_model_that_cannot_be_read_are_no_examples(models, tmp_path, monkeypatch):
    import app
    import image_tab

    shown = []
    monkeypatch.setattr(image_tab, "image_input", lambda value, **options: shown.append(value) or gr.Image())
    shutil.copytree(models["image"], tmp_path / "image")
    changed(id2label={str(i): f"class {i}" for i in range(10)})(tmp_path / "image" / "config.json")
    (tmp_path / "image" / "1.jpg").write_bytes(b"no image")
    noise().save(tmp_path / "image" / "2.jpg")
    app.build_app({"image": str(tmp_path / "image")})
    assert shown == [str(tmp_path / "image" / "2.jpg")]


def test_images_of_several_visitors_are_computed_at_the_same_time(models):
    import app

    limits = {
        each.concurrency_id: each.concurrency_limit for each in app.build_app({"image": models["image"]}).fns.values()
    }
    assert limits["images"] == 4


def test_a_model_that_no_tab_can_show_is_refused(tmp_path):
    from loading import SHIPPED, load

    with pytest.raises(InputError, match="nowhere"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="classify images, and language models"):
        load(str(SHIPPED / "cifar10-vit"))


@pytest.mark.parametrize("classes", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}], ids=str)
def test_a_classifier_that_does_not_choose_one_of_several_classes_is_refused(classes, models, tmp_path):
    from loading import kind_of

    image_model(**classes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="choose one of several classes"):
        kind_of(str(tmp_path))


def built(**sources):
    """The page of these models: the number of its events, and what tabs say instead."""
    import app

    page = app.build_app({kind: str(source) for kind, source in sources.items()})
    said = [each.value for each in page.blocks.values() if "aft-unavailable" in (each.elem_classes or ())]
    return len(page.fns), [each for each in said if "No model is given" not in each]


def test_a_model_that_a_tab_cannot_show_leaves_the_other_tabs(models, tmp_path):
    shutil.copytree(models["image"], tmp_path / "gray")
    image_model(num_channels=1).save_pretrained(tmp_path / "gray")
    events, (said,) = built(image=tmp_path / "gray", text=models["text"])
    assert events == built(text=models["text"])[0]
    assert re.search(r"gray: this tab cannot show the model \(pixel_values must be \(batch, 1, ", said)


def test_models_of_one_layer_and_one_head_and_without_a_maximum_length_have_their_tabs(models, tmp_path):
    for name in ("image", "text"):
        shutil.copytree(models[name], tmp_path / name)
    image_model(num_hidden_layers=1, num_heads=1).save_pretrained(tmp_path / "image")
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(vocab_size=258, **sizes)).save_pretrained(tmp_path / "text")
    events, said = built(image=tmp_path / "image", text=tmp_path / "text")
    assert events > 3 and not said


def test_the_space_installs_what_the_package_asks_for():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    asked = (setup["options"]["install_requires"] + extras["demo"] + extras["train"]).split()
    lines = (ROOT / "spaces" / "demo" / "requirements.txt").read_text().splitlines()
    wanted = {line for line in lines if line and not line.startswith("#")}
    assert wanted <= set(asked)
    assert set(setup["options"]["install_requires"].split()) - wanted <= {"huggingface_hub>=2.4"}  # of transformers


def test_the_space_runs_the_gradio_that_was_tested():
    from huggingface_hub import RepoCard

    version = re.search(r"^gradio==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    front = RepoCard.load(ROOT / "spaces" / "demo" / "README.md").data
    assert (front.sdk, front.sdk_version, front.app_file) == ("gradio", version, "app.py")
