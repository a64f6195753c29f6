"""Wheel and source distribution with the same bytes from the same commit, on any day and in any folder.

    python scripts/build.py dist

Built from the files that git tracks, as they stand, with the setuptools of constraints.txt. SOURCE_DATE_EPOCH is the
time in both, by default that of the last commit. Needs git, and `build` of the extra `audit`.
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
    """What git says of this checkout."""
    # The git of the PATH, as everybody who builds has it in a place of its own.
    return subprocess.check_output(["git", *arguments], cwd=ROOT)  # nosec B607


def export(folder: Path) -> None:
    """Copy what git tracks; permissions are those that git knows, whatever the umask was."""
    names = git("ls-files", "-z")
    for name in filter(None, os.fsdecode(names).split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():  # and not deleted since
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def normalize(archive: Path, epoch: int) -> None:
    """Rewrite a .tar.gz with sorted members of one time and no owner.

    Wheels follow SOURCE_DATE_EPOCH; in source distributions setuptools keeps the times of files, of which it writes
    some itself, and gzip notes the current time.
    """
    members = []
    with tarfile.open(archive) as read:
        for member in read.getmembers():
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}  # fractions of seconds
            content = read.extractfile(member)
            members.append((member, content and content.read()))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as written:
        for member, content in sorted(members, key=lambda each: each[0].name):
            written.addfile(member, content and io.BytesIO(content))
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def build(out: Path) -> list[Path]:
    """Build into `out`; the paths of sdist and wheel."""
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
