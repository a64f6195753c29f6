"""AFTConfig: defaults, derived fields, and every validator. tests/properties draws valid configs, and saves them."""

import copy
import dataclasses
import json
import pickle

import pytest
import torch
from saved_models import changed

from aft_hf import AFTConfig
from aft_hf.configuration_aft import MOST_LABELS


# The largest value of each field that is a number of something.
RANGES = {field.name: field.metadata.get("range", (0, 0.0)) for field in dataclasses.fields(AFTConfig)}
LARGEST = {name: largest for name, (_, largest) in RANGES.items() if isinstance(largest, int)}
LARGEST["num_labels"] = MOST_LABELS
IMAGE = {"modality": "image", "aft_type": "full"}
IMAGE_CONV = {"modality": "image", "aft_type": "conv"}

# The best character model of the paper, and what a caller of the config sees before anything is derived.
DEFAULTS = {"modality": "text", "aft_type": "local", "hidden_size": 256, "num_hidden_layers": 24, "window_size": 32}
DEFAULTS |= {"max_position_embeddings": 1024, "vocab_size": 256, "position_bias_dim": 256, "kernel_size": 11}
DEFAULTS |= {"intermediate_size": 1024, "num_heads": 1, "use_position_embeddings": True, "use_cls_token": False}
DEFAULTS |= {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "initializer_range": 0.02, "position_bias_init_std": 0.1}
DEFAULTS |= {"hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "position_bias_entropy_weight": 0.0}
DEFAULTS |= {"query_activation": "sigmoid", "gumbel_temperature": 0.5, "tie_word_embeddings": False, "use_cache": True}
DEFAULTS |= {"image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 2, "position_bias_multiplier": 1.0}


def test_the_defaults_are_those_of_the_design():
    assert {name: getattr(AFTConfig(), name) for name in DEFAULTS} == DEFAULTS and AFTConfig.model_type == "aft"


@pytest.mark.parametrize(
    ("modality", "aft_type", "positions", "cls_token", "pooling"),
    (
        ("text", "full", True, False, None),
        ("text", "local", True, False, None),
        ("text", "simple", True, False, None),
        ("text", "conv", False, False, None),
        ("text", "alibi", False, False, None),
        ("text", ["conv", "alibi"], False, False, None),
        ("text", ["conv", "simple"], True, False, None),
        ("image", "full", True, True, "cls"),
        ("image", "local", True, True, "cls"),
        ("image", "simple", True, True, "cls"),
        ("image", "conv", False, False, "mean"),
        ("image", ["full", "conv"], True, False, "mean"),
    ),
    ids=str,
)
def test_positions_class_token_and_pooling_follow_from_the_type(modality, aft_type, positions, cls_token, pooling):
    config = AFTConfig(modality=modality, aft_type=aft_type, num_hidden_layers=2)
    assert (config.use_position_embeddings, config.use_cls_token) == (positions, cls_token)
    assert config.pooling == pooling


@pytest.mark.parametrize("cls_token", (False, True))
def test_the_grid_is_rows_and_columns_of_patches_which_may_overlap(cls_token):
    config = AFTConfig(**IMAGE, image_size=(32, 48), patch_size=(8, 16), use_cls_token=cls_token)
    assert config.grid_size == (4, 3) and config.max_positions == 12 + cls_token
    assert config.pooling == ("cls" if cls_token else "mean")
    config = AFTConfig(**IMAGE, image_size=(32, 48), patch_size=10, patch_stride=(8, 4))
    assert config.grid_stride == (8, 4) and config.grid_size == (4, 12) and config.grid_of((16, 8)) == (2, 2)


# Arguments, and the parts that the error message must contain: the field, the wrong value and others.
INVALID = [
    ({"hidden_size": "a"}, ("hidden_size", "'a'")),
    ({"use_query": "yes"}, ("use_query", "'yes'")),
    ({"aft_type": 3}, ("aft_type", "3")),
    ({"modality": "audio"}, ("modality", "'audio'", "'text'", "'image'")),
    ({"aft_type": "linear"}, ("aft_type", "'linear'", "'full'", "'alibi'")),
    ({"aft_type": ["full", "linear"], "num_hidden_layers": 2}, ("aft_type", "'linear'")),
    ({"hidden_act": "gelo"}, ("hidden_act", "'gelo'")),
    ({"position_bias_selection": "top"}, ("position_bias_selection", "'top'", "'gumbel'")),
    ({"mixing_implementation": "flash"}, ("mixing_implementation", "'flash'", "'reference'")),
    ({**IMAGE, "pooling": "max"}, ("pooling", "'max'", "'cls'", "'mean'")),
    ({"pooling": "mean"}, ("pooling", "'mean'")),
    ({"aft_type": ["full", "conv"], "num_hidden_layers": 3}, ("aft_type", "2", "num_hidden_layers=3")),
    ({"num_heads": 3}, ("num_heads=3", "hidden_size=256")),
    ({"position_bias_selection": "gumbel"}, ("position_bias_selection", "gumbel", "aft_type", "local")),
    (
        {"position_bias_selection": "gumbel", "aft_type": ["conv", "full"], "num_hidden_layers": 2},
        ("position_bias_selection", "aft_type", "full"),
    ),
    ({"position_bias_entropy_weight": 0.001}, ("position_bias_entropy_weight=0.001", "aft_type", "local")),
    ({"global_connectivity": False, "aft_type": "full"}, ("global_connectivity=False", "'full'")),
    ({"use_cls_token": True}, ("use_cls_token=True", "modality")),
    ({**IMAGE_CONV, "use_cls_token": True}, ("use_cls_token=True", "conv")),
    ({**IMAGE_CONV, "pooling": "cls"}, ("pooling", "cls", "use_cls_token")),
    ({"modality": "image", "aft_type": "alibi"}, ("alibi", "image")),
    ({**IMAGE_CONV, "kernel_size": 4}, ("kernel_size=4", "odd")),
    ({**IMAGE_CONV, "image_size": 32, "patch_size": 8, "kernel_size": 9}, ("kernel_size=9", "4 x 4", "7")),
    ({**IMAGE, "image_size": 30, "patch_size": 8}, ("image_size=30", "patch_size=8")),
    ({**IMAGE, "image_size": (32, 30), "patch_size": 8}, ("image_size=(32, 30)", "patch_size=8")),
    ({**IMAGE, "image_size": [32, 32, 32]}, ("image_size", "[32, 32, 32]")),
    ({**IMAGE, "image_size": 0}, ("image_size", "0")),
    ({**IMAGE, "patch_size": 16, "patch_stride": (16, 32)}, ("patch_stride=(16, 32)", "patch_size=16")),
    ({**IMAGE, "image_size": 32, "patch_size": 8, "patch_stride": 5}, ("image_size=32", "patch_stride=5")),
    ({"num_labels": -1}, ("num_labels", "-1")),
    ({"num_labels": 2.5}, ("num_labels", "2.5")),
    ({"num_labels": True}, ("num_labels", "True")),
    ({"id2label": {0: "a", 2: "b"}}, ("id2label", "0 .. num_labels - 1")),
    ({"id2label": {"cat": "dog"}}, ("id2label",)),
    ({"id2label": ["cat", "dog"]}, ("id2label",)),
    ({"id2label": {0: None}}, ("id2label",)),
    ({"dtype": "float31"}, ("dtype", "'float31'")),
    ({"dtype": "nn"}, ("dtype", "'nn'")),
    ({"torch_dtype": ["float32"]}, ("dtype", "['float32']")),
    ({"problem_type": "sudoku"}, ("problem_type", "'sudoku'")),
]
# tests/properties/test_configs.py draws other values beyond the range of each field.
for name, largest in LARGEST.items():
    kind = IMAGE if name in ("image_size", "patch_size", "patch_stride") else {}
    for value in (10**9, 10**400):
        INVALID.append(({**kind, name: value}, (name, "1000", str(largest))))
for name in ("layer_norm_eps", "gumbel_temperature", "position_bias_multiplier", "initializer_range"):  # divisors
    INVALID.append(({name: 0.0}, (name, "0.0")))
for name in ("hidden_dropout_prob", "drop_path_rate"):
    INVALID.append(({name: 1.0}, (name, "1.0")))


@pytest.mark.parametrize(("arguments", "named"), INVALID, ids=lambda value: str(value)[:60])
def test_a_wrong_argument_is_a_value_error_that_names_field_and_value(arguments, named):
    with pytest.raises(ValueError) as error:
        AFTConfig(**arguments)
    for name in named:
        assert name in str(error.value)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


def test_a_field_set_wrong_later_is_refused_at_once_or_when_saved(tmp_path):
    config = AFTConfig()
    for name in ("num_hidden_layers", "num_labels"):
        with pytest.raises(ValueError, match=name):
            setattr(config, name, 2**50)  # a list of that length would not fit into memory
    config.num_heads = 3
    with pytest.raises(ValueError, match=r"^AFTConfig: num_heads=3 does not divide hidden_size=256$"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AFTConfig) if field.name[0] != "_"])
