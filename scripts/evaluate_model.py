"""Accuracy, or bits per token, of any saved model on any data: the same as `aft-hf evaluate`.

    python scripts/evaluate_model.py outputs/quickstart/aft-conv test.parquet --image-size 32 --image-size 40
    python scripts/evaluate_model.py outputs/quickstart-text test.txt --block-size 256

(Named evaluate.py, it would hide the library `evaluate` from all scripts beside it.)
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("evaluate")
