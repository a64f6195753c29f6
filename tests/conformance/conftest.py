"""Keep pytest from collecting this folder unless a file of it is named, as `make conformance` does."""

import sys
from pathlib import Path


# `transformers_tests` is a namespace package of two parts: the files that fetch.py puts into .conformance, and the
# stand-ins in this folder.
sys.path.insert(0, str(Path(__file__).parents[2] / ".conformance"))

collect_ignore_glob = ["*"]
