"""Atomic writing replaces a regular file completely or not at all, nothing else, and leaves no other file."""

import os
from pathlib import Path

import pytest
from saved_models import listing

from aft_hf.atomic_files import move_into, write_atomic


def write(path, content=b"one"):
    with write_atomic(path) as file:
        file.write(content)


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with write_atomic(path) as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), write_atomic(path) as file:
        file.write(b"two")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"one" and [each.name for each in path.parent.iterdir()] == ["a.txt"]


def test_files_are_moved_into_a_directory_together_or_not_at_all(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"earlier")
    before = listing(tmp_path)
    with pytest.raises(OSError, match="b: exists and is not a regular file"), move_into(tmp_path) as aside:
        for name in ("a", "b", "c"):
            (aside / name).write_bytes(b"new")
    with pytest.raises(ZeroDivisionError), move_into(tmp_path) as aside:
        (aside / "a").write_bytes(b"half")
        1 / 0  # noqa: B018
    assert listing(tmp_path) == before
    with move_into(tmp_path) as aside:
        (aside / "a").write_bytes(b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("target", ["/etc/hostname", "precious", "nowhere", "{}/nowhere/at/all", "folder", "a.txt"])
def test_a_link_is_neither_replaced_nor_written_through(tmp_path, target):
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").symlink_to(target.format(tmp_path))
    before = listing(tmp_path)
    with pytest.raises(OSError, match=r"a\.txt.*link") as error:
        write(tmp_path / "a.txt")
    assert listing(tmp_path) == before and "\n" not in str(error.value)


def test_a_planted_link_at_a_temporary_name_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    write(tmp_path / "a.txt")
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / f".{'0' * 8}.tmp").symlink_to("precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.txt", b"two")
    assert (tmp_path / "precious").read_bytes() == b"mine" and (tmp_path / "a.txt").read_bytes() == b"one"


def test_pipes_and_directories_in_place_of_a_written_file_are_refused_by_name(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = listing(tmp_path)
    for path in (tmp_path / "folder", tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match=f"{path}: exists and is not a regular file"):
            write(path)
    assert listing(tmp_path) == before


def test_a_file_has_the_rights_of_any_other_and_a_name_as_long_as_the_file_system_allows(tmp_path):
    (tmp_path / "usual").write_bytes(b"")
    write(tmp_path / ("a" * 255))
    assert (tmp_path / ("a" * 255)).stat().st_mode == (tmp_path / "usual").stat().st_mode
