"""Tests of overwriting a conversion: only an unchanged earlier conversion is replaced, completely or not at all."""

import os

import pytest
from checkpoints import OPTIONS

from aft_hf import AFTForImageClassification
from aft_hf.conversion import REPORT_NAME, ConversionError, save_converted, verify_conversion


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


def test_an_earlier_conversion_is_replaced_only_on_request_and_completely(vit, converted):
    before = contents(converted)
    with pytest.raises(ConversionError, match="not empty"):
        save_converted(vit, converted, **OPTIONS)
    save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 5})
    after = contents(converted)
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]
    assert AFTForImageClassification.from_pretrained(converted).config.kernel_size == 5
    assert verify_conversion(vit, converted) > 0
    assert sorted(path.name for path in converted.parent.iterdir()) == ["aft", "vit"]


def append(directory, name):
    with (directory / name).open("ab") as file:
        file.write(b" ")


def add(directory, name):
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text("mine")


def replace_by_a_link(directory):
    (directory / "config.json").rename(directory.parent / "precious")
    (directory / "config.json").symlink_to(directory.parent / "precious")


CHANGED = ["model.safetensors", "modeling_aft.py"]
ADDED = ["README.md", "my_notes_aft.py", "extra.safetensors", "runs/1/log.txt", ".hidden/file"]
TEXTS = ["", '{"source": "vit", "files": {"config.json": 3}}', "[" * 10**5]
REFUSED = {
    **{f"{name} changed": (lambda out, name=name: append(out, name), f"{name} was changed since") for name in CHANGED},
    **{f"{name} added": (lambda out, name=name: add(out, name), f"{name[:4]}.*is not of it") for name in ADDED},
    "empty folder": (lambda out: (out / "empty").mkdir(), "empty .*is not of it"),
    "link": (replace_by_a_link, "config.json was changed"),
    "no report": (lambda out: (out / REPORT_NAME).unlink(), "which alone is overwritten"),
    **{
        f"text {text[:9]}": (lambda out, text=text: (out / REPORT_NAME).write_text(text), REPORT_NAME)
        for text in TEXTS
    },
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_may_not_be_of_an_earlier_conversion_is_kept_and_named(vit, converted, change, message):
    change(converted)
    before = contents(converted.parent)
    with pytest.raises(ConversionError, match=message) as error:
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert "\n" not in str(error.value) and contents(converted.parent) == before


@pytest.mark.parametrize("error", ["full", "Ctrl-C", "not verified"])
def test_a_conversion_that_fails_leaves_everything_as_it_was(vit, converted, monkeypatch, error):
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
