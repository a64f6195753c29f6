"""Tests of overwriting a conversion: only the unchanged files that the earlier conversion wrote are deleted."""

import json

import pytest
from checkpoints import OPTIONS
from saved_models import listing

from aft_hf import AFTForImageClassification
from aft_hf.conversion import REPORT_NAME, ConversionError, save_converted, verify_conversion
from aft_hf.publishing import write_card


pytestmark = pytest.mark.usefixtures("without_limits")


@pytest.fixture
def converted(vit, tmp_path):
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    return tmp_path / "aft"


def contents(directory):
    """Return the content of each path in a directory: bytes of a file, target of a symlink, None for a directory."""
    return {name: state[-1] for name, state in listing(directory).items()}


def add_files_of_the_user(directory):
    for name in ("README.md", "my_notes_aft.py", "extra.safetensors", "runs/1/log.txt", ".hidden/file"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")
    (directory / "empty").mkdir()
    (directory / "link").symlink_to("README.md")
    (directory / "away").symlink_to(directory.parent)


def test_overwriting_keeps_files_of_the_user_and_removes_those_of_the_earlier_conversion(vit, converted):
    report = json.loads((converted / REPORT_NAME).read_text())
    assert set(report["files"]) == {path.name for path in converted.iterdir()} - {REPORT_NAME}
    add_files_of_the_user(converted)
    before = contents(converted)
    (converted / "old.json").write_text("{}")
    report["files"]["old.json"] = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    (converted / REPORT_NAME).write_text(json.dumps(report))
    with pytest.raises(ConversionError, match="not empty"):
        save_converted(vit, converted, **OPTIONS)
    save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 5})
    after = contents(converted)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"config.json", "model.safetensors", REPORT_NAME}
    assert AFTForImageClassification.from_pretrained(converted).config.kernel_size == 5
    assert verify_conversion(vit, converted) > 0
    assert sorted(path.name for path in converted.parent.iterdir()) == ["aft", "vit"]


def test_the_license_of_an_earlier_source_does_not_stay_with_the_weights_of_another(vit, converted):
    for license in ("mit", "cc-by-nc-4.0"):
        (vit / "README.md").write_text(f"---\nlicense: {license}\n---\n# A ViT\n")
        save_converted(vit, converted, overwrite=True, **OPTIONS)
        assert not (converted / "README.md").exists()  # it was generated
        assert f"license: {license}\n" in write_card(converted).read_text()
    write_card(converted, license="apache-2.0")
    save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert "license: apache-2.0\n" in write_card(converted).read_text()  # chosen by the user, for the same source


def append(directory, name):
    with (directory / name).open("ab") as file:
        file.write(b" ")


def unlist(directory, name):
    report = json.loads((directory / REPORT_NAME).read_text())
    del report["files"][name]
    (directory / REPORT_NAME).write_text(json.dumps(report))


def replace_by_a_link(directory):
    (directory / "config.json").rename(directory.parent / "precious")
    (directory / "config.json").symlink_to(directory.parent / "precious")


CHANGED = ["model.safetensors", "modeling_aft.py"]
TEXTS = ["", '{"source": "vit", "files": {"config.json": 3}}', "[" * 10**5]
REFUSED = {
    **{f"{name} changed": (lambda out, name=name: append(out, name), f"{name} was changed since") for name in CHANGED},
    "not listed": (lambda out: unlist(out, "config.json"), "config.json, which the earlier conversion did not write"),
    "link": (replace_by_a_link, "config.json was changed"),
    "no report": (lambda out: (out / REPORT_NAME).unlink(), "only an earlier conversion is overwritten"),
    **{
        f"text {text[:9]}": (lambda out, text=text: (out / REPORT_NAME).write_text(text), REPORT_NAME)
        for text in TEXTS
    },
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_overwriting_refuses_files_that_an_earlier_conversion_did_not_write(vit, converted, change, message):
    change(converted)
    before = contents(converted.parent)
    with pytest.raises(ConversionError, match=message) as error:
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    assert "\n" not in str(error.value) and contents(converted.parent) == before


@pytest.mark.parametrize("error", ["full", "Ctrl-C", "not verified"])
def test_a_conversion_that_fails_leaves_everything_as_it_was(vit, converted, monkeypatch, error):
    add_files_of_the_user(converted)
    before = contents(converted.parent)
    with pytest.raises(ValueError, match="kernel_size=4"):
        save_converted(vit, converted, overwrite=True, **OPTIONS | {"kernel_size": 4})

    def fail(source, target):
        raise {"full": OSError(28, "No space left"), "Ctrl-C": KeyboardInterrupt()}.get(error) or ConversionError(
            error
        )

    name = "aft_hf.conversion.saving.verify_conversion" if error == "not verified" else "os.replace"
    monkeypatch.setattr(name, fail)
    with pytest.raises((ConversionError, KeyboardInterrupt), match=r"No space left|^$|not verified"):
        save_converted(vit, converted, overwrite=True, **OPTIONS)
    monkeypatch.undo()
    assert contents(converted.parent) == before


def test_a_second_conversion_at_the_same_time_stops(vit, tmp_path, monkeypatch):
    def meanwhile(*paths):
        with pytest.raises(ConversionError, match="lock"):
            save_converted(vit, tmp_path / "aft", **OPTIONS | {"kernel_size": 5})
        return verify_conversion(*paths)

    monkeypatch.setattr("aft_hf.conversion.saving.verify_conversion", meanwhile)
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    assert verify_conversion(vit, tmp_path / "aft") > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aft", "vit"]
