"""Tests of overwriting a conversion: only the files that the earlier conversion wrote are deleted."""

import json
import os

import pytest
from checkpoints import OPTIONS

from aft_hf import AFTForImageClassification
from aft_hf.conversion import ConversionError, save_converted, verify_conversion
from aft_hf.conversion.saving import MANIFEST_NAME


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


def listed(directory):
    return json.loads((directory / MANIFEST_NAME).read_text())["files"]


def write_manifest(directory, files):
    (directory / MANIFEST_NAME).write_text(json.dumps({"files": files}))


@pytest.mark.parametrize("hard_links", [True, False])
def test_what_the_user_keeps_stays_and_what_the_earlier_conversion_wrote_goes(vit, converted, monkeypatch, hard_links):
    if not hard_links:  # such a file system raises an OSError

        def link(*arguments, **options):
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    assert set(listed(converted)) == {path.name for path in converted.iterdir()} - {MANIFEST_NAME}
    assert {"config.json", "model.safetensors", "modeling_aft.py", "conversion_report.json"} <= set(listed(converted))
    add_files_of_the_user(converted)
    before = contents(converted)
    (converted / "old.json").write_text("{}")
    of_braces = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    write_manifest(converted, listed(converted) | {"old.json": of_braces})
    with pytest.raises(ConversionError, match="not empty"):
        save_converted(vit, converted, **OPTIONS)
    save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 5})
    after = contents(converted)
    for name in [*KEPT, "empty", "link", "away"]:
        assert after[name] == before[name], name
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    assert AFTForImageClassification.from_pretrained(converted).config.kernel_size == 5
    assert verify_conversion(vit, converted) > 0
    assert sorted(path.name for path in converted.parent.iterdir()) == ["aft", "vit"]


def append(directory, name):
    with (directory / name).open("ab") as file:
        file.write(b" ")


def unlist(directory, name):
    write_manifest(directory, {each: sum for each, sum in listed(directory).items() if each != name})


def plant_names_elsewhere(directory):
    precious = directory.parent / "precious"
    precious.write_text("mine")
    os.link(precious, directory / "same")
    (directory / "link").symlink_to(precious)
    (directory / "runs").mkdir()
    (directory / "runs" / "1").write_text("mine")
    names = ["../precious", str(precious), "link", "runs", "runs/1"]
    write_manifest(directory, listed(directory) | dict.fromkeys(names, "9a1b3d5ee9cd7f3ec8b3d1f5f3b0fd8e"))


TEXTS = ["", '{"files": {"config.json": 3}}', "[" * 10**5]
KINDS = ["model.safetensors", "modeling_aft.py"]
REFUSED = {
    **{f"{name} changed": (lambda out, name=name: append(out, name), f"{name} was changed since") for name in KINDS},
    "not listed": (lambda out: unlist(out, "config.json"), "config.json, which the earlier conversion did not write"),
    "no manifest": (lambda out: (out / MANIFEST_NAME).unlink(), f"no {MANIFEST_NAME} .*delete the directory yourself"),
    "elsewhere": (plant_names_elsewhere, "was changed since"),
    **{f"text {text[:9]}": (lambda out, text=text: (out / MANIFEST_NAME).write_text(text), "") for text in TEXTS},
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_may_not_be_of_an_earlier_conversion_is_kept_and_named(vit, converted, change, message):
    change(converted)
    before = contents(converted.parent)
    with pytest.raises(ConversionError, match=message or MANIFEST_NAME) as error:
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert "\n" not in str(error.value) and contents(converted.parent) == before


@pytest.mark.parametrize("error", ["full", "Ctrl-C", "not verified"])
def test_a_conversion_that_fails_leaves_everything_as_it_was(vit, converted, monkeypatch, error):
    add_files_of_the_user(converted)
    before, rename = contents(converted.parent), os.rename
    with pytest.raises(ValueError, match="kernel_size=4"):
        save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 4})

    def fail(source, target):
        if error == "not verified" or source.name == "finished":
            raise {"full": OSError(28, "No space left"), "Ctrl-C": KeyboardInterrupt()}.get(error) or ConversionError(
                error
            )
        rename(source, target)

    name = "aft_hf.conversion.saving.verify_conversion" if error == "not verified" else "os.rename"
    monkeypatch.setattr(name, fail)
    with pytest.raises((ConversionError, KeyboardInterrupt), match=r"No space left|^$|not verified"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    monkeypatch.undo()
    assert contents(converted.parent) == before
