"""Property tests of configs: a valid one gives a model that trains, saves and loads; an invalid one is refused."""

import re
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from configs import valid_configs, wrong_fields


DTYPES = (torch.float32, torch.bfloat16)


def check(values: dict, dtype: torch.dtype) -> None:
    """Build a model, train one step, save, load, compare weights and outputs, and generate or classify."""
    torch.manual_seed(0)
    config = AFTConfig(**values)
    is_text = config.modality == "text"
    model = (AFTForCausalLM if is_text else AFTForImageClassification)._from_config(config, dtype=dtype)
    inputs = example(config, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = model.train()(**inputs).loss
    loss.backward()
    # Clipped as in recipes: dropout can produce a zero vector, where the slope of a LayerNorm is 1 / sqrt(epsilon).
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert loss.isfinite() and norm.isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    labels = inputs.pop("labels")
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            loaded = type(model).from_pretrained(directory, dtype=dtype)
            for name, value in values.items():
                assert value is None or getattr(loaded.config, name) == (
                    list(value) if name == "image_size" else value
                )
        saved = model.state_dict()
        assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())
        # Not bit for bit: how math libraries round the same sums depends on the alignment of the tensors in memory.
        torch.testing.assert_close(loaded(**inputs).logits, expected)
        assert expected.isfinite().all()
        if is_text:
            generated = loaded.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
            assert 3 <= generated.shape[1] <= 4 and generated.max() < config.vocab_size
        else:
            assert expected.shape == (len(labels), config.num_labels)


def example(config: AFTConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch of two random samples with labels."""
    if config.modality == "text":
        tokens = torch.randint(config.vocab_size, (2, 2))
        if config.pad_token_id is not None:
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        return {"input_ids": tokens, "labels": tokens}
    pixels = torch.randn(2, config.num_channels, *config.image_size, dtype=dtype)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (2,))}


@given(valid_configs(), st.sampled_from(DTYPES))
def test_a_valid_config_gives_a_model_that_trains_saves_loads_and_predicts(values, dtype):
    check(values, dtype)


def refused(values: dict, wrong: tuple) -> None:
    """Assert that AFTConfig refuses the wrong value with an error that names its field."""
    name, value = wrong
    with pytest.raises(ValueError) as error:
        AFTConfig(**values | {name: value})
    assert re.search(rf"\b{name}\b", str(error.value)), f"{error.value} does not name {name}"
    assert len(str(error.value)) < 1500


@given(valid_configs(), wrong_fields())
def test_an_invalid_field_is_refused_by_name(values, wrong):
    refused(values, wrong)
