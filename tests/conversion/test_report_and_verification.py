"""Tests of the conversion report: it is complete, can be executed again, and matches the saved files."""

import io
import json

import pytest
import torch
from checkpoints import OPTIONS, TIMM, save_distilled_deit, save_pth, save_vit
from rich.console import Console
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


def test_every_tensor_of_a_vit_and_of_the_target_is_accounted_for_exactly_once(vit):
    model, report = convert_deit(vit, **OPTIONS)
    sources = [name for record in report.records for name in record.sources]
    targets = [record.target for record in report.records if record.target is not None]
    assert sorted(sources) == sorted(load_file(vit / "model.safetensors"))
    assert sorted(targets) == sorted(model.state_dict())


@pytest.mark.parametrize("options", [{"distilled": True}, {"layer_scale": "ls{}.gamma"}, {"bias": False}], ids=str)
def test_every_row_of_a_fused_tensor_is_accounted_for_exactly_once(tmp_path, options):
    tensors = save_pth(tmp_path / "deit.pth", **options)
    _, report = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    for name, tensor in tensors.items():
        records = [record for record in report.records if name in record.sources]
        if ".qkv." in name:
            assert sorted(record.steps for record in records) == [("rows 0:24",), ("rows 24:48",), ("rows 48:72",)]
            assert [record.status for record in records].count("copied") == 1
        else:
            assert len(records) == 1, name
            assert records[0].shape == tuple(tensor.shape) or records[0].steps


def test_the_report_refuses_an_incomplete_account(vit):
    model, report = convert_deit(vit, **OPTIONS)
    last = report.records.pop()
    for records in (report.records, [*report.records, last, last]):
        with pytest.raises(ValueError, match="exactly once"):
            ConversionReport("vit", records=records).check(load_file(vit / "model.safetensors"), model.state_dict())


def test_the_report_refuses_rows_that_nobody_takes(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth")
    model, report = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    tensors["blocks.1.attn.qkv.weight"] = torch.randn(73, 24)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight"):
        report.check(tensors, model.state_dict())


def test_the_account_for_people_fits_80_columns_with_whole_names(vit):
    _, report = convert_deit(vit, **OPTIONS)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table())
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("aft.layers.N.mixer.v_proj", "from vit.encoder.layer.N.attention.attention.value"):
        assert any(line.rstrip().endswith(name) for line in lines)


def test_a_saved_report_says_with_what_and_how_it_was_made(deit3, tmp_path):
    _, report = save_converted(deit3, tmp_path / "aft", aft_type="simple", image_size=48, **TIMM)
    written = json.loads((tmp_path / "aft" / REPORT_NAME).read_text())
    assert written["source"] == deit3.name  # without the local directory
    assert written["options"]["aft_type"] == "simple" and written["options"]["init"] == "paper"
    assert {"aft_hf", "torch", "transformers"} <= written["versions"].keys()
    records = {record["target"]: record for record in written["tensors"] if record["target"]}
    assert records["aft.embeddings.position_embeddings"]["steps"] == [
        "prepend a zero position",
        "resize positions 4x4 to 6x6, bicubic",
    ]
    assert records["aft.layers.1.mlp.fc2.weight"]["factor"] == "blocks.1.ls2.gamma"
    assert ConversionReport.from_json(report.to_json()) == report


def test_the_summary_counts_tensors_and_parameters(vit):
    _, report = convert_deit(vit, **OPTIONS)
    assert report.summary() == "30 tensors (0.01 M) copied, 14 tensors (0.00 M) new, 10 tensors (0.00 M) dropped"


@pytest.mark.parametrize(
    ("derivation", "expected"),
    [
        (Derivation(("x",)), [[1.0, 2.0], [3.0, 4.0]]),
        (Derivation(("x",), ("rows 1:2",)), [[3.0, 4.0]]),
        (Derivation(("x", "y"), ("mean",)), [[3.0, 4.0], [5.0, 6.0]]),
        (Derivation(("x",), ("scale rows by the factor",), "f"), [[2.0, 4.0], [9.0, 12.0]]),
    ],
)
def test_a_derivation_does_what_it_says(derivation, expected):
    tensors = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "y": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
    tensors["f"] = torch.tensor([2.0, 3.0])
    assert derivation.compute(tensors).tolist() == expected


def test_a_step_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no step"):
        Derivation(("x",), ("transpose",)).compute({"x": torch.zeros(2)})


# ------------------------------------------------------------------------------------------------------ verification


@pytest.mark.parametrize("aft_type", ["conv", "simple"])
def test_verification_compares_every_copied_tensor(deit3, tmp_path, aft_type):
    options = {"aft_type": aft_type, "image_size": 48, "kernel_size": 3, "num_heads": 4, **TIMM}
    _, report = save_converted(deit3, tmp_path / "aft", **options)
    # 2 layers of 6 modules, patch embedding, norm, classifier, each with weight and bias; class token, positions.
    assert verify_conversion(deit3, tmp_path / "aft") == 24 + 6 + (2 if aft_type == "simple" else 0)
    assert verify_conversion(deit3, tmp_path / "aft") == len(report.with_status("copied"))


