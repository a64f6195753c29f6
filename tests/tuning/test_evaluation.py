"""Metrics, and metrics of saved models, compared with direct computations."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from runs import bpe_tokenizer
from tiny_models import vit_model
from tokenizers import normalizers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.testing_utils import CaptureLogger

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification, build_byte_tokenizer
from aft_hf.conversion import adapt_to_image_size, read_source
from aft_hf.data.images import logger as classes_logger
from aft_hf.loading import weights_digest
from aft_hf.publishing import build_card
from aft_hf.training.metrics import accuracy, accuracy_and_loss, code_length
from aft_hf.tuning.evaluation import evaluate_classifier, evaluate_language_model, logger


pytestmark = pytest.mark.usefixtures("without_limits")


CLASSES = 7
SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_heads": 2, "kernel_size": 3}
SIZES |= {"image_size": 16, "patch_size": 4}
TEXT_LABELS = {"image": Image(), "label": Value("string")}


# Metrics


def accuracies(scores: np.ndarray, labels: np.ndarray, *top_k: int) -> dict[str, float]:
    return accuracy(torch.tensor(scores), torch.tensor(labels), top_k or (1,))


def test_of_equal_scores_the_first_class_counts_as_argmax_has_it():
    assert accuracies(np.zeros((4, 4)), np.arange(4), 1, 2) == {"accuracy": 0.25, "top_2_accuracy": 0.5}
    assert accuracies(np.full((2, 3), np.nan), np.array([1, 2])) == {"accuracy": 0.0}  # of a model that is NaN
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 3, (200, 1000)), random.integers(0, 1000, 200)  # enough for any sort to mix
    own = scores[np.arange(200), labels][:, None]
    before = (scores > own).sum(1) + ((scores == own) & (np.arange(1000) < labels[:, None])).sum(1)
    assert accuracies(scores, labels, 100) == {"top_100_accuracy": (before < 100).mean()}


@pytest.mark.parametrize("classes", [5, 6])
def test_the_loss_of_a_classifier_is_the_cross_entropy_also_for_large_scores(classes):
    random = np.random.default_rng(0)
    scores, labels = (1000 * random.normal(size=(9, classes))).astype(np.float32), random.integers(0, classes, 9)
    exact = scores.astype(np.float64)
    losses = np.logaddexp.reduce(exact, 1) - exact[np.arange(9), labels]
    result = accuracy_and_loss(torch.tensor(scores), torch.tensor(labels))
    assert result.pop("loss") == pytest.approx(losses.mean(), rel=1e-12) and losses.mean() > 100
    assert result == accuracies(scores, labels, *((1,) if classes == 5 else (1, 5)))


def test_small_losses_count_beside_a_large_sum():
    nats = torch.tensor([2.0**24] + [1.0] * 1000) * math.log(2)  # float32 has 24 bits
    result = code_length(nats, torch.tensor([[1]] + [[0]] * 1000), ("byte",))
    assert result["bits_per_byte"] == pytest.approx(2**24 + 1000, rel=1e-7)


# Models


def processor_for(height: int, width: int | None = None) -> ViTImageProcessorPil:
    return ViTImageProcessorPil(size={"height": height, "width": width or height})


@pytest.fixture
def images():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (11, 16, 16, 3), dtype=np.uint8)
    rows = {"image": [PILImage.fromarray(x) for x in pixels], "label": [i % CLASSES for i in range(11)]}
    return labelled(rows, list(map(str, range(CLASSES))))


def classifier(aft=True):
    if not aft:
        return vit_model(num_labels=CLASSES).eval()
    config = AFTConfig(modality="image", aft_type="conv", num_labels=CLASSES, **SIZES)
    model = AFTForImageClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=3.0 if "mixer.kernel" in name else 1.0)  # so that kernels change the metrics
    return model.eval()


def metrics_by_hand(model, processor, images, **options):
    """Compute top-1, top-5 and loss one image at a time."""
    first = fifth = loss = 0
    for row in images:
        pixels = processor([row["image"]], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits = model(pixel_values=pixels, **options).logits[0].double()
        order = logits.argsort(descending=True).tolist()
        loss -= (logits[row["label"]] - logits.logsumexp(0)).item()
        first, fifth = first + (order[0] == row["label"]), fifth + (row["label"] in order[:5])
    return {
        name: total / len(images) for name, total in (("accuracy", first), ("top_5_accuracy", fifth), ("loss", loss))
    }


def test_accuracy_and_loss_count_every_image_once_whatever_the_batch_size(images):
    model, processor = classifier(), processor_for(16)
    expected = metrics_by_hand(model, processor, images)
    for batch_size in (1, 4, 64):
        actual = evaluate_classifier(model, processor, images, batch_size=batch_size)
        assert actual == pytest.approx(expected, rel=1e-4)
    # As in a model fine-tuned at a larger size: kernels of the size that the processor makes are not resized.
    expected, actual = (
        evaluate(model, processor_for(24), images, **options)
        for evaluate, options in ((metrics_by_hand, {}), (evaluate_classifier, {"image_size": (24, 24)}))
    )
    assert actual == pytest.approx(expected, rel=1e-4)
    assert evaluate_classifier(model.to(torch.bfloat16), processor, images).keys() == expected.keys()


@pytest.mark.parametrize("aft", [True, False], ids=["AFT-conv", "ViT"])
def test_images_of_another_size_go_through_models_that_can_take_them(images, aft):
    model, processor = classifier(aft), processor_for(16)
    larger = processor_for(24, 32)
    actual = evaluate_classifier(model, processor, images, image_size=(24, 32))
    if aft:  # the model itself is unchanged
        assert model.config.image_size == 16
        adapt_to_image_size(model, (24, 32))
    expected = metrics_by_hand(model, larger, images, **({} if aft else {"interpolate_pos_encoding": True}))
    assert actual == pytest.approx(expected, rel=1e-4)


def test_a_model_whose_kernels_cannot_be_stretched_is_taken_as_it_is(images):
    model, processor = classifier(), processor_for(16)
    for layer in model.aft.layers:
        layer.mixer.position_bias_selection = "gumbel"
    larger = processor_for(24)
    expected = metrics_by_hand(model, larger, images)
    with CaptureLogger(logger) as captured:
        actual = evaluate_classifier(model, processor, images, image_size=(24, 24))
    assert actual == pytest.approx(expected, rel=1e-4) and "position_bias_selection" in captured.out


@pytest.mark.parametrize("enlarge_patches", [False, True])
def test_patches_are_kept_as_trained_on_request(images, enlarge_patches):
    model, processor = classifier(), processor_for(16)
    actual = evaluate_classifier(model, processor, images, image_size=(24, 24), enlarge_patches=enlarge_patches)
    if not enlarge_patches:
        assert actual != pytest.approx(evaluate_classifier(model, processor, images, image_size=(24, 24)), rel=1e-4)
    adapt_to_image_size(model, 24, enlarge_patches=enlarge_patches)
    assert (model.config.kernel_size, model.config.patch_size) == (5, 6 if enlarge_patches else 4)
    larger = processor_for(24)
    assert actual == pytest.approx(metrics_by_hand(model, larger, images), rel=1e-4)


def test_classes_are_matched_by_name_where_the_model_knows_the_names(images):
    model = classifier()
    expected = metrics_by_hand(model, processor_for(16), images)
    names = [f"class {i}" for i in range(CLASSES)]
    model.config.id2label = dict(enumerate(names))
    shuffled = names[3:] + names[:3]
    numbers = [shuffled.index(names[label]) for label in images["label"]]
    renamed = labelled({"image": images["image"], "label": numbers}, shuffled)
    assert evaluate_classifier(model, processor_for(16), renamed) == pytest.approx(expected, rel=1e-4)


def labelled(images, names):
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": images["image"], "label": images["label"]}, features=features)


def test_data_of_other_classes_is_refused_with_both_lists(images):
    model = classifier()
    data = labelled(images, [f"tree {i}" for i in range(CLASSES)])
    expected = metrics_by_hand(model, processor_for(16), data)
    with CaptureLogger(classes_logger) as log:  # the model has no class names
        assert evaluate_classifier(model, processor_for(16), data) == pytest.approx(expected, rel=1e-4)
    told = "matched by number: the data has the 7 classes ['tree 0',", "the model 7: ['LABEL_0',"
    assert all(part in log.out for part in told)
    declared = labelled(images, [f"tree {i}" for i in range(CLASSES + 1)])  # of which the last one does not occur
    assert evaluate_classifier(model, processor_for(16), declared) == pytest.approx(expected, rel=1e-4)
    model.config.id2label = {i: f"animal {i}" for i in range(CLASSES)}
    animals = [f"animal {i}" for i in range(CLASSES)]
    declared = labelled(images, [*animals, "tree"])  # which does not occur, as after a filter
    assert evaluate_classifier(model, processor_for(16), declared) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(
        ValueError, match=r"not among the 7 of the model: \['tree 0', .*model's classes \(\['animal 0',"
    ):
        evaluate_classifier(model, processor_for(16), data)
    with pytest.raises(ValueError, match=r"the data has the 8 classes \[.*, the model 7"):
        more = {"image": images["image"], "label": [CLASSES, *images["label"][1:]]}
        evaluate_classifier(model, processor_for(16), labelled(more, [str(i) for i in range(CLASSES + 1)]))
    for names in (["0", "7"], ["3", "03"]):  # there is no class 7, and 3 has a name already
        data = labelled({"image": images["image"][:2], "label": [0, 1]}, names)
        with pytest.raises(ValueError, match=rf"labels that are not among the 7 classes .*: \['{names[1]}'\]"):
            evaluate_classifier(classifier(), processor_for(16), data)


def test_labels_that_are_numbers_mean_these_classes_in_whatever_order_a_folder_sorts_them(images):
    """Sorted as text, "10" comes before "2". Not every class has to occur."""
    numbers = [10, 2, 0, 5, 10, 2, 11]
    names = sorted(map(str, set(numbers)))
    torch.manual_seed(0)
    model = AFTForImageClassification(AFTConfig(modality="image", aft_type="conv", num_labels=12, **SIZES)).eval()
    torch.nn.init.normal_(model.classifier.weight, std=10)
    rows = {"image": images["image"][: len(numbers)], "label": [names.index(str(number)) for number in numbers]}
    texts = Dataset.from_dict(rows | {"label": list(map(str, numbers))}, features=Features(TEXT_LABELS))
    given = [{"image": image, "label": number} for image, number in zip(rows["image"], numbers)]
    expected = metrics_by_hand(model, processor_for(16), given)
    padded = [f"LABEL_{name:0>3}" for name in names]
    for data in (labelled(rows, names), labelled(rows, padded), texts):
        assert evaluate_classifier(model, processor_for(16), data) == pytest.approx(expected, rel=1e-4)


TEXT = "The quick brown fox jumps over the lazy dog, again. "  # 52 bytes


def language_model(aft=True, vocab_size=258):
    torch.manual_seed(0)
    if aft:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 10, "window_size": 4}
        return AFTForCausalLM(AFTConfig(vocab_size=vocab_size, **sizes)).eval()
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 10, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes)).eval()


def rows_of(*texts):
    return Dataset.from_dict({"text": list(texts)})


@pytest.mark.parametrize("aft", [True, False], ids=["AFT", "GPT-2"])
@pytest.mark.parametrize("length", [2, 10, 11, 21, 52])
@pytest.mark.parametrize("stride", [1, 3, None])
def test_every_token_but_the_first_is_scored_once_whatever_the_length_and_stride(stride, length, aft):
    model, text = language_model(aft), TEXT[:length]
    options = {"block_size": 10, "stride": stride, "batch_size": 3}
    result = evaluate_language_model(model, build_byte_tokenizer(), rows_of(text), **options)
    tokens, losses, step = torch.tensor(list(text.encode())), [], stride or 10
    for position in range(1, length):
        begin = max(0, -(-(position - 10) // step) * step)  # start of the first block that predicts the token
        with torch.no_grad():
            logits = model(input_ids=tokens[None, begin:position]).logits[0, -1].double()
        losses.append(-torch.log_softmax(logits, -1)[tokens[position]].item())
    bits = np.mean(losses) / np.log(2)
    assert result == pytest.approx({"bits_per_byte": bits, "bits_per_token": bits, "perplexity": 2**bits}, rel=1e-5)


def test_bits_per_byte_are_the_bits_of_the_tokens_over_the_bytes_of_the_texts_without_their_ends():
    """With logits of 0, each token has log2(V) bits."""
    model, tokenizer, texts = (
        language_model(aft=False, vocab_size=300),
        bpe_tokenizer(TEXT),
        ["é 文字 🙂 \r\n", "", TEXT],
    )
    torch.nn.init.zeros_(model.lm_head.weight)
    with CaptureLogger(logger) as log:
        result = evaluate_language_model(model, tokenizer, rows_of(*texts), block_size=10)
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    assert result["bits_per_token"] == pytest.approx(np.log2(300)) and log.out == ""
    assert result["bits_per_byte"] == pytest.approx(np.log2(300) * len(tokens) / len("".join(texts).encode()))


@pytest.mark.parametrize(
    ("normalizer", "text", "message"),
    [
        (normalizers.Lowercase(), TEXT, "changes 1 of 1 texts"),
        (normalizers.NFC(), "e\u0301 and more", "changes 1 of 1 texts"),
    ],
    ids=["lower case", "NFC"],
)
def test_a_tokenizer_that_changes_the_text_is_reported_by_a_warning(normalizer, text, message):
    model = language_model(aft=False, vocab_size=300)
    with CaptureLogger(logger) as log:
        evaluate_language_model(model, bpe_tokenizer(TEXT, normalizer), rows_of(text), block_size=10)
    assert message in log.out


def test_strides_above_the_block_size_and_texts_of_one_token_are_refused():
    for block_size, stride in ((10, 0), (10, 11), (0, None)):
        options = {"block_size": block_size, "stride": stride}
        with pytest.raises(ValueError, match=r"the stride of windows of .* tokens must be in 1 \.\. "):
            evaluate_language_model(language_model(), build_byte_tokenizer(), rows_of(TEXT), **options)
    for texts in (["x"], [""], ["", "x", ""]):
        with pytest.raises(ValueError, match="give at least 2"):
            evaluate_language_model(language_model(), build_byte_tokenizer(), rows_of(*texts), block_size=10)


# `aft-hf evaluate`, called as a user calls it


@pytest.fixture
def evaluate(run_command, tmp_path, images):
    """Function that evaluates the model in `tmp_path` on a file there, by default on the images."""
    images.to_parquet(tmp_path / "images.parquet")

    def evaluate(*options, data="images.parquet"):
        done = run_command(
            "aft-hf", "evaluate", tmp_path, tmp_path / data, "--out", tmp_path / "metrics.out", *options
        )
        assert "Traceback" not in done.stderr and "\r" not in done.stderr  # a log has no progress bars
        if done.returncode:
            return done, {}
        actual = json.loads((tmp_path / "metrics.out").read_text())
        assert actual.pop("weights") == weights_digest(tmp_path)
        return done, actual

    return evaluate


def test_a_classifier_is_evaluated_at_every_size_that_is_asked_for(evaluate, images, tmp_path):
    model, processor = classifier(), processor_for(16)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    done, metrics = evaluate("--image-size", 16, "--image-size", 24)
    assert max(map(len, done.stdout.splitlines())) <= 80 and "16 px" in done.stdout
    assert metrics == {
        f"{size} px": pytest.approx(evaluate_classifier(model, processor, images, image_size=(size, size)))
        for size in (16, 24)
    }
    rows = ["image,label"]
    for i, row in enumerate(images):
        row["image"].save(tmp_path / f"{i}.png")
        rows.append(f"{tmp_path}/{i}.png,{row['label']}")
    (tmp_path / "paths.csv").write_text("\n".join(rows))
    assert evaluate(data="paths.csv")[1]["as trained"] == pytest.approx(metrics["16 px"])
    Dataset.from_dict({"text": ["one"]}).to_parquet(tmp_path / "text.parquet")
    for data, options, code, message in (
        ("none.parquet", ["--device", "cpu"], 1, "none.parquet: no such file or folder"),
        ("images.parquet", ["--device", "no device"], 1, "cannot be evaluated on"),
        ("text.parquet", [], 1, "--image-column: the given data has no column 'image', it has 'text'"),
        ("text.parquet", ["--batch-size", 0], 2, "Invalid value for '--batch-size'"),
    ):
        done, _ = evaluate(*options, data=data)
        assert done.returncode == code and message in done.stderr


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "results.json"])
def test_no_file_but_an_earlier_evaluation_is_replaced(evaluate, tmp_path, run_command, name):
    classifier().save_pretrained(tmp_path)
    processor_for(16).save_pretrained(tmp_path)
    (tmp_path / "results.json").write_text('{"metrics": {}}')
    before = (tmp_path / name).read_bytes()
    evaluate()
    done = run_command("aft-hf", "evaluate", tmp_path, tmp_path / "images.parquet", "--out", tmp_path / name)
    assert done.returncode == 1 and f"{name}: is no evaluation, so it is not replaced" in done.stderr
    assert (tmp_path / name).read_bytes() == before
    (tmp_path / "metrics.out").write_text("")  # of mktemp
    assert evaluate("--batch-size", 2)[0].returncode == 0


def test_few_images_of_a_folder_that_is_sorted_by_class_have_several_classes(evaluate, images, tmp_path):
    (model := classifier()).save_pretrained(tmp_path)
    processor_for(16).save_pretrained(tmp_path)
    images.sort("label").to_parquet(tmp_path / "sorted.parquet")
    some = images.sort("label").shuffle(seed=0).take(4)
    assert len({*some["label"]}) > 1
    expected = evaluate_classifier(model, processor_for(16), some)
    assert evaluate("--max-samples", 4, data="sorted.parquet")[1] == {"as trained, 4 samples": pytest.approx(expected)}


def test_options_without_an_effect_are_refused(evaluate, tmp_path):
    classifier().save_pretrained(tmp_path)
    processor_for(16).save_pretrained(tmp_path)
    done, _ = evaluate("--stride", 3, "--text-column", "zzz")
    assert done.returncode == 1 and done.stderr.endswith(
        "--stride needs a language model, --text-column needs a language model\n"
    )


def test_a_model_without_image_processor_gets_that_of_its_conversion(evaluate, tmp_path, caplog):
    classifier(aft=False).save_pretrained(tmp_path)
    _, without = evaluate()
    assert "has no image processor" in caplog.text
    caplog.clear()
    read_source(tmp_path).image_processor.save_pretrained(tmp_path)
    assert evaluate()[1] == without and "has no image processor" not in caplog.text


def test_a_result_of_some_samples_or_another_stride_says_so_also_on_the_card(evaluate, tmp_path):
    config = AFTConfig(aft_type="conv", kernel_size=4, hidden_size=8, num_hidden_layers=1, vocab_size=258)
    AFTForCausalLM(config).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    rows_of(TEXT, TEXT, "another").to_parquet(tmp_path / "text.parquet")
    options = ("--block-size", 8, "--stride", 2, "--max-samples", 2)
    for _ in range(2):  # the file is replaced
        assert evaluate(*options, data="text.parquet")[1].keys() == {"blocks of 8, stride 2, 2 samples"}
    (tmp_path / "metrics.out").rename(tmp_path / "test.json")
    assert "| bits per byte, blocks of 8, stride 2, 2 samples | " in str(build_card(tmp_path))
    (tmp_path / "test.json").write_text('{"as trained, 100 samples": {"loss": 1.5}, "24 px, 9 samples": {"loss": 2}}')
    assert all(row in str(build_card(tmp_path)) for row in ("| loss, 100 samples | ", "| loss, 24 px, 9 samples | "))


def test_a_language_model_is_evaluated_in_blocks_of_texts(evaluate, tmp_path):
    language_model().save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    _, metrics = evaluate("--block-size", 10, data="text.txt")
    expected = evaluate_language_model(language_model(), build_byte_tokenizer(), rows_of(TEXT), block_size=10)
    assert list(metrics.values()) == [pytest.approx(expected)]
    assert evaluate("--block-size", 0, data="text.txt")[0].returncode == 2
    for content, message in (
        ("text,n\none,1\n,2\n", "rows.csv (row 1: column 'text' holds None"),
        ("story\none\n", "--text-column: the given data has no column 'text', it has 'story'"),
    ):
        (tmp_path / "rows.csv").write_text(content)
        done, _ = evaluate(data="rows.csv")
        assert done.returncode == 1 and message in done.stderr and done.stderr.strip().count("\n") == 0
