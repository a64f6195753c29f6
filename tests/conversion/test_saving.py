"""Tests of saving a conversion: nothing is replaced, and either all files are written or none."""

import json

import pytest
from checkpoints import OPTIONS
from saved_models import listing

from aft_hf.conversion import REPORT_NAME, save_converted, verify_conversion
from aft_hf.errors import InputError


pytestmark = pytest.mark.usefixtures("without_limits")


def test_the_report_lists_the_files_and_a_directory_with_files_is_refused(vit, tmp_path):
    target = tmp_path / "aft"
    save_converted(vit, target, **OPTIONS)
    report = json.loads((target / REPORT_NAME).read_text())
    assert set(report["files"]) == {path.name for path in target.iterdir()} - {REPORT_NAME}
    before = listing(tmp_path)
    with pytest.raises(InputError, match="aft: is not empty; give another directory, or delete it"):
        save_converted(vit, target, **OPTIONS | {"kernel_size": 5})
    assert listing(tmp_path) == before


@pytest.mark.parametrize("error", ["full", "Ctrl-C", "not verified"])
def test_a_conversion_that_fails_leaves_no_files(vit, tmp_path, monkeypatch, error):
    (tmp_path / "aft").mkdir()
    before = listing(tmp_path)
    with pytest.raises(ValueError, match="kernel_size=4"):
        save_converted(vit, tmp_path / "aft", **OPTIONS | {"kernel_size": 4})

    def fail(source, target):
        raise {"full": OSError(28, "No space left"), "Ctrl-C": KeyboardInterrupt()}.get(error) or InputError(error)

    name = "aft_hf.conversion.saving.verify_conversion" if error == "not verified" else "os.replace"
    monkeypatch.setattr(name, fail)
    with pytest.raises((InputError, KeyboardInterrupt), match=r"No space left|^$|not verified"):
        save_converted(vit, tmp_path / "aft", **OPTIONS)
    monkeypatch.undo()
    assert listing(tmp_path).keys() == before.keys()


def test_what_a_killed_conversion_left_does_not_stop_the_next(vit, tmp_path):
    (tmp_path / "aft" / ".aft-hf-unfinished").mkdir(parents=True)
    (tmp_path / "aft" / ".aft-hf-lock").touch()
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    assert not [path for path in (tmp_path / "aft").iterdir() if path.name.startswith(".")]


def test_a_second_conversion_at_the_same_time_stops(vit, tmp_path, monkeypatch):
    def meanwhile(*paths):
        with pytest.raises(InputError, match=r"cannot write to .*lock"):
            save_converted(vit, tmp_path / "aft", **OPTIONS | {"kernel_size": 5})
        return verify_conversion(*paths)

    monkeypatch.setattr("aft_hf.conversion.saving.verify_conversion", meanwhile)
    save_converted(vit, tmp_path / "aft", **OPTIONS)
    assert verify_conversion(vit, tmp_path / "aft") > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aft", "vit"]
