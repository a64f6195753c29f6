"""What commands print: text as it is, and progress bars only in a terminal, not in log files."""

import os
import sys
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from transformers.utils import logging


def no_bars_in_logs() -> None:
    """Disable the progress bars of transformers, datasets and huggingface_hub if stderr is not a terminal.

    For bars of tqdm, the argument `disable=None` has the same effect.
    """
    if sys.stderr.isatty():
        return
    # datasets reads this variable on import. An import here would be slow and often needless.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    disable_progress_bars()
    logging.disable_progress_bar()


def plain_console(**options: Any) -> Console:
    """A console that prints text as it is. By default, rich reads brackets, as in file names, as markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)