def test_a_mistyped_field_is_refused_with_the_field_that_was_meant(name):
    """A letter left out, doubled or swapped with the next one, or a word put in front."""
    mistyped = {name[:i] + name[i + 1 :] for i in range(1, len(name))} | {f"my_{name}"}
    mistyped |= {name[:i] + name[i] + name[i:] for i in range(1, len(name))}
    mistyped |= {name[: i - 1] + name[i] + name[i - 1] + name[i + 1 :] for i in range(1, len(name))}
    for wrong in mistyped - {name}:
        with pytest.raises(ValueError, match=rf"unknown field .*; did you mean .*\b{name}\b"):
            AFTConfig(**{wrong: 1})


@pytest.mark.parametrize("other, meant", [("local_window_size", "window_size"), ("num_layers", "num_hidden_layers")])
def test_names_of_other_libraries_are_refused_also_when_a_config_is_loaded(other, meant, tmp_path):
    AFTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'{other}'; did you mean .*{meant}"):
        AFTConfig.from_pretrained(tmp_path, **{other: 4})
    changed(**{other: 4})(tmp_path / "config.json")
    with pytest.raises(ValueError, match=f"'{other}'; did you mean .*{meant}"):
        AFTConfig.from_pretrained(tmp_path)


def test_names_that_transformers_and_users_store_in_a_config_are_kept(tmp_path):
    names = {"sep_token_id": 3, "num_beams": 2, "output_attentions": True, "num_attention_heads": 8, "my_note": "x"}
    config = AFTConfig(**names, torch_dtype="bfloat16", attn_implementation="eager", num_labels=3)
    config.later = 5
    config.save_pretrained(tmp_path)
    loaded = AFTConfig.from_pretrained(tmp_path)
    assert (loaded.sep_token_id, loaded.num_attention_heads, loaded.my_note, loaded.later) == (3, 8, "x", 5)
    assert (loaded.dtype, loaded.num_labels) == (torch.bfloat16, 3)
    assert AFTConfig.from_pretrained(tmp_path, dtype="auto").dtype == "auto"  # as `transformers serve` does


