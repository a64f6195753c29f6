"""`make conformance` names test_conformance.py; nothing in this folder is collected where nobody names it."""

import sys
from pathlib import Path


# `transformers_tests` is a namespace package of two parts: what fetch.py puts here, and the stand-ins in this folder.
sys.path.insert(0, str(Path(__file__).parents[2] / ".conformance"))

collect_ignore_glob = ["*"]
