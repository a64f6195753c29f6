"""Fetch the common model tests of the installed transformers into .conformance/, where test_conformance.py finds them.

The tests are in the source distribution on PyPI, but not in the wheel. They run unchanged and are not committed here.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers


ROOT = Path(__file__).parents[2]
# The tests import each other relatively, so they can run under a package name that differs from our `tests`.
PACKAGE = ROOT / ".conformance" / "transformers_tests"
FETCHED = PACKAGE / "VERSION"


def fetch(version: str = transformers.__version__) -> None:
    """Download the source distribution of this version and unpack its tests/*.py, unless this has been done."""
    if FETCHED.is_file() and FETCHED.read_text() == version:
        return
    PACKAGE.mkdir(parents=True, exist_ok=True)
    for old in PACKAGE.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        source_alone = ["--no-deps", "--no-binary", "transformers"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *source_alone]
        subprocess.run([*command, "--dest", folder, f"transformers=={version}"], check=True)
        (archive,) = Path(folder).glob("transformers-*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                if member.isfile() and path.match("transformers-*/tests/*.py"):
                    (PACKAGE / path.name).write_bytes(tar.extractfile(member).read())
    FETCHED.write_text(version)  # written last, so that an interrupted download is repeated


if __name__ == "__main__":
    fetch()