@pytest.mark.parametrize(
    "aft_type, hidden_size, num_heads",
    [
        ("local", 256, 1),
        ("full", 384, 1),
        ("alibi", 256, 8),
        ("conv", 384, 16),  # the paper's AFT-conv small 11/16
        ("conv", 768, 32),  # base 25/32
        (["conv", "local"], 64, 2),
        ("conv", 8, 1),
        ("conv", 11 * 13, 1),
    ],
)
def test_the_number_of_heads_follows_from_type_and_width(aft_type, hidden_size, num_heads):
    depth = 2 if isinstance(aft_type, list) else 24
    config = AFTConfig(aft_type=aft_type, hidden_size=hidden_size, num_hidden_layers=depth)
    assert config.num_heads == num_heads and AFTConfig.from_dict(config.to_dict()).num_heads == num_heads
    assert AFTConfig(hidden_size=256, aft_type="conv", num_heads=4).num_heads == 4


@pytest.mark.parametrize(
    ("fields", "limited"),
    [
        ({"aft_type": "full"}, True),
        ({"aft_type": "full", "use_position_embeddings": False}, True),  # its tables are learned
        ({"aft_type": ["conv", "local"], "use_position_embeddings": False}, True),
        ({"aft_type": "simple"}, True),
        ({"aft_type": "simple", "use_position_embeddings": False}, False),
        ({"aft_type": "alibi"}, False),
        ({"aft_type": ["conv", "alibi"]}, False),
        ({"aft_type": "conv", "use_position_embeddings": True}, True),
        (IMAGE, False),
        (IMAGE_CONV, False),
    ],
    ids=str,
)
def test_only_a_config_with_learned_positions_of_tokens_states_a_limit_of_the_length(fields, limited, tmp_path):
    """Tools cut texts at `max_position_embeddings`, and some ask with `hasattr` whether there is a limit."""
    fields = fields | {"num_hidden_layers": 2}
    for config in (AFTConfig(**fields), AFTConfig(max_position_embeddings=9, **fields)):
        expected = config.max_position_embeddings if limited else None
        for each in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert hasattr(each, "max_position_embeddings") == limited and each == config
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved.get("max_position_embeddings") == expected
        # As a config that was saved with a limit that the model does not have.
        changed(max_position_embeddings=expected or 512)(tmp_path / "config.json")
        assert AFTConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
        for given in (5, 2048):
            loaded, unused = AFTConfig.from_pretrained(
                tmp_path, max_position_embeddings=given, return_unused_kwargs=True
            )
            assert getattr(loaded, "max_position_embeddings", None) == (given if limited else None) and not unused
    if fields.get("modality") != "image":
        assert AFTConfig.from_pretrained(tmp_path, use_position_embeddings=True).max_position_embeddings > 0
