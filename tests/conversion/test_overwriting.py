"""Tests of overwriting a conversion: only the files that the earlier conversion wrote are deleted."""

import json
import os

import pytest
from checkpoints import OPTIONS

from aft_hf import AFTForImageClassification
from aft_hf.conversion import ConversionError, save_converted, verify_conversion
from aft_hf.conversion.manifest import MANIFEST_NAME


KEPT = {
    "README.md": "# My words",
    "my_notes_aft.py": "notes",
    "extra.safetensors": "mine",
    "position_biases.png": "a picture",
    "preprocessor_config.json.bak": "a copy",
    "runs/1/log.txt": "step 1",
    ".hidden/file": "hidden",
}


@pytest.fixture
def converted(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    return tmp_path / "aft"


def contents(directory):
    """Return the content of each path in a directory: bytes of a file, target of a symlink, None for a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        found[path.relative_to(directory).as_posix()] = kind
    return found


def add_files_of_the_user(directory):
    for name, content in KEPT.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    (directory / "empty").mkdir()
    (directory / "link").symlink_to("README.md")
    (directory / "away").symlink_to(directory.parent)


def test_the_manifest_lists_what_was_written(converted):
    listed = json.loads((converted / MANIFEST_NAME).read_text())["files"]
    assert set(listed) == {path.name for path in converted.iterdir()} - {MANIFEST_NAME}
    assert {"config.json", "model.safetensors", "modeling_aft.py", "conversion_report.json"} <= set(listed)


def test_what_the_user_keeps_beside_a_conversion_stays(vit, converted):
    add_files_of_the_user(converted)
    before = contents(converted)
    save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 5})
    after = contents(converted)
    for name in [*KEPT, "empty", "link", "away"]:
        assert after[name] == before[name], name
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    assert AFTForImageClassification.from_pretrained(converted).config.kernel_size == 5
    assert verify_conversion(vit, converted) > 0
    assert sorted(path.name for path in converted.parent.iterdir()) == ["aft", "vit"]


def test_what_the_earlier_conversion_wrote_and_the_new_one_does_not_is_deleted(vit, converted):
    (converted / "old.json").write_text("{}")
    content = json.loads((converted / MANIFEST_NAME).read_text())
    content["files"]["old.json"] = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    (converted / MANIFEST_NAME).write_text(json.dumps(content))
    save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert not (converted / "old.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "modeling_aft.py", "conversion_report.json"])
def test_what_was_changed_since_is_kept_and_named(vit, converted, name):
    with (converted / name).open("ab") as file:
        file.write(b" ")
    before = contents(converted)
    with pytest.raises(ConversionError, match=f"{name} was changed since"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert contents(converted) == before


def test_a_file_of_the_user_with_a_name_that_the_new_one_needs_is_kept_and_named(vit, converted):
    content = json.loads((converted / MANIFEST_NAME).read_text())
    del content["files"]["config.json"]
    (converted / MANIFEST_NAME).write_text(json.dumps(content))
    before = contents(converted)
    with pytest.raises(ConversionError, match=r"config\.json, which the earlier conversion did not write"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert contents(converted) == before


def test_a_conversion_without_a_manifest_is_kept(vit, converted):
    (converted / MANIFEST_NAME).unlink()
    before = contents(converted)
    with pytest.raises(ConversionError, match=rf"no {MANIFEST_NAME} .*delete the directory yourself"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert contents(converted) == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"files": 3}', '{"files": {"config.json": 3}}', '{"files": ["config.json"]}', "[" * 10**5],
)
def test_a_damaged_manifest_deletes_nothing(vit, converted, content):
    (converted / MANIFEST_NAME).write_text(content)
    before = contents(converted)
    with pytest.raises(ConversionError, match=MANIFEST_NAME) as error:
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert "\n" not in str(error.value) and contents(converted) == before


def test_a_manifest_that_names_files_elsewhere_deletes_none_of_them(vit, converted, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.link(precious, converted / "same")
    (converted / "link").symlink_to(precious)
    (converted / "runs").mkdir()
    (converted / "runs" / "1").write_text("mine")
    sums = dict.fromkeys(
        ["../precious", str(precious), "link", "runs", "runs/1"],
        "9a1b3d5ee9cd7f3ec8b3d1f5f3b0fd8e",
    )
    content = json.loads((converted / MANIFEST_NAME).read_text())
    (converted / MANIFEST_NAME).write_text(json.dumps({"files": content["files"] | sums}))
    before = contents(converted)
    with pytest.raises(ConversionError):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert contents(converted) == before and precious.read_text() == "mine"


def test_a_conversion_that_fails_leaves_everything_as_it_was(vit, converted, monkeypatch):
    add_files_of_the_user(converted)
    before = contents(converted)
    with pytest.raises(ValueError, match="kernel_size=4"):
        save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 4})
    rename = os.rename

    def full(source, target):
        if source.name == "finished":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(ConversionError, match="No space left"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    monkeypatch.undo()
    assert contents(converted) == before


def test_files_are_kept_where_there_are_no_hard_links(vit, converted, monkeypatch):
    def refused(*arguments, **options):
        raise OSError(1, "Operation not permitted")

    add_files_of_the_user(converted)
    before = contents(converted)
    monkeypatch.setattr(os, "link", refused)
    save_converted(vit, converted, overwrite=True, **OPTIONS)
    after = contents(converted)
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
