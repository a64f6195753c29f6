"""Fetch the common model tests of the installed transformers into .conformance/, where test_conformance.py finds them.

They come in the source distribution on PyPI and in no wheel. They are run as they are, and are no part of this tree.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers


ROOT = Path(__file__).parents[2]
# The tests know each other as `tests`, by relative imports; under this name they do not meet ours.
PACKAGE = ROOT / ".conformance" / "transformers_tests"
FETCHED = PACKAGE / "VERSION"


def fetch(version: str = transformers.__version__) -> None:
    """Unpack tests/*.py of that version's source distribution, unless this is done already."""
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
    FETCHED.write_text(version)  # last, so that what was cut short is done again


if __name__ == "__main__":
    fetch()
