"""Sequence and token classification, and the pipelines of the text classifiers and the base models."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import image_model, language_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import (
    AFTForCausalLM,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    build_byte_tokenizer,
    context_parallel,
)


HEADS = [AFTForSequenceClassification, AFTForTokenClassification]
AUTO = {
    AFTForSequenceClassification: AutoModelForSequenceClassification,
    AFTForTokenClassification: AutoModelForTokenClassification,
}
TYPES = ["full", "local", "simple", "conv", "alibi"]
PAD = 257


def build(head=AFTForSequenceClassification, **options):
    sizes = {"hidden_size": 16, "num_heads": 2, "max_position_embeddings": 32, "window_size": 4, "kernel_size": 4}
    sizes |= {"vocab_size": 258, "pad_token_id": PAD, "num_labels": 3, "initializer_range": 0.5}
    return language_model(head=head, **(sizes | options)).double()


def padded(rows, side, pad=PAD):
    """Pad rows of tokens to a batch with its attention mask."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


ROWS = [torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 1, 5)]
# In float64, rounding in layers of width 16 costs a few of 16 digits, while an error in the code changes the first.
EXACT = {"atol": 1e-11, "rtol": 1e-11}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("aft_type", TYPES)
@torch.no_grad()
def test_a_padded_text_and_its_tokens_get_the_classes_that_they_get_alone(aft_type, side):
    for head in HEADS:
        model, batch = build(head, aft_type=aft_type), padded(ROWS, side)
        actual, expected = model(**batch).logits, [model(row[None]).logits[0] for row in ROWS]
        if head is AFTForTokenClassification:
            torch.testing.assert_close(actual[batch["attention_mask"].bool()], torch.cat(expected), **EXACT)
        else:
            torch.testing.assert_close(actual, torch.stack(expected), **EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_the_auto_classes_load_them_and_a_trained_language_model_lends_them_its_backbone(head, tmp_path):
    for source in (build(head), build(AFTForCausalLM)):
        source.save_pretrained(tmp_path)
        loaded = AUTO[head].from_pretrained(tmp_path, dtype=torch.float64, num_labels=3).eval()
        assert type(loaded) is head and {name.split(".")[0] for name in loaded.state_dict()} == {"aft", "score"}
        torch.testing.assert_close(loaded.aft.state_dict(), source.aft.state_dict(), rtol=0, atol=0)
        if type(source) is head:
            torch.testing.assert_close(loaded(ROWS[0][None]).logits, source(ROWS[0][None]).logits, **EXACT)


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_has_the_entropy_of_the_position_biases(head):
    batch = padded(ROWS, "right")
    labels = torch.tensor([0, 2, 1]) if head is AFTForSequenceClassification else batch["input_ids"] % 3
    plain, weight = build(head, aft_type="conv"), 0.5
    regularized = build(head, aft_type="conv", position_bias_entropy_weight=weight)
    entropy = regularized.aft.position_bias_entropy()
    difference = regularized(**batch, labels=labels).loss - plain(**batch, labels=labels).loss
    torch.testing.assert_close(difference, weight * entropy, **EXACT)
    assert entropy > 0.1


@pytest.mark.parametrize("head", HEADS)
def test_a_loss_of_ones_own_takes_the_place_of_the_library_s(head):
    model = build(head)
    model.loss_function = lambda *_, **__: torch.tensor(5.0)
    labels = torch.tensor([0]) if head is AFTForSequenceClassification else ROWS[0][None] % 3
    assert model(ROWS[0][None], labels=labels).loss == 5


@pytest.mark.parametrize("head", HEADS)
def test_shards_of_rows_are_refused(head):
    with pytest.raises(ValueError, match=f"got .*{head.__name__}"), context_parallel(build(head), None):
        pass


@pytest.fixture
def saved(tmp_path):
    """A function that saves a model in float32 with the byte tokenizer, and returns the directory."""

    def save(model):
        model.float().save_pretrained(tmp_path)
        build_byte_tokenizer(model_max_length=32).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_the_pipelines_of_texts_and_tokens(saved):
    classify = pipeline("text-classification", saved(build()), device="cpu")
    texts = ["a text", "another", "x"]
    together, alone = classify(texts, batch_size=3, top_k=None), [classify(text, top_k=None) for text in texts]
    for several, one in zip(together, alone):
        assert [each["label"] for each in several] == [each["label"] for each in one]
        # The tolerance of float32 for sums over a width of 16 and a softmax.
        assert all(abs(a["score"] - b["score"]) < 1e-5 for a, b in zip(several, one))
    answer = pipeline("token-classification", saved(build(AFTForTokenClassification)), device="cpu")("words")
    assert [each["index"] for each in answer] == [0, 1, 2, 3, 4] and {"entity", "score", "word"} <= set(answer[0])


@pytest.mark.parametrize("aft_type", ["full", "conv"])
@pytest.mark.parametrize("pool", [False, True])
def test_the_pipeline_of_features_of_images(aft_type, pool, tmp_path):
    model = image_model(aft_type, image_size=8, patch_size=2, kernel_size=3)
    model.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    features = np.array(pipeline("image-feature-extraction", str(tmp_path), device="cpu")(picture, pool=pool))
    with torch.no_grad():
        outputs = model.aft(**processor(picture, return_tensors="pt"))
    expected = outputs.pooler_output if pool else outputs.last_hidden_state
    np.testing.assert_allclose(features, expected.numpy(), atol=1e-5 * expected.abs().max().item())
