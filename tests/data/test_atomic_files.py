"""Atomic writing replaces a regular file completely or not at all, nothing else, and leaves no other file."""

import os
import socket
import stat
import threading

import pytest

from aft_hf.data.atomic_files import write_atomic


def write(path, content=b"one"):
    with write_atomic(path) as file:
        file.write(content)


def state(directory):
    """Return the kind, the target or content, and the inode of each path in a directory."""
    found = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        target = os.readlink(path) if path.is_symlink() else None
        found[path.relative_to(directory).as_posix()] = (status.st_mode, status.st_ino, content, target)
    return found


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with write_atomic(path) as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), write_atomic(path) as file:
        file.write(b"two")
        1 / 0  # noqa: B018
    assert path.read_bytes() == b"one" and [each.name for each in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    "target",
    [
        "/etc/hostname",
        "{}/precious",
        "precious",
        "../{}",
        "nowhere",
        "{}/nowhere/at/all",
        "folder",
        "a.txt",
        "/dev/sda",
    ],
)
def test_a_link_is_neither_replaced_nor_written_through(tmp_path, target):
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "a.txt"
    path.symlink_to(target.format(tmp_path))
    before = state(tmp_path)
    with pytest.raises(OSError, match=r"a\.txt.*link") as error:
        write(path)
    assert state(tmp_path) == before and "\n" not in str(error.value)


def test_a_planted_link_at_a_temporary_name_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    write(tmp_path / "a.txt")
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / f".{'0' * 8}.tmp").symlink_to("precious")
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.txt", b"two")
    assert (tmp_path / "precious").read_bytes() == b"mine" and (tmp_path / "a.txt").read_bytes() == b"one"


def test_a_folder_and_a_socket_are_refused_by_name(tmp_path):
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        before = state(tmp_path)
        for name in ("folder", "socket"):
            with pytest.raises(OSError, match=f"{tmp_path / name}: exists and is not a regular file"):
                write(tmp_path / name)
        assert state(tmp_path) == before


def test_a_link_to_a_device_stays_and_the_device_gets_the_content(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "full").symlink_to("/dev/full")
    before = state(tmp_path)
    write(tmp_path / "null")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/full'"):
        write(tmp_path / "full")
    assert state(tmp_path) == before


@pytest.mark.parametrize("device", [os.makedev(1, 3), os.makedev(1, 5)], ids=["null", "zero"])
def test_a_device_stays_a_device(tmp_path, device):
    try:
        os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, device)
        write(tmp_path / "device")
    except PermissionError:
        pytest.skip("devices can be made and used by root only")
    status = (tmp_path / "device").lstat()
    assert stat.S_ISCHR(status.st_mode) and status.st_rdev == device
    assert [path.name for path in tmp_path.iterdir()] == ["device"]


@pytest.mark.parametrize("linked", [False, True])
def test_whoever_reads_a_pipe_gets_everything_or_nothing(tmp_path, linked):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    path, received = tmp_path / ("link" if linked else "pipe"), []
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    with open(descriptor, "rb") as pipe:

        def read() -> None:
            content = b""
            while len(content) < 300_000:  # before a writer has opened the pipe, nothing comes
                content += pipe.read()
            received.append(content)

        reader = threading.Thread(target=read)
        with pytest.raises(ZeroDivisionError), write_atomic(path) as file:
            file.write(b"half")
            1 / 0  # noqa: B018
        content = os.urandom(300_000)  # more than a pipe holds
        with write_atomic(path) as file:
            file.write(content)
            reader.start()
        reader.join()
    assert received == [content] and (tmp_path / "pipe").is_fifo()


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"'{tmp_path}/pipe'"):
        write(tmp_path / "pipe")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"] and (tmp_path / "pipe").is_fifo()


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a.txt'"),
        write_atomic(tmp_path / "a.txt"),
    ):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_rights_of_any_other(tmp_path):
    (tmp_path / "usual").write_bytes(b"")
    write(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    write(tmp_path / ("a" * 255))
    assert (tmp_path / ("a" * 255)).read_bytes() == b"one"
