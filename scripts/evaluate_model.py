"""Accuracy, or bits per token, of any saved model on any data: the same as `aft-hf evaluate`.

    python scripts/evaluate_model.py outputs/quickstart/aft-conv test.parquet --image-size 32 --image-size 40
    python scripts/evaluate_model.py outputs/quickstart-text test.txt --block-size 256

(Named evaluate.py, it would hide the library `evaluate` from all scripts beside it.)
"""

import sys

import typer

from aft_hf.training.command import evaluate_command


if __name__ == "__main__":
    try:
        typer.run(evaluate_command)
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate_model.py: {' '.join(str(error).split())}")
