"""Build a wheel and a source distribution with the same bytes from the same commit, on any day and in any folder.

    python scripts/build.py dist

The files that git tracks are built as they are in the working tree, with the setuptools of constraints.txt. The files
in both archives have the time SOURCE_DATE_EPOCH, by default that of the last commit. Needs git, and `build` from the
extra `audit`.
"""

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> bytes:
    """The output of a git command in this checkout."""
    # git is found in the PATH, because its location differs between machines.
    return subprocess.check_output(["git", *arguments], cwd=ROOT)  # nosec B607


def export(folder: Path) -> None:
    """Copy the files that git tracks, with the permissions that git records, independent of the umask."""
    names = git("ls-files", "-z")
    for name in filter(None, os.fsdecode(names).split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():  # skips tracked files that have been deleted
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def normalize(archive: Path, epoch: int) -> None:
    """Rewrite a .tar.gz with sorted members, one modification time and no owner.

    Wheels follow SOURCE_DATE_EPOCH. In source distributions, setuptools keeps the modification times of files, some of
    which it writes itself, and gzip records the current time.
    """
    members = []
    with tarfile.open(archive) as read:
        for member in read.getmembers():
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}  # they hold fractions of seconds
            content = read.extractfile(member)
            members.append((member, content and content.read()))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as written:
        for member, content in sorted(members, key=lambda each: each[0].name):
            written.addfile(member, content and io.BytesIO(content))
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def build(out: Path) -> list[Path]:
    """Build into `out`, and return the paths of the source distribution and the wheel."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct").decode().strip()
    variables = os.environ | {"SOURCE_DATE_EPOCH": epoch, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        export(source)
        subprocess.run([sys.executable, "-m", "build", "--outdir", built, source], env=variables, check=True)
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(built.iterdir()):
            if path.name.endswith(".tar.gz"):
                normalize(path, int(epoch))
            shutil.copyfile(path, out / path.name)
        return [out / path.name for path in sorted(built.iterdir())]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for path in build(Path(sys.argv[1])):
        print(path)
