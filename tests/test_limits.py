"""Limits of memory and time for libraries that expand what the files of a model say, and the classes of its parts."""

import os
import shutil
import signal
import sys

import pytest
import torch
from datasets import Dataset
from saved_models import changed
from tiny_models import image_model, language_model
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import build_byte_tokenizer, limits
from aft_hf.data.text import tokenize_file
from aft_hf.errors import InputError
from aft_hf.limits import limited
from aft_hf.loading import load
from aft_hf.training.recipe import build_recipe
from aft_hf.training.tasks import BytesTask
from aft_hf.tuning.evaluation import evaluate_language_model


pytestmark = [
    pytest.mark.usefixtures("datasets_cache"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can fork safely"),
]


@pytest.fixture(autouse=True)
def low(monkeypatch):
    """Low limits, so that the tests are fast."""
    monkeypatch.setattr(limits, "MEMORY", 2**29)
    monkeypatch.setattr(limits, "SECONDS", 1)


def fails():
    raise KeyError("a")


def test_a_function_gives_its_result_or_its_exception_and_prints_nothing(capfd):
    torch.ones(300, 300) @ torch.ones(300, 300)  # starts threads, which a forked process does not have
    assert limited(lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item(), "x.json") == 300**3
    assert limited(lambda: list(range(10**6)), "x.json") == list(range(10**6))
    limited(lambda: os.write(1, b"printed"), "x.json")
    with pytest.raises(KeyError, match="a"):
        limited(fails, "x.json")
    assert limited(fails, "x.json", again=False) is limited(lambda: lambda: 0, "x.json", again=False) is None
    assert limited(lambda: len(bytearray(2**29)), "x.json", size=2**19) == 2**29  # a longer text has more memory
    assert capfd.readouterr() == ("", "")


ENDLESS = {
    "memory of Python": lambda: [0] * 10**9,
    "memory of PyTorch": lambda: torch.ones(2**30),
    "memory behind another error": lambda: wrapped(lambda: bytearray(2**32)),
    "time": lambda: sum(iter(int, 1)),
    "a process that is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def wrapped(function):
    try:
        function()
    except MemoryError as error:
        raise OSError("the file is damaged") from error


@pytest.mark.parametrize("case", ENDLESS)
@pytest.mark.parametrize("again", [True, False])
def test_a_limit_is_an_error_of_one_line_that_names_the_file(again, case):
    with pytest.raises(InputError, match=r"^x\.json: reading it needs more than 0\.5 GiB of memory or 1 seconds$"):
        limited(ENDLESS[case], "x.json", again=again)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    language_model(hidden_size=8, num_heads=2, vocab_size=258).save_pretrained(root / "text")
    build_byte_tokenizer().save_pretrained(root / "text")
    image_model(hidden_size=8, num_heads=2, image_size=16).save_pretrained(root / "image")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(root / "image")
    return root


def sequence(kind, pattern="a"):
    step = {"type": "Replace", "pattern": {"String": pattern}, "content": 2 * pattern}
    return {"type": "Sequence", kind: [step] * 40}


SPECIAL = {"id": "x", "ids": [1] * 50_000, "tokens": ["a"] * 50_000}
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 10_000}
EXPANDING = {
    "normalizers that double": (AutoTokenizer, "tokenizer.json", {"normalizer": sequence("normalizers")}),
    "decoders that double": (AutoTokenizer, "tokenizer.json", {"decoder": sequence("decoders")}),
    "special tokens": (
        AutoTokenizer,
        "tokenizer.json",
        {"post_processor": TEMPLATE | {"pair": [], "special_tokens": {"x": SPECIAL}}},
    ),
    "extra tokens": (AutoTokenizer, "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 10**8}),
    "patches": (
        AutoImageProcessor,
        "preprocessor_config.json",
        {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 10**9, "patch_size": 1},
    ),
    "a side 32 times the other": (
        AutoImageProcessor,
        "preprocessor_config.json",
        {"image_processor_type": "DeiTImageProcessor", "size": {"shortest_edge": 4000}, "do_center_crop": False},
    ),
    "layers of one stage": (
        AutoModelForImageClassification,
        "config.json",
        {"model_type": "swin", "depths": [10**9, 1], "num_heads": [1, 1]},
    ),
}


def planted(saved, directory, file, changes):
    kind = "image" if file == "preprocessor_config.json" or "depths" in changes else "text"
    shutil.copytree(saved / kind, directory, dirs_exist_ok=True)
    changed(**changes)(directory / file)
    return directory


@pytest.mark.parametrize("case", EXPANDING)
def test_a_small_file_that_expands_without_end_is_refused(saved, tmp_path, case):
    auto_class, file, changes = EXPANDING[case]
    folder = planted(saved, tmp_path / "model", file, changes)
    with pytest.raises(InputError, match=r"model: reading it needs more than .* GiB of memory or \d seconds$"):
        load(auto_class, folder)


def test_a_tokenizer_that_expands_some_texts_only_is_refused_with_them(saved, tmp_path):
    rules = {"normalizer": sequence("normalizers", "some words")}
    tokenizer = load(AutoTokenizer, planted(saved, tmp_path / "model", "tokenizer.json", rules))
    model = load(AutoModelForCausalLM, saved / "text")
    for text, ends in (("other words", False), ("some words", True)):
        (tmp_path / "text.txt").write_text(text)
        for read in (
            lambda: tokenize_file(tmp_path / "text.txt", (0, 10), tokenizer),
            lambda text=text: evaluate_language_model(
                model, tokenizer, Dataset.from_dict({"text": [text]}), block_size=8
            ),
        ):
            if ends:
                with pytest.raises(InputError, match=r"model: reading it needs more than"):
                    read()
            else:
                assert read()


CLASSES = {
    "a model": {"tokenizer_class": "GPT2LMHeadModel"},
    "a model whose name ends as that of a fast tokenizer": {"tokenizer_class": "GPT2LMHeadModelFast"},
    "a class that loads any tokenizer": {"tokenizer_class": "AutoTokenizer"},
    "a function": {"tokenizer_class": "pipeline"},
    "a module": {"tokenizer_class": "models"},
}


@pytest.mark.parametrize("case", CLASSES)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_classes_that_are_no_tokenizer_are_refused_as_tokenizer_class(saved, tmp_path, file, case):
    folder = planted(saved, tmp_path / "model", file, CLASSES[case])
    if file == "config.json":
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"\(tokenizer_class='.*': must be a tokenizer"):
        load(AutoTokenizer, folder)


@pytest.mark.parametrize("model_type", ["rag", "encoder-decoder"])
def test_a_tokenizer_that_loads_others_from_a_folder_inside_is_refused(saved, tmp_path, model_type):
    parts = {"encoder": {"model_type": "rag"}, "decoder": {"model_type": "gpt2"}}
    folder = planted(saved, tmp_path / "model", "config.json", {"model_type": model_type, **parts})
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer_class='RagTokenizer': must be a tokenizer"):
        load(AutoTokenizer, folder)


@pytest.mark.parametrize("kind", ["ViTModel", "MllamaImageProcessor", "pipeline", "AutoImageProcessor", "PilBackend"])
@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type", "config"])
def test_an_image_processor_is_that_of_an_image_classifier(saved, tmp_path, key, kind):
    own = {"image_processor_type": None} | ({} if key == "config" else {key: kind})
    folder = planted(saved, tmp_path / "model", "preprocessor_config.json", own)
    if key == "config":
        changed(image_processor_type=kind)(folder / "config.json")
    with pytest.raises(InputError, match=rf"\(image_processor_type='{kind}': must be that of an image classifier"):
        load(AutoImageProcessor, folder)


def test_an_image_processor_without_a_class_is_the_usual_one_of_the_model(saved, tmp_path):
    folder = planted(saved, tmp_path / "model", "preprocessor_config.json", {"image_processor_type": None})
    for model_type, name in (("aft", "ViT"), ("deit", "DeiT")):
        changed(model_type=model_type)(folder / "config.json")
        assert type(load(AutoImageProcessor, folder)).__name__.startswith(f"{name}ImageProcessor")


def test_a_recipe_that_describes_a_billion_layers_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("some text to read" * 8)
    model = {"architecture": "bart", "decoder_layers": 10**9, "d_model": 16, "decoder_attention_heads": 2}
    values = {"task": "bytes", "model": model, "data": {"train": str(tmp_path / "text.txt"), "seq_len": 4}}
    values |= {"optimizer": {"learning_rate": 0.1}, "steps": 1, "global_batch_size": 1, "output_dir": str(tmp_path)}
    with pytest.raises(InputError, match=r"^model: reading it needs more than"):
        BytesTask(build_recipe(values)).build_model()
