"""Stand-in for a module that test_modeling_common.py imports but that the source distribution lacks.

Only the repository of transformers has its generation tests. Those of AFT are in tests/test_caching_aft.py. The class
must exist, because the common tests check that the test class of a model that generates inherits from it.
"""


class GenerationTesterMixin:
    pass
