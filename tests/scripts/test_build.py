"""Tests of build.py: source distributions have the same bytes whenever, wherever and by whomever they are built."""

import importlib.util
import io
import tarfile
from pathlib import Path


_spec = importlib.util.spec_from_file_location("build_script", Path(__file__).parents[2] / "scripts" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


def write(path: Path, names: list[str], *, time: float, owner: str, umask: int) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(name), time, owner, 0o755 & ~umask
            archive.addfile(member, io.BytesIO(name.encode()))


def test_time_order_owner_and_umask_leave_no_trace(tmp_path):
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    write(one, ["a/b", "a/c"], time=1.5, owner="me", umask=0o022)
    write(other, ["a/c", "a/b"], time=2e9, owner="you", umask=0o077)
    for path in (one, other):
        build.normalize(path, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        assert [(each.name, each.mtime, each.mode) for each in archive] == [
            ("a/b", 1_700_000_000, 0o755),
            ("a/c", 1_700_000_000, 0o755),
        ]
        assert archive.extractfile("a/b").read() == b"a/b"
