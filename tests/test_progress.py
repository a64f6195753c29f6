"""Progress bars are disabled where stderr is not a terminal."""

import os
import subprocess
import sys

import pytest


PROGRAM = """
import sys
{before}
from aft_hf.progress import no_bars_in_logs
sys.stderr.isatty = lambda: {terminal}
no_bars_in_logs()
import datasets
import huggingface_hub.utils
from transformers.utils import logging
print(logging.is_progress_bar_enabled())
print(datasets.are_progress_bars_disabled())
print(huggingface_hub.utils.are_progress_bars_disabled())
"""


def bars(terminal, before=""):
    """Whether progress bars are enabled in transformers, and disabled in datasets and in huggingface_hub.

    All three are printed as strings by a new process.
    """
    program = PROGRAM.format(terminal=terminal, before=before)
    # Variables that an earlier test has set in this process must not be inherited.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_DISABLE_PROGRESS_BARS")}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()


@pytest.mark.slow
def test_bars_are_off_where_the_standard_error_is_no_terminal():
    assert bars(False) == ["False", "True", "True"]
    assert bars(False, before="import datasets") == ["False", "True", "True"]


def test_bars_are_on_in_a_terminal():
    assert bars(True) == ["True", "False", "False"]
