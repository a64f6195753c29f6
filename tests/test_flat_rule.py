"""Remote code: the files at the top level of the package can be saved with a checkpoint and loaded without aft-hf.

Transformers resolves only one level of `from .name import ...` in remote code. So these files import only torch,
transformers, huggingface_hub, the standard library and each other, never a sub-package. Optional dependencies are
imported in a `try`, since transformers requires all others to be installed.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aft_hf


PACKAGE = Path(aft_hf.__file__).parent
# These modules of the installed package are not saved with checkpoints.
ABOVE = ("__init__", "__main__", "benchmarking", "cli", "exporting", "limits", "loading", "progress", "reading")
FLAT = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in ABOVE)
ALLOWED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
OPTIONAL = {"triton"}


def imports(path):
    """Yield (level, module, whether in a `try`) for every import statement of a file, nested ones included."""
    tree = ast.parse(path.read_text())
    tried = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node in tried) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node in tried


@pytest.mark.parametrize("path", FLAT, ids=lambda path: path.name)
def test_a_flat_file_imports_only_what_travels_with_it(path):
    siblings = {other.stem for other in FLAT}
    for level, module, tried in imports(path):
        if level == 0:
            allowed = ALLOWED | OPTIONAL if tried else ALLOWED
            assert module.split(".")[0] in allowed, f"{path.name} imports {module}"
        else:
            assert level == 1 and module in siblings, f"{path.name} imports {'.' * level}{module}"


def test_few_files_travel_short_enough_to_be_read_and_none_of_the_kernels():
    names, texts = {path.stem for path in FLAT}, [path.read_bytes() for path in FLAT]
    assert {"configuration_aft", "mixing_aft", "mixers_aft", "modeling_aft"} <= names and len(names) <= 8
    assert sum(text.count(b"\n") for text in texts) <= 3450 and sum(map(len, texts)) <= 175 * 1024
    assert not any(b"torch._C" in text for text in texts)  # a published checkpoint must not break with the next torch
    assert not any("kernels" in module for path in FLAT for _, module, _ in imports(path))


def test_flat_files_can_be_imported_without_what_is_optional():
    names = [f"aft_hf.{path.stem}" for path in FLAT]
    program = "import importlib, sys\n"
    program += f"sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))\n"  # None in sys.modules makes an import fail
    program += f"[importlib.import_module(name) for name in {names}]\n"
    subprocess.run([sys.executable, "-c", program], check=True)
