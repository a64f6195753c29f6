"""Tests of the conversion report: it is complete, can be executed again, and matches the saved files."""

import json

import pytest
import torch
from checkpoints import OPTIONS, TIMM, save_pth
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from aft_hf import convert_deit
from aft_hf.conversion import REPORT_NAME, ConversionError, ConversionReport, save_converted, verify_conversion
from aft_hf.conversion.derivation import Derivation


@pytest.fixture
def deit3(tmp_path):
    """The file of a DeiT-III, whose conversion to `simple` uses all kinds of steps except casts and means."""
    save_pth(tmp_path / "deit3.pth", layer_scale="ls{}.gamma", position_of_cls=False)
    return tmp_path / "deit3.pth"


@pytest.mark.parametrize("options", [{"distilled": True}, {"layer_scale": "ls{}.gamma"}, {"bias": False}], ids=str)
def test_every_part_of_a_fused_tensor_is_accounted_for_exactly_once(tmp_path, options):
    tensors = save_pth(tmp_path / "deit.pth", **options)
    model, report = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    for name, tensor in tensors.items():
        records = [record for record in report.tensors if name in record.sources]
        if ".qkv." in name:
            assert sorted(record.steps for record in records) == [(("part", i),) for i in range(3)]
            assert [record.status for record in records].count("copied") == 1
            report.tensors.remove(records[0])
            with pytest.raises(ValueError, match=f"exactly once: .*{name}"):
                report.check(tensors, model.state_dict())
            report.tensors.append(records[0])
        else:
            assert len(records) == 1, name
            assert records[0].shape == tuple(tensor.shape) or records[0].steps


def test_a_saved_report_says_with_what_and_how_it_was_made(deit3, tmp_path):
    _, report = save_converted(deit3, tmp_path / "aft", aft_type="simple", image_size=48, **TIMM)
    written = json.loads((tmp_path / "aft" / REPORT_NAME).read_text())
    assert written["source"] == deit3.name  # without the local directory
    assert written["options"]["aft_type"] == "simple" and written["options"]["init"] == "paper"
    assert {"aft_hf", "torch", "transformers"} <= written["versions"].keys()
    records = {record["target"]: record for record in written["tensors"] if record["target"]}
    steps = [["prepend_position"], ["resize_positions", 4, 4, 6, 6]]
    assert records["aft.embeddings.position_embeddings"]["steps"] == steps
    assert records["aft.layers.1.mlp.fc2.weight"]["steps"] == [["scale", "blocks.1.ls2.gamma"]]
    assert ConversionReport.model_validate_json(report.model_dump_json()) == report
    counts = ("32 tensors (0.01 M) copied", "8 tensors (0.00 M) new", "8 tensors (0.00 M) dropped")
    assert report.summary() == ", ".join([*counts, "4 tensors (0.00 M) folded"])


@pytest.mark.parametrize("step", [("transpose",), ("cast", "int8"), ("part", "1"), ("mean", 3), ("scale", 1), ()])
def test_a_step_that_nobody_knows_is_refused(step):
    with pytest.raises(ValueError, match="no step"):
        Derivation(("x",), (step,)).compute({"x": torch.zeros(2)})


# ------------------------------------------------------------------------------------------------------ verification


def test_one_changed_bit_is_found_in_the_target_or_the_source(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    places = {tmp_path / "aft": "aft.layers.1.mlp.fc1.bias", vit: "vit.encoder.layer.1.output.dense.bias"}
    for directory, name in places.items():
        path = directory / "model.safetensors"
        before = path.read_bytes()
        tensors = load_file(path)
        tensors[name].view(torch.int32)[3] ^= 1
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ConversionError, match=r"aft\.layers\.1\.mlp"):
            verify_conversion(vit, tmp_path / "aft")
        path.write_bytes(before)
    assert verify_conversion(vit, tmp_path / "aft") == 30


def test_a_report_that_was_lost_cut_or_changed_verifies_nothing(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    path = tmp_path / "aft" / REPORT_NAME
    content = json.loads(path.read_text())
    texts = {json.dumps(content | {"tensors": content["tensors"][:-1]}): "exactly once", "{": "is not JSON"}
    texts |= {"[]": "must be an object"}
    for change in ({"status": "whatever"}, {"status": "dropped"}, {"target": None}):
        changed = [{**content["tensors"][0], **change}, *content["tensors"][1:]]
        texts[json.dumps(content | {"tensors": changed})] = "which it cannot have|status='whatever': must be"
    for text, message in texts.items():
        path.write_text(text)
        with pytest.raises(ConversionError, match=message):
            verify_conversion(vit, tmp_path / "aft")


# ------------------------------------------------------------------------------------------------------------ saving


def test_what_is_saved_loads_with_its_image_processor_and_report(vit, tmp_path):
    model, report = save_converted(vit, tmp_path / "aft", image_size=48, **OPTIONS)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "aft").eval()
    pixels = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "aft")
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    assert len(json.loads((tmp_path / "aft" / REPORT_NAME).read_text())["tensors"]) == len(report.tensors)
    assert report.options["image_processor"] == "of the source"
    (vit / "preprocessor_config.json").unlink()
    assert convert_deit(vit, **OPTIONS)[1].options["image_processor"].startswith("assumed")
