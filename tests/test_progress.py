"""Progress bars are disabled where stderr is not a terminal."""

import sys

import datasets
import huggingface_hub.utils
import pytest
from transformers.utils import logging

from aft_hf.progress import no_bars_in_logs


@pytest.mark.parametrize("terminal", (True, False))
def test_bars_are_on_in_a_terminal_alone(terminal, monkeypatch):
    disabled = []
    libraries = {datasets: "disable_progress_bars", huggingface_hub.utils: "disable_progress_bars"}
    for library, function in (libraries | {logging: "disable_progress_bar"}).items():
        monkeypatch.setattr(library, function, lambda library=library: disabled.append(library))
    for library in ("DATASETS", "HUB"):
        monkeypatch.setenv(f"HF_{library}_DISABLE_PROGRESS_BARS", "")  # restored after the test
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    no_bars_in_logs()
    assert disabled == ([] if terminal else [datasets, huggingface_hub.utils, logging])
