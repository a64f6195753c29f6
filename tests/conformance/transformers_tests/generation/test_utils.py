"""Stand-in for a module that test_modeling_common.py imports and the source distribution leaves out.

The generation tests behind this name are in the repository of transformers alone; tests/test_caching_aft.py has ours.
The name itself must be there, as the common tests check that the test of a model that generates inherits from it.
"""


class GenerationTesterMixin:
    pass
