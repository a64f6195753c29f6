"""Tests of the conversion report: it is complete, and matches the saved files."""

import json

import pytest
import torch
import yaml
from checkpoints import OPTIONS, TIMM, save_pth
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from aft_hf import AFTForImageClassification, convert_deit
from aft_hf.conversion import REPORT_NAME, ConversionReport, save_converted, verify_conversion
from aft_hf.errors import InputError
from aft_hf.publishing import build_card


pytestmark = pytest.mark.usefixtures("without_limits")


def test_a_report_accounts_for_every_tensor_and_is_refused_if_it_does_not(tmp_path):
    tensors = save_pth(tmp_path / "deit.pth", distilled=True, layer_scale="ls{}.gamma")
    model, report = convert_deit(tmp_path / "deit.pth", **OPTIONS, **TIMM)
    for name in tensors:
        records = [record for record in report.tensors if name in record.sources]
        # Of query, key and value, one is copied. A layer scale is folded into the weight and the bias of a module.
        assert len(records) == (3 if ".qkv." in name else 2 if name.endswith("gamma") else 1), name
        assert sum(record.status == "copied" for record in records) == (1 if ".qkv." in name else len(records)) or (
            name in ("cls_token", "dist_token", "pos_embed")
        )
    for i in range(len(report.tensors)):
        changed = report.model_copy(update={"tensors": report.tensors[:i] + report.tensors[i + 1 :]})
        if report.tensors[i].target or ".qkv." not in report.tensors[i].sources[0]:
            with pytest.raises(ValueError, match="exactly once: "):
                changed.check(tensors, model.state_dict())


def test_a_saved_report_says_with_what_and_how_it_was_made(tmp_path):
    save_pth(tmp_path / "deit3.pth", layer_scale="ls{}.gamma", position_of_cls=False)
    _, report = save_converted(tmp_path / "deit3.pth", tmp_path / "aft", aft_type="simple", image_size=48, **TIMM)
    written = json.loads((tmp_path / "aft" / REPORT_NAME).read_text())
    assert written["source"] == "deit3.pth"  # without the local directory
    assert written["options"]["aft_type"] == "simple" and written["options"]["init"] == "paper"
    assert {"aft_hf", "torch", "transformers"} <= written["versions"].keys()
    records = {record["target"]: record for record in written["tensors"] if record["target"]}
    assert records["aft.layers.1.mlp.fc2.weight"]["sources"] == ["blocks.1.mlp.fc2.weight", "blocks.1.ls2.gamma"]
    assert ConversionReport.model_validate_json(report.model_dump_json()) == report
    counts = ("32 tensors (0.01 M) copied", "8 tensors (0.00 M) new", "8 tensors (0.00 M) dropped")
    assert report.summary() == ", ".join(counts)


@pytest.mark.parametrize(
    ("header", "license"),
    [
        ("license: mit", {"license": "mit"}),
        ("license: other\nlicense_name: theirs\nlicense_link: https://example.org/terms", "all"),
        ("license: other\nlicense_link: LICENSE", None),  # of a file that is not beside the AFT
        ("license: [mit", None),
        ("license: 3", None),
        (None, None),
    ],
)
def test_a_converted_model_has_the_license_of_its_source_if_it_is_known(vit, tmp_path, header, license):
    if header is not None:
        (vit / "README.md").write_text(f"---\n{header}\n---\n# A ViT\n")
    _, report = save_converted(vit, tmp_path / "aft", **OPTIONS)
    expected = yaml.safe_load(header) if license == "all" else license
    assert report.options.get("source_license") == expected
    # The record is in the config, so it follows the model through any training.
    AFTForImageClassification.from_pretrained(tmp_path / "aft").save_pretrained(tmp_path / "trained")
    for directory in ("aft", "trained"):
        metadata = build_card(tmp_path / directory).data.to_dict()
        assert {name: value for name, value in metadata.items() if name.startswith("license")} == (expected or {})
        own = build_card(tmp_path / directory, license="gpl-3.0").data.to_dict()
        assert own["license"] == "gpl-3.0" and "license_name" not in own


def test_a_source_in_the_working_directory_has_a_name_in_the_report(vit, monkeypatch):
    monkeypatch.chdir(vit)
    assert convert_deit(".", **OPTIONS)[1].source == "vit"


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
        with pytest.raises(InputError, match=r"aft\.layers\.1\.mlp"):
            verify_conversion(vit, tmp_path / "aft")
        path.write_bytes(before)
    assert verify_conversion(vit, tmp_path / "aft") == 30


def test_a_report_that_was_lost_cut_or_changed_verifies_nothing(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    path = tmp_path / "aft" / REPORT_NAME
    content = json.loads(path.read_text())
    texts = {json.dumps(content | {"tensors": content["tensors"][:-1]}): "exactly once", "{": "is not JSON"}
    texts |= {"[]": "must be an object", json.dumps(content | {"options": {}}): "source_image_size"}
    told = {"whatever": "status='whatever': must be", "dropped": "does not list", None: "exactly once"}
    for value, message in told.items():
        change = {"status": value} if value else {"target": None}
        changed = [{**content["tensors"][0], **change}, *content["tensors"][1:]]
        texts[json.dumps(content | {"tensors": changed})] = message
    for text, message in texts.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
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
