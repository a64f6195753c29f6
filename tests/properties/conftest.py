"""Hypothesis profiles, which set how many examples each property test tries.

`make test` tries 25 examples of each property, the same ones in every run, and `make soak` 2,000 random ones.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings


sys.path.insert(0, str(Path(__file__).parent))

# Building a model is slow by the standards of hypothesis, and no test here measures time.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("test", max_examples=25, derandomize=True, database=None, **COMMON)
settings.register_profile("soak", max_examples=2000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))
