"""Property tests of configs: a valid one gives a model that trains, saves and loads; an invalid one is refused."""

import math
import re
import tempfile
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from aft_hf.configuration_aft import AFT_TYPES, MIXING_IMPLEMENTATIONS


RANGES = {field.name: field.metadata["range"] for field in fields(AFTConfig) if "range" in field.metadata}
ACTIVATIONS = st.sampled_from(sorted(ACT2FN))
DEVIATIONS = st.sampled_from([0.0, 0.02, 0.1, 1.0])
SHARES = st.sampled_from([0, 0.1, 0.5, 0.99])


@st.composite
def valid_configs(draw) -> dict[str, Any]:
    """Draw the arguments of a valid AFTConfig whose model is small and quick to build."""
    is_text = draw(st.booleans())
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    types = st.sampled_from([name for name in AFT_TYPES if is_text or name != "alibi"])
    aft_type = draw(st.one_of(types, st.lists(types, min_size=layers, max_size=layers)))
    epsilon = draw(st.sampled_from([1e-12, 1e-5, 1.0]))
    used = {aft_type} if isinstance(aft_type, str) else set(aft_type)
    values: dict[str, Any] = {
        "modality": "text" if is_text else "image",
        "aft_type": aft_type,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "hidden_size": heads * draw(st.integers(1, 6)),
        "intermediate_size": draw(st.none() | st.integers(1, 24)),
        "hidden_act": draw(ACTIVATIONS),
        "query_activation": draw(ACTIVATIONS),
        "layer_norm_eps": epsilon,
        "initializer_range": draw(st.sampled_from([1e-12, 0.02, 1.0])),
        "position_bias_init_std": draw(DEVIATIONS),
        "position_bias_multiplier": draw(st.sampled_from([1, 20.0])),
        # Dropout can produce a zero vector, and the embedding of padding is one. There the slope of a LayerNorm is
        # 1 / sqrt(epsilon), 1e6 for 1e-12, and the product over seven such LayerNorms overflows in any model.
        "hidden_dropout_prob": draw(SHARES) if epsilon > 1e-12 else 0.0,
        "drop_path_rate": draw(SHARES),
        "qkv_bias": draw(st.booleans()),
        "use_output_projection": draw(st.booleans()),
        "use_query": draw(st.booleans()),
        "position_bias_dim": draw(st.none() | st.integers(1, 8)),
        "window_size": draw(st.integers(1, 12)),
        "position_bias_reparameterized": draw(st.booleans()),
        "global_connectivity": draw(st.booleans()) or not used <= {"local", "conv"},
        "gumbel_temperature": draw(st.sampled_from([0.01, 0.5, 100])),
        "mixing_implementation": draw(st.sampled_from(MIXING_IMPLEMENTATIONS)),
        "use_position_embeddings": draw(st.none() | st.booleans()),
        "use_cache": draw(st.booleans()),
    }
    if used == {"conv"} and draw(st.booleans()):
        values["position_bias_selection"] = "gumbel"
    if "conv" in used:
        values["position_bias_entropy_weight"] = draw(st.sampled_from([0, 0.001, 1.0]))
    return values | draw(_text_fields(epsilon) if is_text else _image_fields(used))


@st.composite
def _text_fields(draw, epsilon: float) -> dict[str, Any]:
    vocabulary = draw(st.integers(1, 20))
    token = st.none() | st.integers(0, vocabulary - 1)
    return {
        "vocab_size": vocabulary,
        "max_position_embeddings": draw(st.integers(4, 12)),
        "kernel_size": draw(st.integers(1, 16)),
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": draw(token),
        "eos_token_id": draw(token | st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=2)),
        "pad_token_id": draw(token) if epsilon > 1e-12 else None,
    }


@st.composite
def _image_fields(draw, used: set[str]) -> dict[str, Any]:
    rows, columns, patch = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    cls_token = draw(st.booleans()) and "conv" not in used
    return {
        "image_size": draw(st.sampled_from([(rows * patch, columns * patch), [rows * patch, columns * patch]])),
        "patch_size": patch + draw(st.integers(0, 3)),
        "patch_stride": patch,
        "kernel_size": draw(st.integers(1, max(rows, columns))) * 2 - 1,
        "use_cls_token": cls_token,
        "pooling": draw(st.sampled_from(["cls", "mean"] if cls_token else ["mean"])),
        "num_channels": draw(st.integers(1, 4)),
        "num_labels": draw(st.integers(1, 5)),
    }


OF_IMAGES = ("image_size", "patch_size", "patch_stride")  # numbers or pairs of them
COUNTS = [name for name, (_, largest) in RANGES.items() if isinstance(largest, int) and name not in OF_IMAGES]
FLOATS = [name for name, (_, largest) in RANGES.items() if isinstance(largest, float)]
CHOICES = ("modality", "aft_type", "hidden_act", "query_activation", "mixing_implementation", "pooling")
CHOICES += ("position_bias_selection",)
# Without the fields of every config, which transformers does not check.
SWITCHES = [
    field.name
    for field in fields(AFTConfig)
    if isinstance(field.default, bool) and field.name in AFTConfig.__annotations__
]
NO_NUMBERS = st.sampled_from(["text", "", [], [1], {}, {"a": 1}])


@st.composite
def wrong_fields(draw) -> tuple[str, Any]:
    """Draw the name of a field and a value that is invalid for it in every config."""
    kind = draw(st.sampled_from(["count", "float", "choice", "switch", "labels"]))
    if kind == "count":
        name = draw(st.sampled_from(COUNTS))
        beyond = st.integers(max_value=0) | st.integers(min_value=RANGES[name][1] + 1)
        return name, draw(beyond | NO_NUMBERS | st.floats() | st.booleans())
    if kind == "float":
        name = draw(st.sampled_from(FLOATS))
        smallest, largest = RANGES[name]
        outside = st.floats().filter(lambda value: not smallest <= value <= largest)
        return name, draw(outside | st.sampled_from([math.nan, math.inf]) | NO_NUMBERS)
    if kind == "choice":
        known = {*ACT2FN, *AFT_TYPES, *MIXING_IMPLEMENTATIONS, "text", "image", "gumbel", "cls", "mean"}
        return draw(st.sampled_from(CHOICES)), draw(st.text().filter(lambda name: name not in known) | st.just({}))
    if kind == "switch":
        return draw(st.sampled_from(SWITCHES)), draw(NO_NUMBERS | st.integers() | st.floats())
    return "num_labels", draw(st.integers(max_value=-1) | st.integers(min_value=2**22 + 1) | NO_NUMBERS)


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
                stated = value is not None and hasattr(config, name)  # a model without a limit states none
                assert not stated or getattr(loaded.config, name) == (list(value) if name == "image_size" else value)
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