def test_conversions_of_transformers_checkpoints_verify(vit, tmp_path):
    save_distilled_deit(tmp_path / "deit")
    for source in (vit, tmp_path / "deit"):
        save_converted(source, tmp_path / f"aft-{source.name}", **OPTIONS)
        assert verify_conversion(source, tmp_path / f"aft-{source.name}") == 30


def test_a_tensor_that_is_nan_equals_itself(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth")
    save_converted(tmp_path / "deit.pth", tmp_path / "aft", **OPTIONS, **TIMM)
    saved = load_file(tmp_path / "aft" / "model.safetensors")
    # Conversions refuse NaN, but those of an earlier version may contain it; verification compares only bits.
    tensors["blocks.0.mlp.fc1.weight"][0, 0] = saved["aft.layers.0.mlp.fc1.weight"][0, 0] = torch.nan
    torch.save(tensors, tmp_path / "deit.pth")
    save_file(saved, tmp_path / "aft" / "model.safetensors")
    assert verify_conversion(tmp_path / "deit.pth", tmp_path / "aft") == 30


def test_one_changed_bit_is_found_in_the_target_or_the_source(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    for directory, name in (
        (tmp_path / "aft", "aft.layers.1.mlp.fc1.bias"),
        (vit, "vit.encoder.layer.1.output.dense.bias"),
    ):
        path = directory / "model.safetensors"
        before = path.read_bytes()
        tensors = load_file(path)
        tensors[name].view(torch.int32)[3] ^= 1
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ConversionError, match=r"aft\.layers\.1\.mlp"):
            verify_conversion(vit, tmp_path / "aft")
        path.write_bytes(before)
    assert verify_conversion(vit, tmp_path / "aft") == 30


def test_a_report_that_was_lost_or_cut_is_said_so(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    report = tmp_path / "aft" / REPORT_NAME
    content = json.loads(report.read_text())
    content["tensors"].pop()
    for text, message in ((json.dumps(content), "exactly once"), ("{", "is not JSON"), ("[]", "must be an object")):
        report.write_text(text)
        with pytest.raises(ConversionError, match=message):
            verify_conversion(vit, tmp_path / "aft")


def test_what_does_not_verify_is_not_left_behind(vit, tmp_path, monkeypatch):
    def fail(*_):
        raise ConversionError("a bit is wrong")

    monkeypatch.setattr("aft_hf.conversion.saving.verify_conversion", fail)
    with pytest.raises(ConversionError, match="a bit is wrong"):
        save_converted(vit, tmp_path / "aft", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["vit"]


# ------------------------------------------------------------------------------------------------------------ saving


def test_what_is_saved_loads_with_its_image_processor_and_report(vit, tmp_path):
    model, report = save_converted(vit, tmp_path / "aft", image_size=48, **OPTIONS)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "aft").eval()
    pixels = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(loaded(pixels).logits, model(pixels).logits)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "aft")
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
    assert (processor.size["height"], processor.size["width"]) == (48, 48)
    written = json.loads((tmp_path / "aft" / REPORT_NAME).read_text())
    assert len(written["tensors"]) == len(report.records)


def test_the_margin_that_is_cropped_grows_with_the_image(deit3, tmp_path):
    save_converted(deit3, tmp_path / "aft", image_size=48, **OPTIONS, **TIMM)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "aft")
    # 32 / 0.875 = 36.57 is rounded down to 36, and 36 * 48 / 32 = 54.
    assert processor.size["shortest_edge"] == 54
    assert (processor.crop_size["height"], processor.crop_size["width"]) == (48, 48)


@pytest.mark.parametrize("change", [{"status": "whatever"}, {"status": "dropped"}, {"target": None}], ids=str)
def test_a_report_whose_copies_are_none_verifies_nothing(vit, tmp_path, change):
    save_converted(vit, tmp_path / "out", **OPTIONS)
    path = tmp_path / "out" / REPORT_NAME
    content = json.loads(path.read_text())
    next(record for record in content["tensors"] if record["status"] == "copied").update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=r"which it cannot have|status='whatever': must be"):
        verify_conversion(vit, tmp_path / "out")


def test_an_image_processor_that_is_assumed_is_said_to_be(vit, tmp_path):
    assert convert_deit(vit, **OPTIONS)[1].options["image_processor"] == "of the source"
    (vit / "preprocessor_config.json").unlink()
    assert convert_deit(vit, **OPTIONS)[1].options["image_processor"].startswith("assumed")


def test_an_earlier_conversion_is_replaced_when_told_to(vit, tmp_path):
    target = tmp_path / "aft"
    save_converted(vit, target, **OPTIONS)
    with pytest.raises(ConversionError, match="not empty"):
        save_converted(vit, target, **OPTIONS)
    save_converted(vit, target, overwrite=True, kernel_size=5, num_heads=4)
    assert AutoModelForImageClassification.from_pretrained(target).config.kernel_size == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aft", "vit"]


def test_a_conversion_can_be_made_from_a_relative_path(tmp_path, monkeypatch):
    save_vit(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    save_converted("vit", "aft", **OPTIONS)
    assert (tmp_path / "aft" / "model.safetensors").exists()
