"""Publish a saved model on the Hub: the same as `aft-hf publish`.

python scripts/publish.py outputs/quickstart/aft-conv name/aft-conv-digits --dry-run
"""

from aft_hf.cli import main


if __name__ == "__main__":
    main("publish")
