"""Stand-in for a module that test_modeling_common.py imports but that the source distribution lacks.

Only the repository of transformers has its export tests. Those of AFT are in tests/test_compile_and_export.py.
"""


class ExportTesterMixin:
    pass
