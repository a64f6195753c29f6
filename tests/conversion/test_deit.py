"""Conversion of ViT and DeiT checkpoints to AFT-conv, from files as transformers writes them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from aft_hf import convert_deit
from aft_hf.conversion import ConversionError, save_converted


SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
OPTIONS = {"kernel_size": 3, "num_heads": 4}


def randomize(model):
    """No parameter at its initial 0 or 1, so a forgotten copy cannot pass for a right one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.fixture
def vit(tmp_path):
    labels = {"id2label": {0: "cat", 1: "dog", 2: "owl"}, "label2id": {"cat": 0, "dog": 1, "owl": 2}}
    path = tmp_path / "vit"
    randomize(ViTForImageClassification(ViTConfig(**SIZES, **labels))).save_pretrained(path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(path)
    return path


def expected_copies(tensors, prefix):
    """What the paper transfers, written out by hand for two layers."""
    expected = {}
    for kind in ("weight", "bias"):
        expected[f"aft.embeddings.patch_embeddings.{kind}"] = f"{prefix}embeddings.patch_embeddings.projection.{kind}"
        expected[f"aft.layernorm.{kind}"] = f"{prefix}layernorm.{kind}"
        for i in (0, 1):
            layer, new = f"{prefix}encoder.layer.{i}", f"aft.layers.{i}"
            expected[f"{new}.layernorm_before.{kind}"] = f"{layer}.layernorm_before.{kind}"
            expected[f"{new}.layernorm_after.{kind}"] = f"{layer}.layernorm_after.{kind}"
            expected[f"{new}.mixer.v_proj.{kind}"] = f"{layer}.attention.attention.value.{kind}"
            expected[f"{new}.mixer.o_proj.{kind}"] = f"{layer}.attention.output.dense.{kind}"
            expected[f"{new}.mlp.fc1.{kind}"] = f"{layer}.intermediate.dense.{kind}"
            expected[f"{new}.mlp.fc2.{kind}"] = f"{layer}.output.dense.{kind}"
    return {name: tensors[source] for name, source in expected.items()}


def test_a_vit_gives_its_values_outputs_mlps_norms_and_classifier(vit):
    model, report = convert_deit(vit, **OPTIONS)
    tensors, state = load_file(vit / "model.safetensors"), model.state_dict()
    expected = expected_copies(tensors, "vit.")
    expected |= {f"classifier.{kind}": tensors[f"classifier.{kind}"] for kind in ("weight", "bias")}
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert {record.target for record in report.with_status("copied")} == expected.keys()
    new = {record.target.split(".mixer.")[1] for record in report.with_status("new")}
    assert new == {
        "kernel",
        "kernel_scale",
        "kernel_shift",
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
        "k_proj.bias",
    }
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "owl"}


def test_every_source_and_target_tensor_is_accounted_for_exactly_once(vit):
    model, report = convert_deit(vit, **OPTIONS)
    sources = [name for record in report.records for name in record.sources]
    targets = [record.target for record in report.records if record.target is not None]
    assert sorted(sources) == sorted(load_file(vit / "model.safetensors"))
    assert sorted(targets) == sorted(model.state_dict())


def test_the_report_refuses_an_incomplete_account(vit):
    model, report = convert_deit(vit, **OPTIONS)
    report.records.pop()
    with pytest.raises(ValueError, match="exactly once"):
        report.check(load_file(vit / "model.safetensors"), model.state_dict())


def test_a_distilled_deit_gives_the_mean_of_its_two_heads(tmp_path):
    randomize(DeiTForImageClassificationWithTeacher(DeiTConfig(**SIZES, num_labels=3))).save_pretrained(tmp_path)
    model, report = convert_deit(tmp_path, **OPTIONS)
    tensors, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    for kind in ("weight", "bias"):
        mean = (tensors[f"cls_classifier.{kind}"] + tensors[f"distillation_classifier.{kind}"]) / 2
        torch.testing.assert_close(state[f"classifier.{kind}"], mean)
    for name, tensor in expected_copies(tensors, "deit.").items():
        assert torch.equal(state[name], tensor), name
    dropped = {record.sources[0] for record in report.with_status("dropped")}
    assert "deit.embeddings.distillation_token" in dropped


def test_a_backbone_gets_a_new_classifier(tmp_path):
    randomize(ViTModel(ViTConfig(**SIZES))).save_pretrained(tmp_path)
    model, report = convert_deit(tmp_path, **OPTIONS)
    for name, tensor in expected_copies(load_file(tmp_path / "model.safetensors"), "").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert "classifier.weight" in {record.target for record in report.with_status("new")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_copied_bit_for_bit(tmp_path, dtype):
    randomize(DeiTForImageClassification(DeiTConfig(**SIZES))).to(dtype).save_pretrained(tmp_path)
    model, _ = convert_deit(tmp_path, **OPTIONS)
    assert model.dtype == dtype
    for name, tensor in expected_copies(load_file(tmp_path / "model.safetensors"), "deit.").items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_sharded_checkpoint_converts_like_a_whole_one(vit, tmp_path):
    whole, _ = convert_deit(vit, **OPTIONS)
    ViTForImageClassification.from_pretrained(vit).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded, report = convert_deit(tmp_path / "shards", **OPTIONS)
    for record in report.with_status("copied"):
        assert torch.equal(sharded.state_dict()[record.target], whole.state_dict()[record.target])


def test_what_is_saved_loads_with_its_image_processor_and_report(vit, tmp_path):
    model, report = save_converted(vit, tmp_path / "aft", image_size=48, **OPTIONS)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "aft").eval()
    pixels = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "aft")
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    written = json.loads((tmp_path / "aft" / "conversion_report.json").read_text())
    assert len(written["tensors"]) == len(report.records)


