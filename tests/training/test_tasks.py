"""The tasks on small images and texts: data, metrics and saved models."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from runs import CLASSES, bpe_tokenizer, bytes_recipe, images_recipe, pixels_recipe, run
from tokenizers import normalizers
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.testing_utils import CaptureLogger
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import logging

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer, modeling_aft
from aft_hf.data import text
from aft_hf.data.samples import SampleKey
from aft_hf.training.recipe import build_recipe
from aft_hf.training.tasks import TASKS, BytesTask, TokensTask
from aft_hf.tuning.evaluation import evaluate_language_model


pytestmark = pytest.mark.usefixtures("datasets_cache")


def test_pixels_have_bits_per_dim_of_every_sub_pixel_and_generate_images_from_the_start_token(tmp_path, images):
    values = pixels_recipe(tmp_path, images)
    results = run(values)
    model, nats = AutoModelForCausalLM.from_pretrained(values["output_dir"]), 0.0
    for row in Dataset.from_parquet(str(images)).take(5):
        pixels = np.asarray(row["image"].resize((4, 4), PILImage.Resampling.BOX)).reshape(-1)
        tokens = torch.tensor([256, *pixels.tolist()])
        with torch.no_grad():
            nats += F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="sum").item()
    expected = nats / math.log(2) / (5 * 4 * 4 * 3)
    assert results["metrics"] == {"validation": {"bits_per_dim": pytest.approx(expected, rel=1e-5)}}
    assert model.config.bos_token_id == 256 and model.config.max_position_embeddings == 48
    tokens = model.generate(max_new_tokens=47, do_sample=True, suppress_tokens=[256])[0, 1:]
    assert len(tokens) == 47 and tokens.max() < 256


def test_a_model_of_the_bytes_alone_is_trained_further_with_its_embeddings(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "position_bias_dim": 2, "max_position_embeddings": 16}
    source = AFTForCausalLM(AFTConfig(**sizes))  # 256 tokens: no special tokens
    source.save_pretrained(tmp_path / "source")
    values = bytes_recipe(tmp_path, model={"pretrained": str(tmp_path / "source")})
    task = BytesTask(build_recipe(values))
    model = task.build_model()
    assert len(task.processor) == model.config.vocab_size == 256
    assert torch.equal(model.get_input_embeddings().weight, source.get_input_embeddings().weight)


def test_images_are_learned_augmented_and_read_by_workers(tmp_path, images, monkeypatch):
    values = images_recipe(tmp_path, images, steps=40, evaluate_every=40, save_every=40, micro_batch_size=None)
    told = []  # not that the entropy is missing from the loss
    monkeypatch.setattr(modeling_aft.logger, "warning_once", told.append)
    results = run(values)
    assert told == []
    assert results["metrics"]["validation"]["accuracy"] > 0.9
    model = AutoModelForImageClassification.from_pretrained(values["output_dir"])
    processor = AutoImageProcessor.from_pretrained(values["output_dir"])
    assert list(model.config.id2label.values()) == CLASSES and model.config.image_size == 8
    rows = Dataset.from_parquet(str(images))
    with torch.no_grad():
        logits = model.eval()(**processor([row["image"] for row in rows], return_tensors="pt")).logits
    accuracy = (logits.argmax(-1) == torch.tensor(rows["label"])).float().mean().item()
    assert results["metrics"]["validation"]["accuracy"] == pytest.approx(accuracy)
    loss = F.cross_entropy(logits.double(), torch.tensor(rows["label"])).item()  # without label smoothing
    assert results["metrics"]["validation"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_loss_of_a_task_has_the_entropy_of_the_position_biases(tmp_path, images):
    values = images_recipe(tmp_path, images, label_smoothing=0.0)
    task, batch = TASKS["images"](build_recipe(values)), {"labels": torch.tensor([0, 1])}
    batch["pixel_values"] = torch.rand(2, 3, 8, 8)
    task.augment = lambda *given: given
    model = task.build_model().eval()
    entropy = model.aft.position_bias_entropy()
    model.config.position_bias_entropy_weight = 0.5
    expected = F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"]) + 0.5 * entropy
    torch.testing.assert_close(task.loss(model, batch), expected)


def test_a_vit_trains_by_the_same_recipe_and_so_does_a_trained_model_of_another_size(tmp_path, images):
    model = {"architecture": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = images_recipe(tmp_path, images, model=model | {"intermediate_size": 16, "patch_size": 4}, steps=2)
    values["data"] = values["data"] | {"eval_crop_ratio": 0.8}
    run(values)
    again = values | {"model": {"pretrained": values["output_dir"]}, "output_dir": str(tmp_path / "again")}
    assert run(again)["parameters"] == run(values)["parameters"]
    processor = AutoImageProcessor.from_pretrained(values["output_dir"])  # evaluates centre crops of larger images
    assert processor(PILImage.new("RGB", (30, 20)), return_tensors="pt")["pixel_values"].shape == (1, 3, 8, 8)
    assert dict(processor.size)["shortest_edge"] == 10


def test_a_model_that_is_trained_further_keeps_the_order_of_its_classes_and_its_normalization(tmp_path, images):
    still = {"steps": 1, "optimizer": {"learning_rate": 1e-30}, "ema_decay": None}
    values = images_recipe(tmp_path, images, steps=20)
    values["data"] = values["data"] | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    expected = run(values)["metrics"]
    rows = Dataset.from_parquet(str(images))
    names = ["zebra", *CLASSES[1:]]  # sorted, the first class is the last
    rows.cast_column("label", ClassLabel(names=names)).to_parquet(images := tmp_path / "named.parquet")
    first = run(values | {"output_dir": str(tmp_path / "named"), "data": values["data"] | paths(images)})["metrics"]
    assert first == expected
    strings = [names[label] for label in rows["label"]]
    features = Features(image=Image(), label=Value("string"))
    Dataset.from_dict({"image": rows["image"], "label": strings}, features).to_parquet(tmp_path / "strings.parquet")
    again = still | {"model": {"pretrained": str(tmp_path / "named")}, "output_dir": str(tmp_path / "again")}
    again["data"] = {"image_size": 8} | paths(tmp_path / "strings.parquet")
    assert run(values | again)["metrics"] == {"validation": pytest.approx(expected["validation"], rel=1e-5)}


@pytest.mark.parametrize(
    "format",
    [
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
        {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [100.0] * 3},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.5] * 3},
        {"do_normalize": False},
        {"do_normalize": False, "do_rescale": False},
    ],
    ids=str,
)
def test_a_model_that_is_trained_further_keeps_its_image_size_and_sees_the_same_pixel_values(tmp_path, images, format):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "patch_size": 2, "kernel_size": 3, "num_labels": 3}
    source = str(tmp_path / "source")
    AFTForImageClassification(AFTConfig(modality="image", aft_type="conv", image_size=6, **sizes)).save_pretrained(
        source
    )
    before = ViTImageProcessorPil(size={"height": 6, "width": 6}, resample=3, **format)
    before.save_pretrained(source)
    values = images_recipe(tmp_path, images, model={"pretrained": source}, data=paths(images))
    assert "image_size" not in yaml.safe_load(build_recipe(values).to_yaml())["data"]
    task = TASKS["images"](build_recipe(values))
    assert task.build_model().config.image_size == 6
    picture = Dataset.from_parquet(str(images))["image"][0].convert("RGB")
    after, expected = (each(picture, return_tensors="pt")["pixel_values"] for each in (task.processor, before))
    torch.testing.assert_close(after, expected.float(), rtol=1e-5, atol=1e-5)
    values["data"] = values["data"] | {"image_size": 8}
    with CaptureLogger(logging.get_logger("aft_hf.training.tasks")) as log:
        TASKS["images"](build_recipe(values))
    assert "has images of 6 x 6 pixels, and is trained with data.image_size=8" in log.out
    values["model"] = {"pretrained": source, "image_size": 6}
    with pytest.raises(ValueError, match=r"model.image_size=6: the data determines 8; leave it out"):
        TASKS["images"](build_recipe(values)).build_model()


def paths(images: Path) -> dict[str, str]:
    return {"train": str(images), "validation": str(images)}


def test_the_recipe_orders_the_classes(tmp_path, images):
    values = images_recipe(tmp_path, images)
    model = values["model"] | {"id2label": {"0": "red", "1": "dark", "2": "light"}}
    task = TASKS["images"](build_recipe(values | {"model": model}))
    assert task.config_values["label2id"] == {"red": 0, "dark": 1, "light": 2}
    rows = Dataset.from_parquet(str(images))
    ordered = [[1, 2, 0][label] for label in rows["label"][:3]]  # dark, light, red
    assert [task.train[SampleKey(0, i)]["labels"].item() for i in range(3)] == ordered
    for number in range(12):  # folders are sorted as text: 0, 1, 10, 11, 2
        (tmp_path / "folders" / str(number)).mkdir(parents=True)
        for i in range(2):
            rows["image"][i].save(tmp_path / "folders" / str(number) / f"{i}.png")
    folders = {"data": {"image_size": 8} | paths(tmp_path / "folders")}
    folders["model"] = values["model"] | {"id2label": {i: i for i in range(12)}}
    task = TASKS["images"](build_recipe(values | folders))
    of_folder = task.train.rows.features["label"].names
    assert [task.train.make.numbers[of_folder.index(str(i))] for i in range(12)] == [*range(12)]
    assert task.build_model().config.id2label[11] == "11"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"id2label": {0: "light", 1: "dark", 2: "blue"}}, r"id2label=.*'blue'.*: give all 3 classes .*'red'"),
        ({"id2label": {0: "light", 1: "dark", 2: "red", 3: "red"}}, "give all 3 classes of the data"),
        ({"id2label": {"zero": "light", 1: "dark", 2: "red"}}, "model.id2label: must map each class number to its"),
        ({"id2label": ["light", "dark", "red"]}, "model.id2label: must map each class number to its name"),
        (
            {"label2id": {"red": 1}},
            "model.label2id=.*: the data determines {'dark': 0, 'light': 1, 'red': 2}; leave it out",
        ),
        ({"num_labels": 9}, "model.num_labels=9: the data determines 3; leave it out"),
    ],
    ids=str,
)
def test_classes_that_contradict_the_data_are_refused(tmp_path, images, model, message):
    values = images_recipe(tmp_path, images)
    with pytest.raises(ValueError, match=message):
        run(values | {"model": values["model"] | model})


def test_a_class_that_only_the_held_out_images_have_is_known(tmp_path, images):
    rows = Dataset.from_parquet(str(images)).take(20)
    features = Features(image=Image(), label=Value("string"))
    for rare in range(20):  # one of them is held out
        labels = ["rare" if i == rare else "usual" for i in range(20)]
        Dataset.from_dict({"image": rows["image"], "label": labels}, features).to_parquet(tmp_path / "rare.parquet")
        values = images_recipe(tmp_path, images, data={"train": str(tmp_path / "rare.parquet"), "image_size": 8})
        assert TASKS["images"](build_recipe(values)).config_values["label2id"] == {"rare": 0, "usual": 1}


def test_few_samples_of_a_folder_that_is_sorted_by_class_have_all_classes(tmp_path, images):
    rows = Dataset.from_parquet(str(images)).sort("label")
    rows.to_parquet(tmp_path / "sorted.parquet")
    data = {"max_train_samples": 12, "max_eval_samples": 12, "image_size": 8} | paths(tmp_path / "sorted.parquet")
    task = TASKS["images"](build_recipe(images_recipe(tmp_path, images, data=data)))
    for samples in (task.train, *task.evaluated.values()):
        assert {*samples.rows["label"]} == {0, 1, 2} and len(samples) == 12


def test_a_run_whose_classes_have_another_order_is_not_resumed(tmp_path, images):
    order = {"id2label": {0: "red", 1: "dark", 2: "light"}}
    values = images_recipe(tmp_path, images, steps=2)
    run(values)
    with pytest.raises(ValueError, match="was made with other training data"):
        run(values | {"steps": 3, "model": values["model"] | order})


def test_a_pretrained_model_of_other_sizes_is_refused_and_not_made_anew(tmp_path):
    values = bytes_recipe(tmp_path, steps=1)
    run(values)
    wider = {"pretrained": values["output_dir"], "hidden_size": 16}
    with pytest.raises(ValueError, match=r"aft.layers.0.\S+ has another size .* leave them out"):
        BytesTask(build_recipe(values | {"model": wider})).build_model()


@pytest.mark.parametrize("inside", ["", "outputs/run"])
def test_an_output_directory_in_the_data_is_refused(tmp_path, images, inside):
    values = images_recipe(tmp_path, images, output_dir=str(tmp_path / "data" / inside))
    (tmp_path / "data").mkdir()
    shutil.copy(images, tmp_path / "data" / "images.parquet")
    values["data"] = values["data"] | paths(tmp_path / "data")
    with pytest.raises(ValueError, match="lies in the data"):
        run(values)


def test_a_run_may_write_to_a_folder_named_like_generated_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(bytes_recipe(tmp_path, output_dir="generated", data={"train": "generated", "seq_len": 16}, steps=1))
    TASKS["bytes"](build_recipe(bytes_recipe(tmp_path, output_dir="generated/a", data={"train": "generated"})))


def test_a_bidirectional_model_is_trained_as_a_decoder(tmp_path):
    model = {"architecture": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BytesTask(build_recipe(bytes_recipe(tmp_path, model=model))).build_model().eval()
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, -1] = 77
    assert torch.equal(model(tokens).logits[0, :-1], model(changed).logits[0, :-1])


def test_text_beyond_ascii_has_bits_per_character_too(tmp_path):
    path = tmp_path / "text"
    path.write_text("äöü 文 " * 400, encoding="utf-8")
    metrics = run(bytes_recipe(tmp_path, steps=1))["metrics"]["validation"]
    validation = path.read_bytes()[len(path.read_bytes()) * 90 // 100 :][: 7 * 16 + 1][1:]
    characters = sum((byte & 0xC0) != 0x80 for byte in validation)
    ratio = metrics["bits_per_character"] / metrics["bits_per_byte"]
    assert ratio == pytest.approx(len(validation) / characters) and ratio > 1.3


TEXTS = {"train": ["naïve\n", "", "文字 🙂"] * 50, "validation": ["eins", "", "zwei"] * 9, "test": ["drei"] * 9}


def text_dataset(directory: Path, splits: tuple[str, ...] = ("train", "validation", "test")) -> Path:
    """Write a local dataset with a parquet file for each split."""
    for split in splits:
        directory.mkdir(exist_ok=True)
        Dataset.from_dict({"content": TEXTS[split]}).to_parquet(directory / f"{split}.parquet")
    return directory


def parts_of(values: dict) -> dict[str, bytes]:
    """Return the bytes from which the windows of each split are taken."""
    task = BytesTask(build_recipe(values))
    windows = {"train": task.train, **task.evaluated}
    return {name: Path(w.path).read_bytes()[w.start : w.stop] for name, w in windows.items()}


def test_the_texts_of_a_dataset_are_trained_on_as_bytes_in_its_own_splits(tmp_path):
    values = bytes_recipe(tmp_path, steps=2)
    values["data"] = {"dataset": str(text_dataset(tmp_path / "texts")), "text_column": "content", "seq_len": 16}
    assert parts_of(values) == {split: "\n".join(rows).encode() for split, rows in TEXTS.items()}
    assert run(values)["metrics"].keys() == {"validation", "test"}


def test_the_texts_of_one_split_or_file_are_split_by_position(tmp_path):
    joined = "\n".join(TEXTS["train"]).encode()
    folder = text_dataset(tmp_path / "texts", ("train",))
    Dataset.from_parquet(str(folder / "train.parquet")).to_json(tmp_path / "texts.jsonl")
    for dataset in (folder, tmp_path / "texts.jsonl"):
        values = bytes_recipe(tmp_path, data={"dataset": str(dataset), "text_column": "content", "seq_len": 16})
        parts = parts_of(values)
        assert b"".join(parts.values()) == joined and len(parts["train"]) == len(joined) * 90 // 100


FILE = {"dataset": None, "text_column": "text"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "file"}, "give either data.dataset or data.train"),
        ({"text_column": "text"}, "data.text_column: the train data has no column 'text', it has 'content', 'gaps'"),
        ({"text_column": "gaps"}, "row 1: column 'gaps' holds None"),
        ({"dataset": None}, "no data: give data.train=FILE"),
        (FILE | {"train": "nowhere"}, "data.train=nowhere: no such file"),
        (FILE | {"train": "{tmp_path}/test"}, r"data.train=.*test: is a folder; give a file"),
        ({"dataset": None, "train": __file__}, "data.text_column='content' needs data.dataset"),
        (FILE | {"train": __file__, "dataset_config": "x"}, "data.dataset_config='x' needs data.dataset"),
        ({"dataset": __file__, "dataset_config": "x"}, "is a file, which has no configuration 'x'"),
        ({"dataset": "{tmp_path}/test"}, r"there is nothing to train on: .* has no split 'train'"),
    ],
)
def test_data_without_texts_are_an_error(tmp_path, data, message):
    Dataset.from_dict({"content": ["a", "b"], "gaps": ["a", None]}).to_parquet(tmp_path / "a.parquet")
    text_dataset(tmp_path / "test", ("test",))
    data = {key: value and value.format(tmp_path=tmp_path) for key, value in data.items()}
    with pytest.raises(ValueError, match=message):
        run(bytes_recipe(tmp_path, data={"dataset": str(tmp_path / "a.parquet"), "text_column": "content"} | data))


TEXT = "y" * 199 + "The naïve fox, 文字 and 🙂 jump\nover the lazy dog. " * 60  # 90 % end within a character


def tokens_recipe(tmp_path: Path, **data) -> dict:
    bpe_tokenizer(TEXT).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "words.txt").write_text(TEXT, encoding="utf-8")
    data = {"train": str(tmp_path / "words.txt"), "tokenizer": str(tmp_path / "tokenizer"), "seq_len": 8} | data
    return bytes_recipe(tmp_path, task="tokens", data=data)


@pytest.mark.parametrize("part", [2**20, 300])
def test_the_tokens_of_a_text_are_those_of_the_tokenizer_in_each_split(tmp_path, monkeypatch, part):
    monkeypatch.setattr(text, "PART", part)  # the text is tokenized in parts, and no character is divided
    task = TokensTask(build_recipe(tokens_recipe(tmp_path)))
    tokenizer, joined = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), ""
    for split, windows in {"train": task.train, **task.evaluated}.items():
        tokens = np.fromfile(windows.path, dtype=np.uint32).tolist()
        words = tokenizer.decode(tokens)
        joined += words
        assert tokens == tokenizer(words)["input_ids"]
        assert task.tokens_per_byte[split] == len(tokens) / len(words.encode()) < 0.7
    assert joined == TEXT


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ({"architecture": "aft", "aft_type": "local"}, 8),
        ({"architecture": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}, 8),
        ({"architecture": "aft", "aft_type": "alibi"}, VERY_LARGE_INTEGER),
        ({"architecture": "aft", "aft_type": ["conv", "alibi"]}, VERY_LARGE_INTEGER),
        ({"architecture": "mamba", "hidden_size": 8, "num_hidden_layers": 1}, VERY_LARGE_INTEGER),
    ],
    ids=str,
)
def test_clients_cut_texts_at_the_limit_of_the_model_and_not_at_another(tmp_path, model, longest):
    aft = {"hidden_size": 8, "num_hidden_layers": 2, "position_bias_dim": 2} if model["architecture"] == "aft" else {}
    recipe = tokens_recipe(tmp_path)
    for task in (recipe, recipe | {"task": "bytes", "data": {"train": recipe["data"]["train"], "seq_len": 8}}):
        made = TASKS[task["task"]](build_recipe(task | {"model": aft | model}))
        config = made.build_model().config
        assert made.processor.model_max_length == longest
        # Trained further, the model has no limit either.
        assert getattr(config, "max_position_embeddings", VERY_LARGE_INTEGER) == longest


def test_a_model_without_a_limit_is_trained_further_on_any_length(tmp_path):
    sizes = {"aft_type": "alibi", "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 258}
    AFTForCausalLM(AFTConfig(**sizes)).save_pretrained(tmp_path / "source")
    task = BytesTask(build_recipe(bytes_recipe(tmp_path, model={"pretrained": str(tmp_path / "source")})))
    assert not hasattr(task.build_model().config, "max_position_embeddings")


def test_a_model_of_tokens_has_bits_per_token_and_per_byte_and_is_resumed(tmp_path):
    values = tokens_recipe(tmp_path)
    expected = run(values | {"output_dir": str(tmp_path / "whole")})
    run(values | {"steps": 6})
    results = run(values)
    assert results["losses"] == expected["losses"] and results["metrics"] == expected["metrics"]
    model, tokenizer = (kind.from_pretrained(values["output_dir"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    size = len(TEXT.encode())
    test = TEXT.encode()[size * 95 // 100 :].decode(errors="ignore")
    actual = evaluate_language_model(model, tokenizer, Dataset.from_dict({"text": [test]}), block_size=8)
    assert results["metrics"]["test"] == pytest.approx(
        {name: actual[name] for name in ("bits_per_token", "bits_per_byte")}, rel=1e-5
    )
    other = tmp_path / "other"
    bpe_tokenizer(TEXT).save_pretrained(other)
    run(values | {"data": values["data"] | {"tokenizer": str(other)}, "steps": 13})  # the same tokens elsewhere
    build_byte_tokenizer().save_pretrained(other)
    with pytest.raises(ValueError, match="other training data"):
        run(values | {"data": values["data"] | {"tokenizer": str(other)}, "steps": 14})


def test_a_tokenizer_that_changes_the_text_is_reported_although_its_tokens_are_cached(tmp_path):
    (tmp_path / "text").write_text("One TWO three. " * 9)
    lower = bpe_tokenizer("one two three", normalizers.Lowercase())
    for _ in range(2):
        logging.warning_once.cache_clear()
        with CaptureLogger(text.logger) as log:
            text.tokenize_file(tmp_path / "text", (0, 100), lower)
        assert "the tokenizer changes the text, for example to lower case" in log.out


def test_a_text_that_cannot_be_tokenized_is_named(tmp_path):
    values = tokens_recipe(tmp_path)
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(ValueError, match=r"words.txt: its text cannot be tokenized .*utf-8"):
        run(values)
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        run(tokens_recipe(tmp_path, tokenizer="./nowhere"))


@pytest.mark.parametrize("task", ["bytes", "pixels", "images"])
def test_generated_data_and_the_first_samples_of_them_serve_to_try_a_recipe(tmp_path, capsys, task):
    values = images_recipe(tmp_path, tmp_path) if task == "images" else bytes_recipe(tmp_path)
    model = values["model"] | ({} if task == "images" else {"max_position_embeddings": 3072})
    data = {"train": "generated", "max_train_samples": 9, "max_eval_samples": 3}
    data |= {"bytes": {"seq_len": 16}, "pixels": {"image_size": 8}, "images": {"image_size": 8}}[task]
    run(values | {"task": task, "model": model, "data": data, "steps": 2})
    assert f"{task}: 9 samples, 1 steps in an epoch, 2 steps" in capsys.readouterr().out
