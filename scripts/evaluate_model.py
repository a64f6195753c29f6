"""Evaluate the accuracy, or the bits per token, of a saved model on any data: the same as `aft-hf evaluate`.

    python scripts/evaluate_model.py outputs/quickstart/aft-conv test.parquet --image-size 32 --image-size 40
    python scripts/evaluate_model.py outputs/quickstart-text test.txt --block-size 256

(The name evaluate.py would hide the library `evaluate` from the other scripts in this folder.)
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("evaluate")
