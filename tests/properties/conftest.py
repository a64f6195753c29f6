"""How many examples the property tests try: 25 of each in `make test` and 100 in `make test-all`, the same ones every
time, and 2,000 others in `make soak`."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings


sys.path.insert(0, str(Path(__file__).parent))

# What is slow for hypothesis is a model that is built, and nothing here is about time.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("test", max_examples=25, derandomize=True, database=None, **COMMON)
settings.register_profile("all", settings.get_profile("test"), max_examples=100)
settings.register_profile("quick", max_examples=15, phases=[Phase.explicit, Phase.generate], **COMMON)
settings.register_profile("soak", max_examples=2000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))
