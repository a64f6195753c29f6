"""Write the archives of saved models under fixtures/, once for each release whose checkpoints must keep loading.

    python tests/publishing/make_fixtures.py

Each archive holds a directory that `save_pretrained` wrote, without the code, with `expected.safetensors` beside the
weights. An existing archive is never overwritten, since it has to stay as the old release wrote it.
"""

import shutil
import tempfile
from pathlib import Path

import tiny
from safetensors.torch import save_file

from aft_hf import __version__


FIXTURES = Path(__file__).parent / "fixtures"
MODELS = {"text": ["full", "local", "simple", "conv", "alibi"], "image": ["conv", "conv"]}


def main() -> None:
    for task, types in MODELS.items():
        archive = FIXTURES / f"{task}-{__version__}"
        if archive.with_name(f"{archive.name}.tar.xz").exists():
            print(f"{archive.name} is there")
            continue
        model = tiny.build(task, types)
        with tempfile.TemporaryDirectory() as directory:
            tiny.save(model, Path(directory))
            save_file(tiny.expected_of(model), Path(directory) / "expected.safetensors")
            shutil.make_archive(str(archive), "xztar", directory)
        print(f"wrote {archive.name}")


if __name__ == "__main__":
    main()