def damage_truncated(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def damage_missing_weights(path):
    (path / "model.safetensors").unlink()


def damage_missing_tensor(path):
    tensors = load_file(path / "model.safetensors")
    del tensors["vit.encoder.layer.1.output.dense.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def damage_extra_tensor(path):
    tensors = load_file(path / "model.safetensors")
    tensors["vit.encoder.layer.0.lambda1"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def damage_wrong_shape(path):
    tensors = load_file(path / "model.safetensors")
    tensors["vit.encoder.layer.0.output.dense.weight"] = torch.zeros(24, 41)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def damage_config(path):
    (path / "config.json").write_text("{")


def damage_config_type(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))


def damage_index(path):
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("[]")


def damage_processor(path):
    (path / "preprocessor_config.json").write_text("{bad")


def damage_processor_type(path):
    (path / "preprocessor_config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncated, "damaged or truncated"),
        (damage_missing_weights, "no model.safetensors"),
        (damage_missing_tensor, "encoder.layer.1.output.dense.weight"),
        (damage_extra_tensor, "lambda1"),
        (damage_wrong_shape, r"\(24, 41\)"),
        (damage_config, "config.json"),
        (damage_config_type, "config.json"),
        (damage_index, "weights"),
        (damage_processor, "preprocessor_config.json"),
        (damage_processor_type, "preprocessor_config.json"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error_and_nothing_is_written(vit, tmp_path, damage, message):
    damage(vit)
    with pytest.raises(ConversionError, match=message) as error:
        save_converted(vit, tmp_path / "aft", **OPTIONS)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit"]


def test_a_checkpoint_of_another_architecture_is_refused_by_name(tmp_path):
    sizes = {key: SIZES[key] for key in SIZES}
    CLIPVisionModel(CLIPVisionConfig(**sizes)).save_pretrained(tmp_path / "clip")
    with pytest.raises(ConversionError, match="clip_vision_model"):
        convert_deit(tmp_path / "clip", **OPTIONS)


def test_a_missing_directory_is_said_so(tmp_path):
    with pytest.raises(ConversionError, match="no such directory"):
        convert_deit(tmp_path / "nowhere", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 4}, "conv_kernel_size=4"),
        ({"kernel_size": 9}, "conv_kernel_size=9"),  # a 4 x 4 grid has offsets for 7
        ({"num_heads": 5}, "num_heads=5"),
        ({"image_size": 33}, "image_size=33"),
        ({"image_size": 0}, "image_size"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(vit, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        save_converted(vit, tmp_path / "aft", **(OPTIONS | options))
    assert not (tmp_path / "aft").exists()


def test_a_directory_with_something_in_it_is_kept(vit, tmp_path):
    target = tmp_path / "aft"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConversionError, match="not empty" if not overwrite else "earlier conversion"):
            save_converted(vit, target, overwrite=overwrite, **OPTIONS)
    assert [path.name for path in target.iterdir()] == ["precious.txt"]


def test_an_earlier_conversion_is_replaced_when_told_to(vit, tmp_path):
    target = tmp_path / "aft"
    save_converted(vit, target, **OPTIONS)
    (target / "stale.txt").write_text("old")
    with pytest.raises(ConversionError, match="not empty"):
        save_converted(vit, target, **OPTIONS)
    save_converted(vit, target, overwrite=True, kernel_size=5, num_heads=4)
    assert AutoModelForImageClassification.from_pretrained(target).config.conv_kernel_size == 5
    assert not (target / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aft", "vit"]


@pytest.mark.parametrize("target", ["vit", "."])
def test_the_source_is_never_written_over(vit, tmp_path, target):
    before = sorted(path.name for path in vit.iterdir())
    with pytest.raises(ConversionError, match="holds the source"):
        save_converted(vit, tmp_path / target, overwrite=True, **OPTIONS)
    assert sorted(path.name for path in vit.iterdir()) == before


def test_the_working_directory_is_never_replaced(vit, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConversionError, match="working directory"):
        save_converted(vit, ".", **OPTIONS)


def test_a_directory_that_cannot_be_made_is_one_clear_error(vit, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConversionError, match="cannot be written"):
        save_converted(vit, tmp_path / "file" / "aft", **OPTIONS)
