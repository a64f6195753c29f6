"""Keep pytest from collecting this folder unless a file of it is named, as `make conformance` does."""

import sys
from pathlib import Path
from types import ModuleType


sys.path.insert(0, str(Path(__file__).parents[2] / ".conformance"))  # where fetch.py puts the tests

# test_modeling_common.py imports these mixins, which only the repository of transformers has, and checks that the test
# class of a model that generates derives from the first one. tests/test_caching_aft.py and
# tests/test_compile_and_export.py test generation and export.
for name, mixin in (
    ("generation.test_utils", "GenerationTesterMixin"),
    ("exporters.test_export", "ExportTesterMixin"),
):
    module = sys.modules[f"transformers_tests.{name}"] = ModuleType(name)
    setattr(module, mixin, type(mixin, (), {}))

collect_ignore_glob = ["*"]
