"""What travels to the Hub: the files at the top of the package stand alone.

Transformers resolves remote code through one level of `from .name import ...` only, so these files import torch,
transformers, huggingface_hub, the standard library and each other, never a sub-package. What a file can do without, it
imports in a `try`, where Transformers does not ask for it.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aft_hf


PACKAGE = Path(aft_hf.__file__).parent
# The package itself, its command line and its readers of files do not travel.
ABOVE = ("__init__", "__main__", "cli", "loading", "progress", "reading")
FLAT = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in ABOVE)
ALLOWED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
OPTIONAL = {"triton"}


def imports(path):
    """(level, module, whether in a `try`) of every import statement of a file, wherever it stands."""
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


def test_the_flat_files_are_there():
    assert {"configuration_aft", "mixing_aft", "mixers_aft", "modeling_aft"} <= {path.stem for path in FLAT}


def test_flat_files_can_be_imported_without_what_is_optional():
    names = [f"aft_hf.{path.stem}" for path in FLAT]
    program = "import importlib, sys\n"
    program += f"sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))\n"  # None: not to be found
    program += f"[importlib.import_module(name) for name in {names}]\n"
    subprocess.run([sys.executable, "-c", program], check=True)
