"""Tests of input that cannot be converted: a one-line error, a non-zero exit code, and no files written."""

import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import MLP, OPTIONS, TIMM, save_pth, timm_tensors
from PIL import Image
from safetensors.torch import save_file
from saved_models import changed, edited
from transformers import ViTForImageClassification

from aft_hf import convert_deit
from aft_hf.conversion import save_converted, verify_conversion
from aft_hf.errors import InputError
from tests.runs import Payload


def assert_refused(source, tmp_path, message, **options):
    """Assert that saving a conversion raises a one-line error with this message and leaves `tmp_path` unchanged."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message) as error:
        save_converted(source, tmp_path / "aft", **OPTIONS | options)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def convert(run_command):
    """Function that runs `aft-hf convert`, and returns its exit code and the last line of stderr."""

    def convert(*arguments):
        done = run_command("aft-hf", "convert", *arguments)
        return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]

    return convert


# ----------------------------------------------------------------------------------------- checkpoints of transformers


def lose_a_shard(path):
    path.unlink()
    path.with_name(f"{path.name}.index.json").write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')


LAYER, WEIGHTS = "vit.encoder.layer", "model.safetensors"
IMAGES = [Image.new("RGB", (32, 32))]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (WEIGHTS, Path.unlink, "no model.safetensors"),
        (WEIGHTS, edited(lambda t: t.pop(f"{LAYER}.1.output.dense.weight")), "Missing key.*layers.1.mlp.fc2.weight"),
        (WEIGHTS, edited(lambda t: t.update({f"{LAYER}.0.lambda1": torch.zeros(3)})), "lambda1 is not a tensor"),
        (
            WEIGHTS,
            edited(lambda t: t.update({f"{LAYER}.0.output.dense.weight": torch.zeros(24, 41)})),
            r"layers.0.mlp.fc2.weight: .*\[24, 41\].*\[24, 40\]",
        ),
        (WEIGHTS, edited(lambda t: t.update({"vit.layernorm.bias": torch.zeros(24).int()})), "int32"),
        (
            WEIGHTS,
            edited(lambda t: t["vit.layernorm.bias"][:1].fill_(-torch.inf)),
            r"bias holds NaN .*\(1 of 24 values\)",
        ),
        ("adapter_config.json", partial(Path.write_text, data="{}"), "vit: has an adapter_config.json: merge"),
        ("config.json", partial(Path.write_text, data='{"name": "mine"}'), "its config.json has no model_type"),
        ("config.json", Path.unlink, "contains no config.json"),
        ("config.json", changed(transformers_weights="other.safetensors"), "transformers_weights"),
        ("config.json", changed(num_hidden_layers=3), "Missing key.*vit.layers.2"),
        (WEIGHTS, lose_a_shard, "model-00001-of-00002.safetensors is missing"),
        ("preprocessor_config.json", changed(image_processor_type="NoProcessor"), "vit: cannot be loaded"),
        (
            "processor_config.json",
            partial(Path.write_text, data='{"image_processor": {"size": 1000000000}}'),
            "image_processor.size",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(vit, tmp_path, name, damage, message):
    damage(vit / name)
    assert_refused(vit, tmp_path, message)


# ---------------------------------------------------------------------------------------------------- bare files, timm


@pytest.mark.parametrize(
    "wrap",
    [
        lambda code: code,
        lambda code: {"model": {"cls_token": code}},
        lambda code: {"model": timm_tensors(), "args": code},
    ],
    ids=["alone", "as a tensor", "beside the weights"],
)
@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_pickle_does_not_run(tmp_path, convert, wrap, save):
    save(wrap(Payload(tmp_path / "it-ran")), tmp_path / "deit.pth")
    code, line = convert(tmp_path / "deit.pth", tmp_path / "aft")
    assert code == 1 and "can run code" in line
    assert [path.name for path in tmp_path.iterdir()] == ["deit.pth"]


def test_a_file_without_a_state_dict_and_a_truncated_one_are_refused(tmp_path):
    path = tmp_path / "deit.pth"
    for save in (torch.save, partial(torch.save, _use_new_zipfile_serialization=False), save_file):
        save(timm_tensors(), path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert_refused(path, tmp_path, "damaged or truncated", **TIMM)
    for content in (b"hello world\n", b"", b"{}"):
        path.write_bytes(content)
        assert_refused(path, tmp_path, "neither a safetensors file nor a checkpoint of PyTorch")
    for content in ([torch.zeros(2)], {"model": 3}, {"epoch": 1}, torch.nn.Linear(2, 2)):
        torch.save(content, path)
        assert_refused(path, tmp_path, "no state dict")
    np.savez(tmp_path / "vit.npz", cls_token=np.zeros(3))
    assert_refused(tmp_path / "vit.npz", tmp_path, "neither a safetensors file nor a checkpoint of PyTorch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.1.attn.qkv.bias"), r"Missing key.*layers.1.attention.\w_proj.bias"),
        (lambda t: t.pop("patch_embed.proj.weight"), "contains no state dict of a ViT"),
        (
            lambda t: t.update({"patch_embed.proj.weight": torch.zeros(24, 192)}),
            "projection.weight.* not have the shapes",
        ),
        (
            lambda t: t.update({"head_dist.weight": torch.zeros(3, 24)}),
            "Unexpected key.*distillation_classifier.weight",
        ),
        (
            lambda t: t.update({"blocks.1.attn.qkv.weight": torch.zeros(73, 24)}),
            r"layers.1.attention.\w_proj.weight: .*\[24, 24\]",
        ),
        (lambda t: [t.pop(name) for name in [*t] if "blocks.0" in name], "has no layers.0.mlp.fc1.weight"),
        (lambda t: t.pop("pos_embed"), "has no embeddings.position_embeddings"),
        (lambda t: t.update({"blocks.1.ls1.gamma": torch.zeros(23)}), "blocks.1.ls1.gamma has the shape"),
        (
            lambda t: t.update({"blocks.1.ls1.gamma": torch.ones(24), "blocks.1.attn.proj.weight": torch.ones(1, 24)}),
            r"gamma has the shape \(24,\), which does not fit blocks.1.attn.proj.weight of the shape \(1, 24\)",
        ),
        (lambda t: t.update({"blocks.9.ls1.gamma": torch.zeros(24)}), "once: blocks.9.ls1.gamma"),
        (lambda t: t.update({"layers.0.mlp.fc1.bias": torch.zeros(MLP)}), "fc1.bias .* under two names"),
        (lambda t: t.update({"pos_embed": torch.zeros(1, 15, 24)}), "give source_image_size"),
        (lambda t: t.update({"pos_embed": torch.zeros(1).expand(1, 10**11, 24)}), "pos_embed has more elements than"),
    ],
)
def test_a_file_that_is_no_plain_deit_is_refused_by_the_tensor(tmp_path, change, message):
    tensors = timm_tensors()
    change(tensors)
    torch.save(tensors, tmp_path / "deit.pth")
    assert_refused(tmp_path / "deit.pth", tmp_path, message, **TIMM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give source_image_size"),
        ({"source_image_size": 32}, "do not fit its 7 positions"),
        ({"source_image_size": (16, 24), "source_num_heads": 5}, "give source_num_heads"),
        ({"source_image_size": (16, 24), "source_num_heads": None}, "give source_num_heads"),
    ],
)
def test_a_weight_file_without_image_size_or_head_count_is_refused_with_the_option_to_give(tmp_path, options, message):
    save_pth(tmp_path / "deit.pth", grid=(2, 3))
    assert_refused(tmp_path / "deit.pth", tmp_path, message, **TIMM | options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_that_are_not_finite_are_refused_in_every_dtype(tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in timm_tensors().items()}
    tensors["blocks.0.mlp.fc1.weight"][3, 5] = torch.nan
    torch.save({"model": tensors}, tmp_path / "deit.pth")
    message = r"blocks.0.mlp.fc1.weight holds NaN or infinity \(1 of 960 values\)"
    assert_refused(tmp_path / "deit.pth", tmp_path, message, **TIMM)


def test_source_options_that_contradict_the_config_are_refused(vit, tmp_path):
    assert_refused(vit, tmp_path, "leave out source_image_size", source_image_size=48)
    with pytest.raises(InputError, match="leave out source_image_size"):
        convert_deit(ViTForImageClassification.from_pretrained(vit), source_num_heads=1)


# ----------------------------------------------------------------------------------------------------- missing sources


def test_the_output_directory_of_a_trainer_names_its_checkpoints(tmp_path):
    for steps in (500, 1000, 90):
        (tmp_path / "out" / f"checkpoint-{steps}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{steps}" / "config.json").write_text("{}")
    (tmp_path / "out" / "checkpoint-2000").mkdir()  # incomplete
    newest_first = ", ".join(f"{tmp_path}/out/checkpoint-{steps}" for steps in (1000, 500, 90))
    assert_refused(tmp_path / "out", tmp_path, f"no config.json; give one of its checkpoints: {newest_first}$")


def test_a_repository_of_the_hub_that_is_not_here_says_to_download_it(tmp_path, convert, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, line = convert("nobody/no-such-deit", tmp_path / "aft")
    assert code == 1 and "download it" in line and "HF_HUB_OFFLINE" in line
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- output directories


def test_the_source_is_never_replaced_and_the_working_directory_can_be_the_output(vit, tmp_path, monkeypatch):
    before = sorted(path.name for path in vit.iterdir())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "file").write_text("mine")
    for target in ("vit", "."):
        with pytest.raises(InputError, match="is not empty"):
            save_converted(vit, tmp_path / target, **OPTIONS)
    with pytest.raises(InputError, match=r"cannot write to .*/file/aft"):
        save_converted(vit, tmp_path / "file" / "aft", **OPTIONS)
    assert sorted(path.name for path in vit.iterdir()) == before
    save_converted(vit, ".", **OPTIONS)
    assert verify_conversion(vit, Path.cwd()) > 0


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 4}, "kernel_size=4"),
        ({"kernel_size": 9}, "kernel_size=9"),  # a 4 x 4 grid has 7 x 7 offsets
        ({"image_size": 33}, "image_size=33"),
        ({"aft_type": "fast"}, "'aft_type'.*'fast'"),
        ({"aft_type": "alibi"}, "alibi"),
        ({"num_labels": 3}, "has a classifier; leave out num_labels"),
        ({"aft_type": ["conv"]}, "lists 1 types"),
        ({"init": "attention", "images": IMAGES, "aft_type": "full"}, "there are none"),
        ({"init": "paper", "images": IMAGES}, "attention"),
        ({"init": "magic"}, "init must be"),
    ],
)
def test_invalid_options_of_convert_deit_are_refused_by_name(vit, tmp_path, options, message):
    assert_refused(vit, tmp_path, message, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "attention"], "needs images"),
        (["--init", "attention", "--images", "empty"], "no images in it"),
        (["--init", "attention", "--images", "unreadable"], "cannot be read as an image"),
        (["--images", "pictures"], "--images needs --distill or --init attention"),
        (["--aft-type", "full", "--kernel-size", 7], "--kernel-size needs --aft-type conv"),
        (["--aft-type", "simple", "--position-bias-dim", 7], "--position-bias-dim needs --aft-type full or local"),
        (["--learning-rate", 1, "--steps", 3], "--steps needs --distill, --learning-rate needs --distill"),
        (["--distill"], "--distill needs --images"),
    ],
)
def test_invalid_arguments_of_the_command_convert_end_in_one_line_and_exit_code_1(
    vit, tmp_path, convert, monkeypatch, arguments, message
):
    for name in ("empty", "unreadable", "pictures"):
        (tmp_path / name).mkdir()
    (tmp_path / "unreadable" / "picture.png").write_text("no picture")
    Image.new("RGB", (40, 40)).save(tmp_path / "pictures" / "picture.png")
    monkeypatch.chdir(tmp_path)
    arguments = [vit, tmp_path / "aft", "--kernel-size", 3, "--num-heads", 4, *arguments]
    code, line = convert(*arguments)
    assert code == 1 and line.startswith("aft-hf: ") and message in line
    assert not (tmp_path / "aft").exists()
