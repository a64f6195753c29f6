"""Progress of long work: bars in a terminal; a log gets no bars, but a line now and then."""

import os
import sys


def no_bars_in_logs() -> None:
    """Switch the bars of transformers, datasets and huggingface_hub off where the standard error is no terminal.

    Bars of tqdm take `disable=None` for the same.
    """
    if sys.stderr.isatty():
        return
    # Read when they are imported, which is slow and not always needed.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    if "huggingface_hub" in sys.modules:
        sys.modules["huggingface_hub"].utils.disable_progress_bars()
    from transformers.utils import logging

    logging.disable_progress_bar()
