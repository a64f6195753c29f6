"""Stand-in for a module that test_modeling_common.py imports and the source distribution leaves out.

The export tests behind this name are in the repository of transformers alone; tests/test_modeling_aft.py has ours.
"""


class ExportTesterMixin:
    pass
