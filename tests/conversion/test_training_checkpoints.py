"""Tests of reading the weights in the files of training tools: names of wrappers, and averaged weights."""

import json

import pytest
import torch
from checkpoints import OPTIONS, TIMM, assert_read, save_vit, timm_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aft_hf import convert_deit
from aft_hf.conversion import read_source
from aft_hf.conversion.files import read_weights
from aft_hf.errors import InputError


def under(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def refusal(path):
    with pytest.raises(InputError) as error:
        read_source(path, **TIMM)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# --------------------------------------------------------------------------------------------------- names of wrappers

PREFIXES = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_forward_module.",
    "model.",
    "net.",
    "backbone.",
    "vit.",
)
PREFIXES += ("encoder.trunk.", "student.")
KEYS = ("state_dict", "model", "module", "net", "model_state_dict", "state", "weights")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefixes=st.lists(st.sampled_from(PREFIXES), max_size=3),
    keys=st.lists(st.sampled_from(KEYS), max_size=3),
    inside=st.sampled_from(("", "_checkpoint_wrapped_module.", "_orig_mod.", "module.", "_fsdp_wrapped_module.")),
)
def test_names_of_wrappers_and_keys_around_the_weights_do_not_matter(tmp_path, prefixes, keys, inside):
    tensors = timm_tensors()
    content = {f"{''.join(prefixes)}{name.replace('.attn.', f'.{inside}attn.')}": t for name, t in tensors.items()}
    for key in keys:
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "ema": None}
    torch.save(content, tmp_path / "checkpoint.pth")
    assert_read(tmp_path / "checkpoint.pth", tensors)


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "model.vit_model.module."])
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_of_transformers_lose_the_names_of_wrappers_too(tmp_path, prefix, shards):
    save_vit(tmp_path)
    tensors, weight_map = load_file(tmp_path / "model.safetensors"), {}
    items = list((under(prefix, tensors) | {"n_averaged": torch.tensor(3)}).items())
    (tmp_path / "model.safetensors").unlink()
    for i in range(shards):
        save_file(dict(items[i::shards]), tmp_path / ("model.safetensors" if shards == 1 else f"{i}.safetensors"))
        weight_map |= dict.fromkeys(dict(items[i::shards]), f"{i}.safetensors")
    if shards > 1:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read_source(tmp_path)
    actual, _ = read_weights(tmp_path)
    assert actual.keys() == tensors.keys() and all(torch.equal(actual[name], each) for name, each in tensors.items())


OTHERS = [
    "blocks.0.attn.qkv.lora_A.default.weight",
    "_fsdp_wrapped_module._flat_param",
    "norm_pre.weight",
    "reg_token",
]
OTHERS += ["blocks.0.attn.parametrizations.qkv.original0", "blocks.0.attn.rel_pos.relative_position_bias_table"]
OTHERS += ["attn_pool.latent", "blocks.0.attn.q_norm.weight", "fc_norm.weight"]


@pytest.mark.parametrize("name", OTHERS)
def test_state_dicts_that_are_not_of_a_vit_are_refused_by_the_name_of_a_tensor(tmp_path, name):
    # With other positions, shapes would fail first.
    positions = {"pos_embed": torch.zeros(1, 21, 24)} if name == "reg_token" else {}
    torch.save(timm_tensors() | positions | {name: torch.zeros(1, 4, 24)}, tmp_path / "other.pth")
    assert f"{name.removeprefix('_fsdp_wrapped_module.')} is not a tensor of a ViT" in refusal(tmp_path / "other.pth")


def test_a_module_beside_the_vit_is_refused(tmp_path):
    torch.save(under("backbone.", timm_tensors()) | {"projector.weight": torch.zeros(4, 24)}, tmp_path / "other.pth")
    assert "projector.weight is not a tensor of the ViT, whose names begin with 'backbone.'" in refusal(
        tmp_path / "other.pth"
    )


@pytest.mark.parametrize(
    ("prefix", "name", "value", "refused"),
    [
        ("", "blocks.0.ls1.gamma", 0.1, True),
        ("model.", "model.logit_scale", 0.1, True),
        ("1.", "0.mean", 0.1, True),
        ("model.", "n_averaged", 3, False),
        ("model.", "model.n_averaged", 3.0, False),
        ("model.", "initted", True, False),
    ],
)
def test_counters_and_flags_are_left_out_and_other_scalars_refused(tmp_path, prefix, name, value, refused):
    tensors, path = timm_tensors(), tmp_path / "vit.pth"
    torch.save(under(prefix, tensors) | {name: torch.tensor(value)}, path)
    if refused:
        assert name.removeprefix("model.") in refusal(path)
    else:
        assert_read(path, tensors)


# ---------------------------------------------------------------------------------------------------- averaged weights


@pytest.mark.parametrize(
    ("raw", "averaged", "prefix"),
    [
        ("state_dict", "state_dict_ema", ""),
        ("model", "ema_state_dict", "module."),
        ("model", "swa_model", "module."),
    ],
)
def test_averaged_weights_are_preferred_as_in_timm_and_the_report_names_them(tmp_path, raw, averaged, prefix):
    first, second = timm_tensors(), timm_tensors()
    torch.save({raw: first, averaged: under(prefix, second), "epoch": 1}, tmp_path / "checkpoint.pth.tar")
    source = assert_read(tmp_path / "checkpoint.pth.tar", second)
    assert convert_deit(source, **OPTIONS)[1].options["source_weights"] == averaged
    torch.save({raw: first, averaged: None}, tmp_path / "checkpoint.pth.tar")
    assert assert_read(tmp_path / "checkpoint.pth.tar", first).part == raw


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (lambda a, b: {"state_dict": under("model.", a) | under("ema_model.module.", b)}, "state_dict.ema_model"),
        (lambda a, b: {"state_dict": a, "callbacks": {"EMA": {"ema_state_dict": b}}}, "callbacks.EMA.ema_state_dict"),
        (lambda a, b: a | {"state_dict_ema": b}, "state_dict_ema"),
        *(
            (lambda a, b, name=name: {"model_ema": b, name: a}, "model_ema")  # names that deny averaging
            for name in ("model_no_ema", "non_ema", "no-swa", "model_before_swa", "preEMA", "raw.ema", "unaveraged")
        ),
    ],
)
def test_averaged_weights_are_read_from_any_place_in_a_checkpoint(tmp_path, content, part):
    averaged = timm_tensors()
    torch.save(content(timm_tensors(), averaged), tmp_path / "last.ckpt")
    assert assert_read(tmp_path / "last.ckpt", averaged).part == part


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (lambda a, b: {"student": a, "teacher": b}, "student, teacher"),
        (lambda a, b: {"state_dict": a, "current_model_state": b}, "current_model_state, state_dict"),
        (lambda a, b: {"semantic": a, "model": b}, "model, semantic"),
        (lambda a, b: {"model_ema": a, "model_ema2": b}, "model_ema, model_ema2"),
        (lambda a, b: {"model": a, "model_no_ema": b}, "model, model_no_ema"),
        (lambda a, b: under("module.base_encoder.", a) | under("module.momentum_encoder.", b), "base_encoder, mom"),
    ],
)
def test_a_checkpoint_of_several_models_is_refused_with_their_names(tmp_path, content, names):
    torch.save(content(timm_tensors(), timm_tensors()), tmp_path / "checkpoint.pth")
    assert f"contains 2 models ({names}" in refusal(tmp_path / "checkpoint.pth")
