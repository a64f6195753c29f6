"""Atomic writing replaces a file completely or not at all, and leaves no other file."""

import os

import pytest

from aft_hf.data.whole_files import write_whole


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with write_whole(path) as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), write_whole(path) as file:
        file.write(b"two")
        1 / 0  # noqa: B018
    assert path.read_bytes() == b"one" and [each.name for each in path.parent.iterdir()] == ["a.txt"]


def test_a_planted_link_is_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path = tmp_path / "a.txt"
    for name in (path.name, f"{path.name}.{os.getpid()}"):
        (tmp_path / name).symlink_to(precious)
    with write_whole(path) as file:
        file.write(b"one")
    assert precious.read_bytes() == b"mine" and path.read_bytes() == b"one" and not path.is_symlink()


def test_a_file_has_the_rights_of_any_other(tmp_path):
    (tmp_path / "usual").write_bytes(b"")
    with write_whole(tmp_path / "a.txt") as file:
        file.write(b"one")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode
