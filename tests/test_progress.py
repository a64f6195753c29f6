"""Progress bars are disabled where stderr is not a terminal."""

import sys

import datasets
import huggingface_hub.utils
import pytest
from transformers.utils import logging

from aft_hf.progress import no_bars_in_logs


@pytest.fixture
def bars(monkeypatch):
    """Function that tells whether each library shows bars; all do before and after the test."""
    libraries = (datasets, huggingface_hub.utils)
    for library in ("DATASETS", "HUB"):
        monkeypatch.delenv(f"HF_{library}_DISABLE_PROGRESS_BARS", raising=False)
        monkeypatch.setenv(f"HF_{library}_DISABLE_PROGRESS_BARS", "")  # restored after the test
    before = [library.are_progress_bars_disabled() for library in libraries], logging.is_progress_bar_enabled()
    for library in libraries:
        library.enable_progress_bars()
    logging.enable_progress_bar()
    yield lambda: [
        logging.is_progress_bar_enabled(),
        *(not library.are_progress_bars_disabled() for library in libraries),
    ]
    for library, disabled in zip(libraries, before[0]):
        library.disable_progress_bars() if disabled else library.enable_progress_bars()
    logging.enable_progress_bar() if before[1] else logging.disable_progress_bar()


@pytest.mark.parametrize("terminal", (True, False))
def test_bars_are_on_in_a_terminal_alone(terminal, bars, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    no_bars_in_logs()
    assert bars() == [terminal] * 3
