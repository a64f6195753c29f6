"""What imports what: files that are saved with a checkpoint load without aft-hf, and imports never lead upwards.

Transformers resolves only one level of `from .name import ...` in remote code. So these files import only torch,
transformers, huggingface_hub, the standard library and each other, never a sub-package. Optional dependencies are
imported in a `try`, since transformers requires all others to be installed.

A room is a folder of the package or a module at its top level; all files that are saved are one room, "core".
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import aft_hf


PACKAGE = Path(aft_hf.__file__).parent
FLAT = sorted(PACKAGE.glob("*_aft.py"))
# The rooms of the package, from the top floor down. A room imports only rooms of lower floors.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("tuning",),
    ("publishing", "__init__"),
    ("training", "conversion", "benchmarking"),
    ("data", "running", "analysis"),
    ("loading", "exporting", "parallel", "kernels"),
    ("limits", "reading", "console", "atomic_files"),
    ("core", "errors", "_version"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
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


def name_of(path):
    """Return the dotted name of a module of the package, without that of the package: "" for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room_of(module):
    room = module.partition(".")[0] or "__init__"
    return "core" if room.endswith("_aft") else room


def imported_modules(path, modules):
    """Return the modules of the package that a file imports, also in functions and for types only."""
    place = path.relative_to(PACKAGE).parent.parts
    actual = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = [*place[: len(place) + 1 - node.level], *filter(None, [node.module])]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == PACKAGE.name:
            start = node.module.split(".")[1:]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == PACKAGE.name for name in names), f"{path}: use a relative import"
            continue
        for alias in node.names:
            whole = ".".join([*start, alias.name])
            actual.add(whole if whole in modules else ".".join(start))
    return actual


def test_no_import_leads_to_a_room_of_the_same_or_a_higher_floor_and_no_files_import_each_other_in_a_circle():
    modules = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    imported = {name: imported_modules(path, modules) for name, path in modules.items()}
    pairs = [(name, other) for name, others in imported.items() for other in others]
    between = [(name, other) for name, other in pairs if room_of(name) != room_of(other)]
    assert len(between) > 150
    assert [pair for pair in between if FLOOR_OF[room_of(pair[0])] >= FLOOR_OF[room_of(pair[1])]] == []
    graphlib.TopologicalSorter(imported).prepare()  # raises an error that lists the files of a circle
    assert {room_of(name) for name in modules} == FLOOR_OF.keys()


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
    assert sum(text.count(b"\n") for text in texts) <= 3450 and sum(map(len, texts)) <= 176 * 1024
    assert not any(b"torch._C" in text for text in texts)  # a published checkpoint must not break with the next torch
    assert not any("kernels" in module for path in FLAT for _, module, _ in imports(path))


def test_flat_files_can_be_imported_without_what_is_optional():
    names = [f"aft_hf.{path.stem}" for path in FLAT]
    program = "import importlib, sys\n"
    program += f"sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))\n"  # None in sys.modules makes an import fail
    program += f"[importlib.import_module(name) for name in {names}]\n"
    subprocess.run([sys.executable, "-c", program], check=True)
